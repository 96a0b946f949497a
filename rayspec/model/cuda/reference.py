"""The operations in plain torch: the reference in tests of the kernels, and the implementation on a CPU.

The docstrings hold for the Triton kernels, too. Sums are computed in float32.
Sizes: N rows, C columns, H query heads, H_kv key heads, D numbers per head, S slots, R sequences, P pages per sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from rayspec.model import noise

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": lambda gate: gelu(gate, approximate="tanh"),
}

_SHORTLISTS = (128, 2048)  # how many tokens `cut_to_top_p` sorts first, before it sorts all
# Of the quarters of a group, and of the two columns of a quarter: [4, 1, 2].
_LEVEL_BITS = torch.tensor([[4 * quarter, 4 * quarter + 16] for quarter in range(4)]).view(4, 1, 2)


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
) -> Tensor:
    """Compute attention of ragged rows over pages. Returns [N, H, D], zeros for padding rows.

    query: [N, H, D]. keys, values: [H_kv, S, D], last stride 1. They already hold the rows' own keys and values, and
    finite numbers in every place of a sequence; other slots may hold any data.
    block_table: int32 [R, P]; place p of sequence r is slot block_table[r, p // page_size] * page_size + p % page_size.
    row_starts: int32 [R + 1]; sequence r has the rows row_starts[r] .. row_starts[r + 1], none if they are equal. Rows
    from row_starts[R] on are padding. contexts: int32 [R], places filled before the rows; row i of a sequence is in
    place contexts[r] + i. positions: int32 or int64 [N]; a row's position is never larger than its place.

    A row sees all places up to its own. With shared, int32 [N], and bits, int64 [N], it sees only the first shared[row]
    of them, and contexts[r] + j if bit j of bits[row] is set. Bits are for the rows of a tree, at most 63 per sequence:
    a row of a chain has shared[row] = its place + 1, and no bits.
    window: if not 0, a row at position p sees only places of position > p - window; the position of a place of the
    context is its number. softcap: if not 0, scores are softcap * tanh(score / softcap).

    max_rows, max_context: the bucket, the most rows and the most places of a sequence, including its rows' places. On a
    CPU a larger sequence raises ValueError; on a GPU there is no check.

    Batch invariance (the company rule of docs/gpu.md): the bits of a row's result depend on its query, the keys and
    values that it sees, their places, and the bucket. They do not depend on other rows or sequences, or on the pages.
    """
    output = torch.zeros_like(query)
    starts = row_starts.tolist()
    for sequence, context in enumerate(contexts.tolist()):
        first, end = starts[sequence], starts[sequence + 1]
        num_rows, num_places = end - first, context + end - first
        if num_rows > max_rows:
            raise ValueError(f"a sequence has {num_rows} rows, but max_rows={max_rows}: use a larger bucket")
        if num_places > max_context:
            raise ValueError(f"a sequence has {num_places} places, but max_context={max_context}: use a larger bucket")
        places = torch.arange(num_places)
        slots = block_table[sequence].long()[places // page_size] * page_size + places % page_size
        position_of_place = torch.cat([places[:context], positions[first:end]])
        for row in range(first, end):  # each row alone, so that its bits are the same regardless of the other rows
            own = context + row - first
            seen = places <= own
            if shared is not None and bits is not None:
                marked = int(bits[row]) >> (places - context).clamp(0, 63) & 1 == 1
                seen &= (places < shared[row]) | (places >= context) & marked
            if window:
                seen &= position_of_place > positions[row] - window
            output[row] = _mixed(query[row], keys[:, slots[seen]], values[:, slots[seen]], scaling, softcap)
    return output


def _mixed(query: Tensor, keys: Tensor, values: Tensor, scaling: float, softcap: float) -> Tensor:
    """Compute attention of one row. query: [H, D]; keys, values: [H_kv, n, D]; returns [H, D], zeros if n is 0."""
    grouped = query.float().view(len(keys), -1, query.shape[-1])
    scores = grouped @ keys.float().transpose(1, 2) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return (scores.softmax(-1) @ values.float()).view_as(query).to(query.dtype)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, weight_offset: float) -> Tensor:
    """Compute an RMS norm of hidden, [N, C] in and out. weight: [C], of the same type.

    Rounds as transformers does. With weight_offset 0, as in LlamaRMSNorm, the normalised numbers are rounded and then
    multiplied by the weight. Else, as in Gemma's norm, they are multiplied by weight_offset + weight in float32 and
    rounded once. On a GPU the squares are summed in another order than torch's: a result may differ by one unit in the
    last place.
    """
    numbers = hidden.float()
    normal = numbers * torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + eps)
    if weight_offset:
        return (normal * (weight_offset + weight.float())).to(hidden.dtype)
    return normal.to(hidden.dtype) * weight


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
) -> Tensor:
    """Return rotated queries [N, H, D]; write rotated keys, and values, to their slots.

    packed: [N, (H + 2 * H_kv) * D]: query, key and value heads. cos, sin: [N, rotary], of the type of packed; rotary is
    even, and a head's numbers after the first `rotary` do not change. slots: int64 [N]. keys, values: [H_kv, S, D].
    query_norm, key_norm: [D], weights of an RMS norm with `eps` of each head before its rotation.

    Rounds both products and their sum to the type of packed, as eager torch does. Without norms the result is bit-equal
    to transformers'; with norms it may differ as `rms_norm` does.
    """
    num_kv_heads, _, dim = keys.shape
    heads = packed.view(len(packed), -1, dim)
    query, key, value = heads[:, :num_heads], heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:]
    query = query if query_norm is None else rms_norm(query, query_norm, eps, 0.0)
    key = key if key_norm is None else rms_norm(key, key_norm, eps, 0.0)
    keys.index_copy_(1, slots, _rotated(key, cos, sin).transpose(0, 1))
    values.index_copy_(1, slots, value.transpose(0, 1))
    return _rotated(query, cos, sin).contiguous()


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `rotary` numbers of each head. heads: [N, heads, D]; cos, sin: [N, rotary]."""
    turned, rest = heads[..., : cos.shape[-1]], heads[..., cos.shape[-1] :]
    low, high = turned.chunk(2, -1)
    turned = turned * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]
    return torch.cat([turned, rest], -1)


