"""Trees of draft tokens: whatever their shape, the text is that of plain decoding, and what is accepted is kept."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rayspec.choices import choices_of
from rayspec.config import SamplingParams
from rayspec.decode.engine import Engine
from rayspec.decode.runner import Runner
from rayspec.model.kv_cache import KVCache
from rayspec.model.row_counts import RowCounts
from rayspec.model.rows import RowSpan, one_run
from rayspec.types import Plan
from tests.engines import complete, engine_with, plant_trees, tokens_of
from tests.families import MATRIX, VOCAB_SIZE, Cases, cases, checkpoint, parts_of
from tests.pipeline.loop import TravellingPlans, loop_engine

CPU = torch.device("cpu")
LENGTHS = (1, 37, 3, 61, 12)
MAX_TOKENS = 16


def known_cases(family: str) -> Cases:
    return cases(checkpoint(family), LENGTHS, MAX_TOKENS)


def greedy_names(known: Cases) -> dict[tuple[str, int], Sequence[int]]:
    return {(str(index), 0): tokens for index, tokens in enumerate(known.expected)}


def _counts(bucket_rows: int | None) -> RowCounts | None:
    return RowCounts(bucket_rows, bucket_rows) if bucket_rows else None


def _runner(family: str, bucket_rows: int | None) -> Runner:
    parts = parts_of(checkpoint(family))
    cache = KVCache(parts.shapes, 120, dtype=torch.float32, device=CPU, num_spare=bucket_rows or 0)
    return Runner(parts, cache, device=CPU, row_counts=_counts(bucket_rows))


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


def test_under_the_rejection_rule_only_greedy_drafts_have_siblings() -> None:
    prompts = known_cases("llama").prompts
    params = [SamplingParams(temperature=index % 2, seed=index, max_tokens=12) for index in range(5)]
    engine = _swift((4, 4, 4, 4), verification="rejection")
    outputs = complete(engine, prompts, params)
    for index, output in enumerate(outputs):
        per_round = output.metrics.num_draft_tokens / output.metrics.num_rounds
        assert (per_round > 4) == (index % 2 == 0)
