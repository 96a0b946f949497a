"""The pipeline without Ray: whatever the cut, the plan and the order of messages, tokens are those of one process.
`test_losslessness.py` has stages of every family."""

import logging
import random
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
from torch import Tensor

from rayspec.choices import choices_of
from rayspec.config import SamplingParams
from rayspec.decode.stages import StageLostError, StagesReplacedError
from rayspec.decode.strategy import RoundPlan
from rayspec.decode.work import Pass
from rayspec.errors import TransportError
from rayspec.pipeline import server as server_module
from rayspec.pipeline.messages import Connect, Failed
from rayspec.pipeline.placement import ShardEndedError
from rayspec.pipeline.ray_stages import RayStages
from rayspec.pipeline.recovery import Status
from rayspec.pipeline.server import COORDINATOR, ENGINE, stage_name
from rayspec.strategies.fixed import FixedPlan
from rayspec.types import OutOfMemoryError, Plan
from tests.engines import complete, engine_with, finish, plant_trees, requests_for, require_idle, tokens_of
from tests.exhaustive import few_of
from tests.families import Cases, cases, checkpoint, parts_of
from tests.pipeline.loop import NUM_LAYERS, Chaos, LoopEngine, LoopReplica, TravellingPlans, cut, loop_engine

LENGTHS = (1, 60, 37, 3, 25, 12, 70)
MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
NUM_SUBLAYERS = 2 * NUM_LAYERS


def known_cases(family: str = "llama") -> Cases:
    return cases(checkpoint(family), LENGTHS, MAX_TOKENS)


def plans(seed: int) -> TravellingPlans:
    return TravellingPlans(seed, NUM_SUBLAYERS)


def begin(run: LoopEngine, known: Cases) -> None:
    for request in requests_for(known.prompts, GREEDY):
        run.engine.add(request)
    for _ in range(5):
        run.engine.step()


@pytest.mark.parametrize("seed", few_of(range(4), [3]))
def test_preempted_and_moved_sequences_keep_their_tokens(seed: int) -> None:
    known = known_cases()
    options: dict[str, Any] = {"kv_cache_tokens": 150, "max_num_batched_tokens": 16, "max_num_seqs": 6}
    with loop_engine(checkpoint("llama"), 2 + seed % 2, plans(seed), seed=seed, **options) as run:
        outputs = complete(run.engine, known.prompts, GREEDY)
        assert tokens_of(outputs) == known.expected
        run.require_clean()
        assert sum(output.metrics.num_preemptions for output in outputs) == run.engine.stats.num_preemptions > 0


def test_moves_happen_in_every_stage() -> None:
    """Accepted branches are moved to where their positions are."""
    known = known_cases()
    names = {(str(index), 0): tokens for index, tokens in enumerate(known.expected)}
    with loop_engine(checkpoint("llama"), 3, TravellingPlans(1, 2 * NUM_LAYERS), num_beside=20) as run:
        plant_trees(run.engine, names, 1, max_tokens=20)
        assert tokens_of(complete(run.engine, known.prompts, GREEDY)) == known.expected
        moved = [name for name, message, _ in run.loop.delivered if type(message).__name__ == "Moves"]
        assert {stage_name(stage) for stage in range(3)} == set(moved)