def product(
    output: Tensor, rows: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, adds: bool
) -> None:
    """Write rows times a transposed matrix [M, C], plus the bias [M], to the output [N, M], or add it if `adds`.

    rows: [N, C]. weight, contiguous, and scales: the matrix in full, of the type of rows, and no scales; or int8 [M,
    C], scaled by float32 [M]; or int32 [M, C / 8], of `packed_levels`, and scale and offset [groups of a row, M, 2] of
    the type of rows, contiguous: its numbers are (level + 16) * scale + offset, rounded to that type. A group has 32,
    64 or 128 columns.

    Sums are float32 and rounded once. A row has the same bits with any other rows, on a GPU in 16 bits if N is at most
    64; by a quantised matrix only among N up to 8, and among N from 9 to 16.
    """
    if weight.dtype == torch.int32 and scales is not None:
        scale, offset = scales.float().transpose(0, 1).unbind(-1)
        words = weight.to(torch.int64).view(len(weight), -1, 1, rows.shape[1] // len(scales) // 8, 1) & 0xFFFFFFFF
        words = words >> 3 | words << 29
        levels = (words >> _LEVEL_BITS.to(weight.device) & 15).flatten(2).float()
        weight = ((levels + 16) * scale[..., None] + offset[..., None]).to(rows.dtype).flatten(1)
        scales = None
    matrix = weight.T.float()
    for row, to in zip(torch.split(rows.float(), 1), torch.split(output, 1), strict=True):
        found = row @ matrix if scales is None else row @ matrix * scales
        if bias is not None:
            found += bias.float()
        to.copy_(found + to.float() if adds else found)


def packed_levels(levels: Tensor, size: int) -> Tensor:
    """Pack levels 0 to 15, [M, C], in groups of `size` columns: int32 [M, C / 8].

    Word w of a group holds the columns 2 w and 2 w + 1 of each quarter of the group. The level of the first column of
    quarter j is in the bits 4 j to 4 j + 3, that of the second 16 bits higher. Then the word is rotated left by 3 bits:
    bits 3 to 6 are the highest of a bfloat16 number's fraction, so a level becomes a number by shifts and masks.
    """
    quarters = levels.to(torch.int64).view(len(levels), -1, 4, size // 8, 2)
    words = (quarters << _LEVEL_BITS.to(levels.device)).sum((2, 4))
    words = (words << 3 | words >> 29) & 0xFFFFFFFF
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32).flatten(1)


def gated(packed: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up: [N, I]. packed: [N, 2 * I], gate first. activation: "silu" or "gelu_tanh". Rounds
    the activation to the type of packed before the product, as eager torch does."""
    gate, up = packed.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up


def gumbel(keys: Tensor, vocab_size: int) -> Tensor:
    """Return the Gumbel noise of `rayspec.model.noise.gumbel`. On a GPU its last bits may differ."""
    return noise.gumbel(keys, vocab_size).contiguous()


def cut_to_top_p(scores: Tensor, top_p: Tensor) -> None:
    """Forbid, by -inf in place, each token before which the likelier ones have top_p of the probability. scores:
    float32 [N, V]; the largest of a row is 0, and -inf is allowed. top_p: float64 [N, 1], below 1. Of equally likely
    tokens at the edge the lowest ids stay. Here, the host waits for the device."""
    total = scores.to(torch.float64).exp_().sum(1, keepdim=True)
    scores.copy_(_nucleus(scores, top_p, total, _SHORTLISTS))


def _nucleus(scores: Tensor, top_p: Tensor, total: Tensor, shortlists: Sequence[int]) -> Tensor:
    """Return scores with -inf beyond top_p. total: the sum of the scores' exponentials, float64 [N, 1]. The first of
    `shortlists` is how many of the best tokens are sorted. Rows whose sorted tokens do not reach top_p are repeated
    with the next."""
    num_ranked, *longer = *shortlists, scores.shape[1]
    ranked, order = _ranked(scores, num_ranked)
    mass = ranked.to(torch.float64).exp_().div_(total)
    beyond = mass.cumsum(1).sub_(mass) >= top_p
    beyond[:, 0] = False
    kept = ranked.masked_fill(beyond, -math.inf)
    cut = torch.full_like(scores, -math.inf).scatter_(1, order, kept)
    if num_ranked < scores.shape[1]:
        weakest = ranked.masked_fill(beyond, math.inf).amin(1)
        left = (~(weakest > ranked[:, -1])).nonzero().squeeze(1)  # a tie of the weakest may not have been ranked
        if len(left):
            cut[left] = _nucleus(scores[left], top_p[left], total[left], longer[:-1])
    return cut


def _ranked(scores: Tensor, num_ranked: int) -> tuple[Tensor, Tensor]:
    """Return the best scores and their tokens, [N, num_ranked], best first and lowest id first among ties. Some ties
    with the last score may be missing."""
    if num_ranked >= scores.shape[1]:
        return scores.sort(dim=1, descending=True, stable=True)
    tokens = scores.topk(num_ranked, dim=1, sorted=False).indices.sort(dim=1).values
    ranked, order = scores.gather(1, tokens).sort(dim=1, descending=True, stable=True)
    return ranked, tokens.gather(1, order)
