"""Packed rows in device buffers with fixed addresses, so that every pass of a bucket has the same launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from rayspec.choices import Keys
from rayspec.model.attention import AttentionKind, Heads, Rows
from rayspec.model.buckets import MAX_TREE_ROWS, Bucket
from rayspec.model.cuda.operations import attend, rotate_and_write
from rayspec.model.few_keys import few_pages
from rayspec.model.kv_cache import PAGE_SIZE, KVCache, whole_pages
from rayspec.model.norms import RmsNorm
from rayspec.model.rows import Path, RowSpan, Runs, is_paged, slots_between

# The keys that rows in these buffers can read.
STATIC_KEYS: Final[tuple[Keys, ...]] = ("all", "window")
# The most copies to the device that may be under way.
_NUM_STAGED = 4
# Fields of a pass with an int64 number for each row.
_NUM_WIDE = 5


@dataclass(frozen=True, slots=True, eq=False)
class BatchMetadata:
    """Rows of a pass, to be written to the buffers. paths: by span, the places that its rows see; empty for a chain.
    token_ids: the tokens of all rows, a tensor if the device sampled them; empty if the pass starts from hidden
    states."""

    bucket: Bucket
    spans: Sequence[RowSpan]
    paths: Sequence[Sequence[Path]]
    token_ids: Sequence[int] | Tensor = ()

    @property
    def num_rows(self) -> int:
        """Number of rows without padding."""
        return sum(span.num_rows for span in self.spans)


@dataclass(slots=True)
class StaticRows(Rows):
    """`Rows` whose sequences are known on the device. The buffers belong to a `StepBuffers`; the next pass overwrites
    them.

    tokens, positions, slots, bits: int64 [N]. shared: int32 [N]. row_starts: int32 [R + 1]. contexts: int32 [R].
    block_table: int32 [R, pages]. residual: [1, N, hidden_size]. Rows after those of the last sequence are padding.
    rope: by layer type, cosines and sines [1, N, rotary]. `cuda.reference.attend` explains the numbers.

    keys: the keys that rows read; if sequences have several rows, these read all keys. windowed: the same rows with the
    slots and pages of the cache's windowed store. few: by sliding window, the pages that single rows read with keys
    "window", int32 [N, P], and how many places of these are before the row, int32 [N]; of this pass only.
    """

    in_place: ClassVar[bool] = True
    bucket: Bucket
    cache: KVCache
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    bits: Tensor
    shared: Tensor
    row_starts: Tensor
    contexts: Tensor
    block_table: Tensor
    residual: Tensor
    rope: dict[str, Any] = field(default_factory=dict)
    keys: Keys = "all"
    windowed: StaticRows | None = None
    few: dict[int | None, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def seeing(self, keys: Keys) -> StaticRows:
        """Do as `Rows.seeing`. Raises NotImplementedError for keys that are not in `STATIC_KEYS`."""
        if keys not in STATIC_KEYS:
            allowed = " or ".join(map(repr, STATIC_KEYS))
            raise NotImplementedError(f"attention over pages on the device cannot read keys={keys!r}; use {allowed}")
        return self if keys == self.keys else replace(self, keys=keys)

    def forget_few(self) -> None:
        self.few.clear()
        if self.windowed is not None:
            self.windowed.few.clear()

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind, *, first_head: int = 0
    ) -> Tensor:
        rows = self._in_store(layer)
        self.cache.write(layer, rows.slots, key, value, first_head=first_head)
        cached = self.cache.heads(layer, first_head, len(key))
        return rows._mixed(cached, query.transpose(0, 1).contiguous(), kind)

    def attend_projected(self, heads: Heads, projected: Tensor) -> Tensor:
        norms = _operator_weights(heads)
        if norms is None:
            return Rows.attend_projected(self, heads, projected)
        cosines, sines = self.rope[heads.layer_type]
        query_norm, key_norm, eps = norms
        rows = self._in_store(heads.layer)
        query = rotate_and_write(
            projected, cosines[0], sines[0], rows.slots, self.cache.keys[heads.layer], self.cache.values[heads.layer],
            num_heads=heads.num_heads, query_norm=query_norm, key_norm=key_norm, eps=eps,
        )  # fmt: skip
        return rows._mixed((self.cache.keys[heads.layer], self.cache.values[heads.layer]), query, heads.kind)

    def _in_store(self, layer: int) -> StaticRows:
        """Return the rows with the slots of the layer's store."""
        is_windowed = self.windowed is not None and layer in self.cache.windowed_layers
        return self.windowed.seeing(self.keys) if self.windowed is not None and is_windowed else self

    def _mixed(self, cached: tuple[Tensor, Tensor], query: Tensor, kind: AttentionKind) -> Tensor:
        """Return the attention of the queries [N, H, D]. cached: keys and values of all slots, those of the rows
        included."""
        is_tree, budget, sliding_window = self.bucket.is_tree, self.cache.budgets.window, kind.sliding_window
        table, starts, contexts, positions = self.block_table, self.row_starts, self.contexts, self.positions
        is_narrow = sliding_window is not None and sliding_window <= budget.num_pages * PAGE_SIZE
        if self.keys == "window" and self.bucket.max_rows == 1 and not is_tree and not is_narrow:
            if sliding_window not in self.few:
                own = few_pages(budget, positions, table[: len(query)].long(), sliding_window=sliding_window)
                self.few[sliding_window] = own.pages[0].int(), own.num_before[0].int()
            table, contexts = self.few[sliding_window]
            # A row's place in these pages stands for its position. None of them is outside the sliding window.
            starts, positions, sliding_window = starts[: len(query) + 1], contexts, None
        return attend(
            query, *cached, table, starts, contexts, positions,
            self.shared if is_tree else None, self.bits if is_tree else None,
            scaling=kind.scaling, window=sliding_window or 0, softcap=kind.softcap or 0.0, page_size=PAGE_SIZE,
            max_rows=self.bucket.max_rows, max_context=table.shape[1] * PAGE_SIZE,
        )  # fmt: skip


