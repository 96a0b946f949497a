from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rayspec.model.attention import Rows
from rayspec.model.row_counts import FIXED, RowCounts, has_experts, independent_row_counts
from tests.families import checkpoint, parts_of


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
def test_the_loaded_model_says_which_counts_do_not_matter(family: str, dtype: str) -> None:
    counts = independent_row_counts(parts_of(checkpoint(family), dtype))
    assert counts == FIXED or (counts.least in (1, 2, 4, 8) and counts.most == 64)


def _counting(least: int) -> object:
    """A body whose result depends on the number of rows below `least`."""

    def body(hidden: Tensor, rows: Rows) -> Tensor:
        return hidden + (hidden.shape[1] if hidden.shape[1] < least else 0)

    return body


@pytest.mark.parametrize(("least", "expected"), [(1, 1), (2, 2), (4, 4), (5, None), (60, None)])
def test_counts_that_matter_are_found(least: int, expected: int | None) -> None:
    parts = parts_of(checkpoint("llama"))
    bodies = [replace(sublayer, body=_counting(least)) for sublayer in parts.sublayers]  # type: ignore[arg-type]
    changed = replace(parts, sublayers=tuple(bodies), lm_head=torch.nn.Identity())
    assert independent_row_counts(changed) == (FIXED if expected is None else RowCounts(expected, 64))


def test_a_count_in_the_middle_that_matters_is_found() -> None:
    def body(hidden: Tensor, rows: Rows) -> Tensor:
        return hidden + (hidden.shape[1] == 33)

    parts = parts_of(checkpoint("llama"))
    changed = replace(parts, sublayers=tuple(replace(sublayer, body=body) for sublayer in parts.sublayers))
    assert independent_row_counts(changed) == FIXED


def test_experts_are_known() -> None:
    assert has_experts(parts_of(checkpoint("mixtral")))
    assert not has_experts(parts_of(checkpoint("llama")))
