"""Chooses grids, tiles and arguments for the Triton kernels. Arguments and results are those of `operations.py`.

Choices depend on shapes and constants of model and bucket, never on data: a launch needs no host sync and can be
captured. Tiles and splits do not depend on other sequences, so a row's sums have the same order in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton import cdiv

from rayspec.model.cuda import kernels
from rayspec.model.rows import LEAST_SPLIT_LENGTH, MOST_SPLITS
from rayspec.model.rows import power_of_two as _padded

# More rows are a chunk of a prompt. Up to so many, all launches have the same tile, and so a row has the same bits.
MAX_SMALL_ROWS = 64
_MAX_KEY_TILE_BYTES = 2**14
# Programs of a launch that read keys: about four for each multiprocessor of a large GPU.
_NUM_PROGRAMS = 512
# Up to so many rows, only reading the matrix limits a product's speed.
MAX_FEW_ROWS = 16
# Columns of a matrix in full or in int8 are read in groups, too, though they share no scale.
_FULL_GROUP, _INT8_GROUP = 64, 128
_NOISE_WORDS = 512  # of a program, with the numbers of two tokens each
_MOST_SCORES = 4096  # that a program reads at once


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with its launch parameters. arguments: by the kernel's names. options: those of Triton's compiler."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    def run(self) -> None:
        if all(self.grid):
            self.kernel[self.grid](**self.arguments, **self.options)


@dataclass(frozen=True, slots=True)
class Call:
    """A prepared operation: its launches fill the output, None if it is an argument."""

    output: Tensor | None
    launches: tuple[Launch, ...]

    def run(self) -> Tensor | None:
        for launch in self.launches:
            launch.run()
        return self.output


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile of an attention program. rows: rows of one sequence, each with the query heads of one key head. group: these
    heads, padded to a power of two. keys: places per step of the program's loop."""

    rows: int
    group: int
    keys: int
    num_warps: int
    num_stages: int = 2


