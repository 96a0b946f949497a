"""Runs packed rows through spans of sublayers, in one batch or, when deterministic, in buckets of one fixed shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rayspec.model.architecture import Decomposition
from rayspec.model.attention import PackedRows, pack
from rayspec.model.kv_arena import KVArena
from rayspec.model.rows import Path, RowSpan
from rayspec.model.sublayers import Tap, run


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one pass. Each bucket is (rows that are real, rows as the kernels see them)."""

    buckets: tuple[tuple[int, PackedRows], ...]

    @property
    def num_rows(self) -> int:
        return sum(num_real for num_real, _ in self.buckets)


class Runner:
    """The model of this process with its arena. `bucket_rows` fixes the shape of decode passes: every kernel then sees
    the same number of rows, whatever the plan and the batch, and each row attends by itself."""

    def __init__(self, parts: Decomposition, arena: KVArena, *, device: torch.device, bucket_rows: int | None) -> None:
        self.parts = parts
        self.arena = arena
        self.device = device
        self.bucket_rows = bucket_rows
        self._like_hidden = torch.zeros(1, 1, 1, dtype=parts.dtype, device=device)

    @property
    def first_sublayer(self) -> int:
        """The first sublayer that is here."""
        return self.parts.sublayers[0].index

    @property
    def end_sublayer(self) -> int:
        """One after the last sublayer that is here."""
        return self.parts.sublayers[-1].index + 1

    def batch(self, spans: Sequence[RowSpan], *, fixed_shape: bool = True) -> Batch:
        """Pack rows for `embed`, `run` and `head`. `fixed_shape=False`: a prefill chunk, whose shape is its own."""
        size = self.bucket_rows if fixed_shape else None
        if size is None:
            by_run = self.bucket_rows is None
            packs = [pack(self.arena, spans, device=self.device, by_run=by_run)]
        else:
            single, paths = _row_by_row(spans)
            packs = [
                pack(
                    self.arena, single[at : at + size], pad_to=size, device=self.device, paths=paths[at : at + size],
                    by_run=False,
                )
                for at in range(0, len(single), size)
            ]  # fmt: skip
        for rows in packs:
            self.parts.rotate(self._like_hidden, rows)
        return Batch(tuple((sum(span.num_rows for span in rows.spans), rows) for rows in packs))

    def embed(self, token_ids: Tensor) -> Tensor:
        """[N] int64 -> [1, N, hidden_size]."""
        return self.parts.embed(token_ids)

    def run(
        self,
        batch: Batch,
        hidden: Tensor,
        *,
        begin: int | None = None,
        end: int | None = None,
        keep: Sequence[bool] | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Sublayers `begin` .. `end` (exclusive), by default all that are here, over [1, N, hidden_size]."""
        begin = self.first_sublayer if begin is None else begin
        end = self.end_sublayer if end is None else end
        span = self.parts.sublayers[begin - self.first_sublayer : end - self.first_sublayer]
        parts, at = [], 0
        for num_real, rows in batch.buckets:
            padded = _pad_rows(hidden[:, at : at + num_real], len(rows.positions))
            parts.append(run(span, padded, rows, keep=keep, tap=_real_rows(tap, num_real))[:, :num_real])
            at += num_real
        return _joined(parts, 1)

    def head(self, hidden: Tensor) -> Tensor:
        """[1, N, hidden_size] -> logits [N, vocab_size]."""
        num_rows = hidden.shape[1]
        size = self.bucket_rows or num_rows
        pieces = [self.parts.head(_pad_rows(hidden[:, at : at + size], size)) for at in range(0, num_rows, size)]
        return _joined(pieces, 0)[:num_rows]


def _row_by_row(spans: Sequence[RowSpan]) -> tuple[list[RowSpan], list[Sequence[Path]]]:
    """Each row as a span of its own, and its path; none where it sees all slots up to its own, as in a chain."""
    rows: list[RowSpan] = []
    paths: list[Sequence[Path]] = []
    for span in spans:
        rows.extend(RowSpan(span.runs, span.context + row, 1) for row in range(span.num_rows))
        tree = span.paths()
        paths.extend([() if path.is_straight else (path,) for path in tree] if tree else [()] * span.num_rows)
    return rows, paths


def _pad_rows(hidden: Tensor, size: int) -> Tensor:
    """[1, n, hidden_size] -> [1, size, hidden_size], zeros behind."""
    return pad(hidden, (0, 0, 0, size - hidden.shape[1])) if hidden.shape[1] < size else hidden


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _real_rows(tap: Tap | None, num_real: int) -> Tap | None:
    return None if tap is None else lambda index, hidden: tap(index, hidden[:, :num_real])
