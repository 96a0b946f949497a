import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from rayspec.decode.runner import Runner
from rayspec.machine import cpu_class
from rayspec.model.attention import AttentionKind, PackedRows, Rows, pack
from rayspec.model.fused import fuse
from rayspec.model.kv_cache import PAGE_SIZE, KVCache, LayerShape
from rayspec.model.row_counts import FIXED, RowCounts, independent_row_counts
from rayspec.model.rows import RowSpan, one_run, runs_of_pages
from tests.exhaustive import few_of
from tests.families import checkpoint, modules_of, parts_of

# Pages of two sequences: the first adjacent, the second not.
ALONE = one_run(0, 20 * PAGE_SIZE)
SCATTERED = runs_of_pages([20, 21, 30, 22, 39, 31, 32, 25, 24, 33, 34, 35, 36, 37, 38, 26, 27, 28, 29, 23], PAGE_SIZE)


@pytest.mark.parametrize(
    ("family", "dtype"),
    few_of(
        list(product(["llama", "gemma2", "granite", "smollm3"], ["float32", "bfloat16"])),
        [("gemma2", "bfloat16")],
    ),
)
@torch.inference_mode()
def test_with_the_counts_that_are_found_a_row_has_the_same_bits_in_any_company(family: str, dtype: str) -> None:
    """Sequences of one token; then one copy of a text token by token, the other in chains and trees, in scattered
    pages."""
    parts, device, rng = parts_of(checkpoint(family), dtype), torch.device("cpu"), random.Random(0)
    counts, num_tokens = independent_row_counts(parts), 80
    tokens = [rng.randrange(5, 90) for _ in range(num_tokens)]
    cache = KVCache(
        parts.shapes, 80 * PAGE_SIZE, dtype=parts.dtype, device=device, num_spare=counts.least, keeps_finite=True
    )
    runner = Runner(parts, cache, device=device, row_counts=counts)

    def logits(spans: Sequence[RowSpan], token_ids: Sequence[int]) -> Tensor:
        batch = runner.batch(spans, token_ids=token_ids)
        return runner.head(runner.run(batch, runner.embed(batch)))

    def of_one_token(rows: Sequence[int]) -> Tensor:
        return logits([RowSpan(one_run(PAGE_SIZE * row, PAGE_SIZE), 0, 1) for row in rows], [20 + row for row in rows])

    alone = torch.cat([of_one_token([row]) for row in range(80)])
    for number in (2, 3, 5, 13, 37, 64, 65, 80):
        rows = rng.sample(range(80), number)
        assert torch.equal(of_one_token(rows), alone[rows])
    alone = torch.cat([logits([RowSpan(ALONE, at, 1)], tokens[at : at + 1]) for at in range(num_tokens)])
    at = 0
    while at < num_tokens:
        num_rows = min(rng.choice([1, 2, 3, 7, 16, 33, 40]), num_tokens - at)
        wrong = [rng.randrange(5, 90) for _ in range(num_rows)]
        tree = RowSpan(SCATTERED, at, 2 * num_rows, (*range(-1, num_rows - 1), -1, *range(num_rows, 2 * num_rows - 1)))
        company = RowSpan(ALONE, 0, 1)
        found = logits([company, tree], [tokens[0], *tokens[at : at + num_rows], *wrong])
        assert torch.equal(found[1 : num_rows + 1], alone[at : at + num_rows])
        flipped = logits([tree, company], [*wrong, *tokens[at : at + num_rows], tokens[0]])
        assert torch.equal(flipped[num_rows : 2 * num_rows], alone[at : at + num_rows])
        chain = logits([company, RowSpan(SCATTERED, at, num_rows)], [tokens[0], *tokens[at : at + num_rows]])
        assert torch.equal(chain[1:], alone[at : at + num_rows])
        at += num_rows


