"""Which replica is to have a prompt: one that has its first pages already, unless others have much less to do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from rayspec.decode.engine import Engine
from rayspec.decode.pages import PageHash

# A replica that has the pages may have so many requests more than twice those of the least busy one.
_SLACK = 4
# Pages of prompts that were given out, and may be computed at this moment.
_MAX_GIVEN = 2**16


class PrefixAffinity:
    """Asks the engines which pages they have, and remembers which prompts it gave to whom."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._given: OrderedDict[PageHash, int] = OrderedDict()

    def choose(self, hashes: Sequence[PageHash], loads: Mapping[int, int]) -> int:
        """The replica for a prompt with pages of these hashes. loads: requests of each replica that may be chosen."""
        found = {replica: self._num_found(replica, hashes) for replica in loads}
        most = max(found.values())
        candidates = [
            replica
            for replica in loads
            if found[replica] == most and loads[replica] <= 2 * min(loads.values()) + _SLACK
        ]
        chosen = min(candidates or loads, key=lambda replica: loads[replica])
        self._remember(hashes, chosen)
        return chosen

    def _num_found(self, replica: int, hashes: Sequence[PageHash]) -> int:
        """Of the first pages, that the replica has or was given."""
        num_given = next((at for at, one in enumerate(hashes) if self._given.get(one) != replica), len(hashes))
        return max(num_given, self._engines[replica].num_cached_pages(hashes))

    def _remember(self, hashes: Sequence[PageHash], replica: int) -> None:
        for one in hashes:
            self._given[one] = replica
            self._given.move_to_end(one)
        while len(self._given) > _MAX_GIVEN:
            self._given.popitem(last=False)
