"""The supervisor's rules, with engines in this process; `test_processor.py` has real engines."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from rayspec.decode.engine_loop import EngineDeadError
from rayspec.pipeline.placement import NoPlaceError, PlacementError, ShardEndedError
from rayspec.pool.dispatch import EngineKilledError
from rayspec.pool.supervisor import DrainingError, EngineSupervisor, merged_stats
from rayspec.pool.worker import NodeLostError
from rayspec.types import CheckpointError, ConfigError, EngineLoad, EngineStats, PlanRecord, no_draft

Outcome = Any


def is_whole(supervisor: EngineSupervisor) -> bool:
    """Return whether all engines that are not lost are up."""
    return all(slot.engine is not None or slot.failure is not None for slot in supervisor._slots)


class Engine:
    """Takes a few turns of the event loop for a row, and dies of those that the lab names."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.has_ended = False
        self.rows: list[str] = []

    async def load(self) -> dict[str, Any]:
        number = self._lab.engines.index(self) + 1
        await self._lab.loading(number)
        await self.ask("ping")
        return {"engine": number}

    async def handle(self, row: str, callback: object = None) -> str:
        self.rows.append(row)
        self._lab.begun[row] += 1
        for turn in range(3):
            await asyncio.sleep(0)
            if turn == 1 and not self.has_ended and self._lab.kills(row):
                self.has_ended = True
            await self.ask("ping")
        if row == "bug":
            raise TypeError("a bug of the handler's")
        return f"done {row}"

    async def ask(self, question: str) -> Any:
        if self.has_ended:
            raise EngineDeadError("the engine's process has ended")
        self.has_ended = question == "stop"
        load = EngineLoad(num_running=0, num_waiting=0, kv_used_tokens=0, kv_total_tokens=0)
        return {"stats": EngineStats(), "load_now": load}.get(question)

    async def answer(self) -> None:
        if self in self._lab.frozen:
            await asyncio.Event().wait()
        await self.ask("ping")

    def end(self) -> None:
        self.has_ended = True


async def _at_once(_: int) -> None:
    await asyncio.sleep(0)


@dataclass
class Lab:
    """Engines and what happens to them. kills: whether an engine dies of the row, this time."""

    kills: Callable[[str], bool] = lambda row: row.startswith("deadly")
    loading: Callable[[int], Awaitable[None]] = _at_once
    engines: list[Engine] = field(default_factory=list)
    begun: Counter[str] = field(default_factory=Counter)
    frozen: list[Engine] = field(default_factory=list)
    slept_s: list[float] = field(default_factory=list)

    def start(self) -> Engine:
        self.engines.append(Engine(self))
        return self.engines[-1]

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        await asyncio.sleep(0)

    def supervisor(self, max_restarts: int = 3, **options: Any) -> EngineSupervisor:
        return EngineSupervisor(self.start, max_restarts=max_restarts, sleep=self.sleep, **options)

    async def run(self, rows: Sequence[str], supervisor: EngineSupervisor | None = None) -> dict[str, Outcome]:
        """The outcome of every row, all of them under way at once; none takes for ever."""
        supervisor = supervisor or self.supervisor()
        work = asyncio.gather(*map(supervisor.handle, rows), return_exceptions=True)
        return dict(zip(rows, await asyncio.wait_for(work, 20), strict=True))

    async def whole(self, **options: Any) -> EngineSupervisor:
        """All of whose engines are up, or lost for good."""
        supervisor = self.supervisor(**options)
        await supervisor.begin()
        await until(lambda: is_whole(supervisor))
        return supervisor


ROWS = [f"row {number}" for number in range(12)]
DONE = {row: f"done {row}" for row in ROWS}


def times(number: int) -> Callable[[str], bool]:
    """The first rows kill, whichever they are."""
    left = iter([True] * number)
    return lambda _: next(left, False)


