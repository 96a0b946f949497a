"""What a sampler makes of raw logits, one sequence alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rayspec.decode.processing import LogitRow, TokenSampler, process
from rayspec.decode.sampling import Rows, target_tokens


def processed(sampler: TokenSampler, logits: Tensor, pending: Sequence[int], *, first: int = 0) -> Tensor:
    """The logits that the sequence samples from, [m, V]. Row j follows the committed tokens and pending[:first + j]."""
    rows = [LogitRow(at, sampler, pending[: first + at]) for at in range(len(logits))]
    return process(logits.to(torch.float32, copy=True), rows)


def chosen(sampler: TokenSampler, logits: Tensor, pending: Sequence[int] = ()) -> Tensor:
    """The token after committed + pending[:j] for each row j of [m, V] by the coupled rule: int64 [m]."""
    return target_tokens(logits, [Rows(sampler, 0, pending[: logits.shape[0] - 1])])
