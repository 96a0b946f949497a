"""Decides which engine gets a waiting item, and which item is blamed when engines die. Starts and ends no engines.

Routing: an item goes to an engine that had prompts with the same beginning, unless others have much less to do.

Isolation: items that an engine had when it died run again apart from all other items, few at a time. So an item that
kills engines is soon alone. An item that was alone at two deaths is the culprit.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rayspec.pipeline.recovery import Restarts
from rayspec.pool.worker import Beginning, NodeLostError, RemoteEngine
from rayspec.types import RequestError

# An engine can be chosen if it has at most twice as many items as the least busy engine, and this many more.
_SLACK = 4
_MAX_REMEMBERED = 2**16
_MAX_PARTS = 32
_CHARACTERS_PER_PART, _TOKENS_PER_PART = 256, 64

_DEATHS_ALONE = 2  # one death may be a kill from outside
_NUM_GROUPS = 16  # so many isolated items run one at a time; more of them run in so many groups

PartHash = bytes
"""Hash of a part of a prompt and of all parts before it."""


class EngineKilledError(RequestError):
    """Engines died twice while this item was their only item."""

    kind = "engine_killed"


@dataclass(slots=True, kw_only=True)
class Slot:
    """The place of one engine in a pool. restarts_alone: after deaths at which an item was alone for the first time.
    under_way: numbers of the engine's items. delay_s: before the next start. has_place: whether the cluster had a place
    for the engine the last time. failure: why no engine is started here any more."""

    number: int
    restarts: Restarts
    restarts_alone: Restarts
    engine: RemoteEngine | None = None
    starting: asyncio.Task[None] | None = None
    watch: asyncio.Task[None] | None = None
    under_way: set[int] = field(default_factory=set)
    delay_s: float = 0.0
    has_place: bool = True
    failure: Exception | None = None

    @property
    def is_usable(self) -> bool:
        return self.failure is None and self.has_place

    def renew_restarts(self) -> None:
        self.restarts.renew()
        self.restarts_alone.renew()


Turn = asyncio.Future[tuple[Slot, RemoteEngine]]


@dataclass(slots=True)
class _Isolated:
    """rank: random, because items that kill engines are often neighbours. judgement: of a culprit."""

    rank: float
    num_deaths: int = 0
    num_deaths_alone: int = 0
    judgement: EngineKilledError | None = None


class Dispatch:
    """Gives waiting items, known by number, to engines. While there are isolated items, one slot gets only these, and
    the other slots get the other items. max_items: largest number of items that an engine has at a time; None: no
    limit."""

    def __init__(self, slots: Sequence[Slot], *, max_items: int | None) -> None:
        self._slots, self._max_items = slots, max_items
        self._waiting: dict[int, tuple[Turn, tuple[PartHash, ...]]] = {}
        self._router = Router()
        self._isolated: dict[int, _Isolated] = {}
        self._isolating: Slot | None = None
        self._random = random.Random(0)

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def turn(self, number: int, hashes: tuple[PartHash, ...]) -> Turn:
        turn: Turn = asyncio.get_running_loop().create_future()
        self._waiting[number] = turn, hashes
        return turn

    def withdraw(self, number: int) -> None:
        self._waiting.pop(number, None)

    def leave(self, number: int) -> None:
        for slot in self._slots:
            slot.under_way.discard(number)
        self._isolated.pop(number, None)

    def fail(self, error: Exception) -> None:
        for turn, _ in self._waiting.values():
            if not turn.done():
                turn.set_exception(error)

    def deal(self) -> None:
        if not self._isolated:
            self._isolating = None
        elif self._isolating is None or not self._isolating.is_usable:  # else the slot stays the same
            left = [slot for slot in self._slots if slot.is_usable]
            self._isolating = min(left, key=lambda slot: len(slot.under_way), default=None)
        isolating = self._isolating if self._isolating is not None and self._isolating.engine is not None else None
        if isolating is not None:
            num_free = -(-len(self._isolated) // _NUM_GROUPS) - len(isolating.under_way)
            found = {number: self._isolated[number] for number in self._waiting if number in self._isolated}
            ready = sorted(found, key=lambda number: (found[number].num_deaths, found[number].rank))
            for number in ready[: max(0, num_free)]:
                self._give(number, isolating)
        loads = {
            slot.number: len(slot.under_way)
            for slot in self._slots
            if slot.engine is not None and slot is not isolating and self._has_room(slot)
        }
        for number in [number for number in self._waiting if number not in self._isolated] if loads else ():
            slot = self._slots[self._router.choose(self._waiting[number][1], loads)]
            self._give(number, slot)
            loads[slot.number] += 1
            if not self._has_room(slot):
                del loads[slot.number]
            if not loads:
                return

    def died(self, slot: Slot, error: Exception) -> int:
        """Record that the engine of a slot died with the items that it has. Return at how many deaths its only item was
        alone; 0 if there were several items or none, or if the node was lost. At the second such death the item is the
        culprit."""
        self._router.forget(slot.number)
        if isinstance(error, NodeLostError):
            return 0
        if slot.under_way and self._isolating is None:
            self._isolating = slot
        for number in slot.under_way:
            isolated = self._isolated.setdefault(number, _Isolated(self._random.random()))
            isolated.num_deaths += 1
            if len(slot.under_way) > 1:
                continue
            isolated.num_deaths_alone += 1
            if isolated.num_deaths_alone == _DEATHS_ALONE:
                message = f"engines died of this row, also where it was the only row, the last time so: {error}"
                isolated.judgement = EngineKilledError(message)
            return isolated.num_deaths_alone
        return 0

    def judgement(self, number: int) -> EngineKilledError | None:
        return isolated.judgement if (isolated := self._isolated.get(number)) is not None else None

    def _has_room(self, slot: Slot) -> bool:
        return self._max_items is None or len(slot.under_way) < self._max_items

    def _give(self, number: int, slot: Slot) -> None:
        turn, _ = self._waiting.pop(number)
        if not turn.done() and slot.engine is not None:
            slot.under_way.add(number)
            turn.set_result((slot, slot.engine))


def part_hashes(beginning: Beginning) -> tuple[PartHash, ...]:
    """Hash the whole parts that a prompt begins with, at most `_MAX_PARTS`, which bounds the cost of long prompts."""
    if not isinstance(beginning, Sequence):  # the engine refuses what is no prompt
        return ()
    size = _CHARACTERS_PER_PART if isinstance(beginning, str) else _TOKENS_PER_PART
    digest, hashes = hashlib.blake2b(digest_size=8), []
    for start in range(0, min(len(beginning) // size, _MAX_PARTS) * size, size):
        part = beginning[start : start + size]
        digest.update(part.encode(errors="surrogatepass") if isinstance(part, str) else repr(list(part)).encode())
        hashes.append(digest.digest())
    return tuple(hashes)


class Router:
    """Remembers which prompts each engine was given. Knows engines by number only."""

    def __init__(self) -> None:
        self._given: OrderedDict[PartHash, int] = OrderedDict()

    def choose(self, hashes: Sequence[PartHash], loads: Mapping[int, int]) -> int:
        """Choose an engine for a prompt with these hashes. loads: number of items of each engine that may be chosen."""
        least = min(loads.values())
        near = [engine for engine, load in loads.items() if load <= 2 * least + _SLACK]
        owners = [self._given.get(part) for part in hashes]
        found = {
            engine: next((at for at, owner in enumerate(owners) if owner != engine), len(owners)) for engine in near
        }
        most = max(found.values())
        chosen = min((engine for engine in near if found[engine] == most), key=lambda engine: loads[engine])
        for part in hashes:
            self._given[part] = chosen
            self._given.move_to_end(part)
        while len(self._given) > _MAX_REMEMBERED:
            self._given.popitem(last=False)
        return chosen

    def forget(self, engine: int) -> None:
        """Forget which prompts the engine was given, because a new engine has replaced it."""
        self._given = OrderedDict((part, owner) for part, owner in self._given.items() if owner != engine)
