"""The Triton kernels. `launches.py` chooses their grids and constants. This module needs triton.

Names in capitals are compile-time constants. A size with the suffix _PADDED is rounded up to a power of two, as tiles
of Triton need; masks exclude the padding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rayspec.model import noise

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_STEP: tl.constexpr = tl.constexpr(noise.STEP)
_FACTOR: tl.constexpr = tl.constexpr(noise.FACTORS[0])
_OTHER_FACTOR: tl.constexpr = tl.constexpr(noise.FACTORS[1])
_SCALE: tl.constexpr = tl.constexpr(noise.SCALE)
_OFFSET: tl.constexpr = tl.constexpr(noise.OFFSET)


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "table_stride"])
def attend_rows(
    query, keys, values, block_table, row_starts, contexts, positions, shared, bits, output, log_sums,
    scaling, num_rows, num_tiles, query_row_stride, query_head_stride, key_head_stride, key_slot_stride,
    value_head_stride, value_slot_stride, table_stride,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, SPLITS: tl.constexpr,
    LEAST_LENGTH: tl.constexpr, DOUBLINGS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_TREE: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend over pages. One program: a tile of rows of a sequence, the query heads of a key head, some splits.

    Grid: (sequences * num_tiles + 1, H_kv, programs). The last index of the first axis writes the zeros of padding
    rows. Of n programs, program i takes the splits i, i + n, i + 2n ... of those that the rows see.
    output: [N, H, D] if SPLITS is 1, else float32 [N, H, SPLITS, D]; log_sums: [N, H, SPLITS], base 2, if SPLITS > 1.
    """
    program = tl.program_id(0)
    sequence = program // num_tiles
    kv_head = tl.program_id(1)
    member = tl.arange(0, TILE_ROWS * GROUP_PADDED)
    in_group = member % GROUP_PADDED
    head = kv_head * GROUP + in_group
    num_heads = tl.num_programs(1) * GROUP
    dim = tl.arange(0, DIM_PADDED)
    first = tl.load(row_starts + sequence)
    if program == tl.num_programs(0) - 1:
        if SPLITS == 1:
            for start in range(first, num_rows, TILE_ROWS):
                row = start + member // GROUP_PADDED
                there = (row < num_rows) & (in_group < GROUP)
                nothing = tl.zeros([TILE_ROWS * GROUP_PADDED, DIM_PADDED], output.dtype.element_ty)
                to = output + (row.to(tl.int64) * num_heads + head)[:, None] * DIM + dim[None, :]
                tl.store(to, nothing, mask=there[:, None] & (dim < DIM)[None, :])
        return

    first_in_tile = (program % num_tiles) * TILE_ROWS
    num_own = tl.load(row_starts + sequence + 1) - first
    if first_in_tile >= num_own:
        return
    context = tl.load(contexts + sequence)
    length = _split_length(context + num_own, SPLITS, LEAST_LENGTH, DOUBLINGS)
    end = context + tl.minimum(first_in_tile + TILE_ROWS, num_own)
    own = first_in_tile + member // GROUP_PADDED
    live = (own < num_own) & (in_group < GROUP)
    row = first + own
    first_seen = 0  # earlier pages may belong to other sequences
    lowest = tl.zeros([TILE_ROWS * GROUP_PADDED], tl.int32)
    if WINDOW > 0:
        lowest = tl.load(positions + row, mask=live, other=2147483647).to(tl.int32) - WINDOW + 1
        first_seen = tl.maximum(tl.min(lowest, 0), 0)
    first_split = first_seen // length + tl.program_id(2)
    if first_split * length >= end:
        return
    row_shared = context
    row_bits = tl.zeros([TILE_ROWS * GROUP_PADDED], tl.int64)
    if HAS_TREE:
        row_shared = tl.load(shared + row, mask=live, other=0)
        row_bits = tl.load(bits + row, mask=live, other=0)
    rows = tl.load(
        query + row.to(tl.int64)[:, None] * query_row_stride + head[:, None] * query_head_stride + dim[None, :],
        mask=live[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    keys += kv_head.to(tl.int64) * key_head_stride
    values += kv_head.to(tl.int64) * value_head_stride
    block_table += sequence.to(tl.int64) * table_stride
    for split in range(first_split, (end + length - 1) // length, tl.num_programs(2)):
        high = tl.minimum(end, (split + 1) * length)
        low = split * length
        if WINDOW > 0:
            low = tl.maximum(low, first_seen // TILE_KEYS * TILE_KEYS)
        last = tl.where(live, tl.minimum(context + own, high - 1), -1)
        mixed, total, top = _mixed(
            rows, keys, values, block_table, low, high, first_seen, last, context, row_shared, row_bits,
            positions + first, lowest, scaling, key_slot_stride, value_slot_stride, DIM, DIM_PADDED, PAGE_SIZE,
            TILE_KEYS, WINDOW, SOFTCAP, HAS_TREE, UPCAST, STAGES,
        )  # fmt: skip
        divisor = tl.where(total == 0.0, 1.0, total)
        where = (row.to(tl.int64) * num_heads + head) * SPLITS + split
        tl.store(
            output + where[:, None] * DIM + dim[None, :],
            (mixed / divisor[:, None]).to(output.dtype.element_ty),
            mask=live[:, None] & (dim < DIM)[None, :],
        )
        if SPLITS > 1:
            tl.store(log_sums + where, tl.where(total == 0.0, float("-inf"), top + tl.log2(divisor)), mask=live)


@triton.jit
def _mixed(
    rows, keys, values, block_table, low, high, first_seen, last, context, shared, bits, positions, lowest,
    scaling, key_slot_stride, value_slot_stride, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_TREE: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend over the places from `low` to `high`. Return the sum of values by weight, the sum of weights, and the
    largest score, which all weights are relative to."""
    dim = tl.arange(0, DIM_PADDED)
    top = tl.full([rows.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([rows.shape[0]], tl.float32)
    mixed = tl.zeros([rows.shape[0], DIM_PADDED], tl.float32)
    for start in tl.range(low, high, TILE_KEYS, num_stages=STAGES):
        place = start + tl.arange(0, TILE_KEYS)
        filled = (place >= first_seen) & (place < high)
        page = tl.load(block_table + place // PAGE_SIZE, mask=filled, other=0)
        slot = page * PAGE_SIZE + place % PAGE_SIZE
        key = tl.load(
            keys + slot[None, :] * key_slot_stride + dim[:, None],
            mask=filled[None, :] & (dim < DIM)[:, None],
            other=0.0,
        )
        value = tl.load(
            values + slot[:, None] * value_slot_stride + dim[None, :],
            mask=filled[:, None] & (dim < DIM)[None, :],
            other=0.0,
        )
        scores = _scores(rows, key, scaling, SOFTCAP, UPCAST)
        seen = place[None, :] <= last[:, None]
        if HAS_TREE:
            seen &= _in_path(place, context, shared, bits)
        if WINDOW > 0:  # by positions, which places of a tree do not equal
            is_own = filled & (place >= context)
            own = tl.load(positions + tl.maximum(place - context, 0), mask=is_own, other=0).to(tl.int32)
            seen &= tl.where(is_own, own, place)[None, :] >= lowest[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        mixed = _dot(weights.to(value.dtype), value, mixed * shrink[:, None], UPCAST)
        top = new_top
    return mixed, total, top


@triton.jit
def _split_length(places, SPLITS: tl.constexpr, LEAST_LENGTH: tl.constexpr, DOUBLINGS: tl.constexpr):
    """Return the least of LEAST_LENGTH * 2^k with which SPLITS splits hold so many places."""
    length = LEAST_LENGTH
    for _ in tl.static_range(DOUBLINGS):
        length = tl.where(length * SPLITS < places, length * 2, length)
    return length


@triton.jit
def _scores(rows, key, scaling, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr):
    """Return scaled scores times log2(e), for exp2. rows: [rows, D]; key: [D, places]."""
    scores = _dot(rows, key, None, UPCAST) * scaling
    if SOFTCAP > 0:
        # tanh(x) = 2 sigmoid(2x) - 1
        scores = SOFTCAP * (2.0 * tl.sigmoid(scores * (2.0 / SOFTCAP)) - 1.0)
    return scores * _LOG2_E


@triton.jit
def _dot(left, right, before, UPCAST: tl.constexpr):
    """Return left @ right + before in float32. UPCAST: Triton's interpreter would multiply the bits of bfloat16."""
    if UPCAST:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, before, input_precision="ieee")


@triton.jit
def _in_path(place, context, shared, bits):
    """Return which places up to its own each row of a tree sees: [rows, places]."""
    own = place - context
    shift = tl.minimum(tl.maximum(own, 0), 63).to(tl.int64)
    marked = ((bits[:, None] >> shift[None, :]) & 1) == 1
    return (place[None, :] < shared[:, None]) | ((own >= 0)[None, :] & marked)


@triton.jit(do_not_specialize=["num_sequences"])
def merge_splits(
    parts, log_sums, output, row_starts, contexts, positions, num_sequences,
    SEQUENCES_PADDED: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr, LEAST_LENGTH: tl.constexpr, DOUBLINGS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Merge the splits. One program: one head of one row. Grid: (N, H). Reads only splits with places the row may see.
    parts: float32 [N, H, SPLITS, D]; log_sums: float32 [N, H, SPLITS]; output: [N, H, D], zeros for padding rows."""
    row = tl.program_id(0)
    where = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    dim = tl.arange(0, DIM_PADDED)
    index = tl.arange(0, SEQUENCES_PADDED)
    starts = tl.load(row_starts + index, mask=index <= num_sequences, other=2147483647)
    sequence = tl.sum((starts <= row).to(tl.int32), 0) - 1
    if sequence == num_sequences:
        nothing = tl.zeros([DIM_PADDED], output.dtype.element_ty)
        tl.store(output + where * DIM + dim, nothing, mask=dim < DIM)
        return
    split = tl.arange(0, SPLITS_PADDED)
    context, first = tl.load(contexts + sequence), tl.load(row_starts + sequence)
    num_own = tl.load(row_starts + sequence + 1) - first
    length = _split_length(context + num_own, SPLITS, LEAST_LENGTH, DOUBLINGS)
    needed = split * length <= context + row - first
    if WINDOW > 0:
        needed &= (split + 1) * length > tl.load(positions + row).to(tl.int32) - WINDOW + 1
    sums = tl.load(log_sums + where * SPLITS + split, mask=needed, other=float("-inf"))
    top = tl.max(sums, 0)
    weights = tl.exp2(sums - tl.where(top == float("-inf"), 0.0, top))
    part = tl.load(
        parts + (where * SPLITS + split)[:, None] * DIM + dim[None, :],
        mask=needed[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    total = tl.sum(weights, 0)
    mixed = tl.sum(part * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(output + where * DIM + dim, mixed.to(output.dtype.element_ty), mask=dim < DIM)


@triton.jit
def rms_norm_rows(
    hidden, weight, output, eps, row_stride, SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr, OFFSET: tl.constexpr
):
    """Compute an RMS norm. One program: one row. Grid: (N,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE_PADDED)
    inside = column < SIZE
    numbers = tl.load(hidden + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    normal = numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) / SIZE + eps)
    if OFFSET == 0:
        normal = _rounded(normal, output)
    else:
        scale += OFFSET
    tl.store(output + row * SIZE + column, _as(normal * scale, output), mask=inside)


@triton.jit
def rotate_and_write_heads(
    packed, cos, sin, slots, keys, values, query_norm, key_norm, query, eps,
    packed_stride, cos_stride, sin_stride, key_head_stride, key_slot_stride, value_head_stride, value_slot_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, ROTARY: tl.constexpr,
    QUERY_NORM: tl.constexpr, KEY_NORM: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate query and key heads; write keys and values to their slots. One program: one head of one row.
    Grid: (N, H + 2 * H_kv): first the query heads, then the key heads, then the value heads."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, DIM_PADDED)
    packed += row * packed_stride + head * DIM
    cos += row * cos_stride
    sin += row * sin_stride
    if head < HEADS:
        rotated = _rotated(packed, cos, sin, query_norm, eps, query, DIM, DIM_PADDED, ROTARY, QUERY_NORM)
        tl.store(query + (row * HEADS + head) * DIM + dim, rotated, mask=dim < DIM)
    elif head < HEADS + KV_HEADS:
        rotated = _rotated(packed, cos, sin, key_norm, eps, query, DIM, DIM_PADDED, ROTARY, KEY_NORM)
        where = (head - HEADS).to(tl.int64) * key_head_stride + tl.load(slots + row) * key_slot_stride
        tl.store(keys + where + dim, rotated, mask=dim < DIM)
    else:
        value = tl.load(packed + dim, mask=dim < DIM)
        where = (head - HEADS - KV_HEADS).to(tl.int64) * value_head_stride + tl.load(slots + row) * value_slot_stride
        tl.store(values + where + dim, value, mask=dim < DIM)


@triton.jit
def _rotated(
    head, cos, sin, norm, eps, like,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Return one head, normalised if NORM, with its first ROTARY numbers rotated: [DIM_PADDED]."""
    dim = tl.arange(0, DIM_PADDED)
    inside = dim < DIM
    turned = dim < ROTARY
    partner = tl.where(dim < ROTARY // 2, dim + ROTARY // 2, dim - ROTARY // 2)
    numbers = tl.load(head + dim, mask=inside, other=0.0).to(tl.float32)
    partners = tl.load(head + partner, mask=turned, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(numbers * numbers, 0) / DIM + eps)
        weight = tl.load(norm + dim, mask=inside, other=0.0).to(tl.float32)
        partner_weight = tl.load(norm + partner, mask=turned, other=0.0).to(tl.float32)
        numbers = _rounded(_rounded(numbers * factor, like) * weight, like)
        partners = _rounded(_rounded(partners * factor, like) * partner_weight, like)
    partners = tl.where(dim < ROTARY // 2, -partners, partners)
    cosine = tl.load(cos + dim, mask=turned, other=0.0).to(tl.float32)
    sine = tl.load(sin + dim, mask=turned, other=0.0).to(tl.float32)
    rotated = _rounded(numbers * cosine, like) + _rounded(partners * sine, like)
    return _as(tl.where(turned, rotated, numbers), like)


@triton.jit
def gate_columns(packed, output, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    """Compute activation(gate) * up. One program: BLOCK columns of one row. Grid: (N, ceil(SIZE / BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(packed + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(packed + row * row_stride + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    slope = gate
    if GELU:
        # 0.5 (1 + tanh(u)) = sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(output + row * SIZE + column, _as(_rounded(gate * tl.sigmoid(slope), output) * up, output), mask=inside)


@triton.jit(do_not_specialize=["key_stride"])
def gumbel_words(keys, output, key_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Make noise, see `rayspec.model.noise`. One program: BLOCK words of one row. Grid: (N, ceil(SIZE / 2 BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    at = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    state = _splitmix(tl.load(keys + row), tl.load(keys + key_stride + row))
    word = _splitmix(state, at)
    to = output + row * SIZE + 2 * at
    tl.store(to, _gumbel_of(word), mask=2 * at < SIZE)
    tl.store(to + 1, _gumbel_of(word >> 32), mask=2 * at + 1 < SIZE)


@triton.jit
def _splitmix(state, at):
    word = state + (at + 1) * _STEP
    word ^= (word >> 30) & (2**34 - 1)
    word *= _FACTOR
    word ^= (word >> 27) & (2**37 - 1)
    word *= _OTHER_FACTOR
    return word ^ ((word >> 31) & (2**33 - 1))


@triton.jit
def _gumbel_of(number):
    size = (number & 0x7FFFFFFF).to(tl.float32) * _SCALE + _OFFSET
    # log(1 + size), as exact as the logarithm where the sum is rounded: see Goldberg, "What every computer scientist
    # should know about floating-point arithmetic", theorem 4
    whole = 1.0 + size
    log = tl.where(whole == 1.0, size, tl.log(whole) * (size / (whole - 1.0)))
    return -tl.log(-log)


@triton.jit
def cut_rows_to_top_p(scores, top_p, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Forbid the tokens beyond top_p. One program: a row. Grid: (N,). Non-negative float32 numbers are in the order of
    their bits. So 16 searches, of two bits each, find the size of the weakest score that stays. Sums are of float32 for
    each place of a block, then of float64."""
    row = tl.program_id(0)
    scores += row.to(tl.int64) * row_stride
    place = tl.arange(0, BLOCK)
    total, _, _ = _mass_up_to(scores, place, 0x7FFFFFFF, 0x7FFFFFFF, 0x7FFFFFFF, SIZE, BLOCK)
    wanted = tl.load(top_p + row) * total
    weakest = tl.full([], 0, tl.int32)
    above = total * 0  # of tokens that are likelier than the weakest
    for level in range(16):
        shift = tl.maximum(29 - 2 * level, 0)
        step = 1 << shift
        bound = weakest + step - 1
        first, second, third = _mass_up_to(scores, place, bound, bound + step, bound + 2 * step, SIZE, BLOCK)
        if third < wanted:
            weakest += 3 * step
            above = third
        elif second < wanted:
            weakest += 2 * step
            above = second
        elif first < wanted:
            weakest += step
            above = first
    each = tl.exp(-weakest.to(tl.float32, bitcast=True)).to(tl.float64)
    num_weakest = tl.ceil((wanted - above) / each).to(tl.int32)
    num_before = 0
    for start in range(0, SIZE, BLOCK):
        score = tl.load(scores + start + place, mask=start + place < SIZE, other=-float("inf"))
        size = _size_of(score)
        is_weakest = (size == weakest).to(tl.int32)
        rank = num_before + tl.cumsum(is_weakest, 0) - is_weakest
        is_beyond = (size > weakest) | ((size == weakest) & (rank >= num_weakest))
        tl.store(scores + start + place, -float("inf"), mask=is_beyond & (start + place < SIZE))
        num_before += tl.sum(is_weakest, 0)


@triton.jit
def _size_of(score):
    return tl.abs(score).to(tl.int32, bitcast=True)


@triton.jit
def _mass_up_to(scores, place, first, second, third, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sums of the exponentials of the scores whose sizes have at most these bits."""
    sums = tl.zeros([BLOCK], tl.float32)
    second_sums, third_sums = sums, sums
    for start in range(0, SIZE, BLOCK):
        score = tl.load(scores + start + place, mask=start + place < SIZE, other=-float("inf"))
        size, mass = _size_of(score), tl.exp(score)
        sums += tl.where(size <= first, mass, 0.0)
        second_sums += tl.where(size <= second, mass, 0.0)
        third_sums += tl.where(size <= third, mass, 0.0)
    return (
        tl.sum(sums.to(tl.float64), 0), tl.sum(second_sums.to(tl.float64), 0), tl.sum(third_sums.to(tl.float64), 0),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def product_tiles(
    output, rows, weight, scales, bias, num_rows, row_stride,
    SIZE: tl.constexpr, OUTPUTS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr, TILE_GROUPS: tl.constexpr, BY_GROUP: tl.constexpr, INT4: tl.constexpr, ADDS: tl.constexpr,
    UPCAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply by a matrix in full, in int8 with scales, or in int4, whose numbers are restored before the product. One
    program: a tile of rows times a tile of matrix rows, which are output columns.

    A step of the loop reads TILE_GROUPS groups of columns. BY_GROUP: each group has its own sums, so that warps share
    the groups; the sums are added at the end. ADDS: to what is in the output.
    Grid: (ceil(OUTPUTS / TILE_OUTPUTS), ceil(N / TILE_ROWS)).
    """
    out = tl.program_id(0) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    row = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    own, live = out < OUTPUTS, row < num_rows
    column = tl.arange(0, TILE_GROUPS * GROUP)
    total = tl.zeros([TILE_OUTPUTS, TILE_ROWS], tl.float32)
    if BY_GROUP:
        column = tl.arange(0, TILE_GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        total = tl.zeros([TILE_GROUPS, TILE_OUTPUTS, TILE_ROWS], tl.float32)
    rows += row.to(tl.int64) * row_stride + tl.expand_dims(column, -1)
    if INT4:
        group = tl.arange(0, TILE_GROUPS)
        if BY_GROUP:
            group, out_of_word = group[:, None], out[None, :]
        else:
            group, out_of_word = group[None, :], out[:, None]
        word = tl.arange(0, GROUP // 8)[None, None, :]
        weight += out_of_word.to(tl.int64)[:, :, None] * (SIZE // 8) + group[:, :, None] * (GROUP // 8) + word
    else:
        weight += out.to(tl.int64)[:, None] * SIZE + tl.expand_dims(column, -2)
    for start in tl.range(0, SIZE, TILE_GROUPS * GROUP, num_stages=STAGES):
        inside = start + column < SIZE
        if INT4:
            there = (out_of_word < OUTPUTS) & (start // GROUP + group < SIZE // GROUP)
            words = tl.load(weight + start // 8, mask=there[:, :, None], other=0)
            numbers = tl.load(rows + start, mask=live & tl.expand_dims(inside, -1), other=0.0)
            matrix = _of_int4(words, scales, (start // GROUP + group) * OUTPUTS + out_of_word, there, rows, UPCAST)
            if not BY_GROUP:
                matrix = tl.reshape(matrix, [TILE_OUTPUTS, TILE_GROUPS * GROUP])
        else:
            matrix = tl.load(weight + start, mask=own[:, None] & tl.expand_dims(inside, -2), other=0)
            numbers = tl.load(rows + start, mask=live & tl.expand_dims(inside, -1), other=0.0)
            matrix = matrix.to(tl.float32 if UPCAST else numbers.dtype)
        total = _dot(matrix, numbers, total, UPCAST)
    if BY_GROUP:
        total = tl.sum(total, 0)
    if not INT4 and scales is not None:
        total *= tl.load(scales + out, mask=own, other=0.0)[:, None]
    _store_product(output, bias, total, row, out, live, own, OUTPUTS, ADDS)


@triton.jit
def _of_int4(words, scales, where, there, like, UPCAST: tl.constexpr):
    """Return the numbers of int4 words in the type of a tensor. where: of their scales and offsets."""
    if like.dtype.element_ty == tl.bfloat16 and not UPCAST:
        pairs = tl.load(scales.to(tl.pointer_type(tl.int32)) + where, mask=there, other=0)
        numbers = _bfloat16_of_words(words, pairs)
    else:
        scale = tl.load(scales + where * 2, mask=there, other=0.0).to(tl.float32)
        offset = tl.load(scales + where * 2 + 1, mask=there, other=0.0).to(tl.float32)
        levels = _levels_of_words(words).to(tl.float32)
        numbers = _as((levels + 16) * scale[:, :, None] + offset[:, :, None], like)
    return numbers


@triton.jit
def _store_product(output, bias, total, row, out, live, own, OUTPUTS: tl.constexpr, ADDS: tl.constexpr):
    """Write sums [outputs, rows], plus the bias, to the output, or add them to it; round once."""
    if bias is not None:
        total += tl.load(bias + out, mask=own, other=0.0).to(tl.float32)[:, None]
    where = output + row.to(tl.int64)[None, :] * OUTPUTS + out[:, None]
    inside = live[None, :] & own[:, None]
    if ADDS:
        total += tl.load(where, mask=inside, other=0.0).to(tl.float32)
    tl.store(where, _as(total, output), mask=inside)


@triton.jit
def _bfloat16_of_words(words, pairs):
    """Return (level + 16) * scale + offset, rounded once: bfloat16 [groups, outputs, size]. words: int32 [groups,
    outputs, size / 8]. pairs: int32 [groups, outputs], the bits of scale and offset. Four bits below the exponent of 16
    make the bfloat16 number level + 16, so a pair of numbers takes a shift, a mask and an add."""
    scale, offset = tl.inline_asm_elementwise(
        "prmt.b32 $0, $2, 0, 0x1010; prmt.b32 $1, $2, 0, 0x3232;",
        "=&r,=&r,r", [pairs], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    first, second, third, fourth = tl.inline_asm_elementwise(
        """{
        .reg .b32 turned;
        lop3.b32 $0, $4, $7, $8, 0xEA;
        fma.rn.bf16x2 $0, $0, $5, $6;
        shr.u32 turned, $4, 4;
        lop3.b32 $1, turned, $7, $8, 0xEA;
        fma.rn.bf16x2 $1, $1, $5, $6;
        shr.u32 turned, $4, 8;
        lop3.b32 $2, turned, $7, $8, 0xEA;
        fma.rn.bf16x2 $2, $2, $5, $6;
        shf.r.wrap.b32 turned, $4, $4, 12;
        lop3.b32 $3, turned, $7, $8, 0xEA;
        fma.rn.bf16x2 $3, $3, $5, $6;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [words, scale[:, :, None], offset[:, :, None], tl.full([1], 0x00780078, tl.int32),
         tl.full([1], 0x41804180, tl.int32)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return _in_order(_halves(first), _halves(second), _halves(third), _halves(fourth))


@triton.jit
def _halves(pair):
    """Return the bfloat16 numbers in the low and high bits of int32: [..., 2]."""
    low = (pair & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = ((pair >> 16) & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _levels_of_words(words):
    """Return the levels: int32 [groups, outputs, size]."""
    turned = ((words >> 3) & 0x1FFFFFFF) | (words << 29)
    first = tl.join(turned & 15, (turned >> 16) & 15)
    second = tl.join((turned >> 4) & 15, (turned >> 20) & 15)
    third = tl.join((turned >> 8) & 15, (turned >> 24) & 15)
    fourth = tl.join((turned >> 12) & 15, (turned >> 28) & 15)
    return _in_order(first, second, third, fourth)


@triton.jit
def _in_order(first, second, third, fourth):
    """Put quarters of groups side by side. Each: [groups, outputs, size / 8, 2]. Returns [groups, outputs, size]."""
    joined = tl.permute(tl.join(tl.join(first, third), tl.join(second, fourth)), [0, 1, 4, 5, 2, 3])
    return tl.reshape(joined, [first.shape[0], first.shape[1], 8 * first.shape[2]])


@triton.jit
def _as(numbers, like):
    """Convert to the type of a tensor, rounding to nearest. Triton's interpreter rounds bfloat16 towards zero."""
    return numbers.to(like.dtype.element_ty)


@triton.jit
def _rounded(numbers, like):
    """Round float32 numbers to the precision of a tensor's type."""
    return _as(numbers, like).to(tl.float32)
