"""Packed rows in buffers of the device that stay where they are, so that a pass is the same launches every time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rayspec.choices import Keys
from rayspec.model.attention import AttentionKind, Heads
from rayspec.model.buckets import MAX_TREE_ROWS, Bucket
from rayspec.model.cuda.operations import attend, rotate_and_write
from rayspec.model.kv_arena import PAGE_SIZE, KVArena, whole_pages
from rayspec.model.norms import RmsNorm
from rayspec.model.rows import Path, RowSpan, Runs, is_paged, slots_between

# Copies to the device that may be under way.
_NUM_STAGED = 4


@dataclass(frozen=True, slots=True, eq=False)
class Filling:
    """Rows of a pass, to be put into buffers. paths: of each span what its rows see; empty for a chain. token_ids: of
    all rows, on the device where they were drawn there; empty where the pass begins with hidden states."""

    bucket: Bucket
    spans: Sequence[RowSpan]
    paths: Sequence[Sequence[Path]]
    token_ids: Sequence[int] | Tensor = ()

    @property
    def num_rows(self) -> int:
        """Without padding."""
        return sum(span.num_rows for span in self.spans)


@dataclass(slots=True)
class StaticRows:
    """`Rows` whose sequences the device knows. The buffers belong to a `StepBuffers`: the next pass overwrites them.

    tokens, positions, slots, bits: int64 [N]. shared: int32 [N]. row_starts: int32 [R + 1]. contexts: int32 [R].
    page_table: int32 [R, pages]. residual: [1, N, hidden_size]. Rows behind the last sequence's are padding. rope: by
    layer type, cosines and sines [1, N, rotary].
    """

    bucket: Bucket
    arena: KVArena
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    bits: Tensor
    shared: Tensor
    row_starts: Tensor
    contexts: Tensor
    page_table: Tensor
    residual: Tensor
    rope: dict[str, Any] = field(default_factory=dict)

    @property
    def in_place(self) -> bool:
        return True

    def seeing(self, keys: Keys) -> StaticRows:
        """Raises NotImplementedError for keys other than all."""
        if keys != "all":
            raise NotImplementedError(f"attention over pages on the device cannot read keys={keys!r}; choose 'all'")
        return self

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
        self.arena.write(layer, self.slots, key, value)
        return self._mixed(layer, query.transpose(0, 1).contiguous(), kind)

    def attend_projected(self, heads: Heads, projected: Tensor) -> Tensor:
        norms = _operator_weights(heads)
        if norms is None:
            return self.attend(heads.layer, *heads.split(projected, self.rope), heads.kind)
        cosines, sines = self.rope[heads.layer_type]
        query = rotate_and_write(
            projected, cosines[0], sines[0], self.slots, self.arena.keys[heads.layer], self.arena.values[heads.layer],
            num_heads=heads.num_heads, query_norm=norms.query, key_norm=norms.key, eps=norms.eps,
        )  # fmt: skip
        return self._mixed(heads.layer, query, heads.kind)

    def _mixed(self, layer: int, query: Tensor, kind: AttentionKind) -> Tensor:
        """query: [N, H, D]."""
        is_tree = self.bucket.is_tree
        return attend(
            query, self.arena.keys[layer], self.arena.values[layer], self.page_table, self.row_starts, self.contexts,
            self.positions, self.shared if is_tree else None, self.bits if is_tree else None,
            scaling=kind.scaling, window=kind.sliding_window or 0, softcap=kind.softcap or 0.0, page_size=PAGE_SIZE,
            max_rows=self.bucket.max_rows, max_context=self.page_table.shape[1] * PAGE_SIZE,
        )  # fmt: skip


class StepBuffers:
    """The device's buffers for one pass at a time, of up to `max_rows` rows of `max_sequences` sequences.

    max_places: of a sequence; it decides how attention divides keys, so that all passes divide them alike. A pass costs
    one copy to the device, and another one for each sequence whose pages are others than the last time.
    """

    def __init__(
        self,
        arena: KVArena,
        *,
        max_rows: int,
        max_sequences: int,
        max_places: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._arena = arena
        self._max_rows = max_rows
        self._max_sequences = max_sequences
        self._numbers = Staging(_num_words(max_rows, max_sequences), device)
        num_pages = whole_pages(max_places) // PAGE_SIZE
        self._table = torch.zeros(max_sequences, num_pages, dtype=torch.int32, device=device)
        self._residual = torch.zeros(1, max_rows, hidden_size, dtype=dtype, device=device)
        self._runs: list[Runs] = [()] * max_sequences  # that the page table holds
        self._rows: dict[Bucket, StaticRows] = {}
        self._held: Filling | None = None
        self._ropes: dict[str, tuple[Tensor, ...]] = {}  # by layer type, [1, max_rows, rotary] each

    def can_hold(self, filling: Filling) -> bool:
        """Whether the pass fits, and every sequence lies in whole pages."""
        bucket, num_places = filling.bucket, self._table.shape[1] * PAGE_SIZE
        return (
            bucket.num_rows <= self._max_rows
            and bucket.num_sequences <= self._max_sequences
            and not (bucket.is_tree and bucket.max_rows > MAX_TREE_ROWS)
            and all(span.end <= num_places and is_paged(span.runs, PAGE_SIZE) for span in filling.spans)
        )

    def holds(self, filling: Filling) -> bool:
        """Whether the pass is in the buffers."""
        return self._held is filling

    def hold(self, filling: Filling) -> tuple[StaticRows, bool]:
        """The rows of the pass, and whether they are new in the buffers."""
        bucket = filling.bucket
        if bucket not in self._rows:
            self._rows[bucket] = self._views(bucket)
        is_new = not self.holds(filling)
        if is_new:
            self._held = None  # until all of it is there
            self._numbers.upload(partial(self._write, filling))
            for sequence, span in enumerate(filling.spans):
                self._write_pages(sequence, span.runs)
            if isinstance(filling.token_ids, Tensor):
                self._rows[bucket].tokens[: len(filling.token_ids)].copy_(filling.token_ids)
            self._held = filling
        return self._rows[bucket], is_new

    def keep_rope(self, rows: StaticRows) -> None:
        """Copy `rows.rope` to where the rows of every pass have it."""
        for layer_type, computed in rows.rope.items():
            if layer_type not in self._ropes:
                self._ropes[layer_type] = tuple(each.new_zeros(1, self._max_rows, each.shape[-1]) for each in computed)
            kept = tuple(buffer[:, : rows.bucket.num_rows] for buffer in self._ropes[layer_type])
            for buffer, each in zip(kept, computed, strict=True):
                buffer.copy_(each)
            rows.rope[layer_type] = kept

    def padded(self, hidden: Tensor) -> Tensor | None:
        """The states with the padding behind them: [1, bucket's rows, hidden_size]. None for states that do not lie in
        the buffer."""
        if self._held is None or hidden.data_ptr() != self._residual.data_ptr():
            return None
        return self._rows[self._held.bucket].residual

    def _views(self, bucket: Bucket) -> StaticRows:
        words = _Words.of(self._numbers.device, self._max_rows, self._max_sequences)
        rows, sequences = slice(bucket.num_rows), slice(bucket.num_sequences)
        return StaticRows(
            bucket=bucket,
            arena=self._arena,
            tokens=words.tokens[rows],
            positions=words.positions[rows],
            slots=words.slots[rows],
            bits=words.bits[rows],
            shared=words.shared[rows],
            row_starts=words.row_starts[: bucket.num_sequences + 1],
            contexts=words.contexts[sequences],
            page_table=self._table[sequences],
            residual=self._residual[:, rows],
        )

    def _write(self, filling: Filling, numbers: Tensor) -> None:
        """numbers: on the host."""
        numbers.zero_()
        words = _Words.of(numbers, self._max_rows, self._max_sequences)
        words.slots[:] = self._arena.num_slots  # of padding: a spare one
        end = 0
        for sequence, (span, paths) in enumerate(zip(filling.spans, filling.paths, strict=True)):
            rows, end = slice(end, end + span.num_rows), end + span.num_rows
            words.slots[rows] = torch.tensor(slots_between(span.runs, span.context, span.end))
            words.contexts[sequence] = span.context
            words.row_starts[sequence + 1] = end
            if paths:
                words.positions[rows] = torch.tensor([path.position for path in paths])
                words.shared[rows] = torch.tensor([path.shared for path in paths], dtype=torch.int32)
                words.bits[rows] = torch.tensor([_bits(path, span.context) for path in paths])
            else:
                words.positions[rows] = torch.arange(span.context, span.end)
                words.shared[rows] = span.context
                if span.num_rows <= MAX_TREE_ROWS:
                    words.bits[rows] = torch.tensor([(2 << row) - 1 for row in range(span.num_rows)])
        words.row_starts[len(filling.spans) + 1 :] = end
        if not isinstance(filling.token_ids, Tensor) and filling.token_ids:
            words.tokens[:end] = torch.tensor(filling.token_ids)

    def _write_pages(self, sequence: int, runs: Runs) -> None:
        if self._runs[sequence] != runs:
            pages = [slot // PAGE_SIZE for run in runs for slot in run.slots[::PAGE_SIZE]][: self._table.shape[1]]
            self._table[sequence, : len(pages)].copy_(torch.tensor(pages, dtype=torch.int32), non_blocking=True)
            self._runs[sequence] = runs


class Staging:
    """A buffer of the device, int64 [n], that is filled from page-locked memory of the host without waiting for it."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        self.device = torch.zeros(num_words, dtype=torch.int64, device=device)
        self._is_cuda = device.type == "cuda"
        self._hosts = [torch.zeros(num_words, dtype=torch.int64, pin_memory=self._is_cuda) for _ in range(_NUM_STAGED)]
        self._copied = [torch.cuda.Event() for _ in self._hosts] if self._is_cuda else []  # type: ignore[no-untyped-call]
        self._turn = 0

    def upload(self, write: Callable[[Tensor], None]) -> None:
        """write: fills the host's side, [n]."""
        self._turn = (self._turn + 1) % len(self._hosts)
        if self._is_cuda:
            self._copied[self._turn].synchronize()  # long ago, as a rule
        write(self._hosts[self._turn])
        self.device.copy_(self._hosts[self._turn], non_blocking=True)
        if self._is_cuda:
            self._copied[self._turn].record()


@dataclass(frozen=True, slots=True)
class _Words:
    """What the numbers of a pass are, as views of one buffer. tokens .. bits: int64 [max_rows]; the others int32."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    bits: Tensor
    shared: Tensor
    row_starts: Tensor
    contexts: Tensor

    @classmethod
    def of(cls, numbers: Tensor, max_rows: int, max_sequences: int) -> _Words:
        wide, narrow = numbers[: 4 * max_rows].view(4, max_rows), numbers[4 * max_rows :].view(torch.int32)
        ends = (max_rows, max_rows + max_sequences + 1, max_rows + 2 * max_sequences + 1)
        return cls(
            tokens=wide[0],
            positions=wide[1],
            slots=wide[2],
            bits=wide[3],
            shared=narrow[: ends[0]],
            row_starts=narrow[ends[0] : ends[1]],
            contexts=narrow[ends[1] : ends[2]],
        )


def _num_words(max_rows: int, max_sequences: int) -> int:
    return 4 * max_rows + -(-(max_rows + 2 * max_sequences + 1) // 2)


def _bits(path: Path, context: int) -> int:
    """Which of the rows' own places the row sees."""
    return sum(1 << (place - context) for place in path.own)


@dataclass(frozen=True, slots=True)
class _NormWeights:
    query: Tensor | None
    key: Tensor | None
    eps: float


def _operator_weights(heads: Heads) -> _NormWeights | None:
    """Of norms that the operator can take on. None where it cannot."""
    if heads.norms is None:
        return _NormWeights(None, None, 0.0)
    query, key = heads.norms
    if not (isinstance(query, RmsNorm) and isinstance(key, RmsNorm)):
        return None
    if query.weight_offset or key.weight_offset or query.eps != key.eps:
        return None
    return _NormWeights(query.weight, key.weight, query.eps)
