"""Packed ragged attention over the KV cache, registered with transformers' attention interface as "rayspec".

Rows of many sequences are one batch, without padding and mask; each attends to the keys of its own sequence, wherever
they are. Rows of a tree see their ancestors, but no row of another branch. Long runs of keys are read in place, once
for all sequences that share them, and the results are merged by the log-sum-exp of their scores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from rayspec.choices import Keys
from rayspec.model.few_keys import (
    NewestRows,
    block_tables,
    few_pages,
    newest_rows,
    note_pages,
    reads_all,
)
from rayspec.model.kv_cache import PAGE_SIZE, KVCache
from rayspec.model.matrices import Norm
from rayspec.model.rows import Path, RowSpan, Run, Runs, joined, runs_between, slots_between
from rayspec.types import UnsupportedModelError

IMPLEMENTATION = "rayspec"
# Up to this number of rows, query heads that share a key head are folded into rows: keys are read once, not per head.
_MAX_FOLDED_ROWS = 32
# A run whose keys take at least so many bytes is read in place. Shorter runs are gathered: fewer calls cost less.
_LONG_RUN_BYTES = 2**20
# With "blocks", a call reads a multiple of so many keys. torch's flash kernel for CPUs then adds up the keys of a row
# in the same order, whether the row is alone or in a chain (measured in bfloat16; not so with blocks of 16 keys).
_BLOCK = 64
# torch's flash kernel for CPUs takes rows in blocks of 32, or of multiples. A single row, alone or left over, has a
# kernel of its own, which rounds otherwise (measured with AMX: 33 rows; 65 rows with heads of 80).
_BLOCK_ROWS = 32
# Rows of a chain that share a call at most with "blocks".
LONGEST_CHAIN = 32

# What may decide how the keys of a row are divided among calls, and thereby how sums round. runs: the runs of its
# sequence. places: only the number of its keys; a row has the same bits wherever its keys lie. blocks: as places, and
# rows of a chain share a call, in which each has the bits that it has alone.
Division: TypeAlias = Literal["runs", "places", "blocks"]


@dataclass(slots=True)
class _Call:
    """One attention call: some rows of the batch, and the keys that they read.

    slots: the slots of the keys, a slice if they are adjacent; None for the rows' own keys. mask: [rows, keys], 0 where
    a row sees the key and -inf elsewhere; None if rows see all keys, or, with `causal`, the keys up to their own.
    folded_mask: the mask of rows as `_folded` has them, once a layer has asked for it.
    """

    rows: slice | Tensor
    slots: slice | Tensor | None
    mask: Tensor | None = None
    causal: bool = False
    folded_mask: Tensor | None = None

    @property
    def only_row(self) -> int | None:
        """The row of a call of one row, whose place is known here."""
        if isinstance(self.rows, slice) and self.rows.stop - self.rows.start == 1:
            return int(self.rows.start)
        return None


@dataclass(slots=True)
class _Calls:
    """The attention calls of a batch. whole: calls whose rows occur in no other call. alone: calls of one row that
    occurs in no other call, without a softcap, and this row, in order. pieces: calls whose results are merged. few:
    rows [T * B] that read few keys, B for each of T tokens, the slots [L, T, n] of each token and the mask
    [L, T, B, n], as in `_Call`, in each of L layers, where L is 1 if all layers read the same keys. B is 1, but for
    rows that are alternatives: their own keys are the last B of the mask."""

    whole: list[_Call] = field(default_factory=list)
    alone: list[tuple[int, _Call]] = field(default_factory=list)
    pieces: list[_Call] = field(default_factory=list)
    few: tuple[slice | Tensor, Tensor, Tensor] | None = None


# On what `_Calls` depend: keys that rows read, sliding window, softcap, `_Attention._merges` and `._group_size`.
_CallsKey: TypeAlias = tuple[Keys, int | None, float | None, bool, int]


class AttentionKind(NamedTuple):
    """Parameters of a layer's attention. sliding_window: how many keys a row sees, its own included; None for all.
    softcap: the bound of the scores, as in Gemma 2."""

    scaling: float
    sliding_window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The heads of an attention layer with a rotate-half rotary embedding. norms: the norm of each query head and the
    norm of each key head, applied before the rotation; None for a family without such norms."""

    layer: int
    layer_type: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norms: tuple[Norm, Norm] | None
    kind: AttentionKind

    def split(self, projected: Tensor, rope: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries [H, N, D], rotated keys and values [H_kv, N, D] of [N, (H + 2 * H_kv) * D]."""
        heads = projected.view(len(projected), -1, self.head_dim)
        turning, value = heads.split_with_sizes([self.num_heads + self.num_kv_heads, self.num_kv_heads], 1)
        if self.norms is not None:
            query, key = turning.split_with_sizes([self.num_heads, self.num_kv_heads], 1)
            turning = torch.cat([self.norms[0](query), self.norms[1](key)], 1)
        cosines, sines = (each[0][:, None] for each in rope[self.layer_type])
        first, second = turning.chunk(2, -1)
        turned = turning * cosines + torch.cat((-second, first), -1) * sines
        query, key = turned.split_with_sizes([self.num_heads, self.num_kv_heads], 1)
        return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)


class Rows(ABC):
    """A packed batch of N rows, as sublayers see it. positions: [N]. rope: by layer type, the output of the family's
    rotary embedding. in_place: the residual is a buffer that sublayers add to. adapters: the rows that run with an
    adapter, by its number."""

    positions: Tensor
    rope: dict[str, Any]
    in_place: ClassVar[bool] = False
    adapters: Sequence[tuple[int, slice]] = ()

    def seeing(self, keys: Keys) -> Rows:
        """Return the same rows, but reading only these keys. They write the same keys and values as before."""
        return self

    @abstractmethod
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind, *, first_head: int = 0
    ) -> Tensor:
        """Write keys [H_kv, N, D] and values [H_kv, N, D_v] of the rows to the cache, as the layer's key heads from
        `first_head` on. Return the attention of the queries [H, N, D] over the keys that each row sees: [N, H, D_v]."""

    def attend_projected(self, heads: Heads, projected: Tensor) -> Tensor:
        """Split and rotate projected queries, keys and values, [N, (H + 2 * H_kv) * D], then do as `attend`."""
        return self.attend(heads.layer, *heads.split(projected, self.rope), heads.kind)


@dataclass(slots=True)
class AttentionCalls:
    """The attention calls of one forward of an attention block. Each call has key heads of its own in the layer's
    store, because a block may call attention several times with different keys or values (DiffLlama)."""

    rows: Rows
    first_head: int = 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
        """Do as `Rows.attend`, with the key heads after those of the earlier calls."""
        first, self.first_head = self.first_head, self.first_head + len(key)
        return self.rows.attend(layer, query, key, value, kind, first_head=first)


@dataclass(slots=True)
class PackedRows(Rows):
    """`Rows` whose sequences are known on the host. Attention reads their runs with torch's kernels.

    positions: [N] int64. slots: [N] int64, where keys and values are written. If `slots` is None, rows write nothing to
    the cache: the rows of a span are alternatives for the position after its context, and each sees the context and
    itself. paths: by span, the places that each row of a tree sees; empty if the rows see one another causally.
    division: with "blocks", a span is a chain of up to LONGEST_CHAIN rows or one row of a tree, and the cache
    `keeps_finite`. keys: rows that see no more keys than the cache's budget, and rows of trees, read all that they see.
    scores_pages: note the pages with most attention of the newest rows, if the cache has `looked_at`. windowed: the
    same rows with the slots of the cache's windowed store.
    """

    cache: KVCache
    positions: Tensor
    slots: Tensor | None
    spans: Sequence[RowSpan]
    paths: Sequence[Sequence[Path]]
    division: Division = "runs"
    rope: dict[str, Any] = field(default_factory=dict)
    calls: dict[_CallsKey, _Calls] = field(default_factory=dict)  # shared by layers of the same kind
    keys: Keys = "all"
    scores_pages: bool = False
    newest: dict[int | None, NewestRows | None] = field(default_factory=dict)  # by sliding window
    windowed: PackedRows | None = None
    adapters: Sequence[tuple[int, slice]] = ()

    def seeing(self, keys: Keys) -> PackedRows:
        return self if keys == self.keys else replace(self, keys=keys)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind, *, first_head: int = 0
    ) -> Tensor:
        if self.windowed is not None and layer in self.cache.windowed_layers:
            return self.windowed.seeing(self.keys).attend(layer, query, key, value, kind, first_head=first_head)
        cached = self.cache.heads(layer, first_head, len(key))
        attention = _Attention(rows=self, layer=layer, query=query, own=(key, value), cached=cached, kind=kind)
        if self.slots is None:
            return attention.of_rows()
        self.cache.write(layer, self.slots, key, value, first_head=first_head)
        if self.scores_pages and self.cache.looked_at is not None and first_head == 0:
            window = kind.sliding_window
            if window not in self.newest:
                budget = self.cache.budgets.pages
                self.newest[window] = newest_rows(budget, self.spans, self.paths, window, query.device)
            if (newest := self.newest[window]) is not None:
                note_pages(self.cache, layer, newest, query, cached[0], scaling=kind.scaling, softcap=kind.softcap)
        return attention.of_rows()


def pack(
    cache: KVCache,
    spans: Sequence[RowSpan],
    *,
    device: torch.device,
    pad_to: int = 0,
    paths: Sequence[Sequence[Path]] | None = None,
    division: Division = "runs",
    scores_pages: bool = False,
) -> PackedRows:
    """Pack rows that extend sequences, as `PackedRows` says. paths: by default `RowSpan.paths` of each span. pad_to: up
    to so many rows, padding rows are added. They attend to nothing and write to the cache's spare slots. With pad_to,
    the bits of a row must not depend on the others, so the products of adapters have a single row."""
    paths = [span.paths() for span in spans] if paths is None else paths
    positions = [
        position
        for span, tree in zip(spans, paths, strict=True)
        for position in ([path.position for path in tree] if tree else range(span.context, span.end))
    ]
    num_padding = max(0, pad_to - len(positions))
    places = torch.tensor([*positions, *[0] * num_padding], dtype=torch.int64, device=device)

    def in_store(own: Sequence[RowSpan], first_spare: int) -> PackedRows:
        slots = [slot for span in own for slot in slots_between(span.runs, span.context, span.end)]
        slots += range(first_spare, first_spare + num_padding)
        written = torch.tensor(slots, dtype=torch.int64, device=device)
        return PackedRows(cache, places, written, own, paths, division, scores_pages=scores_pages)

    rows = in_store(spans, cache.num_slots)
    rows.adapters = _with_adapters(spans, alone=pad_to > 0)
    if cache.windowed_layers:
        rows.windowed = in_store([span.in_windowed_store() for span in spans], cache.num_windowed_slots)
    return rows


def pack_branches(cache: KVCache, tokens: Sequence[RowSpan], num_branches: int, positions: Tensor) -> PackedRows:
    """Pack `num_branches` alternatives for each of `tokens`, which are single rows. positions: [tokens * branches]."""
    spans = [token.chain(0, num_branches) for token in tokens]
    rows = PackedRows(cache, positions, None, spans, [()] * len(spans), adapters=_with_adapters(spans))
    if cache.windowed_layers:
        rows.windowed = PackedRows(cache, positions, None, [span.in_windowed_store() for span in spans], rows.paths)
    return rows


def _with_adapters(spans: Sequence[RowSpan], *, alone: bool = False) -> list[tuple[int, slice]]:
    """Return the rows that run with an adapter, by its number. alone: one by one."""
    found, end = [], 0
    for number, some in groupby(spans, key=lambda span: span.adapter):
        first, end = end, end + sum(span.num_rows for span in some)
        if number:
            size = 1 if alone else end - first
            found += [(number, slice(at, at + size)) for at in range(first, end, size)]
    return found


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: AttentionCalls,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Implement transformers' attention signature. query: [1, H, N, D]; key: [1, H_kv, N, D]; value: [1, H_kv, N, D_v];
    returns [1, N, H, D_v]. Raises UnsupportedModelError for attention with sinks, `s_aux`."""
    if s_aux is not None:  # a check by numbers could miss sinks that are small for its rows
        config: Any = module.config
        raise UnsupportedModelError(f"{config.model_type}: attention has sinks")
    layer: int = module.layer_idx  # type: ignore[assignment]
    kind = AttentionKind(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    return packed.attend(layer, query[0], key[0], value[0], kind)[None], None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """One layer's attention over a packed batch of N rows. query: [H, N, D]. own: keys [H_kv, N, D] and values [H_kv,
    N, D_v] of the rows; cached: those of all slots."""

    rows: PackedRows
    layer: int
    query: Tensor
    own: tuple[Tensor, Tensor]
    cached: tuple[Tensor, Tensor]
    kind: AttentionKind

    def of_rows(self) -> Tensor:
        """Return the attention of the rows: [N, H, D_v]."""
        shared = (self.rows.keys, self.kind.sliding_window, self.kind.softcap, self._merges, self._group_size)
        if shared not in self.rows.calls:
            is_of_branches = self.rows.slots is None
            self.rows.calls[shared] = self._find_calls_of_branches() if is_of_branches else self._find_calls()
        calls = self.rows.calls[shared]
        num_rows = self.query.shape[1]
        if len(calls.whole) == 1 and isinstance(rows := calls.whole[0].rows, slice) and rows == slice(0, num_rows):
            return self._seen(calls.whole[0]).transpose(0, 1).contiguous()  # some families call view()
        if len(calls.alone) == num_rows:
            return self._seen_alone(calls.alone)
        output = self._merged(calls.pieces) if calls.pieces else self._zeros(self.query.dtype)
        for call in calls.whole:
            output[call.rows] = self._seen(call).transpose(0, 1)
        if calls.alone:
            for (row, _), seen in zip(calls.alone, self._seen_alone(calls.alone), strict=True):
                output[row] = seen
        if calls.few is not None:
            output[calls.few[0]] = self._seen_in_few(*calls.few)
        return output

    def _find_calls_of_branches(self) -> _Calls:
        """Return a call for the tokens of each sequence that read all their keys, and one for all other tokens. The
        last keys of a call are the rows' own, of which a row sees its own only."""
        calls, num_branches = _Calls(), self.rows.spans[0].num_rows
        few: list[tuple[int, RowSpan]] = []
        groups: dict[Runs, list[list[tuple[int, RowSpan]]]] = {}
        for at, span in sorted(enumerate(self.rows.spans), key=lambda each: each[1].context):
            if not self._reads_all(span):
                few.append((at, span))
                continue
            own = groups.setdefault(span.runs, [[]])
            if own[-1] and self._first_seen(span.context) > own[-1][-1][1].context:  # what lies between means nothing
                own.append([])
            own[-1].append((at, span))
        for runs, group in ((runs, group) for runs, own in groups.items() for group in own):
            first, end = self._first_seen(group[0][1].context), group[-1][1].context
            places = torch.arange(first, end, device=self.query.device)
            bounds = self._index([(self._first_seen(span.context), span.context) for _, span in group])[:, :, None]
            seen = ((places >= bounds[:, 0]) & (places < bounds[:, 1])).repeat_interleave(num_branches, 0)
            own_only = torch.eye(len(seen), dtype=torch.bool, device=seen.device)
            slots = self._slots(runs_between(runs, first, end))
            mask = self._masked(torch.cat([seen, own_only], 1))
            calls.whole.append(_Call(self._rows_of_branches([at for at, _ in group]), slots, mask))
        if few:
            few.sort(key=lambda each: each[0])
            positions = self._index([span.context for _, span in few])
            slots, counts = self._few_slots(positions, [span.runs for _, span in few], with_own=False)
            own_only = torch.eye(num_branches, dtype=torch.bool, device=counts.device)
            shape = (*counts.shape[:2], num_branches)
            seen = torch.cat([counts[:, :, None].expand(*shape, -1), own_only.expand(*shape, -1)], -1)
            calls.few = self._rows_of_branches([at for at, _ in few]), slots, self._masked(seen)
        return calls

    def _first_seen(self, position: int) -> int:
        """Return the first place that the sliding window shows to a row at this position."""
        return max(0, position + 1 - self.kind.sliding_window) if self.kind.sliding_window else 0

    def _rows_of_branches(self, tokens: Sequence[int]) -> slice | Tensor:
        """Return the rows of these tokens: a slice if they are adjacent."""
        size = self.rows.spans[0].num_rows
        if list(tokens) == list(range(tokens[0], tokens[0] + len(tokens))):
            return slice(tokens[0] * size, (tokens[0] + len(tokens)) * size)
        return self._index([row for token in tokens for row in range(token * size, (token + 1) * size)])

    def _find_calls(self) -> _Calls:
        calls, end = _Calls(), 0
        few: list[tuple[int, Runs]] = []
        views: dict[Run, list[slice]] = defaultdict(list)  # the rows that read a run in place
        for span, paths in zip(self.rows.spans, self.rows.paths, strict=True):
            rows, end = slice(end, end + span.num_rows), end + span.num_rows
            if not paths and not self._reads_all(span):
                few.extend((row, span.runs) for row in range(rows.start, rows.stop))
                continue
            if self.rows.division == "blocks":
                calls.whole.extend(self._calls_in_blocks(rows, span, paths))
                continue
            pieces = self._pieces(span, paths)
            for run in pieces:
                if self._is_long(run):
                    views[run].append(rows)
            if scattered := [run for run in pieces if not self._is_long(run)]:
                calls.pieces.append(_Call(rows, self._slots(scattered)))
            last = self._last_call(rows, span, paths, sum(run.length for run in pieces))
            (calls.pieces if pieces else calls.whole).append(last)
        for run, readers in views.items():
            together = self._index([row for each in readers for row in range(each.start, each.stop)])
            calls.pieces.append(_Call(readers[0] if len(readers) == 1 else together, self._slots([run])))
        if few:
            rows_of_few = self._index([row for row, _ in few])
            positions = self.rows.positions[rows_of_few]
            slots, counts = self._few_slots(positions, [runs for _, runs in few], with_own=True)
            calls.few = rows_of_few, slots, self._masked(counts[:, :, None])
        if not self.kind.softcap:
            calls.alone = [(row, call) for call in calls.whole if (row := call.only_row) is not None]
            calls.whole = [call for call in calls.whole if call.only_row is None]
        return calls

    def _reads_all(self, span: RowSpan) -> bool:
        budget = self.rows.cache.budgets.of(self.rows.keys)
        return budget is None or reads_all(budget, span.context, self.kind.sliding_window)

    def _few_slots(self, positions: Tensor, runs: Sequence[Runs], *, with_own: bool) -> tuple[Tensor, Tensor]:
        """Return the slots that rows at these positions read, int64 [L, R, n], and which of them count, bool [L, R, n].
        L is 1, or all layers if the budget has notes. with_own: the row's own slot counts. The first slot, which
        counts, replaces each slot that does not, as that may hold any data."""
        budget = self.rows.cache.budgets.of(self.rows.keys)
        assert budget is not None, "rows that read all keys need no pages"
        tables, looked_at = block_tables(runs, positions.device), None
        if budget.looked_at:
            notes, own = self.rows.cache.looked_at, tables.gather(1, positions[:, None] // PAGE_SIZE)[:, 0]
            assert notes is not None, "a cache with room for notes"
            looked_at = notes[:, own]
        window = self.kind.sliding_window
        pages, num_before = few_pages(budget, positions, tables, looked_at=looked_at, sliding_window=window)
        inside = torch.arange(PAGE_SIZE, device=pages.device)
        slots = (pages[..., None] * PAGE_SIZE + inside).flatten(-2)
        counts = torch.arange(slots.shape[-1], device=slots.device) < (num_before + with_own)[..., None]
        return torch.where(counts, slots, slots[..., :1]), counts

    def _pieces(self, span: RowSpan, paths: Sequence[Path]) -> list[Run]:
        """Return the leading runs of the places from `_first_for_all` to the end of the context that have attention
        calls of their own. All rows see all of them."""
        if not self._merges or any(path.shared < span.context for path in paths):
            return []
        first = self._first_for_all(span, paths)
        context = runs_between(span.runs, first, span.context)
        if _is_chunk(span, paths):
            return [] if self._is_windowed(span) else context
        is_scattered = len(context) > 1 and any(self._is_long(run) for run in context)
        is_last_alone = self._first_for_any(span, paths) < first
        return context[: None if is_last_alone else -1] if is_scattered else []

    def _first_for_any(self, span: RowSpan, paths: Sequence[Path]) -> int:
        """Return the first place that the sliding window shows to any row."""
        return self._first_seen(min(path.position for path in paths) if paths else span.context)

    def _first_for_all(self, span: RowSpan, paths: Sequence[Path]) -> int:
        """Return the first place that the sliding window shows to all rows."""
        return self._first_seen(max(path.position for path in paths) if paths else span.end - 1)

    def _calls_in_blocks(self, rows: slice, span: RowSpan, paths: Sequence[Path]) -> list[_Call]:
        """Return the calls of a chain, or of one row of a tree, in which every row has the bits that it has alone."""
        end = paths[0].position + 1 if paths else span.end
        in_blocks = self._merges and (self.kind.sliding_window is None or end <= self.kind.sliding_window)
        left_over = {number * self._group_size % _BLOCK_ROWS for number in (1, span.num_rows)}
        if span.num_rows > 1 and (not in_blocks or 1 in left_over):
            most, last = span.num_rows - 1, rows.stop - 1
            return [
                *self._calls_in_blocks(slice(rows.start, last), span.chain(0, most), ()),
                *self._calls_in_blocks(slice(last, rows.stop), span.chain(most, 1), ()),
            ]
        if not in_blocks:
            return [self._last_call(rows, span, paths, 0)]
        # Whole blocks of keys. The mask hides those after each row: slots of others, or the first slot again.
        num_keys, first = -(-end // _BLOCK) * _BLOCK, span.runs[0].start
        columns = torch.arange(num_keys, device=self.query.device)
        mask = self._masked(columns <= columns[end - span.num_rows : end, None])
        if not paths and len(span.runs) == 1 and first + num_keys <= self.cached[0].shape[1]:
            return [_Call(rows, slice(first, first + num_keys), mask)]
        slots = self._slots_of_path(span, paths[0]) if paths else self._index(slots_between(span.runs, 0, end))
        return [_Call(rows, pad(slots, (0, num_keys - end), value=first), mask)]

    def _last_call(self, rows: slice, span: RowSpan, paths: Sequence[Path], num_seen: int) -> _Call:
        """Return the call that reads all keys that the rows see, but not the first `num_seen` that all of them see."""
        sees_own = num_seen == span.context and not self._is_windowed(span) and not self.kind.softcap
        if sees_own and _is_chunk(span, paths):
            return _Call(rows, None, causal=True)
        if paths and span.num_rows == 1 and not num_seen:
            return _Call(rows, self._slots_of_path(span, paths[0]))
        first, begin = self._first_for_any(span, paths), self._first_for_all(span, paths)
        hidden_from_some = runs_between(span.runs, first, begin)
        rest = runs_between(span.runs, begin + num_seen, span.end)
        slots = self._slots(joined(tuple(hidden_from_some), tuple(rest)))
        if span.num_rows == 1:
            return _Call(rows, slots)
        columns = torch.arange(first, span.end, device=self.query.device)
        columns = torch.cat([columns[: begin - first], columns[begin + num_seen - first :]])
        return _Call(rows, slots, self._mask(span, paths, columns))

    @property
    def _group_size(self) -> int:
        return len(self.query) // len(self.own[0])

    def _folded_mask(self, call: _Call) -> Tensor | None:
        if call.folded_mask is None and call.mask is not None:
            call.folded_mask = call.mask.repeat(self._group_size, 1)
        return call.folded_mask

    @property
    def _merges(self) -> bool:
        """Whether partial results can be merged: torch's CPU kernel returns the log-sum-exp of its scores. The kernel
        supports no softcap, and needs keys and values of the same head size."""
        return (
            self.query.device.type == "cpu" and not self.kind.softcap and self.query.shape[-1] == self.own[1].shape[-1]
        )

    def _is_windowed(self, span: RowSpan) -> bool:
        """Return whether the sliding window hides earlier keys from some rows."""
        return self.kind.sliding_window is not None and span.end > self.kind.sliding_window

    def _is_long(self, run: Run) -> bool:
        num_heads, _, size = self.own[0].shape
        num_bytes = run.length * num_heads * size * self.own[0].element_size()
        return self.rows.division == "runs" and num_bytes >= _LONG_RUN_BYTES

    def _slots(self, runs: Sequence[Run]) -> slice | Tensor:
        if len(runs) <= 1:
            return slice(runs[0].start, runs[0].end) if runs else slice(0)
        return self._index([slot for run in runs for slot in run.slots])

    def _slots_of_path(self, span: RowSpan, path: Path) -> Tensor:
        """Return the slots that a single row of a tree sees, in order of position. Its attention is then bit-equal to
        that of a single row outside a tree."""
        lowest = self._first_seen(path.position)
        places = slots_between(span.runs, 0, span.end)
        own = path.own[max(0, lowest - path.shared) :]
        return self._index([*places[lowest : path.shared], *(places[place] for place in own)])

    def _index(self, numbers: Sequence[int] | Sequence[tuple[int, int]]) -> Tensor:
        return torch.tensor(numbers, device=self.query.device)

    def _mask(self, span: RowSpan, paths: Sequence[Path], columns: Tensor) -> Tensor:
        """Return the mask over these places, as `_Call` has it; the last are the rows' own. A boolean mask would cost a
        conversion in every layer."""
        rows = torch.arange(span.context, span.end, device=columns.device)[:, None]
        if paths:
            seen = _seen_in_tree(paths, columns, self.kind.sliding_window)
        else:
            seen = columns <= rows
            if self.kind.sliding_window:
                seen &= columns > rows - self.kind.sliding_window
        return self._masked(seen)

    def _masked(self, seen: Tensor) -> Tensor:
        mask = torch.zeros(seen.shape, dtype=self.query.dtype, device=seen.device)
        return mask.masked_fill_(~seen, float("-inf"))

    def _keys_and_values(self, call: _Call) -> tuple[Tensor, Tensor]:
        """Return the keys [H_kv, n, D] and values [H_kv, n, D_v] that a call reads."""
        if call.slots is None:
            return self.own[0][:, call.rows], self.own[1][:, call.rows]
        if isinstance(call.slots, slice):
            keys, values = self.cached[0][:, call.slots], self.cached[1][:, call.slots]
        else:
            keys, values = self.cached[0].index_select(1, call.slots), self.cached[1].index_select(1, call.slots)
        if self.rows.slots is None:
            keys, values = (
                torch.cat([each, own[:, call.rows]], 1) for each, own in zip((keys, values), self.own, strict=True)
            )
        return keys, values

    def _seen(self, call: _Call) -> Tensor:
        """Return the attention of m rows that occur in this call only: [H, m, D_v]."""
        keys, values = self._keys_and_values(call)
        query, mask, softcap = self.query[:, call.rows], call.mask, self.kind.softcap
        if call.causal or (query.shape[1] > _MAX_FOLDED_ROWS and not softcap):
            return _sdpa(query, keys, values, mask, self.kind.scaling, causal=call.causal)
        mask, folded = self._folded_mask(call), _folded(query, len(keys))
        if softcap:
            mixed = _softcapped(folded, keys, values, mask, self.kind.scaling, softcap)
        else:
            mixed = _sdpa(folded, keys, values, mask, self.kind.scaling)
        return mixed.reshape(*query.shape[:2], values.shape[-1])

    def _seen_alone(self, calls: Sequence[tuple[int, _Call]]) -> Tensor:
        """Return what `_seen` does for calls of one row, by fewer operations: [m, H, D_v]."""
        rows = self.query.view(1, len(self.own[0]), self._group_size, *self.query.shape[1:]).unbind(3)
        all_keys, all_values = self.cached[0][None], self.cached[1][None]
        found = []
        for row, call in calls:
            assert call.slots is not None, "only chunks read their own keys"
            if isinstance(call.slots, slice):
                keys, values = all_keys[:, :, call.slots], all_values[:, :, call.slots]
            else:
                keys, values = all_keys.index_select(2, call.slots), all_values.index_select(2, call.slots)
            found.append(scaled_dot_product_attention(rows[row], keys, values, call.mask, scale=self.kind.scaling))
        return torch.cat(found).flatten(1, 2)

    def _seen_in_few(self, rows: slice | Tensor, slots: Tensor, mask: Tensor) -> Tensor:
        """Return the attention of rows that read few keys, [T * B, H, D_v], by one call. Key heads take its batch axis,
        tokens its axis of heads. slots, mask: as in `_Calls`."""
        place = self.rows.cache.place_of_layer[self.layer] if len(slots) > 1 else 0
        slots, mask = slots[place], mask[place]
        num_tokens, num_branches = mask.shape[:2]
        keys, values = (
            cached.index_select(1, slots.flatten()).view(len(cached), *slots.shape, -1) for cached in self.cached
        )
        if self.rows.slots is None:
            own = (each[:, rows].view(len(each), num_tokens, num_branches, -1) for each in self.own)
            keys, values = (torch.cat(both, 2) for both in zip((keys, values), own, strict=True))
        query = self.query[:, rows].view(len(keys), -1, num_tokens, num_branches, self.query.shape[-1]).transpose(1, 2)
        size = query.shape[2]  # query heads of a key head
        query, mask = query.flatten(2, 3), mask.repeat(1, size, 1) if num_branches > 1 else mask
        if self.kind.softcap:
            mixed = _softcapped(query, keys, values, mask, self.kind.scaling, self.kind.softcap)
        else:
            mixed = scaled_dot_product_attention(query, keys, values, mask[None], scale=self.kind.scaling)
        mixed = mixed.view(len(keys), num_tokens, size, num_branches, -1)
        return mixed.permute(1, 3, 0, 2, 4).flatten(2, 3).flatten(0, 1)

    def _merged(self, pieces: Sequence[_Call]) -> Tensor:
        """Merge the results of several calls for the same rows: [N, H, D_v], zeros for rows of none of the calls. The
        weight of a call's result is its share of the softmax's denominator."""
        mixed = self._zeros(torch.float32)
        total = self.query.new_full(mixed.shape[:2], float("-inf"), dtype=torch.float32)
        for call in pieces:
            keys, values = self._keys_and_values(call)
            query, mask = self.query[:, call.rows], None
            num_heads, num_rows, size = query.shape
            if not call.causal:
                query, mask = _folded(query, len(keys)), self._folded_mask(call)
            found, scores = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query[None], keys[None], values[None], 0.0, call.causal, attn_mask=mask, scale=self.kind.scaling
            )
            found = found.reshape(num_heads, num_rows, size).transpose(0, 1)
            scores = scores.reshape(num_heads, num_rows).T  # log-sum-exp
            before = total[call.rows]
            after = torch.logaddexp(before, scores)
            mixed[call.rows] = (
                mixed[call.rows] * (before - after).exp()[..., None] + found * (scores - after).exp()[..., None]
            )
            total[call.rows] = after
        return mixed.to(self.query.dtype)

    def _zeros(self, dtype: torch.dtype) -> Tensor:
        return self.query.new_zeros(self.query.shape[1], len(self.query), self.own[1].shape[-1], dtype=dtype)


def _is_chunk(span: RowSpan, paths: Sequence[Path]) -> bool:
    """Return whether the span has more rows than are folded, and no tree: torch's causal kernel then needs no mask."""
    return span.num_rows > _MAX_FOLDED_ROWS and not paths


def _folded(query: Tensor, num_kv_heads: int) -> Tensor:
    """Group rows that read the same keys: [H, m, D] -> [H_kv, H / H_kv * m, D]."""
    return query.reshape(num_kv_heads, -1, query.shape[-1])


def _sdpa(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, *, causal: bool = False
) -> Tensor:
    if mask is not None and len(query) > len(keys):
        # Key heads take the batch axis: torch's fused kernels for a GPU do not share key heads where there is a mask.
        grouped = query.view(len(keys), -1, *query.shape[1:])
        keys, values = (each[:, None].expand(-1, grouped.shape[1], -1, -1) for each in (keys, values))
        return scaled_dot_product_attention(grouped, keys, values, mask, scale=scaling).flatten(0, 1)
    return scaled_dot_product_attention(
        query[None], keys[None], values[None], mask, is_causal=causal, scale=scaling,
        enable_gqa=len(query) > len(keys),
    )[0]  # fmt: skip


def _softcapped(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, softcap: float
) -> Tensor:
    scores = torch.tanh(query @ keys.transpose(-1, -2) * (scaling / softcap)) * softcap
    scores = scores if mask is None else scores + mask
    return torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype) @ values


def _seen_in_tree(paths: Sequence[Path], columns: Tensor, sliding_window: int | None) -> Tensor:
    """Return which of the places `columns` each row sees: bool [num_rows, len(columns)]. The last columns are the
    places of all rows. A sliding window counts positions. They equal the numbers of the places only in the shared part
    of a path."""
    device, first = columns.device, int(columns[-1]) + 1 - len(columns)
    lowest = [path.position + 1 - sliding_window if sliding_window else 0 for path in paths]
    bounds = torch.tensor([[path.shared for path in paths], lowest], device=device)[:, :, None]
    seen = (columns < bounds[0]) & (columns >= bounds[1])
    own = [
        (row, place - first)
        for row, path in enumerate(paths)
        for place in path.own[max(0, lowest[row] - path.shared) :]
    ]
    where = torch.tensor(own, device=device).T
    seen[where[0], where[1]] = True
    return seen


AttentionInterface.register(IMPLEMENTATION, packed_attention)
