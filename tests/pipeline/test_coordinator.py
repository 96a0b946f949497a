"""The plan search over stages finds what the search in one process finds, bit by bit, and gives way to failures."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from rayspec.choices import FULL, SKIP, choices_of
from rayspec.config import SamplingParams
from rayspec.decode.runner import Runner
from rayspec.decode.search import (
    Answer,
    Cosine,
    Feature,
    Found,
    FoundDraft,
    Knapsack,
    LayerKnapsack,
    PlanSearch,
    Question,
    Trial,
    Values,
    answer,
)
from rayspec.decode.stages import SpanRunner
from rayspec.decode.work import TappedToken
from rayspec.model.kv_cache import KVCache
from rayspec.model.rows import RowSpan
from rayspec.pipeline.messages import Searched, Seek
from rayspec.pipeline.server import COORDINATOR, stage_name
from rayspec.planning.knapsack import finished
from rayspec.strategies.fixed import FixedPlan
from rayspec.types import Plan, RayspecError
from tests.engines import TINY_BUDGETS, complete, requests_for, tiny_budgets
from tests.exhaustive import few_of
from tests.families import cases, checkpoint, parts_of
from tests.pipeline.loop import HIDDEN_SIZE, NUM_LAYERS, Chaos, LoopEngine, cut, loop_engine

LENGTHS = (37, 3, 25, 12)
LONG = (97, 80, 3, 70)
COPIES = ("int8", "int4")
NUM_SLOTS = 1024
CPU = torch.device("cpu")


class Tapping(FixedPlan):
    """One plan, hidden states always captured."""

    def __init__(self) -> None:
        plan = Plan(choices=(FULL, FULL, SKIP) + (FULL,) * 5, num_draft_tokens=2, source="test")
        super().__init__(plan, capture=True)


def knapsack(num_tokens: int = 6) -> Knapsack:
    return Knapsack(
        num_tokens=num_tokens,
        savings=[{SKIP: weight} for weight in (3, 1, 2, 1, 2, 2, 1, 3)],
        max_saved=9,
        min_similarity=-1.0,
        max_states=6,
    )


def generate(run: LoopEngine, path: str, lengths: tuple[int, ...] = LENGTHS) -> None:
    """To the middle of some generations."""
    for request in requests_for(cases(path, lengths, 16).prompts, SamplingParams(temperature=0, max_tokens=200)):
        run.engine.add(request)
    for _ in range(12):
        run.engine.step()
    assert not run.engine._under_way, "caches must stay as they are"
    assert len(run.engine._planner.tapped) >= 6


def places(run: LoopEngine, count: int) -> tuple[list[TappedToken], list[RowSpan]]:
    sequences = {sequence.sequence_id: sequence for sequence in run.engine._scheduler.running}
    tokens = run.engine._planner.tapped[-count:]
    return tokens, [sequences[token.sequence_id].rows(token.position, 1) for token in tokens]


@contextmanager
def searching(
    num_stages: int, family: str = "llama", *, lengths: tuple[int, ...] = LENGTHS, **options: Any
) -> Iterator[tuple[LoopEngine, list[TappedToken], list[RowSpan]]]:
    """In the middle of some generations: six tapped tokens, and their rows."""
    path = checkpoint(family)
    with loop_engine(path, num_stages, Tapping(), seed=num_stages, kv_cache_tokens=NUM_SLOTS, **options) as run:
        generate(run, path, lengths)
        yield run, *places(run, 6)


def wait_for(run: LoopEngine, *futures: Future[Answer]) -> None:
    for _ in range(1000):
        run.engine.stages.wait()
        if all(future.done() for future in futures):
            return
    raise AssertionError("a search has no end")


def drafts_of(future: Future[Answer]) -> Sequence[FoundDraft]:
    found = future.result()
    assert isinstance(found, Found)
    return found.drafts


def answer_here(
    run: LoopEngine, path: str, tokens: Sequence[TappedToken], rows: Sequence[RowSpan], question: Question
) -> Answer:
    """The same question answered in one process, on the shards' sublayers, keys, values and taps."""
    shards = [run.replica.parts[stage_name(stage)] for stage in range(run.replica.num_stages)]
    sublayers = tuple(sublayer for shard in shards for sublayer in shard.span.runner.parts.sublayers)
    parts = replace(parts_of(path, "float32", COPIES), sublayers=sublayers)
    cache = KVCache(
        parts.shapes, NUM_SLOTS, dtype=torch.float32, device=CPU, num_spare=1, budgets=TINY_BUDGETS, notes_pages=True
    )
    assert cache.looked_at is not None
    for shard in shards:
        for layer, keys in shard.span.runner.cache.keys.items():
            cache.keys[layer].copy_(keys)
            cache.values[layer].copy_(shard.span.runner.cache.values[layer])
        first = shard.span.runner.first_sublayer // 2
        notes = shard.span.runner.cache.looked_at
        if notes is not None and notes.shape[-1] == cache.looked_at.shape[-1]:
            cache.looked_at[first : first + len(notes)].copy_(notes)
    taps = [torch.stack([shard.span._taps[token] for token in tokens], 1) for shard in shards]
    boundaries = torch.cat([taps[0], *(states[1:] for states in taps[1:])])
    search = PlanSearch(
        Runner(parts, cache, device=CPU, row_counts=None), boundaries, rows, shards[-1].head.next_tokens(tokens)
    )
    return finished(answer(question, search, num_sublayers=2 * NUM_LAYERS))


