import itertools
from concurrent.futures import Future
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from rayspec.config import SamplingParams
from rayspec.decode import rounds
from rayspec.decode.engine import Engine
from rayspec.decode.stages import LocalStages, StageLostError, StagesReplacedError, done
from rayspec.decode.strategy import BatchState, RoundPlan
from rayspec.decode.work import Result, RoundResult, Work
from rayspec.types import EngineLoad, OutOfMemoryError, RayspecError, RequestOutput
from tests.engines import (
    GREEDY,
    Pieces,
    RandomPlans,
    RowClock,
    complete,
    engine_with,
    finish,
    requests_for,
    require_idle,
    streaming,
    tokens_of,
)
from tests.families import cases, checkpoint, parts_of

LENGTHS = (20, 5, 60, 33, 12)
PARTS = parts_of(checkpoint("llama"))
KNOWN = cases(checkpoint("llama"), LENGTHS, 16)


def _engine(seed: int = 0, **options: Any) -> Engine:
    return engine_with(PARTS, RandomPlans(seed, len(PARTS.sublayers)), **options)


def test_counts_add_up() -> None:
    engine = _engine(max_num_seqs=3)
    outputs = complete(engine, KNOWN.prompts)
    stats, metrics = engine.stats, [output.metrics for output in outputs]
    assert stats.num_generated_tokens == sum(len(output.outputs[0].token_ids) for output in outputs)
    assert stats.num_prompt_tokens == sum(LENGTHS)
    for name in ("num_rounds", "num_draft_tokens", "num_accepted_tokens", "num_preemptions"):
        assert getattr(stats, name) == sum(getattr(one, name) for one in metrics)
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert 0 < stats.num_plain_rounds < stats.num_rounds
    assert sum(stats.accepted_lengths.values()) == stats.num_rounds - stats.num_plain_rounds
    assert sum(n * count for n, count in stats.accepted_lengths.items()) == stats.num_accepted_tokens
    assert stats.mean_accepted_length is not None
    assert 1 < stats.mean_accepted_length < 7
    assert stats.total_s >= stats.prefill_s + stats.draft_s + stats.verify_s > 0
    for one in metrics:
        assert one.first_token_s is not None
        assert one.finished_s is not None
        assert one.arrival_s <= one.first_token_s <= one.finished_s


