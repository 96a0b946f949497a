"""Packed rows in device buffers with fixed addresses, so that every pass of a bucket has the same launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from rayspec.choices import Keys
from rayspec.model.attention import AttentionKind, Heads, Rows
from rayspec.model.cuda.operations import attend, rotate_and_write
from rayspec.model.few_keys import few_pages
from rayspec.model.kv_cache import PAGE_SIZE, KVCache, whole_pages
from rayspec.model.matrices import RmsNorm
from rayspec.model.rows import MAX_PADDED_ROWS, MAX_TREE_ROWS, Bucket, Path, RowSpan, Runs, is_paged

# The keys that rows in these buffers can read.
STATIC_KEYS: Final[tuple[Keys, ...]] = ("all", "window")
# The most copies to the device that may be under way.
_NUM_STAGED = 4
# Entries of block tables in one copy to the device. More of them take several copies.
_MOST_ENTRIES = 4096
# Buffers begin at multiples of 16 bytes, which kernels are compiled for.
_WORDS_ALIGNED = 2

_Integers: TypeAlias = NDArray[np.int64]


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

    tokens, positions, slots: int64 [N]. row_starts: int32 [R + 1]. contexts: int32 [R]. block_table: int32 [R, pages].
    residual: [1, N, hidden_size]. shared, bits: int32 [N] and int64 [N] in the bucket of a tree, else None. Rows after
    those of the last sequence are padding. rope: by layer type, cosines and sines [1, N, rotary].
    `cuda.reference.attend` explains the numbers.

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
    row_starts: Tensor
    contexts: Tensor
    block_table: Tensor
    residual: Tensor
    shared: Tensor | None = None
    bits: Tensor | None = None
    rope: dict[str, Any] = field(default_factory=dict)
    keys: Keys = "all"
    windowed: StaticRows | None = None
    few: dict[int | None, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def seeing(self, keys: Keys) -> StaticRows:
        """Do as `Rows.seeing`. keys: of `STATIC_KEYS`."""
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
        query_norm, key_norm, eps = None, None, 0.0
        if heads.norms is not None:
            query, key = heads.norms
            if not (isinstance(query, RmsNorm) and isinstance(key, RmsNorm)):
                return Rows.attend_projected(self, heads, projected)
            if query.weight_offset or key.weight_offset or query.eps != key.eps:  # the operator cannot compute these
                return Rows.attend_projected(self, heads, projected)
            query_norm, key_norm, eps = query.weight, key.weight, query.eps
        cosines, sines = self.rope[heads.layer_type]
        rows = self._in_store(heads.layer)
        rotated = rotate_and_write(
            projected, cosines[0], sines[0], rows.slots, self.cache.keys[heads.layer], self.cache.values[heads.layer],
            num_heads=heads.num_heads, query_norm=query_norm, key_norm=key_norm, eps=eps,
        )  # fmt: skip
        return rows._mixed((self.cache.keys[heads.layer], self.cache.values[heads.layer]), rotated, heads.kind)

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
            number = min(len(query), len(table))  # of rows that may be a sequence's; there may be more for padding
            if sliding_window not in self.few:
                own = few_pages(budget, positions[:number], table[:number].long(), sliding_window=sliding_window)
                self.few[sliding_window] = own[0][0].int(), own[1][0].int()
            table, contexts = self.few[sliding_window]
            # A row's place in these pages stands for its position. None of them is outside the sliding window.
            starts, positions, sliding_window = starts[: number + 1], pad(contexts, (0, len(query) - number)), None
        return attend(
            query, *cached, table, starts, contexts, positions, self.shared, self.bits,
            scaling=kind.scaling, window=sliding_window or 0, softcap=kind.softcap or 0.0, page_size=PAGE_SIZE,
            max_rows=self.bucket.max_rows, max_context=table.shape[1] * PAGE_SIZE,
        )  # fmt: skip


class StepBuffers:
    """Device buffers for one pass at a time, of up to `max_rows` rows and `max_sequences` sequences. max_places: the
    most places of a sequence. It decides how attention splits the keys, so all passes split them alike. A pass costs
    one copy to the device, and one more if pages of its sequences have changed."""

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
        largest = _Layout(Bucket(max_rows, max_sequences, max_rows, is_tree=True))
        self._numbers = Staging(largest.num_words, device)
        self._num_places = whole_pages(max_places)
        self._table = _BlockTable(max_sequences, self._num_places, device)
        self._windowed_table = _BlockTable(max_sequences, self._num_places, device) if cache.windowed_layers else None
        self._residual = torch.zeros(1, max_rows, hidden_size, dtype=dtype, device=device)
        self._rows: dict[Bucket, tuple[_Layout, StaticRows]] = {}
        self._held: BatchMetadata | None = None
        self._ropes: dict[str, tuple[Tensor, ...]] = {}  # by layer type, [1, max_rows, rotary] each

    def can_hold(self, metadata: BatchMetadata) -> bool:
        """Return whether the pass fits, every sequence is in whole pages, and none has an adapter."""
        bucket, spans = metadata.bucket, metadata.spans
        unknown = [one.runs for one, held in zip(spans, self._table.runs, strict=False) if one.runs != held]
        return (
            bucket.num_rows <= self._max_rows
            and bucket.num_sequences <= self._max_sequences
            and max(map(len, metadata.paths), default=0) <= MAX_TREE_ROWS
            and max([span.end for span in spans], default=0) <= self._num_places
            and not max([span.adapter for span in spans], default=0)
            and all(is_paged(runs, PAGE_SIZE) for runs in unknown)
        )

    def hold(self, metadata: BatchMetadata) -> tuple[StaticRows, bool]:
        """Write the pass to the buffers if it is not there. Return its rows, and whether they were written now."""
        bucket = metadata.bucket
        if bucket not in self._rows:
            for other in [each for each in self._rows if each.num_rows > MAX_PADDED_ROWS]:  # they rarely come back
                del self._rows[other]
            layout = _Layout(bucket)
            self._rows[bucket] = layout, self._views(bucket, layout)
        layout, rows = self._rows[bucket]
        is_new = self._held is not metadata
        if is_new:
            self._held = None  # until all of it is there
            self._table.write([span.runs for span in metadata.spans])
            if self._windowed_table is not None:
                self._windowed_table.write([span.windowed for span in metadata.spans])
            self._numbers.upload(layout.num_words, partial(self._write, metadata, layout))
            rows.forget_few()
            if isinstance(metadata.token_ids, Tensor):
                rows.tokens[: len(metadata.token_ids)].copy_(metadata.token_ids)
            self._held = metadata
        return rows, is_new

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
        return self._residual[:, : self._held.bucket.num_rows]

    def _views(self, bucket: Bucket, layout: _Layout) -> StaticRows:
        words, narrow = self._numbers.buffer, self._numbers.buffer.view(torch.int32)
        sequences = slice(bucket.num_sequences)
        views = StaticRows(
            bucket=bucket,
            cache=self._cache,
            tokens=words[layout.tokens],
            positions=words[layout.positions],
            slots=words[layout.slots],
            row_starts=narrow[layout.row_starts],
            contexts=narrow[layout.contexts],
            block_table=self._table.device[sequences],
            residual=self._residual[:, : bucket.num_rows],
            shared=narrow[layout.shared] if bucket.is_tree else None,
            bits=words[layout.bits] if bucket.is_tree else None,
        )
        if self._windowed_table is None:
            return views
        views.windowed = replace(
            views,
            slots=words[layout.windowed_slots],
            block_table=self._windowed_table.device[sequences],
            few={},
        )
        return views

    def _write(self, metadata: BatchMetadata, layout: _Layout, words: _Integers) -> None:
        """Write the integers of the pass to `words`, on the host."""
        spans, narrow = metadata.spans, words.view(np.int32)
        sizes = np.array([(span.num_rows, span.context) for span in spans], np.int64).reshape(-1, 2)
        lengths, contexts = sizes[:, 0], sizes[:, 1]
        ends, sequences = lengths.cumsum(), np.arange(len(spans)).repeat(lengths)
        places = np.arange(len(sequences)) + (contexts + lengths - ends)[sequences]
        _fill(words[layout.positions], places, 0)
        # Padding rows write to a spare slot.
        _fill(words[layout.slots], self._table.slots(sequences, places), self._cache.num_slots)
        if self._windowed_table is not None:
            slots = self._windowed_table.slots(sequences, places)
            _fill(words[layout.windowed_slots], slots, self._cache.num_windowed_slots)
        narrow[layout.row_starts][0] = 0
        _fill(narrow[layout.row_starts][1:], ends, len(sequences))
        _fill(narrow[layout.contexts], contexts, 0)
        if metadata.bucket.is_tree:
            positions, shared, bits = words[layout.positions], narrow[layout.shared], words[layout.bits]
            _fill(shared, places + 1, 0)  # right for chains of any length
            bits[:] = 0
            for span, paths, end in zip(spans, metadata.paths, ends.tolist(), strict=True):
                own = slice(end - len(paths), end)
                positions[own] = [path.position for path in paths]
                shared[own] = [path.shared for path in paths]
                bits[own] = [sum(1 << (place - span.context) for place in path.own) for path in paths]
        known = () if isinstance(metadata.token_ids, Tensor) else metadata.token_ids
        if known and len(known) != len(sequences):
            raise ValueError(f"{len(known)} tokens for {len(sequences)} rows")
        _fill(words[layout.tokens], np.array(known, np.int64), 0)


def _fill(field: NDArray[Any], numbers: _Integers, padding: int) -> None:
    number = len(numbers)
    field[:number] = numbers
    if number < len(field):
        field[number:] = padding


class _Layout:
    """Where the integers of a bucket lie in a buffer of int64 words, one field after the other, so that a short copy
    brings them to the device. row_starts, contexts, shared: in the same buffer as int32."""

    def __init__(self, bucket: Bucket) -> None:
        self.num_words = 0
        num_rows, num_sequences = bucket.num_rows, bucket.num_sequences
        self.tokens, self.positions, self.slots, self.windowed_slots = (self._wide(num_rows) for _ in range(4))
        self.row_starts, self.contexts = self._narrow(num_sequences + 1), self._narrow(num_sequences)
        self.shared, self.bits = self._narrow(num_rows * bucket.is_tree), self._wide(num_rows * bucket.is_tree)

    def _wide(self, size: int) -> slice:
        first = self.num_words
        self.num_words += -(-size // _WORDS_ALIGNED) * _WORDS_ALIGNED
        return slice(first, first + size)

    def _narrow(self, size: int) -> slice:
        first = 2 * self._wide(-(-size // 2)).start
        return slice(first, first + size)


class _BlockTable:
    """The pages of sequences in one store of the cache. device: int32 [sequences, pages]."""

    def __init__(self, max_sequences: int, num_places: int, device: torch.device) -> None:
        self.device = torch.zeros(max_sequences, num_places // PAGE_SIZE, dtype=torch.int32, device=device)
        self._host = np.zeros(self.device.shape, np.int64)  # the same; -1 if a copy has failed
        self._capacities = np.zeros(max_sequences, np.int64)  # places of each sequence
        self.runs: list[Runs] = [()] * max_sequences  # of each sequence
        self._entries = Staging(_MOST_ENTRIES + _MOST_ENTRIES // 2, device)

    def write(self, runs: Sequence[Runs]) -> None:
        """Write the pages of the first sequences, and copy the entries that have changed to the device."""
        changed = [(at, own) for at, (own, known) in enumerate(zip(runs, self.runs, strict=False)) if own != known]
        if not changed:
            return
        width = self._host.shape[1]
        where, pages = [], []
        for sequence, own in changed:
            new = np.concatenate([np.arange(run.start // PAGE_SIZE, -(-run.end // PAGE_SIZE)) for run in own])[:width]
            differing = np.flatnonzero(new != self._host[sequence, : len(new)])
            where.append(sequence * width + differing)
            pages.append(new[differing])
        all_where, all_pages = np.concatenate(where), np.concatenate(pages)
        self._host.reshape(-1)[all_where] = -1  # until they are there
        for sequence, _ in changed:
            self.runs[sequence] = ()
        for first in range(0, len(all_where), _MOST_ENTRIES):
            self._copy(all_where[first : first + _MOST_ENTRIES], all_pages[first : first + _MOST_ENTRIES])
        self._host.reshape(-1)[all_where] = all_pages
        for sequence, own in changed:
            self.runs[sequence], self._capacities[sequence] = own, sum(run.length for run in own)

    def slots(self, sequences: _Integers, places: _Integers) -> _Integers:
        """Return the slots of these places, each in the sequence of the same index. Raises ValueError for a place that
        the sequence's pages do not have."""
        if np.count_nonzero(places >= self._capacities[sequences]):
            raise ValueError("rows of a pass lie beyond the pages of their sequence")
        pages, offsets = np.divmod(places, PAGE_SIZE)
        return self._host[sequences, pages] * PAGE_SIZE + offsets

    def _copy(self, where: _Integers, pages: _Integers) -> None:
        number = len(where)
        narrow = slice(2 * number, 3 * number)

        def write(words: _Integers) -> None:
            words[:number] = where
            words.view(np.int32)[narrow] = pages

        self._entries.upload(number + -(-number // 2), write)
        buffer = self._entries.buffer
        self.device.view(-1).index_copy_(0, buffer[:number], buffer.view(torch.int32)[narrow])


class Staging:
    """A device buffer, int64 [n], that the host fills from page-locked memory without waiting for the copy."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        self.buffer = torch.zeros(num_words, dtype=torch.int64, device=device)
        self._device = device
        self._is_cuda = device.type == "cuda"
        hosts = [torch.zeros(num_words, dtype=torch.int64, pin_memory=self._is_cuda) for _ in range(_NUM_STAGED)]
        self._hosts: list[tuple[_Integers, Tensor]] = [(host.numpy(), host) for host in hosts]  # of the same memory
        self._copied = [torch.cuda.Event() for _ in hosts] if self._is_cuda else []  # type: ignore[no-untyped-call]
        self._turn = 0

    def upload(self, num_words: int, write: Callable[[_Integers], None]) -> None:
        """Call `write` to fill the first words of a host buffer, and queue the copy of `num_words` to the device."""
        self._turn = (self._turn + 1) % _NUM_STAGED
        if self._is_cuda:
            self._copied[self._turn].synchronize()  # that copy has usually ended long ago
        words, host = self._hosts[self._turn]
        write(words[:num_words])
        self.buffer[:num_words].copy_(host[:num_words], non_blocking=True)
        if self._is_cuda:
            self._copied[self._turn].record(torch.cuda.current_stream(self._device))