SAMPLING: dict[str, dict[str, Any]] = {
    "penalties": {"temperature": 0.9, "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "bias": {"temperature": 1.0, "logit_bias": {5: 4.0, 17: -100.0, 40: 2.5}},
    "held back": {"temperature": 1.3, "top_k": 40, "min_p": 0.02, "min_tokens": 8, "stop_token_ids": tuple(range(90))},
    "many": {"temperature": 1.0, "n": 3, "logprobs": 4},
}


@pytest.mark.parametrize("name", few_of(SAMPLING, ("many",)))
def test_with_a_seed_the_text_is_that_of_one_process(name: str) -> None:
    prompts = known_cases("qwen2").prompts[-4:]
    params = [SamplingParams(max_tokens=20, seed=1000 + index, **SAMPLING[name]) for index in range(len(prompts))]
    plain = complete(engine_with(parts_of(checkpoint("qwen2"))), prompts, params)
    for num_stages, options in ((2, {}), (3, {"kv_cache_tokens": 180, "max_num_batched_tokens": 16})):
        with loop_engine(checkpoint("qwen2"), num_stages, plans(num_stages), **options) as run:
            outputs = complete(run.engine, prompts, params)
            run.require_clean()
        for one, other in zip(plain, outputs, strict=True):
            assert other.error is None
            assert [list(o.token_ids) for o in other.outputs] == [list(o.token_ids) for o in one.outputs]
            assert [o.finish_reason for o in other.outputs] == [o.finish_reason for o in one.outputs]
            for here, there in zip(one.outputs, other.outputs, strict=True):
                assert [set(each) for each in there.logprobs or ()] == [set(each) for each in here.logprobs or ()]
                assert there.cumulative_logprob == pytest.approx(here.cumulative_logprob, abs=1e-3)


def test_requests_come_late_and_are_aborted_in_flight() -> None:
    known, rng = known_cases(), random.Random(3)
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 32}
    with loop_engine(checkpoint("llama"), 3, plans(11), patience=3, **options) as run:
        waiting, outputs = requests_for(known.prompts * 2, GREEDY), {}
        victims = {"1", "6", "9", "13"}
        num_aborted_tokens = 0
        while waiting or run.engine.has_unfinished:
            if waiting:
                run.engine.add(waiting.pop(0))
            under_way = {sequence_id.split("/")[1] for sequence_id in run.engine.stages.under_way}
            if rng.random() < 0.2 and victims & under_way:
                victim = rng.choice(sorted(victims & under_way))
                unread = run.engine.abort(victim)
                assert unread is not None
                aborted = unread.decoded()
                assert aborted.outputs[0].finish_reason == "abort"
                num_aborted_tokens += len(aborted.outputs[0].token_ids)
                victims.discard(victim)
            outputs |= {output.request_id: output for output in run.engine.step()}
        require_idle(run.engine)
        assert not victims
        assert len(outputs) == 14 - 4
        # What was under way for an aborted request is not committed.
        num_finished_tokens = sum(map(len, tokens_of(outputs.values())))
        assert run.engine.stats.num_generated_tokens == num_finished_tokens + num_aborted_tokens
        for name, output in outputs.items():
            assert tokens_of([output]) == [known.expected[int(name) % 7]]
        # What was aborted is said with the next work.
        assert tokens_of(complete(run.engine, known.prompts[:1], GREEDY)) == known.expected[:1]
        run.require_clean()


@pytest.mark.parametrize("skipped", few_of([1, 2], [2]))
def test_a_stage_with_nothing_to_do_in_a_draft_is_passed_by(skipped: int) -> None:
    known, spans = known_cases(), cut(4)
    choices = choices_of([not spans[skipped][0] <= index < spans[skipped][1] for index in range(NUM_SUBLAYERS)])
    plan = Plan(choices=choices, num_draft_tokens=4, source="test")

    class One(TravellingPlans):
        def choose(self, state: Any) -> RoundPlan:
            return RoundPlan(plan=plan)

    with loop_engine(checkpoint("llama"), 4, One(0, NUM_SUBLAYERS)) as run:
        assert tokens_of(complete(run.engine, known.prompts, GREEDY)) == known.expected
        drafts = [len([p for p in run.passes_seen(stage) if p.choices is not None]) for stage in range(4)]
        verifies = [len([p for p in run.passes_seen(stage) if p.choices is None]) for stage in range(4)]
    assert drafts[skipped] == 0
    assert drafts[3] == drafts[3 - skipped] > 0
    assert verifies[1] == verifies[2] == verifies[3] > 0


def _run_out_of_memory(run: LoopEngine, stage: int, wanted: Any, count: int = 1) -> list[Pass]:
    """The next `count` passes in that stage for which `wanted` holds do not fit."""
    span, failed = run.replica.parts[stage_name(stage)].span, []
    through = span._through

    def full(work: Pass, *arguments: Any) -> Tensor:
        if len(failed) < count and wanted(work):
            failed.append(work)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
        return through(work, *arguments)

    span._through = full  # type: ignore[method-assign]
    return failed


OUT_OF_MEMORY = {
    "prefill": lambda work: work.choices is None and len(work.rows) > 0 and work.rows[0].context == 0,
    "draft": lambda work: work.choices is not None,
    "verify": lambda work: work.choices is None and work.fixed_shape is not False and work.rows[0].context > 0,
}


@pytest.mark.parametrize("stage", few_of([0, 1, 2], [1]))
@pytest.mark.parametrize("when", few_of(OUT_OF_MEMORY, ["draft", "verify"]))
def test_out_of_memory_in_a_stage_fails_only_its_victims(when: str, stage: int) -> None:
    known = known_cases()
    with loop_engine(checkpoint("llama"), 3, plans(4), max_num_seqs=4, max_num_batched_tokens=64) as run:
        failed = _run_out_of_memory(run, stage, OUT_OF_MEMORY[when], count=2)
        outputs = complete(run.engine, known.prompts, GREEDY)
        assert len(failed) == 2
        victims = [output for output in outputs if output.error is not None]
        assert 1 <= len(victims) <= 4
        assert all(isinstance(output.error, OutOfMemoryError) for output in victims)
        for output, expected in zip(outputs, known.expected, strict=True):
            if output.error is None:
                assert tokens_of([output]) == [expected]
        assert run.replica.num_replaced == 0
        assert tokens_of(complete(run.engine, known.prompts, GREEDY)) == known.expected
        run.require_clean(given_up=2)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, seed=5, max_tokens=24, n=2, logprobs=2)])