class _Budgets(RandomPlans):
    """Notes the time that pays its searches."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, len(PARTS.sublayers))
        self.elapsed_s, self.searched_s = list[float](), list[float]()

    def choose(self, state: BatchState) -> RoundPlan:
        self.elapsed_s.append(state.elapsed_s)
        self.searched_s.append(state.searched_s)
        return super().choose(state)


def test_the_time_of_a_strategy_pays_no_search_of_the_next() -> None:
    first, second = _Budgets(1), _Budgets(2)
    clock = RowClock()
    engine = engine_with(PARTS, first, wrap=clock.count, clock=clock)
    complete(engine, KNOWN.prompts)
    engine.stats.optimise_s = 0.5
    assert engine.replace_strategy(second) is first
    complete(engine, KNOWN.prompts)
    assert second.elapsed_s[0] <= first.elapsed_s[0] < first.elapsed_s[-1]
    assert 0 < second.elapsed_s[-1] <= engine.stats.total_s - first.elapsed_s[-1]
    assert set(second.searched_s) == {0.0}


class _Seconds(RandomPlans):
    """Adds up what it is told of rounds, which is nothing of those that had chunks."""

    seconds = seconds_by_result = 0.0

    def observe(
        self, state: BatchState, chosen: RoundPlan, result: RoundResult, num_tokens: int, seconds: float
    ) -> None:
        assert not result.prefilled
        self.seconds += seconds
        self.seconds_by_result += result.draft_s + result.verify_s


@pytest.mark.parametrize("behind", [False, True])
def test_every_second_counts_once(behind: bool) -> None:
    """Long and short prompts in chunks, so that steps have a prefill and a round, and on a device that works behind
    the host rounds begin while the device is still busy with a chunk."""
    clock, strategy = RowClock(behind=behind), _Seconds(1, len(PARTS.sublayers))
    engine = engine_with(PARTS, strategy, wrap=clock.count, clock=clock, max_num_seqs=3, max_num_batched_tokens=16)
    both, outputs, known = 0, [], cases(checkpoint("llama"), LENGTHS, 24)
    for request in requests_for(known.prompts, GREEDY.replace(max_tokens=24)):
        engine.add(request)
    while engine.has_unfinished:
        before = replace(engine.stats)
        outputs += engine.step()
        both += engine.stats.prefill_s > before.prefill_s and engine.stats.verify_s > before.verify_s
    stats = engine.stats
    assert both > 2
    assert stats.prefill_s == pytest.approx(sum(LENGTHS))
    assert stats.total_s == pytest.approx(stats.prefill_s + stats.draft_s + stats.verify_s)
    assert strategy.seconds == pytest.approx(strategy.seconds_by_result)
    assert strategy.seconds > 0.8 * (stats.draft_s + stats.verify_s)
    assert tokens_of(sorted(outputs, key=lambda output: output.request_id)) == known.expected


@pytest.mark.parametrize(("num_steps", "victim"), [(0, "2"), (1, "0"), (3, "4"), (8, "2")])
def test_abort_at_any_time_frees_what_was_held_and_disturbs_nobody(num_steps: int, victim: str) -> None:
    engine = _engine(num_steps, max_num_seqs=3, max_num_batched_tokens=16, kv_cache_tokens=200)
    for request in requests_for(KNOWN.prompts):
        engine.add(request)
    outputs: dict[str, RequestOutput] = {}
    for _ in range(num_steps):
        outputs |= {output.request_id: output for output in engine.step()}
    unread = engine.abort(victim)
    assert unread is not None
    aborted = unread.decoded()
    assert aborted.finished
    assert aborted.error is None
    assert aborted.outputs[0].finish_reason == "abort"
    partial = tuple(aborted.outputs[0].token_ids)
    assert partial == KNOWN.expected[int(victim)][: len(partial)]
    assert engine.abort(victim) is None, "it is gone"
    outputs |= finish(engine)
    assert outputs.keys() == {str(index) for index in range(5)} - {victim}
    for name, output in outputs.items():
        assert tuple(output.outputs[0].token_ids) == KNOWN.expected[int(name)]


def test_streams_add_up_to_what_is_not_streamed() -> None:
    """Among requests that do not stream, with drafts, preemptions and an abort."""
    engine, pieces = _engine(max_num_seqs=4, max_num_batched_tokens=16, kv_cache_tokens=110), Pieces()
    plain, *others = requests_for(KNOWN.prompts, SamplingParams(temperature=0, max_tokens=16, n=2, logprobs=1))
    for request in [plain, *streaming(others)]:
        engine.add(request)
    for _ in range(4):
        pieces.take(engine.step())
    aborted = engine.abort("2")
    assert aborted is not None
    pieces.take([aborted.decoded()])
    while engine.has_unfinished:
        pieces.take(engine.step())
    require_idle(engine)
    assert engine.stats.num_preemptions > 0
    assert len(pieces.of("0")) == 1
    for name, expected in enumerate(KNOWN.expected):
        assert pieces.of(str(name))[-1].finished
        assert len(pieces.of(str(name))) > 5 or name in {0, 2}
        for index in range(2):
            tokens = pieces.tokens(str(name), index)
            assert tokens == expected[: len(tokens) if name == 2 else None]
    assert pieces.of("2")[-1].outputs[0].finish_reason == "abort"


def test_a_long_prompt_is_read_while_others_decode() -> None:
    engine = engine_with(PARTS, max_num_seqs=2, max_num_batched_tokens=16)
    decoding, reading = requests_for(
        [[3] * 5, [4] * 200],
        [GREEDY.replace(ignore_eos=True, max_tokens=60), GREEDY.replace(ignore_eos=True, max_tokens=1)],
    )
    engine.add(decoding)
    engine.step()
    engine.add(reading)
    while not (outputs := engine.step()):
        pass
    assert [output.request_id for output in outputs] == [reading.request_id]
    engine.shutdown()


def test_load_is_what_is_held() -> None:
    engine = _engine(max_num_seqs=2, kv_cache_tokens=400)
    for request in requests_for(KNOWN.prompts):
        engine.add(request)
    engine.step()
    load = engine.load
    assert (load.num_running, load.num_waiting, load.kv_total_tokens) == (2, 3, 400)
    assert 400 >= load.kv_used_tokens >= sum(LENGTHS[:2])
    engine.abort_all()
    finish(engine)
    assert engine.load == EngineLoad(num_running=0, num_waiting=0, kv_used_tokens=0, kv_total_tokens=400)
    assert (load + load).num_waiting == 6


@pytest.mark.parametrize("error", [StagesReplacedError("it was brought back"), StageLostError("stage-1 is gone")])
def test_a_ping_asks_the_stages(error: RayspecError, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with(PARTS)
    monkeypatch.setattr(engine.stages, "check", Mock(side_effect=error))
    if isinstance(error, StageLostError):
        with pytest.raises(StageLostError, match="stage-1 is gone"):
            engine.ping()
    else:
        engine.ping()
        assert engine.stats.num_replays == 1


def _failing(stages: LocalStages, phase: str, call: int, error: RuntimeError) -> LocalStages:
    """Stages that fail once, on the call of that number: of those with chunks of prompts, or of the others."""
    start, calls = stages.start, itertools.count(1)

    def started(work: Work) -> Future[Result]:
        is_due = bool(work.chunks) == (phase == "prefill") and next(calls) == call
        return done(Mock(side_effect=error)) if is_due else start(work)

    stages.start = started  # type: ignore[method-assign]
    return stages


@pytest.mark.parametrize("call", [1, 4])
@pytest.mark.parametrize("phase", ["prefill", "round"])
def test_out_of_memory_costs_its_victims_and_nobody_else(phase: str, call: int) -> None:
    error = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    engine = engine_with(
        PARTS,
        RandomPlans(call, len(PARTS.sublayers)),
        wrap=lambda stages: _failing(stages, phase, call, error),
        max_num_seqs=3,
        max_num_batched_tokens=24,
    )
    outputs = complete(engine, KNOWN.prompts)
    failed = [output for output in outputs if output.error is not None]
    assert 1 <= len(failed) <= (1 if phase == "round" else 3)
    for output in failed:
        assert isinstance(output.error, OutOfMemoryError)
        assert "max_num_batched_tokens" in str(output.error)
        assert output.outputs[0].finish_reason == "error"
    for output, expected in zip(outputs, KNOWN.expected, strict=True):
        tokens = tuple(output.outputs[0].token_ids)
        assert tokens == (expected if output.error is None else expected[: len(tokens)])


def test_memory_that_runs_out_at_the_end_of_a_round_changes_no_other_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sampler has committed tokens by then: the noise of later ones depends on their number."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=16)
    expected = tokens_of(complete(engine_with(PARTS), KNOWN.prompts, params))
    likeliest, calls = rounds._likeliest, itertools.count(1)

    def lacking(*given: Any) -> Any:
        if next(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return likeliest(*given)

    monkeypatch.setattr(rounds, "_likeliest", lacking)
    outputs = complete(_engine(max_num_seqs=3), KNOWN.prompts, params)
    assert 1 <= sum(output.error is not None for output in outputs) < len(outputs)
    for output, tokens in zip(outputs, expected, strict=True):
        assert output.error is not None or tokens_of([output]) == [tokens]


def test_any_other_failure_is_not_swallowed() -> None:
    error = RuntimeError("shapes do not match")
    engine = engine_with(PARTS, wrap=lambda stages: _failing(stages, "round", 1, error))
    for request in requests_for(KNOWN.prompts, GREEDY):
        engine.add(request)
    with pytest.raises(RuntimeError, match="shapes"):
        while engine.has_unfinished:
            engine.step()
    engine.abort_all()
    require_idle(engine)
