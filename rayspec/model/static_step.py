"""Eager passes in static buffers: launches and their addresses depend on the bucket only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from rayspec.choices import Choice
from rayspec.model.architecture import Decomposition, rounding_tolerance, rows_of
from rayspec.model.attention import PackedRows
from rayspec.model.buckets import bucket_of, padded_rows
from rayspec.model.kv_cache import KVCache, whole_pages
from rayspec.model.load_check import CheckSequence
from rayspec.model.static_rows import BatchMetadata, StaticRows, StepBuffers
from rayspec.model.sublayers import Sublayer, Tap, run

# Rows of a sequence of the check: more than a page, and more than a window of a few tokens.
_NUM_CHECK_ROWS = 40


class StaticStep:
    """Runs one pass at a time in static buffers: `hold` the pass, then `embed` and `run` its rows. Launches its parts
    one by one, without graphs."""

    def __init__(self, parts: Decomposition, buffers: StepBuffers) -> None:
        self.parts = parts
        self.buffers = buffers

    def hold(self, metadata: BatchMetadata) -> StaticRows:
        """Write the pass to the buffers, with its rotary embedding, and return its rows."""
        rows, is_new = self.buffers.hold(metadata)
        if is_new:
            self.rotate(rows)
        return rows

    def rotate(self, rows: StaticRows) -> None:
        """Compute the rotary embedding of the rows' positions and write it to the buffers."""
        before = dict(rows.rope)
        try:
            self.parts.rotate(rows.residual, rows)
        except BaseException:  # a capture that fails has computed some types in memory that others use later
            rows.rope.clear()
            rows.rope.update(before)
            raise
        self.buffers.keep_rope(rows)

    def embed(self, rows: StaticRows) -> None:
        """Write the embedding of `rows.tokens` to `rows.residual`."""
        rows.residual.copy_(self.parts.embed(rows.tokens))

    def run(
        self,
        span: Sequence[Sublayer],
        rows: StaticRows,
        *,
        choices: Sequence[Choice] | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Do as `sublayers.run`, on `rows.residual`. Changes and returns this buffer: [1, N, hidden_size]."""
        return run(span, rows.residual, rows, choices=choices, tap=tap)


@torch.inference_mode()
def require_same_attention(parts: Decomposition) -> None:
    """Raise ValueError if attention in static buffers differs from that of packed rows, in the first attention sublayer
    of each kind: two sequences with a cached prefix, and a decode step."""
    rows = rows_of(parts, [CheckSequence.of(0, _NUM_CHECK_ROWS)] * 2)
    most, num_places = 2 * _NUM_CHECK_ROWS, whole_pages(_NUM_CHECK_ROWS)
    cache = KVCache(parts.shapes, 2 * num_places, dtype=parts.dtype, device=parts.device, num_spare=1)
    buffers = StepBuffers(
        cache,
        max_rows=padded_rows(most),
        max_sequences=2,
        max_places=num_places,
        hidden_size=rows.hidden[0].shape[-1],
        dtype=parts.dtype,
        device=parts.device,
    )
    step = StaticStep(parts, buffers)

    def in_buffers(sublayer: Sublayer, hidden: Tensor, packed: PackedRows) -> Tensor:
        held = step.hold(BatchMetadata(bucket_of(packed.spans, packed.paths), packed.spans, packed.paths))
        held.residual[:, : hidden.shape[1]] = hidden
        return sublayer(held.residual, held)[:, : hidden.shape[1]].clone()

    seen = set()
    for sublayer in parts.sublayers:
        shape, window = parts.shapes[sublayer.layer], parts.windows.get(sublayer.layer)
        kind = (sublayer.layer_type, sublayer.body is None, shape, window)
        if sublayer.kind == "mlp" or kind in seen:
            continue
        seen.add(kind)
        expected = rows.branch(rows.outputs(sublayer.layer, sublayer))
        actual = rows.branch(rows.outputs(sublayer.layer, partial(in_buffers, sublayer)))
        difference = float((expected - actual).abs().max() / expected.abs().max())
        if not difference <= rounding_tolerance(parts.dtype):
            raise ValueError(f"attention of layer {sublayer.layer} differs by {difference:.1e} of the largest output")
