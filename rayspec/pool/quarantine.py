"""Decides which rows an engine is given after deaths, and which row kills engines. Knows rows by number only."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from rayspec.types import RequestError

_DEATHS_OF_A_SUSPECT = 2
_DEATHS_TO_CONDEMN = 4  # three kills from outside must never condemn a row
_CHANCE_TO_CONDEMN = 1e-4  # significance level: how often kills from outside may look like those of a guilty row
_NUM_GROUPS = 16  # so many suspects run one at a time; more suspects run in so many groups


class EngineKilledError(RequestError):
    """Engines died with this row repeatedly, also when it was their only row."""

    kind = "engine_killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The row to blame for a death, if any. suspect: the engine's only row, if it was a suspect before this death.
    is_known: an engine with only this suspect died before. is_guilty: the suspect is condemned."""

    suspect: int | None = None
    is_known: bool = False
    is_guilty: bool = False


@dataclass(slots=True, kw_only=True)
class _Record:
    """Deaths of engines, from the first death with a row until the row is done. place: random rank among suspects.
    num_deaths: deaths with the row. num_alone: deaths with no other row. num_trials: the same, while the row was a
    suspect. num_idle: deaths without any row. alone_s, idle_s: seconds that engines lived with the row alone, and
    without any row."""

    place: float
    num_deaths: int = 0
    num_alone: int = 0
    num_trials: int = 0
    num_idle: int = 0
    alone_s: float = 0.0
    idle_s: float = 0.0

    @property
    def is_suspect(self) -> bool:
        return self.num_deaths >= _DEATHS_OF_A_SUSPECT

    @property
    def is_guilty(self) -> bool:
        """True if engines die with the row alone significantly more often than without a row."""
        return self.num_deaths >= _DEATHS_TO_CONDEMN and self._chance_of_innocence <= _CHANCE_TO_CONDEMN

    @property
    def _chance_of_innocence(self) -> float:
        """Probability of at least `num_alone` deaths with the row alone, if the row has no influence on deaths.

        Each death then happens with the row alone with probability alone_s / (alone_s + idle_s): a binomial tail.
        """
        share = self.alone_s / (self.alone_s + self.idle_s or 1.0)
        return binomial_tail(self.num_alone, self.num_alone + self.num_idle, share)


def binomial_tail(least: int, num_trials: int, chance: float) -> float:
    """Return the probability of `least` or more successes in `num_trials` trials, each with probability `chance`."""
    if not 0 < chance < 1:
        return float(chance >= 1 or least <= 0)
    odds = math.log(chance), math.log1p(-chance)
    all_orders = math.lgamma(num_trials + 1)
    return sum(
        math.exp(
            all_orders - math.lgamma(k + 1) - math.lgamma(num_trials - k + 1) + k * odds[0] + (num_trials - k) * odds[1]
        )
        for k in range(least, num_trials + 1)
    )


class Quarantine:
    """Remembers the rows that an engine had when it died, until they are done, and finds the row that kills engines.

    A row with two deaths is a suspect. While there are suspects, an engine gets no other rows. Up to 16 suspects run
    one at a time, more of them in groups; suspects with the fewest deaths come first. So a row that kills engines runs
    alone in the end. It is condemned after four deaths or more, when engines with the row alone die significantly more
    often than engines without rows, per second that they live.
    Rows that kill engines are often neighbours. Suspects run in random order, so that a healthy row comes soon.
    """

    def __init__(self, seed: int = 0) -> None:
        self._records: dict[int, _Record] = {}
        self._places = random.Random(seed)

    @property
    def has_suspects(self) -> bool:
        return any(record.is_suspect for record in self._records.values())

    def is_suspect(self, row: int) -> bool:
        record = self._records.get(row)
        return record is not None and record.is_suspect

    def admitted(self, waiting: Iterable[int], under_way: Collection[int]) -> list[int]:
        """Return the waiting rows that the engine gets now, in addition to those under way."""
        suspects = {row for row, record in self._records.items() if record.is_suspect}
        if not suspects:
            return list(waiting)
        num_free = -(-len(suspects) // _NUM_GROUPS) - len(under_way)
        ready = sorted((row for row in waiting if row in suspects), key=self._place)
        return ready[: max(0, num_free)]

    def idled(self, seconds: float) -> None:
        """Record that an engine lived for so many seconds without a row."""
        for record in self._records.values():
            record.idle_s += seconds

    def died(self, under_way: Collection[int], seconds: float = 0.0) -> Verdict:
        """Record that an engine died with these rows. seconds: how long it lived with them."""
        if not under_way:
            for record in self._records.values():
                record.num_idle += 1
        if len(under_way) == 1:
            (row,) = under_way
            return self._died_alone(row, self._record(row), seconds)
        for row in under_way:
            self._record(row).num_deaths += 1
        return Verdict()

    def _died_alone(self, row: int, record: _Record, seconds: float) -> Verdict:
        is_trial = record.is_suspect
        record.num_deaths += 1
        record.num_alone += 1
        record.alone_s += seconds
        record.num_trials += is_trial
        if not is_trial:
            return Verdict()
        return Verdict(suspect=row, is_known=record.num_trials > 1, is_guilty=record.is_guilty)

    def _record(self, row: int) -> _Record:
        return self._records.setdefault(row, _Record(place=self._places.random()))

    def _place(self, row: int) -> tuple[int, float]:
        return self._records[row].num_deaths, self._records[row].place

    def forget(self, row: int) -> None:
        """Forget a row, which is done, condemned or given up."""
        self._records.pop(row, None)
