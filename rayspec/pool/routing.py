"""Chooses the engine of an item: one that had prompts with the same beginning, unless others have much less to do."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from rayspec.pool.recipe import Beginning

# An engine can be chosen if it has at most twice as many items as the least busy engine, and this many more.
_SLACK = 4
_MAX_REMEMBERED = 2**16
_MAX_PARTS = 32
_CHARACTERS_PER_PART, _TOKENS_PER_PART = 256, 64

PartHash = bytes
"""Hash of a part of a prompt and of all parts before it."""


def part_hashes(beginning: Beginning) -> tuple[PartHash, ...]:
    """Hash the whole parts that a prompt begins with, at most `_MAX_PARTS`, which bounds the cost of long prompts."""
    if beginning is None:
        return ()
    digest = hashlib.blake2b(digest_size=8)
    hashes = []
    for part in _parts(beginning):
        digest.update(part)
        hashes.append(digest.digest())
    return tuple(hashes)


def _parts(beginning: str | Sequence[int]) -> Iterator[bytes]:
    size = _CHARACTERS_PER_PART if isinstance(beginning, str) else _TOKENS_PER_PART
    for start in range(0, min(len(beginning) // size, _MAX_PARTS) * size, size):
        part = beginning[start : start + size]
        yield part.encode(errors="surrogatepass") if isinstance(part, str) else repr(list(part)).encode()


class Router:
    """Remembers which prompts each engine was given. Knows engines by number only."""

    def __init__(self) -> None:
        self._given: OrderedDict[PartHash, int] = OrderedDict()

    def choose(self, hashes: Sequence[PartHash], loads: Mapping[int, int]) -> int:
        """Choose an engine for a prompt with these hashes. loads: number of items of each engine that may be chosen."""
        least = min(loads.values())
        near = [engine for engine, load in loads.items() if load <= 2 * least + _SLACK]
        found = {engine: self._num_given(engine, hashes) for engine in near}
        most = max(found.values())
        chosen = min((engine for engine in near if found[engine] == most), key=lambda engine: loads[engine])
        self._remember(hashes, chosen)
        return chosen

    def forget(self, engine: int) -> None:
        """Forget which prompts the engine was given, because a new engine has replaced it."""
        for one in [one for one, owner in self._given.items() if owner == engine]:
            del self._given[one]

    def _num_given(self, engine: int, hashes: Sequence[PartHash]) -> int:
        return next((at for at, one in enumerate(hashes) if self._given.get(one) != engine), len(hashes))

    def _remember(self, hashes: Sequence[PartHash], engine: int) -> None:
        for one in hashes:
            self._given[one] = engine
            self._given.move_to_end(one)
        while len(self._given) > _MAX_REMEMBERED:
            self._given.popitem(last=False)
