"""Which row it is that the engine dies of: pure decisions over the rows that were under way at each death."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from rayspec.types import RequestError


class EngineKilledError(RequestError):
    """The engine died whenever this row was under way, the last time with this row alone."""

    kind = "engine_killed"


class Suspects:
    """Narrows down who is to blame for the deaths of a job's engines.

    The first death may be anybody's. Rows under way at two deaths in a row are put `on_trial`: they are to be run one
    at a time, before all others. A row during whose own trial the engine dies is guilty.

    max_deaths: so many deaths that no guilty row explains are borne, and so many guilty rows with no success between
    them: an engine that dies of every row is at fault itself.
    """

    def __init__(self, max_deaths: int) -> None:
        self._max_deaths = max_deaths
        self._num_unexplained = 0
        self._num_guilty_in_a_row = 0
        self._before: frozenset[str] = frozenset()
        self.on_trial: frozenset[str] = frozenset()

    def died(self, under_way: AbstractSet[str]) -> str | None:
        """An engine died with these rows under way. Returns the guilty one, if that is clear now."""
        if self.on_trial and len(under_way) == 1:
            (guilty,) = under_way
            self.on_trial -= {guilty}
            self._before = frozenset()
            self._num_unexplained = 0
            self._num_guilty_in_a_row += 1
            return guilty
        self._num_unexplained += 1
        if not self.on_trial:
            self.on_trial = self._before & under_way
            self._before = frozenset(under_way)
        return None

    def succeeded(self) -> None:
        """An engine has completed a row."""
        self._num_guilty_in_a_row = 0

    def acquit(self) -> None:
        """Whoever is still on trial got through it."""
        self.on_trial = self._before = frozenset()

    @property
    def too_many_deaths(self) -> bool:
        """It is not worth starting another engine."""
        return max(self._num_unexplained, self._num_guilty_in_a_row) > self._max_deaths
