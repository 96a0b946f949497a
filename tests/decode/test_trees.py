"""Trees of draft tokens: whatever their shape, the text is that of plain decoding, and what is accepted is kept."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rayspec.choices import FULL, choices_of
from rayspec.config import SamplingParams
from rayspec.decode.engine import Engine
from rayspec.decode.rounds import SURENESS, _siblings
from rayspec.decode.runner import Runner
from rayspec.decode.scheduler import moves_to_path
from rayspec.decode.work import Draft
from rayspec.model.kv_arena import KVArena
from rayspec.model.row_counts import RowCounts
from rayspec.model.rows import RowSpan, one_run
from rayspec.types import Plan, RequestOutput, no_draft
from tests.engines import RandomPlans, complete, engine_with, plant_trees, tokens_of
from tests.families import MATRIX, VOCAB_SIZE, Cases, cases, checkpoint, parts_of
from tests.pipeline.loop import TravellingPlans, loop_engine

CPU = torch.device("cpu")
LENGTHS = (1, 37, 3, 61, 12)
MAX_TOKENS = 16


def known_cases(family: str) -> Cases:
    return cases(checkpoint(family), LENGTHS, MAX_TOKENS)


def by_name(outputs: Sequence[RequestOutput]) -> dict[tuple[str, int], Sequence[int]]:
    return {(output.request_id, one.index): one.token_ids for output in outputs for one in output.outputs}


def greedy_names(known: Cases) -> dict[tuple[str, int], Sequence[int]]:
    return {(str(index), 0): tokens for index, tokens in enumerate(known.expected)}


def test_paths_of_a_tree() -> None:
    """Row 0 hangs on the last filled slot, row 3 on the one before that."""
    paths = RowSpan(one_run(100, 1000), 7, 5, (-1, 0, 0, -2, 2)).paths()
    assert [(path.shared, path.own) for path in paths] == [
        (7, (7,)), (7, (7, 8)), (7, (7, 9)), (6, (10,)), (7, (7, 9, 11)),
    ]  # fmt: skip
    assert [path.position for path in paths] == [7, 8, 8, 6, 9]
    assert [path.is_straight for path in paths] == [True, True, False, False, False]


def _counts(bucket_rows: int | None) -> RowCounts | None:
    return RowCounts(bucket_rows, bucket_rows) if bucket_rows else None


def _runner(family: str, bucket_rows: int | None) -> Runner:
    parts = parts_of(checkpoint(family))
    arena = KVArena(parts.shapes, 120, dtype=torch.float32, device=CPU, num_spare=bucket_rows or 0)
    return Runner(parts, arena, device=CPU, row_counts=_counts(bucket_rows))


def _logits(runner: Runner, span: RowSpan, tokens: Sequence[int]) -> torch.Tensor:
    batch = runner.batch([span], token_ids=tokens)
    return runner.head(runner.run(batch, runner.embed(batch)))


@pytest.mark.parametrize("bucket_rows", [None, 1, 8])
@pytest.mark.parametrize("family", MATRIX)
@torch.inference_mode()
def test_every_row_of_a_tree_is_the_end_of_a_chain(family: str, bucket_rows: int | None) -> None:
    rng = random.Random(3)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(20)]
    tokens = [rng.randrange(VOCAB_SIZE) for _ in range(14)]
    parents = [-1, *(rng.randrange(row) for row in range(1, 12)), -3, 12]
    runner = _runner(family, bucket_rows)
    _logits(runner, RowSpan(one_run(30, 1000), 0, 20), prompt)
    logits = _logits(runner, RowSpan(one_run(30, 1000), 20, 14, tuple(parents)), tokens)
    for row in range(14):
        path, at = [], row
        while at >= 0:
            path.append(tokens[at])
            at = parents[at]
        chain = [*prompt[: 20 + at + 1], *path[::-1]]
        alone = _logits(_runner(family, bucket_rows), RowSpan(one_run(0, 1000), 0, len(chain)), chain)[-1]
        torch.testing.assert_close(logits[row], alone, atol=1e-3, rtol=1e-4)


@torch.inference_mode()
def test_in_buckets_a_row_of_a_tree_is_that_of_a_chain_to_the_bit() -> None:
    rng = random.Random(4)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(20)]
    tree, chain = _runner("gemma2", 8), _runner("gemma2", 8)
    for runner in (tree, chain):
        _logits(runner, RowSpan(one_run(30, 1000), 0, 20), prompt)
    first = _logits(tree, RowSpan(one_run(30, 1000), 20, 6, (-1, 0, 0, 1, 2, 4)), [5, 6, 7, 8, 9, 10])
    alone = _logits(chain, RowSpan(one_run(30, 1000), 20, 4), [5, 7, 9, 10])
    assert torch.equal(first[[0, 2, 4, 5]], alone)


def test_moves_bring_a_path_together() -> None:
    rng = random.Random(0)
    for _ in range(300):
        path = sorted(rng.sample(range(1, 15), rng.randint(0, 14)))
        slots = list(range(40))
        for move in moves_to_path(range(20, 40), path):
            slots[move.destination : move.destination + move.length] = slots[move.source : move.source + move.length]
        assert slots[: 21 + len(path)] == [*range(21), *(20 + row for row in path)]
    assert [move.length for move in moves_to_path(range(20), [1, 2, 5, 6, 9])] == [2, 1]


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize("family", MATRIX)
def test_greedy_equals_generate_under_random_trees(family: str, verification: str) -> None:
    parts, known = parts_of(checkpoint(family)), known_cases(family)
    engine = engine_with(
        parts, RandomPlans(1, len(parts.sublayers)), verification=verification, num_beside=40, max_num_seqs=5
    )
    plant_trees(engine, greedy_names(known), 7)
    outputs = complete(engine, known.prompts)
    assert tokens_of(outputs) == known.expected
    assert engine.stats.num_accepted_tokens > 20
    assert max(engine.stats.accepted_lengths) > 2


@pytest.mark.parametrize("seed", range(3))
def test_greedy_equals_generate_when_trees_are_preempted(seed: int) -> None:
    parts, known = parts_of(checkpoint("gemma2")), known_cases("gemma2")
    options: dict[str, Any] = {"kv_cache_tokens": 150, "max_num_batched_tokens": 16, "max_num_seqs": 5}
    engine = engine_with(parts, RandomPlans(seed, len(parts.sublayers)), num_beside=20, **options)
    plant_trees(engine, greedy_names(known), seed, max_tokens=20)
    assert tokens_of(complete(engine, known.prompts)) == known.expected
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_accepted_tokens > 10


def test_trees_in_deterministic_mode() -> None:
    parts, known = parts_of(checkpoint("llama")), known_cases("llama")
    engine = engine_with(parts, RandomPlans(4, len(parts.sublayers)), num_beside=40, deterministic=True)
    plant_trees(engine, greedy_names(known), 2)
    assert tokens_of(complete(engine, known.prompts)) == known.expected
    assert max(engine.stats.accepted_lengths) > 2


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_greedy_equals_generate_under_random_trees_in_a_pipeline(num_stages: int, verification: str) -> None:
    known, plans = known_cases("gemma2"), TravellingPlans(2, 8)
    options: dict[str, Any] = {"verification": verification, "num_beside": 40, "seed": num_stages}
    with loop_engine(checkpoint("gemma2"), num_stages, plans, **options) as run:
        plant_trees(run.engine, greedy_names(known), 5)
        assert tokens_of(complete(run.engine, known.prompts)) == known.expected
        run.require_clean()
        assert run.engine.stats.num_accepted_tokens > 20


SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0, "n": 2},
    "penalties": {
        "temperature": 0.9, "presence_penalty": 0.9, "frequency_penalty": 0.6, "repetition_penalty": 1.5, "logprobs": 3,
    },
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.8},
    "held back": {"temperature": 1.0, "min_tokens": 12, "stop_token_ids": tuple(range(30, 120))},
    "bias and truncation": {"temperature": 1.2, "top_p": 0.9, "top_k": 50, "logit_bias": {7: 5.0}, "logprobs": 0},
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLING)
def test_with_a_seed_the_text_does_not_depend_on_trees(name: str) -> None:
    parts, prompts = parts_of(checkpoint("qwen2")), known_cases("qwen2").prompts
    params = [SamplingParams(max_tokens=20, seed=50 + index, **SAMPLING[name]) for index in range(len(prompts))]
    plain = complete(engine_with(parts), prompts, params)
    for seed, options in enumerate(({}, {"kv_cache_tokens": 190, "max_num_batched_tokens": 16})):
        engine = engine_with(parts, RandomPlans(seed, len(parts.sublayers)), num_beside=30, **options)
        plant_trees(engine, by_name(plain), seed)
        outputs = complete(engine, prompts, params)
        assert by_name(outputs) == by_name(plain)
        assert engine.stats.num_accepted_tokens > 10
        for one, other in zip(plain, outputs, strict=True):
            _require_same_logprobs(one, other)


def _require_same_logprobs(one: RequestOutput, other: RequestOutput) -> None:
    for expected, actual in zip(one.outputs, other.outputs, strict=True):
        assert (expected.logprobs is None) == (actual.logprobs is None)
        for these, those in zip(expected.logprobs or (), actual.logprobs or (), strict=True):
            assert those.keys() == these.keys()
            for key, value in these.items():
                assert those[key].logprob == pytest.approx(value.logprob, abs=1e-4)


def _swift(widths: tuple[int, ...], **options: Any) -> Engine:
    parts = parts_of(checkpoint("llama"))
    choices = choices_of([index not in (2, 5) for index in range(len(parts.sublayers))])
    plan = Plan(choices=choices, num_draft_tokens=4, source="swift", tree_widths=widths)
    return engine_with(parts, plan, **({"num_beside": 64} | options))


def test_siblings_are_accepted_where_the_spine_is_not() -> None:
    known = known_cases("llama")
    chain, tree = _swift(()), _swift((10, 10, 10, 10))
    for engine in (chain, tree):
        assert tokens_of(complete(engine, known.prompts)) == known.expected
    assert tree.stats.num_rounds < chain.stats.num_rounds
    assert tree.stats.num_draft_tokens > 3 * chain.stats.num_draft_tokens


def test_widths_follow_the_confidence() -> None:
    spine = Draft([1, 2, 3, 4], [0.96, 0.95, 0.8, 0.5])
    ranked = [[token, *range(10, 20)] for token in spine.token_ids]
    assert SURENESS == (0.95, 0.8, 0.5)
    assert [len(others) for others in _siblings(spine, ranked, (1, 3, 5, 10), 64)] == [0, 2, 4, 9]
    assert [len(others) for others in _siblings(spine, ranked, (3, 5, 8, 10), 64)] == [2, 4, 7, 9]
    assert _siblings(spine, ranked, (1, 3, 5, 10), 9) == [[], [10, 11], [10, 11, 12], []]
    assert _siblings(Draft([11], [0.1]), [[12, 11, 13]], (1, 3, 5, 2), 9) == [[12]]
    spine.branch([[], [10, 11], [12], []])
    assert spine == Draft([1, 2, 3, 4, 10, 11, 12], [0.96, 0.95, 0.8, 0.5], [0, 1, 2, 3, 1, 1, 2])
    assert spine.length == 4
    assert Draft([5, 6, 7], parents=[0, 0, 2]).length == 2


def test_under_the_rejection_rule_only_greedy_drafts_have_siblings() -> None:
    prompts = known_cases("llama").prompts
    params = [SamplingParams(temperature=index % 2, seed=index, max_tokens=12) for index in range(5)]
    engine = _swift((4, 4, 4, 4), verification="rejection")
    outputs = complete(engine, prompts, params)
    for index, output in enumerate(outputs):
        per_round = output.metrics.num_draft_tokens / output.metrics.num_rounds
        assert (per_round > 4) == (index % 2 == 0)


def test_a_tree_keeps_to_the_room_there_is() -> None:
    """Without slots beside its tokens a sequence still has its chain, and branches as far as they fit."""
    known = known_cases("llama")
    engine = _swift((10, 10, 10, 10), num_beside=0, max_num_seqs=5, kv_cache_tokens=sum(LENGTHS) + 5 * MAX_TOKENS)
    assert tokens_of(complete(engine, known.prompts)) == known.expected


def test_plans_name_four_widths() -> None:
    with pytest.raises(ValueError, match=r"tree_widths is \(1, 2\)"):
        Plan(choices=(FULL,), num_draft_tokens=1, source="", tree_widths=(1, 2))
    assert not no_draft(2, "").tree_widths
