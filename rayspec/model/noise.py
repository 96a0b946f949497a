"""Counter-based noise: every number is a pure function of a row's key and of the token, on any device.

SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) gives the n-th output
of a generator without the outputs before. Keys are int64 [2, N]: the state of a row's generator is output keys[1] of
the generator with the state keys[0]. Devices agree up to the last bits of their float32 logarithms.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = TypeVar("Words", Tensor, NDArray[np.int64])

STEP = 0x9E3779B97F4A7C15 - 2**64  # SplitMix64's constants, as int64
SHIFTS, FACTORS = (30, 27, 31), (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64, 1)
SCALE, OFFSET = 2.0**-55 - 2.0**-31, -(2.0**-32)  # of a number of 31 bits, so that the result is in (-1, 0)
_NUM_HALVES = 2  # numbers of 32 bits in a word
# Words computed at once: on a CPU few enough to stay in the cache, elsewhere a few 32 MiB.
_CHUNK_WORDS, _CHUNK_WORDS_ELSEWHERE = 1 << 15, 1 << 22


def splitmix(state: Words, at: Words) -> Words:
    """Return output `at`, counted from 0, of the generator SplitMix64 with this state: 64-bit words, as int64. The
    arguments are both tensors or both arrays, and broadcast together."""
    word = state + (at + 1) * STEP  # int64 sums and products wrap, as unsigned ones do
    for shift, factor in zip(SHIFTS, FACTORS, strict=True):
        high = word >> shift
        high &= (1 << 64 - shift) - 1  # the sign bit does not count
        word ^= high
        if factor != 1:
            word *= factor
    return word


def gumbel(keys: Tensor, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise for every token, float32 [N, vocab_size]: argmax(log p + noise) ~ p. Token v's
    number does not depend on vocab_size. Values lie in (-2.9, 22.2); tokens of probability far below 2**-31 are not
    resolved."""
    states = splitmix(keys[0], keys[1]).unsqueeze(1)
    num_words, on_cpu = -(-vocab_size // _NUM_HALVES), states.device.type == "cpu"
    num_rows = max(1, (_CHUNK_WORDS if on_cpu else _CHUNK_WORDS_ELSEWHERE) // max(1, num_words))
    at, noise = torch.arange(num_words, device=states.device), torch.empty(0)
    for first in range(0, len(states), num_rows):
        some = states[first : first + num_rows]
        if on_cpu:  # NumPy's products and logarithms are two to three times as fast as torch's
            numbers = torch.from_numpy(_gumbel_of(splitmix(some.numpy(), at.numpy()).view(np.int32), np))
        else:
            numbers = _gumbel_of(splitmix(some, at).view(torch.int32), torch)
        if len(some) == len(states):
            return numbers[:, :vocab_size]
        noise = numbers.new_empty(len(states), vocab_size) if first == 0 else noise
        noise[first : first + num_rows] = numbers[:, :vocab_size]
    return noise


def gumbel_of_tokens(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return the noise of one token of each row, float32 [N], on a CPU. token_ids: int64 [N]."""
    halves = splitmix(splitmix(keys[0], keys[1]), token_ids // _NUM_HALVES).view(torch.int32).view(-1, _NUM_HALVES)
    own = halves.gather(1, token_ids.unsqueeze(1) % _NUM_HALVES).squeeze(1)
    return torch.from_numpy(_gumbel_of(own.numpy(), np))


def uniform(keys: Tensor) -> Tensor:
    """Return uniform noise, float64 [N], strictly inside (0, 1): 52 bits, cell-centred."""
    states = splitmix(keys[0], keys[1])
    words = splitmix(states, torch.zeros_like(states))
    return ((words >> 12 & (1 << 52) - 1).to(torch.float64) + 0.5).mul_(2.0**-52)


def _gumbel_of(halves: Any, library: Any) -> Any:
    """Return the Gumbel noise, float32, of 32-bit numbers, int32: a tensor or an array of the library, torch or numpy.
    An exponential number near 0, which wins, is as precise as float32 can hold it; the largest is 16.6."""
    sizes = library.asarray(halves & 0x7FFFFFFF, dtype=library.float32)
    sizes *= SCALE  # never -1
    sizes += OFFSET
    library.negative(library.log1p(sizes, out=sizes), out=sizes)
    return library.negative(library.log(sizes, out=sizes), out=sizes)