@dataclass(frozen=True, slots=True)
class Splits:
    """Division of a context into at most `number` splits. They have `least_length` places each, doubled until all
    places of the sequence have a split: up to `doublings` times. programs: that share the splits of a tile."""

    number: int
    least_length: int
    doublings: int
    programs: int


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Tile of a program that multiplies by a matrix. rows: rows of the output. outputs: its columns. groups:
    groups of columns of the matrix per step of the program's loop. by_group: warps share the groups, not the
    outputs."""

    rows: int
    outputs: int
    groups: int
    by_group: bool
    num_warps: int
    num_stages: int


def choose_tile(*, group: int, dim: int, itemsize: int, max_rows: int) -> Tile:
    """Choose a tile that fits in registers, by the table of docs/gpu.md. group: query heads per key head."""
    group, dim = _padded(group), _padded(dim)
    if itemsize > 2:  # Products of float32 do not use tensor cores.
        height = max(group, 32 if dim <= 128 else 16)
        return Tile(height // group, group, 16, num_warps=4)
    keys = max(16, min(64, _MAX_KEY_TILE_BYTES // (dim * itemsize)))
    if max_rows <= MAX_SMALL_ROWS:
        height = max(group, min(64, 16 * group))
        return Tile(height // group, group, keys, num_warps=4)
    height = max(group, 128 if dim <= 128 else 64)
    return Tile(height // group, group, min(keys, 32), num_warps=8)


def choose_splits(*, num_kv_heads: int, num_sequences: int, max_rows: int, max_context: int) -> Splits:
    """Choose splits so that several programs read a long context of few rows. A chunk needs none: it has many tiles.
    Only the number of programs follows from that of the sequences."""
    number = min(MOST_SPLITS, cdiv(max_context, LEAST_SPLIT_LENGTH))
    if max_rows > MAX_SMALL_ROWS or number == 1:
        return Splits(1, _padded(max_context), 0, 1)
    doublings = (cdiv(max_context, number * LEAST_SPLIT_LENGTH) - 1).bit_length()
    programs = max(1, min(number, _NUM_PROGRAMS // (num_kv_heads * num_sequences)))
    return Splits(number, LEAST_SPLIT_LENGTH, doublings, programs)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    row_starts: Tensor,
    contexts: Tensor,
    positions: Tensor,
    shared: Tensor | None,
    bits: Tensor | None,
    scaling: float,
    window: int,
    softcap: float,
    page_size: int,
    max_rows: int,
    max_context: int,
) -> Call:
    num_rows, num_heads, dim = query.shape
    num_kv_heads, group = len(keys), num_heads // len(keys)
    tile = choose_tile(group=group, dim=dim, itemsize=query.element_size(), max_rows=max_rows)
    splits = choose_splits(
        num_kv_heads=num_kv_heads, num_sequences=len(contexts), max_rows=max_rows, max_context=max_context
    )
    tiles = cdiv(max_rows, tile.rows)
    for cache in (keys, values):
        if cache.shape[1] * cache.stride(1) >= 2**31:  # the kernels have 32-bit offsets in a head
            raise ValueError(
                f"a KV cache of {cache.shape[1]} slots at a stride of {cache.stride(1)} is too large: use fewer slots"
            )
    output = query.new_empty(query.shape)
    parts, log_sums = output, None
    if splits.number > 1:
        parts = output.new_empty((num_rows, num_heads, splits.number, dim), dtype=torch.float32)
        log_sums = output.new_empty((num_rows, num_heads, splits.number), dtype=torch.float32)
    rows = Launch(
        kernels.attend_rows,
        (len(contexts) * tiles + 1, num_kv_heads, splits.programs),
        {
            "query": query, "keys": keys, "values": values, "block_table": block_table, "row_starts": row_starts,
            "contexts": contexts, "positions": positions, "shared": shared, "bits": bits,
            "output": parts, "log_sums": log_sums, "scaling": scaling, "num_rows": num_rows, "num_tiles": tiles,
            "query_row_stride": query.stride(0), "query_head_stride": query.stride(1),
            "key_head_stride": keys.stride(0), "key_slot_stride": keys.stride(1),
            "value_head_stride": values.stride(0), "value_slot_stride": values.stride(1),
            "table_stride": block_table.stride(0),
            "GROUP": group, "GROUP_PADDED": tile.group, "DIM": dim, "DIM_PADDED": _padded(dim),
            "PAGE_SIZE": page_size, "TILE_ROWS": tile.rows, "TILE_KEYS": tile.keys,
            "SPLITS": splits.number, "LEAST_LENGTH": splits.least_length, "DOUBLINGS": splits.doublings,
            "WINDOW": window, "SOFTCAP": softcap,
            "HAS_TREE": bits is not None, "UPCAST": triton.knobs.runtime.interpret, "STAGES": tile.num_stages,
        },
        {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True},
    )  # fmt: skip
    if splits.number == 1:
        return Call(output, (rows,))
    merge = Launch(
        kernels.merge_splits,
        (num_rows, num_heads),
        {
            "parts": parts, "log_sums": log_sums, "output": output, "row_starts": row_starts, "contexts": contexts,
            "positions": positions, "num_sequences": len(contexts), "SEQUENCES_PADDED": _padded(len(row_starts)),
            "DIM": dim, "DIM_PADDED": _padded(dim), "SPLITS": splits.number, "SPLITS_PADDED": _padded(splits.number),
            "LEAST_LENGTH": splits.least_length, "DOUBLINGS": splits.doublings, "WINDOW": window,
        },
        {"num_warps": 4, "enable_fp_fusion": True},
    )  # fmt: skip
    return Call(output, (rows, merge))


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, weight_offset: float) -> Call:
    num_rows, size = hidden.shape
    output = hidden.new_empty(hidden.shape)
    arguments = {
        "hidden": hidden, "weight": weight, "output": output, "eps": eps, "row_stride": hidden.stride(0),
        "SIZE": size, "SIZE_PADDED": _padded(size), "OFFSET": weight_offset,
    }  # fmt: skip
    options = {"num_warps": min(16, max(1, _padded(size) // 512)), "enable_fp_fusion": False}
    return Call(output, (Launch(kernels.rms_norm_rows, (num_rows,), arguments, options),))


def rotate_and_write(
    packed: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    num_heads: int,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> Call:
    num_kv_heads, _, dim = keys.shape
    query = packed.new_empty(len(packed), num_heads, dim)
    arguments = {
        "packed": packed, "cos": cos, "sin": sin, "slots": slots, "keys": keys, "values": values,
        "query_norm": query_norm, "key_norm": key_norm, "query": query, "eps": eps,
        "packed_stride": packed.stride(0), "cos_stride": cos.stride(0), "sin_stride": sin.stride(0),
        "key_head_stride": keys.stride(0), "key_slot_stride": keys.stride(1),
        "value_head_stride": values.stride(0), "value_slot_stride": values.stride(1),
        "HEADS": num_heads, "KV_HEADS": num_kv_heads, "DIM": dim, "DIM_PADDED": _padded(dim),
        "ROTARY": cos.shape[-1], "QUERY_NORM": query_norm is not None, "KEY_NORM": key_norm is not None,
    }  # fmt: skip
    # A fused multiply-add would round float32 once where torch rounds twice.
    options = {"num_warps": 1, "enable_fp_fusion": False}
    grid = (len(packed), num_heads + 2 * num_kv_heads)
    return Call(query, (Launch(kernels.rotate_and_write_heads, grid, arguments, options),))


def gated(packed: Tensor, activation: str) -> Call:
    num_rows, size = len(packed), packed.shape[1] // 2
    output = packed.new_empty(num_rows, size)
    block = min(1024, _padded(size))
    arguments = {
        "packed": packed, "output": output, "row_stride": packed.stride(0),
        "SIZE": size, "BLOCK": block, "GELU": activation == "gelu_tanh",
    }  # fmt: skip
    options = {"num_warps": 4, "enable_fp_fusion": False}
    grid = (num_rows, cdiv(size, block))
    return Call(output, (Launch(kernels.gate_columns, grid, arguments, options),))


def gumbel(keys: Tensor, vocab_size: int) -> Call:
    output = keys.new_empty(keys.shape[1], vocab_size, dtype=torch.float32)
    arguments = {
        "keys": keys, "output": output, "key_stride": keys.stride(0), "SIZE": vocab_size, "BLOCK": _NOISE_WORDS,
    }  # fmt: skip
    # A fused multiply-add would round the numbers once where torch rounds twice.
    options = {"num_warps": 4, "enable_fp_fusion": False}
    grid = (keys.shape[1], cdiv(vocab_size, 2 * _NOISE_WORDS))
    return Call(output, (Launch(kernels.gumbel_words, grid, arguments, options),))


def cut_to_top_p(scores: Tensor, top_p: Tensor) -> Call:
    arguments = {
        "scores": scores, "top_p": top_p, "row_stride": scores.stride(0), "SIZE": scores.shape[1],
        "BLOCK": min(_MOST_SCORES, _padded(scores.shape[1])),
    }  # fmt: skip
    options = {"num_warps": 16, "enable_fp_fusion": False}
    return Call(None, (Launch(kernels.cut_rows_to_top_p, (len(scores),), arguments, options),))


def choose_product_tile(*, num_rows: int, itemsize: int, weight_type: torch.dtype, group: int) -> ProductTile:
    """Choose a tile: with few rows small ones, which many programs read in parallel; with more rows large ones, which
    share what they read. Up to `MAX_SMALL_ROWS` rows, a product in full sums in the same order by any tile. itemsize:
    of the rows' type. group: of an int4 matrix, the columns with one scale, at most 128."""
    rows = 8 if num_rows <= 8 else MAX_FEW_ROWS  # tensor cores take 8 rows at a time
    if itemsize > 2:  # Products of float32 do not use tensor cores.
        return ProductTile(rows, 32, 1, by_group=False, num_warps=4, num_stages=3)
    if weight_type.is_floating_point:
        if num_rows > MAX_FEW_ROWS:
            return ProductTile(MAX_SMALL_ROWS, 32, 4, by_group=True, num_warps=4, num_stages=3)
        num_warps, num_stages = (2, 5) if num_rows <= 8 else (4, 4)
        return ProductTile(rows, 16, 4, by_group=True, num_warps=num_warps, num_stages=num_stages)
    if num_rows > MAX_FEW_ROWS:
        return ProductTile(64, 64, 1, by_group=False, num_warps=8, num_stages=3)
    if weight_type == torch.int8:
        return ProductTile(rows, 16, 4, by_group=True, num_warps=4, num_stages=3)
    # More of the smallest groups would need more shared memory than small GPUs have.
    return ProductTile(rows, 32, 4 if group == 128 else 8, by_group=True, num_warps=4, num_stages=4)


def product(
    output: Tensor, rows: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, adds: bool
) -> Call:
    size, is_int4 = rows.shape[1], weight.dtype == torch.int32
    group = _FULL_GROUP if weight.is_floating_point() else _INT8_GROUP
    if is_int4 and scales is not None:
        group = size // len(scales)
    tile = choose_product_tile(num_rows=len(rows), itemsize=rows.element_size(), weight_type=weight.dtype, group=group)
    arguments = {
        "output": output, "rows": rows, "weight": weight, "scales": scales, "bias": bias, "num_rows": len(rows),
        "row_stride": rows.stride(0), "SIZE": size, "OUTPUTS": len(weight),
        "TILE_ROWS": tile.rows, "TILE_OUTPUTS": tile.outputs, "GROUP": group, "TILE_GROUPS": tile.groups,
        "BY_GROUP": tile.by_group, "INT4": is_int4, "ADDS": adds, "UPCAST": triton.knobs.runtime.interpret,
        "STAGES": tile.num_stages,
    }  # fmt: skip
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}
    grid = (cdiv(len(weight), tile.outputs), cdiv(len(rows), tile.rows))
    return Call(None, (Launch(kernels.product_tiles, grid, arguments, options),))