@pytest.mark.parametrize("seed", few_of(range(6), [1]))
def test_whoever_dies_at_whatever_moment_nothing_is_lost_or_doubled(seed: int, params: SamplingParams) -> None:
    prompts = known_cases().prompts
    expected = complete(engine_with(parts_of(checkpoint("llama"))), prompts, params)
    num_stages = 1 + seed % 4
    names = [stage_name(stage) for stage in range(num_stages)] + [COORDINATOR]
    options: dict[str, Any] = {"kv_cache_tokens": 300} if seed % 2 else {}
    with loop_engine(checkpoint("llama"), num_stages, plans(seed), seed=seed, **options) as run:
        run.loop.chaos = Chaos(run, seed, names, most=5, every=12)
        outputs = complete(run.engine, prompts, params)
        assert run.loop.chaos.left < 5
        stats = run.engine.stats
        for one, other in zip(expected, outputs, strict=True):
            assert other.error is None
            assert [list(o.token_ids) for o in other.outputs] == [list(o.token_ids) for o in one.outputs]
            assert [len(o.logprobs or ()) for o in other.outputs] == [len(o.logprobs or ()) for o in one.outputs]
        assert stats.num_generated_tokens == sum(len(o.token_ids) for one in outputs for o in one.outputs)
        assert stats.num_replays <= 5
        run.loop.chaos = None
        assert [o.outputs[0].token_ids for o in complete(run.engine, prompts[:2], params)] == [
            o.outputs[0].token_ids for o in expected[:2]
        ]
        run.require_clean()


def test_the_engine_drops_what_is_left_of_an_older_epoch() -> None:
    known = known_cases()
    with loop_engine(checkpoint("llama"), 2) as run:
        run.loop.put(stage_name(1), ENGINE, Failed(work_id=0, reason="of before"), [], epoch=0)
        assert tokens_of(complete(run.engine, known.prompts, GREEDY)) == known.expected


def test_without_restarts_everything_ends_with_a_typed_error() -> None:
    known = known_cases()
    with loop_engine(checkpoint("llama"), 3, plans(0), max_restarts=0) as run:
        begin(run, known)
        run.replica.kill(stage_name(1))
        outputs = finish(run.engine)
        assert outputs
        assert all(isinstance(output.error, StageLostError) for output in outputs.values())
        with pytest.raises(StageLostError, match="stage-1 was killed"):
            run.engine.add(requests_for(known.prompts[:1], GREEDY)[0])
        assert not run.engine.has_unfinished


def test_a_shutdown_ends_a_recovery_that_is_under_way() -> None:
    """Else it would start shards, and Ray, when both have ended."""
    with loop_engine(checkpoint("llama"), 2) as run:
        stages, started = run.engine.stages, list[object]()

        def start(*_: object, name: str, **__: object) -> None:
            started.append(name)
            stages.shutdown()  # of another thread
            raise ShardEndedError("a shard ended while it was started: its placement group is gone")

        run.replica._bundles.start = start
        run.replica.kill(stage_name(1))
        with pytest.raises(StageLostError, match="the engine was shut down"):
            stages.check()
        assert started == ["stage-1"]


def test_a_shard_that_replaces_another_may_lack_its_copies() -> None:
    """As after the loss of a GPU, whose kernels the next process avoids: its sublayers run in full."""
    known, by_copies = known_cases(), Plan(choices=("int4",) * NUM_SUBLAYERS, num_draft_tokens=3, source="test")
    with loop_engine(checkpoint("llama"), 2, FixedPlan(by_copies), quantised=("int4",)) as run:
        begin(run, known)
        shards: Any = run.replica.blueprint.shard_type
        shards.quantised = ()
        run.replica.kill(stage_name(1))
        outputs = finish(run.engine)
        assert tokens_of(outputs[str(index)] for index in range(len(LENGTHS))) == known.expected
        assert run.replica.num_replaced == 1


def test_a_coordinator_that_dies_with_a_shard_does_not_hold_it_up() -> None:
    known = known_cases()
    with loop_engine(checkpoint("llama"), 2, plans(0), max_restarts=1) as run:
        begin(run, known)
        run.loop.lose(COORDINATOR)  # nobody has noticed yet
        run.replica.kill(stage_name(0))
        outputs = finish(run.engine)
        assert tokens_of(outputs[str(index)] for index in range(len(LENGTHS))) == known.expected