def _require_counts(changes: Callable[[Tensor, PackedRows], Any], expected: RowCounts, dtype: str = "float32") -> None:
    """Of a model whose sublayers add what `changes` says."""

    def body(hidden: Tensor, rows: Rows) -> Tensor:
        assert isinstance(rows, PackedRows)
        return hidden + changes(hidden, rows)

    parts = parts_of(checkpoint("llama"), dtype)
    bodies = tuple(replace(sublayer, body=body) for sublayer in parts.sublayers)
    assert independent_row_counts(replace(parts, sublayers=bodies, lm_head=torch.nn.Identity())) == expected


@pytest.mark.parametrize(
    ("count", "expected"),
    few_of(
        [(64, RowCounts(1, 32)), (32, RowCounts(1, 16)), (8, FIXED), (7, RowCounts(8, 64)), (1, RowCounts(2, 64))],
        [(32, RowCounts(1, 16)), (8, FIXED)],
    ),
)
def test_a_count_in_the_middle_that_matters_is_found(count: int, expected: RowCounts) -> None:
    _require_counts(lambda hidden, _: hidden.shape[1] == count, expected)


def test_a_count_that_matters_in_few_rows_is_found() -> None:
    _require_counts(lambda hidden, _: (hidden[..., :1] > 2 / 32) * (hidden.shape[1] == 1), RowCounts(2, 64))


@pytest.mark.parametrize("count", few_of([2, 11, 32], [11]))
def test_a_length_of_chains_that_matters_is_found(count: int) -> None:
    _require_counts(lambda _, rows: rows.spans[0].num_rows == count, RowCounts(1, 64, 1), "bfloat16")


def test_differences_of_attention_are_found_beyond_windows_and_under_later_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attend = PackedRows.attend

    def rounding(self: PackedRows, *args: Any, **keywords: Any) -> Tensor:
        """Wherever several rows read more than 40 keys, a number differs by a bit."""
        mixed, kind = attend(self, *args, **keywords), args[-1]
        if self.spans[0].num_rows > 1 and kind.sliding_window is None and self.spans[0].end > 40:
            mixed.view(torch.int16)[0, 0, 0] ^= 1
        return mixed

    monkeypatch.setattr(PackedRows, "attend", rounding)
    assert independent_row_counts(modules_of(checkpoint("mistral"), "bfloat16")).longest_chain == 1


@pytest.mark.skipif(cpu_class() != "AMX", reason="measured with AMX: on others, the test at load decides")
@pytest.mark.parametrize("num_heads", few_of([2, 4, 6, 10, 14], [2, 14]))
@torch.inference_mode()
def test_a_row_of_a_chain_attends_with_the_bits_that_it_has_alone(num_heads: int) -> None:
    """Two key heads. In some chains one row is left over after blocks of 32; with as many query heads, every row is."""
    cpu, kind = torch.device("cpu"), AttentionKind(0.125, None, None)
    cache = KVCache({0: LayerShape(2, 64, 64)}, 512, dtype=torch.bfloat16, device=cpu, keeps_finite=True)
    for seed, context in product(range(20), (150, 480)):
        torch.manual_seed(seed)
        cache.keys[0].copy_(torch.randn(2, 512, 64))
        cache.values[0].copy_(torch.randn(2, 512, 64))
        own = [torch.randn(heads, 32, 64).bfloat16() for heads in (num_heads, 2, 2)]
        singles = [RowSpan(one_run(0, 512), context + row, 1) for row in range(32)]
        alone = pack(cache, singles, device=cpu, division="blocks").attend(0, *own, kind)
        for count in range(2, 33):
            rows = pack(cache, [RowSpan(one_run(0, 512), context, count)], device=cpu, division="blocks")
            assert torch.equal(rows.attend(0, *(each[:, :count] for each in own), kind), alone[:count])


def test_modules_beside_bodies_are_asked_for_themselves() -> None:
    """As where some weights are fetched: the last sublayer of each kind has a body, the first has none."""

    def by_modules(hidden: Tensor, *_: object) -> Tensor:
        return hidden * hidden.shape[1]

    parts = modules_of(checkpoint("llama"))
    fused = fuse(parts, apart_from=[1])
    fused.sublayers[1].block.forward = by_modules
    assert independent_row_counts(fused) == FIXED
