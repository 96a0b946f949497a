from __future__ import annotations

import random

import pytest
import torch

from rayspec.decode.runner import Runner
from rayspec.model.kv_cache import PAGE_SIZE, KeyBudget, KeyBudgets, KVCache
from rayspec.model.row_counts import RowCounts
from rayspec.model.rows import RowSpan, one_run
from tests.families import checkpoint, parts_of

CPU = torch.device("cpu")


def _counts(bucket_rows: int | None) -> RowCounts | None:
    return RowCounts(bucket_rows, bucket_rows) if bucket_rows else None


def _runner(family: str, bucket_rows: int | None, dtype: str = "float32") -> Runner:
    parts = parts_of(checkpoint(family), dtype)
    weight = parts.final_norm.weight
    assert isinstance(weight, torch.Tensor)
    cache = KVCache(parts.shapes, 120, dtype=weight.dtype, device=CPU, num_spare=bucket_rows or 0)
    return Runner(parts, cache, device=CPU, row_counts=_counts(bucket_rows))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "bucket_rows"), [("llama", 8), ("gemma2", 8), ("granite", 8), ("qwen3_moe", 1)])
@torch.inference_mode()
def test_in_buckets_a_row_is_the_same_to_the_bit_whatever_runs_beside_it(
    family: str, bucket_rows: int, dtype: str
) -> None:
    """Every row alone in its bucket, and all rows in shuffled company. Experts see as many rows as choose them, so
    that for a mixture of experts a bucket must be one row."""
    runner = _runner(family, bucket_rows, dtype)
    spans = [RowSpan(one_run(10 * index, 1000), 0, 1) for index in range(11)]
    tokens = torch.arange(20, 31)
    alone = []
    for index, span in enumerate(spans):
        batch = runner.batch([span], token_ids=tokens[index : index + 1])
        alone.append(runner.head(runner.run(batch, runner.embed(batch)))[0])
    order = list(range(11))
    random.Random(0).shuffle(order)
    batch = runner.batch([spans[index] for index in order], token_ids=tokens[order])
    together = runner.head(runner.run(batch, runner.embed(batch)))
    for at, index in enumerate(order):
        assert torch.equal(together[at], alone[index])


@torch.inference_mode()
def test_padding_rows_touch_nothing_that_is_in_use() -> None:
    runner = _runner("llama", 8)
    before = {layer: keys[:, :120].clone() for layer, keys in runner.cache.keys.items()}
    batch = runner.batch([RowSpan(one_run(7, 1000), 0, 1)], token_ids=[5])
    runner.run(batch, runner.embed(batch))
    for layer, keys in runner.cache.keys.items():
        changed = (keys[:, :120] != before[layer]).any(-1).any(0).nonzero().flatten().tolist()
        assert changed == [7]


def _noting_runner(row_counts: RowCounts | None) -> Runner:
    parts = parts_of(checkpoint("llama"))
    budgets = KeyBudgets(pages=KeyBudget(newest=1, looked_at=2))
    cache = KVCache(parts.shapes, 512, dtype=torch.float32, device=CPU, num_spare=8, budgets=budgets, notes_pages=True)
    return Runner(parts, cache, device=CPU, row_counts=row_counts)


@torch.inference_mode()
def test_a_verify_notes_pages_in_one_batch_and_row_by_row() -> None:
    notes = []
    for row_counts in (None, RowCounts(8, 8)):
        runner = _noting_runner(row_counts)
        chunk = runner.batch([RowSpan(one_run(0, 512), 0, 157)], token_ids=torch.arange(3, 160), fixed_shape=False)
        runner.run(chunk, runner.embed(chunk))
        assert bool((runner.cache.looked_at == -1).all()), "nobody asked for notes"
        verify = runner.batch([RowSpan(one_run(0, 512), 157, 5)], token_ids=torch.arange(3, 8), scores_pages=True)
        runner.run(verify, runner.embed(verify))
        notes.append(runner.cache.looked_at)
    assert notes[0] is not None
    assert notes[1] is not None
    assert torch.equal(notes[0], notes[1])
    assert bool((notes[0][:, 157 // PAGE_SIZE] >= 0).all()), "in every layer"