CHOOSING = Knapsack(
    num_tokens=6,
    savings=[
        {SKIP: 6, "int4": 3, "window": 2, "int4+pages": 4} if index % 2 == 0 else {SKIP: 4, "int8": 1, "int4": 2}
        for index in range(8)
    ],
    max_saved=30,
    min_similarity=-1.0,
    max_states=8,
    also=[("int4",) * 8, ("pages", FULL) * 4],
)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_stages_vary_states_as_one_process_does(num_stages: int) -> None:
    """Contexts of about 100 tokens, of which few keys are three or four pages."""
    with tiny_budgets(), searching(num_stages, lengths=LONG, quantised=COPIES) as (run, tokens, rows):
        future = run.engine.stages.search(tokens, rows, CHOOSING)
        wait_for(run, future)
        expected = answer_here(run, checkpoint("llama"), tokens, rows, CHOOSING)
        assert isinstance(expected, Found)
        found = drafts_of(future)
        assert [draft.choices for draft in found] == [draft.choices for draft in expected.drafts]
        assert {choice for draft in found for choice in draft.choices} >= {FULL, SKIP, "int8", "int4", "pages"}
        assert found[-2].choices == ("int4",) * 8


PATTERNS = [
    choices_of(keep)
    for keep in [
        (True, True, False, True, False, True, True, False),
        (True, True, False, True, True, True, True, True),
        (False, True, True, True, True, True, True, True),
        (True,) * 4 + (False,) * 4,
        (False,) * 8,
        (True,) * 8,
    ]
]
QUESTIONS: dict[str, Question] = {
    "knapsack": knapsack(),
    "layers": LayerKnapsack(num_tokens=6, num_skipped=3),
    "trial": Trial(num_tokens=6, patterns=PATTERNS),
    "cosines": Cosine(num_tokens=6),
    "feature": Feature(num_tokens=6),
}


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
@pytest.mark.parametrize(
    ("family", "num_stages"),
    few_of(
        [(family, num_stages) for num_stages in (1, 2, 3, 4) for family in ("llama", "gemma2", "smollm3")],
        [("llama", 1), ("llama", 4), ("gemma2", 3)],
    ),
)
def test_stages_answer_as_one_process_does(question: Question, family: str, num_stages: int) -> None:
    with searching(num_stages, family) as (run, tokens, rows):
        future = run.engine.stages.search(tokens, rows, question)
        wait_for(run, future)
        answered = future.result()
        assert 0 < answered.seconds < 30
        expected = answer_here(run, checkpoint(family), tokens, rows, question)
        assert answered == msgspec.structs.replace(expected, seconds=answered.seconds)
        if isinstance(expected, Found):
            assert len({draft.choices for draft in expected.drafts}) == len(expected.drafts) >= 4
        run.engine.stages.wait()
        assert seeking(run) == [False] * num_stages


def seeking(run: LoopEngine) -> list[bool]:
    return [shard._seeking is not None for shard in run.replica.parts.values()]


def test_states_travel_once_a_stage_and_are_dropped_when_nobody_needs_them() -> None:
    exits = [choices_of([index < end for index in range(8)]) for end in (2, 4, 6)]
    with searching(3) as (run, tokens, rows):
        run.loop.delivered.clear()
        most = 0
        shard = run.replica.parts["stage-1"]
        expand = shard._expand

        def watched(message: Any, tensors: Any, seeking: Any) -> None:
            nonlocal most
            expand(message, tensors, seeking)
            most = max(most, len(seeking.batches))

        shard._expand = watched  # type: ignore[method-assign]
        wait_for(run, run.engine.stages.search(tokens, rows, knapsack()))
        operations = [(name, op) for name, m, _ in run.loop.delivered for op in getattr(m, "operations", ())]
        assert [op.peer for _, op in operations if op.method == "ship"] == ["stage-1", "stage-2"]
        asked = {(name, op.sublayer) for name, op in operations if op.method == "run"}
        assert asked <= {(stage_name(stage), sub) for stage, (a, b) in enumerate(cut(3)) for sub in range(a, b)}
        wait_for(run, run.engine.stages.search(tokens, rows, Trial(num_tokens=6, patterns=exits)))
        assert 0 < most <= 4