async def until(done: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not done():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(wait(), 20)


@pytest.mark.parametrize("num_kills", [0, 3])
def test_an_engine_that_is_killed_is_replaced_and_every_row_comes_once(num_kills: int) -> None:
    lab = Lab(kills=times(num_kills))
    assert asyncio.run(lab.run(ROWS)) == DONE
    assert len(lab.engines) == num_kills + 1
    assert [engine.has_ended for engine in lab.engines] == [True] * num_kills + [False]


def test_an_engine_that_dies_of_every_row_fails_the_rows_and_is_not_started_for_ever() -> None:
    lab = Lab(kills=lambda _: True)
    outcomes = asyncio.run(lab.run(ROWS))
    assert {type(outcome) for outcome in outcomes.values()} == {EngineDeadError}
    assert "max_engine_restarts is 3" in str(outcomes["row 0"])
    assert len(lab.engines) == 5


def test_rows_that_kill_engines_one_after_the_other_are_bounded_too() -> None:
    async def one_by_one() -> list[Outcome]:
        supervisor = lab.supervisor()
        return [(await lab.run([f"deadly {n}"], supervisor))[f"deadly {n}"] for n in range(8)]

    lab = Lab()
    kinds = [type(outcome) for outcome in asyncio.run(one_by_one())]
    assert kinds == [EngineKilledError] * 3 + [EngineDeadError] * 5
    assert len(lab.engines) == 7


def test_an_engine_that_cannot_be_loaded_again_is_tried_again() -> None:
    async def loading(number: int) -> None:
        if number in (2, 3):
            raise ConfigError("the device is busy")

    lab = Lab(kills=times(1), loading=loading)
    assert asyncio.run(lab.run(ROWS)) == DONE
    assert len(lab.engines) == 4


def test_stopped_in_the_middle_all_rows_fail_and_no_engine_is_left() -> None:
    async def stopped(lab: Lab, begun: int) -> list[Outcome]:
        supervisor = lab.supervisor()
        work = asyncio.gather(*map(supervisor.handle, ROWS), return_exceptions=True)
        await until(lambda: len(lab.engines) >= begun)
        await supervisor.stop()
        await supervisor.stop()
        outcomes = await asyncio.wait_for(work, 20)
        with pytest.raises(EngineDeadError, match="shut down"):
            await supervisor.begin()
        return outcomes

    for lab, begun in ((Lab(), 1), (Lab(kills=times(1)), 2)):
        outcomes = asyncio.run(stopped(lab, begun))
        assert {type(outcome) for outcome in outcomes} <= {EngineDeadError, str}
        assert all(engine.has_ended for engine in lab.engines)
        assert len(lab.engines) == begun


def test_a_caller_that_goes_away_holds_nobody_up() -> None:
    async def cancelled() -> dict[str, Outcome]:
        supervisor = lab.supervisor()
        gone = [asyncio.create_task(supervisor.handle(f"deadly {number}")) for number in range(3)]
        await until(lambda: len(lab.engines) >= 2)
        for task in gone:
            task.cancel()
        return await lab.run(ROWS, supervisor)

    lab = Lab()
    assert asyncio.run(cancelled()) == DONE


def test_a_node_that_is_lost_is_no_evidence_and_its_rows_go_on() -> None:
    class OnLostNode(Engine):
        async def handle(self, row: str, callback: object = None) -> str:
            raise NodeLostError("the engine's node is lost")

    lab = Lab()
    lost = iter([True] * 5)

    def start() -> Engine:
        lab.engines.append((OnLostNode if next(lost, False) else Engine)(lab))
        return lab.engines[-1]

    supervisor = EngineSupervisor(start, max_restarts=5, sleep=lab.sleep)
    assert asyncio.run(lab.run(["row 0"], supervisor)) == {"row 0": "done row 0"}
    assert len(lab.engines) == 6


def test_a_job_that_drains_ends_what_an_engine_has_and_begins_nothing_new() -> None:
    async def drained() -> tuple[list[Outcome], Outcome]:
        supervisor = lab.supervisor()
        work = asyncio.gather(*map(supervisor.handle, ROWS), return_exceptions=True)
        await until(lambda: lab.begun.total() == len(ROWS))
        await supervisor.drain()
        late = (await asyncio.gather(supervisor.handle("late"), return_exceptions=True))[0]
        return await work, late

    lab = Lab()
    outcomes, late = asyncio.run(drained())
    assert outcomes == list(DONE.values())
    assert type(late) is DrainingError


class TestSeveralEngines:
    """Each in a slot of its own."""

    MANY: ClassVar = [f"row {number}" for number in range(60)]
    ALL_DONE: ClassVar = {row: f"done {row}" for row in MANY}

    def test_rows_that_begin_alike_meet_unless_others_have_much_less_to_do(self) -> None:
        async def run() -> dict[str, Outcome]:
            supervisor = lab.supervisor(num_engines=2, max_items=40, beginning=lambda row: row[:5] * 100)
            await supervisor.begin()
            await until(lambda: len(lab.engines) == 2 and is_whole(supervisor))
            return await lab.run(rows, supervisor)

        lab = Lab()
        rows = [f"{kind} {number}" for number in range(5) for kind in ("alpha", "gamma")]
        assert len(asyncio.run(run())) == 10
        assert sorted(len({row[:5] for row in engine.rows}) for engine in lab.engines) == [1, 1]

    @pytest.mark.parametrize("num_deadly", [1, 5])
    def test_a_row_that_kills_engines_fails_alone_and_others_do_not_wait_for_it(self, num_deadly: int) -> None:
        async def loading(number: int) -> None:
            for _ in range(50 if number > 3 else 1):  # turns of the loop in which the others could go on
                await asyncio.sleep(0)

        lab = Lab(loading=loading)
        deadly = [f"deadly {number}" for number in range(num_deadly)]
        done_at: dict[str, int] = {}

        async def run() -> dict[str, Outcome]:
            supervisor = lab.supervisor(num_engines=3, max_items=4)

            async def noted(row: str) -> Outcome:
                try:
                    return await supervisor.handle(row)
                finally:
                    done_at[row] = len(lab.engines)

            rows = [*self.MANY[:9], *deadly, *self.MANY[9:]]
            work = asyncio.gather(*map(noted, rows), return_exceptions=True)
            return dict(zip(rows, await asyncio.wait_for(work, 20), strict=True))

        outcomes = asyncio.run(run())
        assert {row: outcomes[row] for row in self.MANY} == self.ALL_DONE
        assert all(isinstance(outcomes[row], EngineKilledError) for row in deadly), outcomes
        late = [row for row in self.MANY if done_at[row] == max(done_at.values())]
        assert len(late) < len(self.MANY) / 2, "most rows were done last"

    def test_an_engine_that_cannot_load_again_leaves_its_rows_to_others(self, caplog: pytest.LogCaptureFixture) -> None:
        async def loading(number: int) -> None:
            if number > 2:
                raise ConfigError("the device is broken")

        async def run() -> tuple[dict[str, Outcome], int]:
            supervisor = await lab.whole(num_engines=2, max_items=4)
            outcomes = await lab.run(self.MANY, supervisor)
            await until(lambda: is_whole(supervisor))
            return outcomes, (await supervisor.stats()).num_lost_replicas

        lab = Lab(loading=loading)
        left = iter([True])
        lab.kills = lambda row: row == "row 30" and next(left, False)
        outcomes, num_lost = asyncio.run(run())
        assert (outcomes, num_lost) == (self.ALL_DONE, 1)
        assert "of 2 is lost for good: the device is broken" in caplog.text

    def test_the_first_that_is_up_begins_and_one_without_a_place_is_tried_again(self) -> None:
        async def loading(number: int) -> None:
            if number == 1:
                await asyncio.sleep(0.01)
                raise NoPlaceError("no place") if has_begun else CheckpointError("another reason")

        async def run() -> dict[str, Outcome]:
            nonlocal has_begun
            supervisor = lab.supervisor(num_engines=2)
            assert await supervisor.begin() == {"engine": 2}
            has_begun = True
            await until(lambda: 30.0 in lab.slept_s)
            await until(lambda: is_whole(supervisor))
            return await lab.run(self.MANY, supervisor)

        has_begun = False
        lab = Lab(loading=loading)
        assert asyncio.run(run()) == self.ALL_DONE
        assert 30.0 in lab.slept_s
        assert len(lab.engines) == 3

    @pytest.mark.parametrize(
        ("error", "num_engines"),
        [(NoPlaceError("no place"), 2), (ShardEndedError("killed"), 1), (ShardEndedError("killed"), 2)],
    )
    def test_an_engine_without_a_place_or_shard_in_the_first_start_is_started_again(
        self, error: Exception, num_engines: int
    ) -> None:
        """Without a place, if others still load."""

        async def loading(number: int) -> None:
            if number == 1:
                raise error
            if isinstance(error, NoPlaceError):
                await until(lambda: 30.0 in lab.slept_s)

        async def run() -> dict[str, Outcome]:
            return await lab.run(self.MANY, await lab.whole(num_engines=num_engines))

        lab = Lab(loading=loading)
        assert asyncio.run(run()) == self.ALL_DONE
        assert len(lab.engines) == num_engines + 1

    @pytest.mark.parametrize("error", [NoPlaceError("no place"), CheckpointError("no/such-model")])
    def test_if_no_engine_loads_that_is_the_error(self, error: Exception) -> None:
        async def loading(number: int) -> None:
            raise error

        async def sleep(seconds: float) -> None:
            await asyncio.sleep(seconds and 60.0)

        lab = Lab(loading=loading)
        lab.sleep = sleep  # type: ignore[method-assign]
        with pytest.raises(type(error)):
            asyncio.run(asyncio.wait_for(lab.supervisor(num_engines=3).begin(), 20))
        assert len(lab.engines) == 3

    def test_an_engine_that_finds_a_place_and_fails_there_is_not_started_for_ever(self) -> None:
        async def loading(number: int) -> None:
            if number > 1:
                raise PlacementError("the shards were not ready in time")

        async def run() -> int:
            return (await (await lab.whole(num_engines=2, max_restarts=3)).stats()).num_lost_replicas

        lab = Lab(loading=loading)
        assert asyncio.run(run()) == 1
        assert 30.0 not in lab.slept_s
        assert len(lab.engines) <= 1 + 1 + 3

    @pytest.mark.parametrize("how", ["frozen", "ended"])
    def test_an_engine_that_is_silent_or_ends_without_items_is_replaced_at_once(self, how: str) -> None:
        async def run() -> dict[str, Outcome]:
            supervisor = await lab.whole(num_engines=2, silence_s=0.02)
            if how == "frozen":
                lab.frozen.append(lab.engines[1])
            lab.engines[1].has_ended = how == "ended"
            await until(lambda: len(lab.engines) == 3 and is_whole(supervisor))
            assert lab.engines[1].has_ended
            outcomes = await lab.run(self.MANY, supervisor)
            await supervisor.stop()
            return outcomes

        async def sleep(_: float) -> None:
            await asyncio.sleep(0.001)

        lab = Lab()
        lab.sleep = sleep  # type: ignore[method-assign]
        assert asyncio.run(run()) == self.ALL_DONE
        assert lab.engines[1].rows == []

    @pytest.mark.parametrize("seed", range(4))
    def test_random_kills_lose_and_double_nothing(self, seed: int) -> None:
        rng = random.Random(seed)
        lab = Lab(kills=lambda row: row == "deadly" or rng.random() < 0.02)
        supervisor = lab.supervisor(max_restarts=20, num_engines=4, max_items=5)
        outcomes = asyncio.run(lab.run([*self.MANY, "deadly"], supervisor))
        assert {row: outcomes[row] for row in self.MANY} == self.ALL_DONE
        assert isinstance(outcomes["deadly"], EngineKilledError)


def test_stats_are_summed() -> None:
    def record(elapsed_s: float) -> PlanRecord:
        return PlanRecord(
            elapsed_s=elapsed_s, context=1, batch=1, plan=no_draft(2, "t"), reason="", estimated_acceptance=0.0,
            predicted_tpt=1.0, plain_tpt=1.0, optimise_s=0.0,
        )  # fmt: skip

    one = EngineStats(num_rounds=3, total_s=1.5, accepted_lengths={0: 1, 2: 5}, plans=[record(1.0), record(3.0)])
    two = EngineStats(num_rounds=4, total_s=2.0, accepted_lengths={2: 1}, plans=[record(2.0)], gate_reason="why")
    total = merged_stats([one, two])
    assert (total.num_rounds, total.total_s, total.gate_reason) == (7, 3.5, "why")
    assert total.accepted_lengths == {0: 1, 2: 6}
    assert [plan.elapsed_s for plan in total.plans] == [1.0, 2.0, 3.0]
    assert one.accepted_lengths == {0: 1, 2: 5}
