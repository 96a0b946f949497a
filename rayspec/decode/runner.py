"""Runs packed rows through spans of sublayers: in one batch; when deterministic, in numbers that do not matter; on a
device that wants static shapes, in the buffers of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from rayspec.choices import FULL, SKIP, Choice, Keys
from rayspec.model.architecture import Decomposition
from rayspec.model.attention import PackedRows, pack
from rayspec.model.buckets import bucket_of
from rayspec.model.graphs import StepGraphs
from rayspec.model.kv_arena import KVArena
from rayspec.model.row_counts import RowCounts
from rayspec.model.rows import Path, RowSpan
from rayspec.model.static_rows import STATIC_KEYS, Filling, StaticRows, StepBuffers
from rayspec.model.static_step import StaticStep, Step
from rayspec.model.sublayers import Sublayer, Tap, run

TokenIds: TypeAlias = Sequence[int] | Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one pass. buckets: each is (rows that are real, rows as the kernels see them). token_ids: where the pass
    begins with tokens."""

    buckets: tuple[tuple[int, PackedRows | Filling], ...]
    token_ids: TokenIds = ()

    @property
    def num_rows(self) -> int:
        return sum(num_real for num_real, _ in self.buckets)


class Runner:
    """The model of this process with its arena. `row_counts`: of decode passes; each row then attends by itself, and
    has the same bits whatever the plan and the batch.

    buffers: passes that fit run in them, as launches that depend on their bucket only. The hidden states that a run
    returns then lie in a buffer until the next batch is embedded or run; where the head is not here, they are a copy.
    graphs: captured from passes in these buffers; without them such passes are launched eagerly. choices: by which
    drafts may run sublayers, of what the sublayers can.
    """

    def __init__(
        self,
        parts: Decomposition,
        arena: KVArena,
        *,
        device: torch.device,
        row_counts: RowCounts | None,
        buffers: StepBuffers | None = None,
        graphs: StepGraphs | None = None,
        choices: Sequence[Choice] = (FULL, SKIP),
    ) -> None:
        self.parts = parts
        self.arena = arena
        self.device = device
        self.row_counts = row_counts
        self.graphs = graphs
        self.choices_by_kind = _choices_by_kind(parts, choices)
        self._buffers = buffers
        self._step: Step | None = graphs or (StaticStep(parts, buffers) if buffers is not None else None)
        self._like_hidden = torch.zeros(1, 1, 1, dtype=parts.dtype, device=device)

    @property
    def first_sublayer(self) -> int:
        """The first sublayer that is here."""
        return self.parts.sublayers[0].index

    @property
    def end_sublayer(self) -> int:
        """One after the last sublayer that is here."""
        return self.parts.sublayers[-1].index + 1

    @property
    def supported_keys(self) -> tuple[Keys, ...]:
        """What the rows of every pass here can read."""
        of_arena = self.arena.supported_keys
        return of_arena if self._buffers is None else tuple(keys for keys in of_arena if keys in STATIC_KEYS)

    def batch(
        self,
        spans: Sequence[RowSpan],
        *,
        token_ids: TokenIds = (),
        fixed_shape: bool = True,
        scores_pages: bool = False,
    ) -> Batch:
        """Pack rows for `embed`, `run` and `head`. `fixed_shape=False`: a prefill chunk, whose shape is its own.
        scores_pages: see `PackedRows`; rows in buffers leave no notes."""
        filling = self._filling(spans, token_ids)
        if filling is not None:
            return Batch(((filling.num_rows, filling),), token_ids)
        packs = self._packed(spans, self.row_counts if fixed_shape else None, scores_pages)
        for rows in packs:
            self.parts.rotate(self._like_hidden, rows)
        return Batch(tuple((sum(span.num_rows for span in rows.spans), rows) for rows in packs), token_ids)

    def embed(self, batch: Batch) -> Tensor:
        """[1, N, hidden_size] of the batch's tokens."""
        _, rows = batch.buckets[0]
        if isinstance(rows, Filling):
            assert self._step is not None
            static = self._held(rows)
            self._step.embed(static)
            return static.residual[:, : rows.num_rows]
        return self.parts.embed(torch.as_tensor(batch.token_ids, device=self.device))

    def run(
        self,
        batch: Batch,
        hidden: Tensor,
        *,
        begin: int | None = None,
        end: int | None = None,
        choices: Sequence[Choice] | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Sublayers `begin` .. `end` (exclusive), by default all that are here, over [1, N, hidden_size]."""
        begin = self.first_sublayer if begin is None else begin
        end = self.end_sublayer if end is None else end
        span = self.parts.sublayers[begin - self.first_sublayer : end - self.first_sublayer]
        parts, at = [], 0
        for num_real, rows in batch.buckets:
            left = self._run(span, rows, hidden[:, at : at + num_real], choices, tap)
            parts.append(left[:, :num_real])
            at += num_real
        left = _joined(parts, 1)
        return left.clone() if self._leaves_buffer(batch) else left

    def head(self, hidden: Tensor) -> Tensor:
        """[1, N, hidden_size] -> logits [N, vocab_size]."""
        num_rows = hidden.shape[1]
        padded = self._buffers.padded(hidden) if self._buffers is not None else None
        if padded is not None:
            return self.parts.head(padded)[:num_rows]
        counts = self.row_counts or RowCounts(num_rows, max(num_rows, 1))
        pieces = [
            self.parts.head(_pad_rows(hidden[:, at : at + counts.most], counts.least))
            for at in range(0, num_rows, counts.most)
        ]
        return _joined(pieces, 0)[:num_rows]

    def _packed(self, spans: Sequence[RowSpan], counts: RowCounts | None, scores_pages: bool) -> list[PackedRows]:
        make = partial(pack, self.arena, device=self.device, scores_pages=scores_pages)
        if counts is None:
            return [make(spans, by_run=self.row_counts is None)]
        single, paths = _row_by_row(spans)
        chosen = [slice(at, at + counts.most) for at in range(0, len(single), counts.most)]
        return [make(single[here], pad_to=counts.least, paths=paths[here], by_run=False) for here in chosen]

    def _filling(self, spans: Sequence[RowSpan], token_ids: TokenIds) -> Filling | None:
        """None where the rows do not run in the buffers."""
        if self._buffers is None:
            return None
        paths = [span.paths() for span in spans]
        filling = Filling(bucket_of(spans, paths), spans, paths, token_ids)
        return filling if self._buffers.can_hold(filling) else None

    def _held(self, filling: Filling) -> StaticRows:
        assert self._step is not None
        return self._step.hold(filling)

    def _run(
        self,
        span: Sequence[Sublayer],
        rows: PackedRows | Filling,
        hidden: Tensor,
        choices: Sequence[Choice] | None,
        tap: Tap | None,
    ) -> Tensor:
        """[1, n, hidden_size] -> [1, n and padding, hidden_size]."""
        num_real = hidden.shape[1]
        if isinstance(rows, PackedRows):
            hidden = _pad_rows(hidden, len(rows.positions))
            return run(span, hidden, rows, choices=choices, tap=_real_rows(tap, num_real, is_copied=False))
        assert self._step is not None
        static = self._held(rows)
        if hidden.data_ptr() != static.residual.data_ptr():
            static.residual[:, :num_real].copy_(hidden)
        return self._step.run(span, static, choices=choices, tap=_real_rows(tap, num_real, is_copied=True))

    def _leaves_buffer(self, batch: Batch) -> bool:
        """The states lie in a buffer and go to another stage, while other batches run here."""
        return self.parts.lm_head is None and any(isinstance(rows, Filling) for _, rows in batch.buckets)


def ways_of(parts: Decomposition, choices: Sequence[Choice]) -> list[tuple[Choice, ...]]:
    """Of each sublayer, those of the choices by which it can run. Each can be skipped."""
    return [
        tuple(choice for choice in choices if choice == SKIP or sublayer.can_run(choice))
        for sublayer in parts.sublayers
    ]


def _choices_by_kind(parts: Decomposition, choices: Sequence[Choice]) -> dict[str, tuple[Choice, ...]]:
    """By the name of a curve, those ways to run that all its sublayers have."""
    found: dict[str, tuple[Choice, ...]] = {}
    for name, sublayer in zip(parts.curve_names, parts.sublayers, strict=True):
        own = tuple(choice for choice in found.get(name, choices) if sublayer.can_run(choice))
        found[name] = own
    return found


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


def _real_rows(tap: Tap | None, num_real: int, *, is_copied: bool) -> Tap | None:
    if tap is None:
        return None
    return lambda index, hidden: tap(index, hidden[:, :num_real].clone() if is_copied else hidden[:, :num_real])
