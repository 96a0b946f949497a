"""Finding the row that kills engines: engines are sets of rows, and time does not pass."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from scipy.stats import binom

from rayspec.pool.quarantine import Quarantine, Verdict, binomial_tail

WIDTH = 8

Kill = Callable[[frozenset[int]], bool]


def run(
    num_rows: int, deadly: frozenset[int], *, kill: Kill = lambda _: False, width: int = WIDTH, seed: int = 0
) -> tuple[set[int], list[int], int]:
    """Rows that succeeded, rows that were condemned, and the number of deaths.

    A deadly row kills the engine when its turn comes. `kill` kills the engine from outside, by its rows.
    """
    quarantine, order = Quarantine(), random.Random(seed)
    waiting, under_way = list(range(num_rows)), frozenset[int]()
    succeeded: set[int] = set()
    condemned: list[int] = []
    num_deaths = 0
    while waiting or under_way:
        admitted = quarantine.admitted(waiting[: width - len(under_way)], under_way)
        under_way |= set(admitted)
        waiting = [row for row in waiting if row not in under_way]
        assert under_way, "nothing runs, and nothing is admitted"
        row = order.choice(sorted(under_way))
        if row not in deadly and not kill(under_way):
            succeeded.add(row)
            quarantine.forget(row)
            under_way -= {row}
            continue
        num_deaths += 1
        verdict = quarantine.died(under_way)
        guilty = verdict.suspect if verdict.is_guilty else None
        if guilty is not None:
            condemned.append(guilty)
            quarantine.forget(guilty)
        waiting = [one for one in sorted(under_way) if one != guilty] + waiting
        under_way = frozenset()
    return succeeded, condemned, num_deaths


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("deadly", [{0}, {20}, {39}, {3, 30}, {10, 11, 12}, set(range(0, 40, 4)), set(range(40))])
def test_only_rows_that_kill_engines_are_condemned(deadly: set[int], seed: int) -> None:
    succeeded, condemned, num_deaths = run(40, frozenset(deadly), seed=seed)
    assert (sorted(condemned), succeeded) == (sorted(deadly), set(range(40)) - deadly)
    assert num_deaths <= 2 + 4 * len(deadly)


def test_one_deadly_row_costs_four_deaths() -> None:
    assert run(40, frozenset({20}))[2] == 4
    assert run(1, frozenset({0})) == (set(), [0], 4)


@pytest.mark.parametrize("seed", range(3))
def test_one_deadly_row_among_thousands_costs_few_deaths(seed: int) -> None:
    succeeded, condemned, num_deaths = run(2000, frozenset({700}), width=1000, seed=seed)
    assert (len(succeeded), condemned) == (1999, [700])
    assert num_deaths <= 8


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_rows", [1, 2, 40])
def test_three_kills_from_outside_condemn_no_row(num_rows: int, seed: int) -> None:
    kills = iter([True] * 3)
    succeeded, condemned, num_deaths = run(num_rows, frozenset(), kill=lambda _: next(kills, False), seed=seed)
    assert (len(succeeded), condemned, num_deaths) == (num_rows, [], 3)


@pytest.mark.parametrize("seed", range(20))
def test_kills_from_outside_beside_a_deadly_row(seed: int) -> None:
    chance = random.Random(seed)
    _, condemned, _ = run(40, frozenset({7}), kill=lambda rows: len(rows) > 1 and chance.random() < 0.1, seed=seed)
    assert condemned == [7]


def test_a_row_is_not_condemned_where_engines_without_rows_die_as_often() -> None:
    quarantine = Quarantine()
    for _ in range(50):
        assert not quarantine.died([1], 5.0).is_guilty
        quarantine.idled(5.0)
        assert not quarantine.died([]).is_guilty


def test_a_row_is_condemned_where_engines_without_rows_live() -> None:
    quarantine = Quarantine()
    verdicts = []
    for _ in range(12):
        verdicts.append(quarantine.died([1], 5.0).is_guilty)
        quarantine.idled(10.0)
    assert verdicts.index(True) == 9  # engines live with the row for 5 s of 15: one chance in 3^9 is below 1e-4


@pytest.mark.parametrize(
    ("least", "num_trials", "chance"), [(0, 5, 0.3), (3, 5, 0.3), (9, 9, 0.5), (40, 300, 0.1), (2, 3, 0.0)]
)
def test_the_binomial_tail(least: int, num_trials: int, chance: float) -> None:
    assert binomial_tail(least, num_trials, chance) == pytest.approx(binom.sf(least - 1, num_trials, chance), abs=1e-12)


@dataclass(kw_only=True)
class TimedJob:
    """A job whose engines take `load_s` to load and about `row_s` for a row, 8 at a time. Kills come from outside, at
    random, every `kill_every_s` on average; they hit loading engines, too."""

    load_s: float
    row_s: float
    kill_every_s: float = math.inf
    deadly: frozenset[int] = frozenset()
    seed: int = 0
    now_s: float = 0.0
    num_deaths: int = 0
    condemned: list[int] = field(default_factory=list)

    def run(self, num_rows: int) -> None:
        self.chance, self.quarantine = random.Random(self.seed), Quarantine(self.seed)
        self.waiting, self.under_way = list(range(num_rows)), dict[int, float]()
        self.next_kill_s = self._when_killed()
        watch_s = 0.0
        while self.waiting:
            while self._idles(self.load_s + watch_s):
                self.num_deaths += 1
                self.quarantine.died([])
            watch_s = self._engine()

    def _engine(self) -> float:
        """Until it dies or all is done. Returns how long the next engine is to live without a row."""
        while self._admit():
            row = self.chance.choice(sorted(self.under_way))
            is_killed = self._is_killed_within(self.chance.expovariate(1 / self.row_s))
            if row in self.deadly or is_killed:
                return self._died()
            del self.under_way[row]
            self.quarantine.forget(row)
        return 0.0

    def _admit(self) -> bool:
        for row in self.quarantine.admitted(self.waiting, self.under_way)[: WIDTH - len(self.under_way)]:
            self.waiting.remove(row)
            self.under_way[row] = self.now_s
        return bool(self.under_way)

    def _died(self) -> float:
        self.num_deaths += 1
        seconds = self.now_s - min(self.under_way.values())
        verdict = self.quarantine.died(list(self.under_way), seconds)
        watch_s = 2 * seconds if len(self.under_way) == 1 else 0.0
        if verdict.is_guilty and verdict.suspect is not None:
            self.condemned.append(verdict.suspect)
            self.quarantine.forget(verdict.suspect)
            del self.under_way[verdict.suspect]
        self.waiting, self.under_way = sorted(self.under_way) + self.waiting, {}
        return watch_s

    def _idles(self, seconds: float) -> bool:
        before_s = self.now_s
        is_killed = self._is_killed_within(seconds)
        self.quarantine.idled(self.now_s - before_s)
        return is_killed

    def _is_killed_within(self, seconds: float) -> bool:
        self.now_s += seconds
        is_killed = self.next_kill_s <= self.now_s
        if is_killed:
            self.now_s, self.next_kill_s = self.next_kill_s, self._when_killed()
        return is_killed

    def _when_killed(self) -> float:
        return (
            math.inf if self.kill_every_s == math.inf else self.now_s + self.chance.expovariate(1 / self.kill_every_s)
        )


@pytest.mark.parametrize(("load_s", "row_s", "kill_every_s"), [(10.0, 1.0, 15.0), (10.0, 1.0, 40.0), (2.0, 5.0, 20.0)])
def test_random_kills_condemn_next_to_no_healthy_row(load_s: float, row_s: float, kill_every_s: float) -> None:
    """With the 40 rows of a job killed until they are done, however often that is."""
    jobs = [TimedJob(load_s=load_s, row_s=row_s, kill_every_s=kill_every_s, seed=seed) for seed in range(150)]
    for job in jobs:
        job.run(40)
    assert sum(job.num_deaths for job in jobs) > len(jobs)
    assert sum(len(job.condemned) for job in jobs) <= 1


@pytest.mark.parametrize(("load_s", "row_s", "most"), [(10.0, 1.0, 8), (3.0, 0.1, 6), (5.0, 30.0, 16)])
def test_a_guilty_row_is_found_after_few_deaths(load_s: float, row_s: float, most: int) -> None:
    for seed in range(30):
        job = TimedJob(load_s=load_s, row_s=row_s, deadly=frozenset({20}), seed=seed)
        job.run(40)
        assert (job.condemned, job.num_deaths <= most) == ([20], True)


def test_a_row_that_is_done_is_forgotten() -> None:
    quarantine = Quarantine()
    for _ in range(2):
        quarantine.died([1, 2])
    (first,) = quarantine.admitted([1, 2, 3], [])
    quarantine.forget(first)
    (second,) = quarantine.admitted([1, 2, 3], [])
    assert {first, second} == {1, 2}
    quarantine.forget(second)
    assert quarantine.admitted([3, 4], []) == [3, 4]


def test_a_verdict_names_the_suspect_that_was_alone() -> None:
    quarantine = Quarantine()
    assert [quarantine.died([1, 2]) for _ in range(2)] == [Verdict()] * 2
    assert quarantine.died([1]) == Verdict(suspect=1)
    assert quarantine.died([2]) == Verdict(suspect=2)
    assert quarantine.died([1]) == Verdict(suspect=1, is_known=True, is_guilty=True)
    quarantine.forget(1)
    assert quarantine.died([1]) == Verdict()


def test_rows_with_one_death_run_beside_all_others() -> None:
    quarantine = Quarantine()
    quarantine.died([1, 2])
    assert quarantine.admitted([1, 2, 3], [4]) == [1, 2, 3]