def test_a_coordinator_that_does_not_begin_to_listen_is_replaced() -> None:
    """As one that is frozen before: there would be no new plans, without a word."""
    known = known_cases()
    with loop_engine(checkpoint("llama"), 2, plans(0)) as run:
        begin(run, known)
        frozen: Any = run.replica.coordinator
        frozen.listening, frozen.listens = Future(), False
        run.replica._listens_by_s = 0.0
        outputs = finish(run.engine)
        assert run.replica.coordinator is not frozen
        assert run.replica.num_replaced == 0, "no shard"
        assert tokens_of(outputs[str(index)] for index in range(len(LENGTHS))) == known.expected


@pytest.mark.parametrize("lost", [None, "stage-0"])
def test_a_shard_that_works_for_long_is_waited_for(lost: str | None) -> None:
    known = known_cases()
    with loop_engine(checkpoint("llama"), 2) as run:
        stages, loop, busy = run.engine.stages, run.loop, run.replica.parts["stage-1"]
        stages._quiet_s, until = 60.0, loop.clock.now + 1000.0

        def works_until_then() -> None:
            if loop.clock.now > until:
                loop.readers["stage-1"] = busy.step
                busy.step()

        busy.status = lambda: Status("", loop.clock.now, 0)
        loop.readers["stage-1"] = lambda: None
        loop.chaos = works_until_then
        if lost is not None:
            run.replica.kill(lost)
        with pytest.raises(StagesReplacedError) if lost else nullcontext():
            stages.check()
        assert loop.clock.now > until
        assert run.replica.num_replaced == (lost is not None)
        assert tokens_of(complete(run.engine, known.prompts[:2], GREEDY)) == known.expected[:2]


def test_an_answer_that_never_comes_is_not_waited_for() -> None:
    known = known_cases()
    with loop_engine(checkpoint("llama"), 2) as run:
        stages = run.engine.stages
        stages._quiet_s = 60.0
        run.loop.chaos = lambda: run.loop.links[ENGINE, "stage-1"].clear() if stages._transport.epoch == 1 else None
        with pytest.raises(StagesReplacedError, match="no Moved came, and no shard has worked for 60 s"):
            stages.check()
        assert run.loop.clock.now < 100
        assert tokens_of(complete(run.engine, known.prompts[:2], GREEDY)) == known.expected[:2]


def require_no_link(caplog: pytest.LogCaptureFixture, reason: str) -> set[tuple[int, bool]]:
    """Generate over three stages that are to have a link, of which one dies. Return the epochs, and whether each had a
    link."""
    known = known_cases()
    with caplog.at_level(logging.WARNING), loop_engine(checkpoint("llama"), 3, data_plane="collective") as run:
        assert tokens_of(complete(run.engine, known.prompts, GREEDY)) == known.expected
        run.replica.kill("stage-1")
        assert tokens_of(complete(run.engine, known.prompts, GREEDY)) == known.expected
        assert run.replica.num_replaced == 1
        warnings = [record.getMessage() for record in caplog.records if "through the host" in record.getMessage()]
        assert len(warnings) == 1
        assert reason in warnings[0]
        assert not [record for record in caplog.records if "could not be brought back" in record.getMessage()]
        return {(epoch, bool(message.link)) for _, message, epoch in run.loop.delivered if isinstance(message, Connect)}


def test_a_link_that_cannot_be_joined_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    cannot = TransportError("Duplicate GPU detected")
    with patch.object(server_module.TensorLink, "join", side_effect=cannot):
        assert require_no_link(caplog, "Duplicate GPU detected") == {(1, False), (2, True), (3, False), (4, False)}


def test_stages_on_the_same_gpu_try_no_link(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(LoopReplica, "stages_share_gpus", True)
    assert require_no_link(caplog, "on the same GPU") == {(1, False), (2, False)}


def test_a_coordinator_that_begins_to_listen_meanwhile_is_introduced_later() -> None:
    """Its address is missing in what the others get, so nothing may be sent to it yet."""
    stages, found = object.__new__(RayStages), [{"stage-0": MagicMock()}]
    stages._transport = MagicMock(address="here")
    processes = property(lambda _: found.pop() if found else {COORDINATOR: MagicMock()})
    stages.replica = type("Replica", (), {"processes": processes})()
    stages._introduce("")
    assert stages._introduced is None
    assert [call.args[0] for call in stages._transport.send.call_args_list] == ["stage-0"]