class StepBuffers:
    """Device buffers for one pass at a time, of up to `max_rows` rows and `max_sequences` sequences.

    max_places: the most places of a sequence. It decides how attention splits the keys, so all passes split them alike.
    A pass costs one copy to the device, and one more for each sequence whose pages have changed.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        max_rows: int,
        max_sequences: int,
        max_places: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._cache = cache
        self._max_rows = max_rows
        self._max_sequences = max_sequences
        self._numbers = Staging(_NUM_WIDE * max_rows + (max_rows + 2 * max_sequences) // 2 + 1, device)
        self._num_places = whole_pages(max_places)
        self._table = _BlockTable(max_sequences, self._num_places, device)
        self._windowed_table = _BlockTable(max_sequences, self._num_places, device) if cache.windowed_layers else None
        self._residual = torch.zeros(1, max_rows, hidden_size, dtype=dtype, device=device)
        self._rows: dict[Bucket, StaticRows] = {}
        self._held: BatchMetadata | None = None
        self._ropes: dict[str, tuple[Tensor, ...]] = {}  # by layer type, [1, max_rows, rotary] each

    def can_hold(self, metadata: BatchMetadata) -> bool:
        """Return whether the pass fits and every sequence is in whole pages."""
        bucket = metadata.bucket
        return (
            bucket.num_rows <= self._max_rows
            and bucket.num_sequences <= self._max_sequences
            and not (bucket.is_tree and bucket.max_rows > MAX_TREE_ROWS)
            and all(span.end <= self._num_places and is_paged(span.runs, PAGE_SIZE) for span in metadata.spans)
        )

    def holds(self, metadata: BatchMetadata) -> bool:
        """Return whether the buffers hold this pass."""
        return self._held is metadata

    def hold(self, metadata: BatchMetadata) -> tuple[StaticRows, bool]:
        """Write the pass to the buffers if it is not there. Return its rows, and whether they were written now."""
        bucket = metadata.bucket
        if bucket not in self._rows:
            self._rows[bucket] = self._views(bucket)
        is_new = not self.holds(metadata)
        if is_new:
            self._held = None  # until all of it is there
            for sequence, span in enumerate(metadata.spans):
                self._table.write(sequence, span.runs)
                if self._windowed_table is not None:
                    self._windowed_table.write(sequence, span.windowed)
            self._numbers.upload(partial(self._write, metadata))
            self._rows[bucket].forget_few()
            if isinstance(metadata.token_ids, Tensor):
                self._rows[bucket].tokens[: len(metadata.token_ids)].copy_(metadata.token_ids)
            self._held = metadata
        return self._rows[bucket], is_new

    def keep_rope(self, rows: StaticRows) -> None:
        """Copy `rows.rope` to buffers with fixed addresses, which all passes share."""
        for layer_type, computed in rows.rope.items():
            if layer_type not in self._ropes:
                self._ropes[layer_type] = tuple(each.new_zeros(1, self._max_rows, each.shape[-1]) for each in computed)
            kept = tuple(buffer[:, : rows.bucket.num_rows] for buffer in self._ropes[layer_type])
            for buffer, each in zip(kept, computed, strict=True):
                buffer.copy_(each)
            rows.rope[layer_type] = kept

    def padded(self, hidden: Tensor) -> Tensor | None:
        """Return hidden states with the padding rows after them: [1, bucket's rows, hidden_size]; None if the states
        are not in the residual's buffer."""
        if self._held is None or hidden.data_ptr() != self._residual.data_ptr():
            return None
        return self._rows[self._held.bucket].residual

    def _views(self, bucket: Bucket) -> StaticRows:
        words = _Numbers(self._numbers.buffer, self._max_rows, self._max_sequences)
        rows, sequences = slice(bucket.num_rows), slice(bucket.num_sequences)
        views = StaticRows(
            bucket=bucket,
            cache=self._cache,
            tokens=words.tokens[rows],
            positions=words.positions[rows],
            slots=words.slots[rows],
            bits=words.bits[rows],
            shared=words.shared[rows],
            row_starts=words.row_starts[: bucket.num_sequences + 1],
            contexts=words.contexts[sequences],
            block_table=self._table.device[sequences],
            residual=self._residual[:, rows],
        )
        if self._windowed_table is None:
            return views
        views.windowed = replace(
            views,
            slots=words.windowed_slots[rows],
            block_table=self._windowed_table.device[sequences],
            few={},
        )
        return views

    def _write(self, metadata: BatchMetadata, numbers: Tensor) -> None:
        """Write the integers of the pass to `numbers`, a tensor on the host."""
        numbers.zero_()
        words = _Numbers(numbers, self._max_rows, self._max_sequences)
        words.slots[:] = self._cache.num_slots  # padding rows write to a spare slot
        words.windowed_slots[:] = self._cache.num_windowed_slots
        end = 0
        for sequence, (span, paths) in enumerate(zip(metadata.spans, metadata.paths, strict=True)):
            rows, end = slice(end, end + span.num_rows), end + span.num_rows
            words.slots[rows] = torch.tensor(slots_between(span.runs, span.context, span.end))
            if span.windowed:
                words.windowed_slots[rows] = torch.tensor(slots_between(span.windowed, span.context, span.end))
            words.contexts[sequence] = span.context
            words.row_starts[sequence + 1] = end
            if paths:
                words.positions[rows] = torch.tensor([path.position for path in paths])
                words.shared[rows] = torch.tensor([path.shared for path in paths], dtype=torch.int32)
                words.bits[rows] = torch.tensor(
                    [sum(1 << (place - span.context) for place in path.own) for path in paths]
                )
            else:
                words.positions[rows] = torch.arange(span.context, span.end)
                words.shared[rows] = span.context
                if span.num_rows <= MAX_TREE_ROWS:
                    words.bits[rows] = torch.tensor([(2 << row) - 1 for row in range(span.num_rows)])
        words.row_starts[len(metadata.spans) + 1 :] = end
        if not isinstance(metadata.token_ids, Tensor) and metadata.token_ids:
            words.tokens[:end] = torch.tensor(metadata.token_ids)


class _BlockTable:
    """The pages of sequences in one store of the cache. device: int32 [sequences, pages]."""

    def __init__(self, max_sequences: int, num_places: int, device: torch.device) -> None:
        self.device = torch.zeros(max_sequences, num_places // PAGE_SIZE, dtype=torch.int32, device=device)
        self._runs: list[Runs] = [()] * max_sequences

    def write(self, sequence: int, runs: Runs) -> None:
        """Write the pages of a sequence. Copies them to the device if they have changed."""
        if self._runs[sequence] != runs:
            pages = [slot // PAGE_SIZE for run in runs for slot in run.slots[::PAGE_SIZE]][: self.device.shape[1]]
            self.device[sequence, : len(pages)].copy_(torch.tensor(pages, dtype=torch.int32), non_blocking=True)
            self._runs[sequence] = runs


class Staging:
    """A device buffer, int64 [n], that the host fills from page-locked memory without waiting for the copy."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        self.buffer = torch.zeros(num_words, dtype=torch.int64, device=device)
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._hosts = [torch.zeros(num_words, dtype=torch.int64, pin_memory=self._is_cuda) for _ in range(_NUM_STAGED)]
        self._copied = [torch.cuda.Event() for _ in self._hosts] if self._is_cuda else []  # type: ignore[no-untyped-call]
        self._turn = 0

    def upload(self, write: Callable[[Tensor], None]) -> None:
        """Call `write` to fill a host buffer, [n], and queue its copy to the device."""
        self._turn = (self._turn + 1) % len(self._hosts)
        if self._is_cuda:
            self._copied[self._turn].synchronize()  # that copy has usually ended long ago
        write(self._hosts[self._turn])
        self.buffer.copy_(self._hosts[self._turn], non_blocking=True)
        if self._is_cuda:
            self._copied[self._turn].record(torch.cuda.current_stream(self._device))


class _Numbers:
    """The integers of a pass, as views of one int64 buffer `words`: int64 [max_rows], then int32."""

    def __init__(self, words: Tensor, max_rows: int, max_sequences: int) -> None:
        wide = words[: _NUM_WIDE * max_rows].view(_NUM_WIDE, max_rows)
        self.tokens, self.positions, self.slots, self.bits, self.windowed_slots = wide.unbind()
        narrow = words[_NUM_WIDE * max_rows :].view(torch.int32)[: max_rows + 2 * max_sequences + 1]
        self.shared, self.row_starts, self.contexts = torch.split(narrow, [max_rows, max_sequences + 1, max_sequences])


def _operator_weights(heads: Heads) -> tuple[Tensor | None, Tensor | None, float] | None:
    """Return the weights and eps of the heads' norms; None if the operator `rotate_and_write` cannot compute them."""
    if heads.norms is None:
        return None, None, 0.0
    query, key = heads.norms
    if not (isinstance(query, RmsNorm) and isinstance(key, RmsNorm)):
        return None
    if query.weight_offset or key.weight_offset or query.eps != key.eps:
        return None
    return query.weight, key.weight, query.eps
