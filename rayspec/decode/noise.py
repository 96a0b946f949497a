"""Counter-based noise: every number is a pure function of (seed, position, stream), on any device, in any batch.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11; constants and known answers from
Random123). The seed is the key; the counter is (block, position, origin, stream) and yields four 32-bit words. The
words are the same bits on every device. Floats are made from them in float64 and rounded once, so devices agree up to
the last bit of their float64 logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn.functional import pad

Integers = Sequence[int] | Tensor

_NUM_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_NUM_WORDS = 4
_CHUNK_BLOCKS = {"cpu": 1 << 16}  # blocks computed at once: few enough to stay in the cache
_CHUNK_BLOCKS_ELSEWHERE = 1 << 22  # the same on other devices: well under a GB
_SPREAD = 27.0  # more than the width of the Gumbel noise's range (-3.2, 22.9), plus rounding


class Stream(IntEnum):
    """The purpose of a random number. Streams are independent of each other at every position.

    TARGET: the token plain decoding takes, and the bonus token. DRAFT: the draft's token under the rejection rule.
    ACCEPT: whether a draft token is accepted. RECOVER: the token that replaces a rejected one.
    """

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four 32-bit words of Philox-4x32-10, as int64, for a `counter` of four and a `key` of two 32-bit words
    (int64 tensors that broadcast together)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):  # int64 products wrap: their 64 bits are the unsigned ones
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 ^ c1 ^ k0) & _LOW, p1, (p0 >> 32 ^ c3 ^ k1) & _LOW, p0
        k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]  # of c1, c3, k0 and k1 only the low 32 bits count
    return c0, c1 & _LOW, c2, c3 & _LOW


def gumbel(
    seeds: Integers,
    positions: Integers,
    vocab_size: int,
    stream: int | Tensor,
    device: torch.device | str,
    *,
    origins: Integers | None = None,
) -> Tensor:
    """Return standard Gumbel noise for every token, float32 [N, vocab_size], N = len(seeds): argmax(log p + noise) ~ p.

    seeds: 64-bit integers (negative ones are taken modulo 2**64). positions, origins: in [0, 2**32). stream: one
    `Stream`, or int64 [N]. Token v's number does not depend on vocab_size. Resolution 2**-32: values lie in
    (-3.2, 22.9), and tokens of probability far below 2**-32 are not resolved.
    """
    key, position, origin, kind = _columns(seeds, positions, origins, stream, device)
    num_rows, num_blocks = position.shape[0], -(-vocab_size // _NUM_WORDS)
    block = torch.arange(num_blocks, device=device)
    noise = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=device)
    step = max(1, _chunk_blocks(noise) // max(1, num_blocks))
    for at in range(0, num_rows, step):
        here = slice(at, at + step)
        words = philox((block, position[here], origin[here], kind[here]), [half[here] for half in key])
        noise[here] = _gumbel_of(torch.stack(words, dim=-1).flatten(1)[:, :vocab_size])
    return noise


def noisy(
    scores: Tensor,
    seeds: Integers,
    positions: Integers,
    stream: int | Tensor,
    *,
    origins: Integers | None = None,
    winner_only: bool = True,
) -> Tensor:
    """Return new scores: `scores` [N, V], float32, plus `gumbel` of the other arguments.

    winner_only: tokens too unlikely to have the largest sum in their row may get no noise. The host synchronises once
    with the device.
    """
    num_rows, vocab_size = scores.shape
    padded = pad(scores, (0, -vocab_size % _NUM_WORDS), value=-math.inf)
    blocks = padded.view(num_rows, padded.shape[1] // _NUM_WORDS, _NUM_WORDS)
    least = scores.amax(1, keepdim=True) - (_SPREAD if winner_only else math.inf)
    row, block = (blocks.amax(2) > least).nonzero().unbind(1)
    if 2 * len(row) > blocks[..., 0].numel():  # it costs less not to choose
        return scores + gumbel(seeds, positions, vocab_size, stream, scores.device, origins=origins)
    key, *counter = _columns(seeds, positions, origins, stream, scores.device)
    step = _chunk_blocks(scores)
    for at in range(0, len(row), step):
        rows, chunk = row[at : at + step], block[at : at + step]
        position, origin, kind = (column[rows, 0] for column in counter)
        words = philox((chunk, position, origin, kind), [half[rows, 0] for half in key])
        blocks[rows, chunk] += _gumbel_of(torch.stack(words, dim=-1))
    return padded[:, :vocab_size]


def uniform(
    seeds: Integers,
    positions: Integers,
    stream: int | Tensor,
    device: torch.device | str = "cpu",
    *,
    origins: Integers | None = None,
) -> Tensor:
    """Return uniform noise, float64 [N], strictly inside (0, 1): 52 bits, cell-centred. Arguments as in `gumbel`."""
    key, position, origin, kind = _columns(seeds, positions, origins, stream, device)
    words = philox((torch.zeros_like(position), position, origin, kind), key)
    return ((words[0] << 20 | words[1] >> 12).to(torch.float64) + 0.5).mul_(2.0**-52).squeeze(1)


def integers(values: Integers, device: torch.device | str) -> Tensor:
    """Return `values` as int64 on `device`, modulo 2**64. Copies from the host without waiting for the device."""
    if not isinstance(values, Tensor):
        values = torch.tensor([(value + 2**63) % 2**64 - 2**63 for value in values], dtype=torch.int64)
    return values.to(device, torch.int64, non_blocking=True)


def _gumbel_of(words: Tensor) -> Tensor:
    """Return the Gumbel noise, float32, of 32-bit words."""
    uniforms = words.to(torch.float64).add_(0.5).mul_(2.0**-32)
    return uniforms.log_().neg_().log_().neg_().to(torch.float32)


def _chunk_blocks(like: Tensor) -> int:
    return _CHUNK_BLOCKS.get(like.device.type, _CHUNK_BLOCKS_ELSEWHERE)


def _columns(
    seeds: Integers, positions: Integers, origins: Integers | None, stream: int | Tensor, device: torch.device | str
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor, Tensor]:
    """Return the key words, positions, origins and streams, each int64 [N, 1]."""
    seed, position = integers(seeds, device).unsqueeze(1), integers(positions, device).unsqueeze(1)
    origin = torch.zeros_like(position) if origins is None else integers(origins, device).unsqueeze(1)
    kind = stream.unsqueeze(1) if isinstance(stream, Tensor) else torch.full_like(position, int(stream))
    return (seed & _LOW, seed >> 32 & _LOW), position, origin, kind