def test_a_search_over_tokens_that_nobody_remembers_fails_leaves_nothing_and_the_next_works() -> None:
    with searching(3) as (run, tokens, rows):
        lost = run.engine.stages.search([TappedToken("nobody", 3)] * 6, rows, knapsack())
        again = run.engine.stages.search(tokens, rows, knapsack())
        cancelled = run.engine.stages.search(tokens, rows, knapsack())
        cancelled.cancel()
        wait_for(run, lost, again)
        with pytest.raises(RayspecError, match="has no captured states of some tokens"):
            lost.result()
        assert drafts_of(again)
        run.replica.parts["stage-1"].span._taps.clear()
        lost = run.engine.stages.search(tokens, rows, knapsack())
        wait_for(run, lost)
        with pytest.raises(RayspecError, match="stage-1 has no captured states of some tokens"):
            lost.result()
        run.engine.stages.wait()
        assert seeking(run) == [False] * 3


@pytest.mark.parametrize("method", ["search", "run"])
def test_lack_of_memory_in_a_search_fails_the_search_alone(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    with searching(2) as (run, tokens, rows):
        with monkeypatch.context() as patch:
            patch.setattr(*{"search": (SpanRunner, "search"), "run": (PlanSearch, "run")}[method], full)
            lost = run.engine.stages.search(tokens, rows, knapsack())
            wait_for(run, lost)
        with pytest.raises(RayspecError, match=r"stage-0 .*can't allocate memory"):
            lost.result()
        again = run.engine.stages.search(tokens, rows, knapsack())
        wait_for(run, again)
        assert drafts_of(again)
        assert run.replica.num_replaced == 0


def test_a_search_that_comes_while_another_is_under_way_has_its_turn() -> None:
    with searching(3) as (run, tokens, rows):
        questions = [knapsack(), Cosine(num_tokens=6), Feature(num_tokens=6)]
        futures = [run.engine.stages.search(tokens, rows, question) for question in questions]
        wait_for(run, *futures)
        found, cosines, feature = (future.result() for future in futures)
        assert isinstance(found, Found)
        assert isinstance(cosines, Values)
        assert isinstance(feature, Values)
        assert (len(cosines.values), len(feature.values)) == (2 * NUM_LAYERS, HIDDEN_SIZE)
        answered = [message.search_id for _, message, _ in run.loop.delivered if isinstance(message, Searched)]
        assert answered == [1, 2, 3]


def test_a_search_fails_at_once_when_the_coordinator_dies_and_works_with_the_next() -> None:
    with searching(2) as (run, tokens, rows):
        seek = Seek(search_id=7, tokens=tokens, rows=rows)
        for shard in run.replica.shards:
            run.loop.put(COORDINATOR, shard, seek, [], epoch=1)
        run.engine.stages.wait()
        assert seeking(run) == [True] * 2
        run.replica.kill(COORDINATOR)
        lost = run.engine.stages.search(tokens, rows, knapsack())
        run.engine.stages._check()
        with pytest.raises(RayspecError, match="coordinator was killed"):
            lost.result(timeout=0)
        with pytest.raises(RayspecError, match="being replaced"):
            run.engine.stages.search(tokens, rows, knapsack()).result(timeout=0)
        run.engine.stages.wait()
        run.engine.stages.wait()
        assert seeking(run) == [False] * 2, "the shards are told"
        again = run.engine.stages.search(tokens, rows, knapsack())
        wait_for(run, again)
        assert drafts_of(again)


def test_a_coordinator_that_dies_again_and_again_is_given_up_and_generation_goes_on() -> None:
    known = cases(checkpoint("llama"), LENGTHS, 16)
    with loop_engine(checkpoint("llama"), 2, Tapping(), max_restarts=2) as run:
        for _ in range(3):
            run.replica.kill(COORDINATOR)
            run.engine.stages.wait()
            run.engine.stages.wait()
        assert run.replica.coordinator is None
        assert [tuple(o.outputs[0].token_ids) for o in complete(run.engine, known.prompts)] == [
            tokens[:16] for tokens in known.expected
        ]


def test_all_measure_again_when_a_shard_is_lost_meanwhile() -> None:
    with loop_engine(checkpoint("llama"), 2) as run:
        run.loop.chaos = Chaos(run, 0, ["stage-1"], most=1, every=1)
        measured = run.engine.stages.measure()
        assert run.replica.num_replaced == 1
        assert len(measured.sublayers) == 2 * NUM_LAYERS


def test_the_whole_replica_is_measured() -> None:
    with loop_engine(checkpoint("llama"), 2, Tapping(), kv_cache_tokens=NUM_SLOTS) as run:
        stages = run.engine.stages
        measured = stages.measure()
        assert len(measured.sublayers) == 2 * NUM_LAYERS
        assert set(measured.stages) == {0, 1}
        assert len(measured.link_s) == 2
        before = [use.num_passes for use in stages.usage()]
        complete(run.engine, cases(checkpoint("llama"), LENGTHS, 16).prompts)
        uses = stages.usage()
        assert [use.name for use in uses] == ["stage-0", "stage-1"]
        assert all(use.num_passes > 0 for use in uses)
        assert before == [0, 0]
