from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from rayspec import LLM, SamplingParams, demo
from rayspec.decode.engine import Engine
from rayspec.decode.head import SamplerSpec
from rayspec.decode.rounds import Result, Work
from rayspec.decode.stages import LocalStages, StageLostError
from rayspec.pipeline.replicas import Replicas, merged_stats
from rayspec.pipeline.retelling import Retelling
from rayspec.types import (
    CompletionOutput,
    EmptyPromptError,
    EngineStats,
    PlanRecord,
    Request,
    RequestError,
    RequestOutput,
    no_draft,
)
from tests.demo_model import demo_parts, demo_prompts
from tests.engines import GREEDY, Pieces, RandomPlans, complete, engine_with, requests_for, streaming, tokens_of
from tests.families import cases, checkpoint, parts_of

LENGTHS = (12, 40, 3, 25, 33, 8)


class Letters:
    """A tokenizer that gives every token a letter."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + token % 26) for token in token_ids)


class FailingStages(LocalStages):
    """Stages that are lost, or break in a way nobody has thought of, when so much work was started."""

    error: Exception
    num_starts_left: float

    @classmethod
    def after(cls, num_starts: float, error: Exception) -> Callable[[LocalStages], FailingStages]:
        def wrap(stages: LocalStages) -> FailingStages:
            failing = cls.__new__(cls)
            failing.__dict__ |= stages.__dict__ | {"error": error, "num_starts_left": num_starts}
            return failing

        return wrap

    def open(self, spec: SamplerSpec) -> None:
        if self.num_starts_left <= 0:
            raise self.error
        super().open(spec)

    def start(self, work: Work) -> Future[Result]:
        self.num_starts_left -= 1
        if self.num_starts_left < 0:
            raise self.error
        return super().start(work)


def engine(num_starts: float = float("inf"), error: Exception | None = None, **options: Any) -> Engine:
    wrap = FailingStages.after(num_starts, error or StageLostError("stage-1 is gone"))
    return engine_with(parts_of(checkpoint("llama")), wrap=wrap, max_num_seqs=2, **options)


@pytest.fixture
def make() -> Iterator[Callable[..., Replicas]]:
    """Replicas of engines; their threads end with the test."""
    with ExitStack() as stack:

        def made(*engines: Engine) -> Replicas:
            replicas = Replicas(engines)
            stack.callback(replicas.shutdown)
            return replicas

        yield made


Make = Callable[..., Replicas]


def finish(replicas: Replicas) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    deadline = time.monotonic() + 60
    while replicas.has_unfinished:
        for output in replicas.step():
            assert output.request_id not in outputs, "nothing comes twice"
            outputs[output.request_id] = output
        assert time.monotonic() < deadline
    return outputs


def refusal(replicas: Replicas, request: Request) -> RequestOutput | None:
    """Why the request could not be added: the replicas may all be lost so soon."""
    try:
        replicas.add(request)
    except StageLostError as error:
        return RequestOutput.refused(request, error)
    return None


def completed(replicas: Replicas, prompts: Sequence[Sequence[int]]) -> list[RequestOutput]:
    requests = requests_for(prompts)
    refused = [output for request in requests if (output := refusal(replicas, request)) is not None]
    outputs = finish(replicas) | {output.request_id: output for output in refused}
    return [outputs[request.request_id] for request in requests]


def known() -> Any:
    return cases(checkpoint("llama"), LENGTHS, 24)


def test_results_are_those_of_one_engine_and_requests_are_spread(make: Make) -> None:
    replicas = make(engine(), engine(), engine())
    for request in requests_for(known().prompts):
        replicas.add(request)
    assert Counter(placed.replica for placed in replicas._placed.values()) == {0: 2, 1: 2, 2: 2}
    assert replicas.num_unfinished == 6
    assert replicas.num_wanted == 3 * 4
    outputs = finish(replicas)
    assert tokens_of(outputs[str(index)] for index in range(6)) == known().expected
    assert replicas.stats.num_prompt_tokens == sum(LENGTHS)
    assert all(one.stats.num_generated_tokens == 48 for one in replicas._engines)
    assert replicas.step() == []


def test_replicas_with_other_plans_give_the_same_tokens(make: Make) -> None:
    parts = parts_of(checkpoint("llama"))
    replicas = make(*(engine_with(parts, RandomPlans(seed, 8)) for seed in range(2)))
    assert tokens_of(completed(replicas, known().prompts)) == known().expected
    assert replicas.stats.num_draft_tokens > replicas.stats.num_accepted_tokens > 0


def test_a_request_goes_where_there_is_least_to_do(make: Make) -> None:
    replicas = make(engine(), engine())
    one, two, *_ = requests_for(known().prompts)
    replicas.add(one)
    finish(replicas)
    replicas.add(two)
    assert replicas._placed[two.request_id].replica == 0, "which is idle again"
    finish(replicas)


def test_a_prompt_goes_where_its_first_pages_are_unless_others_have_much_less_to_do(make: Make) -> None:
    replicas = make(engine(), engine())
    document = list(range(3, 83))
    prompts = [[*document, question] for question in range(3, 20)]
    placed = []
    for request in requests_for(prompts):
        replicas.add(request)
        placed.append(replicas._placed[request.request_id].replica)
    assert placed[:4] == [0] * 4, "it was given the document"
    assert 1 in placed
    finish(replicas)
    alone = requests_for([[*document, 50], [9, *document]])
    for request, expected in zip(alone, (True, False), strict=True):
        replicas.add(replace(request, request_id=f"again-{request.request_id}"))
        (one,) = finish(replicas).values()
        assert (one.metrics.num_cached_tokens == 80) == expected


@pytest.mark.parametrize("num_starts", [0, 1, 2, 7, 30])
@pytest.mark.parametrize("error", [StageLostError("stage-1 is gone"), RuntimeError("a mistake")], ids=["lost", "dead"])
def test_what_a_lost_replica_had_begins_anew_on_another(
    make: Make, num_starts: int, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    replicas = make(engine(num_starts, error), engine())
    assert tokens_of(completed(replicas, known().prompts)) == known().expected
    assert replicas._lost == {0}
    assert replicas.stats.num_lost_replicas == 1
    assert caplog.text.count("replica 0 of 2 is lost for good, and the others take its requests") == 1
    replicas.add(requests_for(known().prompts)[1])
    assert next(iter(replicas._placed.values())).replica == 1
    assert tokens_of(finish(replicas).values()) == [known().expected[1]]


@pytest.mark.parametrize("num_starts", [1, 4, 9, 30])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stream_that_begins_anew_repeats_nothing(make: Make, num_starts: int, temperature: float) -> None:
    """With no seed given, too: the text goes on as it began."""
    params = SamplingParams(temperature=temperature, max_tokens=24, n=2, logprobs=0)
    replicas, pieces = make(engine(num_starts, tokenizer=Letters()), engine(tokenizer=Letters())), Pieces()
    for request in streaming(requests_for(known().prompts, params)):
        replicas.add(request)
    deadline = time.monotonic() + 60
    while replicas.has_unfinished:
        pieces.take(replicas.step())
        assert time.monotonic() < deadline
    assert replicas._lost == {0}
    for name, expected in enumerate(known().expected):
        for index in range(2):
            tokens = pieces.tokens(str(name), index)
            assert len(tokens) == 24
            assert pieces.text(str(name), index) == Letters().decode(tokens)
            assert temperature > 0 or tokens == expected


def test_what_was_told_is_not_told_again_in_whatever_pieces_it_comes() -> None:
    def piece(text: str, finished: bool = False) -> RequestOutput:
        one = CompletionOutput(
            index=0, text=text, token_ids=list(text.encode()), finish_reason="stop" if finished else None
        )
        return RequestOutput(request_id="r", prompt=None, prompt_token_ids=(), outputs=[one], finished=finished)

    first = Retelling()
    told = [first.new_part(piece("abc")), first.new_part(piece("de"))]
    second = first.again()
    told += [second.new_part(piece("a")), second.new_part(piece("bc")), second.new_part(piece("def"))]
    third = second.again()
    told += [third.new_part(piece("abcdefg")), third.last_part(piece("hi", finished=True))]
    texts = [output.outputs[0].text if output else None for output in told]
    assert texts == ["abc", "de", None, None, "f", "g", "hi"]
    assert third.again().last_part(piece("abcdefghi", finished=True)).outputs[0].finish_reason == "stop"


def test_a_ping_reaches_every_replica_that_is_left(make: Make) -> None:
    replicas = make(engine(0), engine())
    replicas.ping().result(10)
    assert tokens_of(completed(replicas, known().prompts)) == known().expected
    replicas.ping().result(10)
    lost = make(engine(0), engine(0))
    completed(lost, known().prompts)
    with pytest.raises(StageLostError, match="all replicas are lost"):
        lost.ping().result(10)


@pytest.mark.parametrize("num_starts", [(0, 0), (3, 30), (30, 3)])
def test_when_all_are_lost_every_request_gets_a_typed_error(make: Make, num_starts: tuple[int, int]) -> None:
    replicas = make(*map(engine, num_starts))
    outputs = completed(replicas, known().prompts)
    failed = [output for output in outputs if output.error is not None]
    assert {output.error.kind for output in failed if output.error} <= {"stage_lost", "engine_dead"}
    assert failed
    assert all("stage-1 is gone" in str(output.error) or "all replicas" in str(output.error) for output in failed)
    for output, expected in zip(outputs, known().expected, strict=True):
        assert output.finished
        assert output.error is not None or output.outputs[0].token_ids == expected
    assert replicas._lost == {0, 1}
    with pytest.raises(StageLostError, match="all replicas are lost"):
        replicas.add(requests_for(known().prompts)[0])


def test_an_aborted_request_ends_and_frees_its_place(make: Make) -> None:
    replicas = make(engine(), engine())
    params = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
    long, short = requests_for(known().prompts[:2], [params, GREEDY])
    replicas.add(long)
    replicas.add(short)
    output = replicas.abort(long.request_id)
    assert output is not None
    assert (output.request_id, output.finished, output.error) == (long.request_id, True, None)
    assert replicas.abort(long.request_id) is None
    assert list(finish(replicas)) == [short.request_id]
    deadline = time.monotonic() + 20
    while any(one.has_unfinished for one in replicas._engines):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert replicas.stats.num_generated_tokens < 900


def test_all_can_be_aborted(make: Make) -> None:
    replicas = make(engine(), engine())
    for request in requests_for(known().prompts):
        replicas.add(request)
    assert sorted(output.request_id for output in replicas.abort_all()) == [str(index) for index in range(6)]
    assert not replicas.has_unfinished


def test_a_bad_prompt_is_its_own_fault(make: Make) -> None:
    replicas = make(engine(), engine())
    bad = Request(request_id="bad", params=GREEDY, prompt_token_ids=[])
    replicas.add(bad)
    with pytest.raises(RequestError, match="'bad' is in use"):
        replicas.add(bad)
    for request in requests_for(known().prompts):
        replicas.add(request)
    outputs = finish(replicas)
    assert isinstance(outputs.pop("bad").error, EmptyPromptError)
    assert tokens_of(outputs[str(index)] for index in range(6)) == known().expected
    assert replicas._lost == set()


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


@pytest.mark.exhaustive
def test_two_replicas_of_shards_answer_as_one_model_does(ray_cluster: None) -> None:
    prompts = demo_prompts(4, 6)
    expected = tokens_of(complete(engine_with(demo_parts()), prompts))
    with LLM(
        demo.model_path(), dtype="float32", device="cpu", num_threads=1, max_model_len=1024, kv_cache_tokens=2048,
        speculation={"strategy": "ar"}, parallel={"stages": 1, "replicas": 2, "cpus_per_shard": 0.5},
    ) as llm:  # fmt: skip
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY)
        assert isinstance(llm.engine, Replicas)
        assert all(one.stats.num_prompt_tokens > 0 for one in llm.engine._engines)
    assert tokens_of(outputs) == expected
