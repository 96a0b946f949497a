"""Choose tokens from the logits of a packed batch, by the coupled rule.

The coupled rule: the token at a position is argmax(processed logits + Gumbel(seed, position)), which is a sample of
softmax(processed logits), and a pure function of the committed tokens and the seed (Gumbel-max trick).

The noise is counter-based: every number is a pure function of (seed, position, stream), on any device, in any batch.
SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) gives the n-th output
of a generator without the outputs before. Each row has a generator of its own: its state is output (position, origin,
stream) of the generator with the request's seed. An output of 64 bits serves two neighbouring tokens. Devices agree up
to the last bits of their float32 logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayspec.config import Verification
from rayspec.decode.processing import LogitRow, RowsChange, TokenSampler, changed, changes_of, check_tokens, process
from rayspec.decode.runner import integers
from rayspec.types import Logprob

Integers = Sequence[int] | Tensor
Words = TypeVar("Words", Tensor, NDArray[np.int64])

_STEP = 0x9E3779B97F4A7C15 - 2**64  # SplitMix64's constants, as int64
_SHIFTS, _FACTORS = (30, 27, 31), (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64, 1)
_NUM_HALVES = 2  # numbers of 32 bits in a word
# Words computed at once: on a CPU few enough to stay in the cache, elsewhere a few 32 MiB.
_CHUNK_WORDS, _CHUNK_WORDS_ELSEWHERE = 1 << 15, 1 << 22
# The most numbers of noise that are computed ahead. If only the likeliest tokens may be sampled, a 16th of it.
_MOST_AHEAD, _MOST_AHEAD_ELSEWHERE = 1 << 18, 1 << 26
_SPREAD = 27.0  # more than the width of the Gumbel noise's range (-2.9, 22.2), plus rounding


class Stream(IntEnum):
    """The purpose of a random number. Streams are independent of each other at every position.

    TARGET: the token plain decoding takes, and the bonus token. DRAFT: the draft's token under the rejection rule.
    ACCEPT: whether a draft token is accepted. RECOVER: the token that replaces a rejected one.
    """

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3


def splitmix(state: Words, at: Words) -> Words:
    """Return output `at`, counted from 0, of the generator SplitMix64 with this state: 64-bit words, as int64. The
    arguments are both tensors or both arrays, and broadcast together."""
    word = state + (at + 1) * _STEP  # int64 sums and products wrap, as unsigned ones do
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=True):
        high = word >> shift
        high &= (1 << 64 - shift) - 1  # the sign bit does not count
        word ^= high
        if factor != 1:
            word *= factor
    return word


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

    seeds: 64-bit integers (negative ones are taken modulo 2**64). positions, origins: in [0, 2**31). stream: one
    `Stream`, or int64 [N]. Token v's number does not depend on vocab_size. Resolution 2**-31: values lie in
    (-2.9, 22.2), and tokens of probability far below 2**-31 are not resolved.
    """
    states = _states(seeds, positions, origins, stream, device).unsqueeze(1)
    num_words, on_cpu = -(-vocab_size // _NUM_HALVES), states.device.type == "cpu"
    num_rows = max(1, (_CHUNK_WORDS if on_cpu else _CHUNK_WORDS_ELSEWHERE) // max(1, num_words))
    at, noise = torch.arange(num_words, device=device), torch.empty(0)
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

    winner_only: on a CPU, tokens too unlikely to have the largest sum in their row may get no noise. Elsewhere the host
    would have to wait for the device to know these tokens.
    """
    if scores.device.type == "cpu":
        least = scores.amax(1, keepdim=True) - (_SPREAD if winner_only else math.inf)
        row, token = (scores > least).nonzero().unbind(1)
        if 4 * len(row) < scores.numel():  # else it costs less not to choose
            states, sums = _states(seeds, positions, origins, stream, scores.device)[row], scores.clone()
            halves = splitmix(states, token // _NUM_HALVES).view(torch.int32).view(-1, _NUM_HALVES)
            own = halves.gather(1, token.unsqueeze(1) % _NUM_HALVES).squeeze(1)
            sums[row, token] += torch.from_numpy(_gumbel_of(own.numpy(), np))
            return sums
    return scores + gumbel(seeds, positions, scores.shape[1], stream, scores.device, origins=origins)


def uniform(
    seeds: Integers,
    positions: Integers,
    stream: int | Tensor,
    device: torch.device | str = "cpu",
    *,
    origins: Integers | None = None,
) -> Tensor:
    """Return uniform noise, float64 [N], strictly inside (0, 1): 52 bits, cell-centred. Arguments as in `gumbel`."""
    states = _states(seeds, positions, origins, stream, device)
    words = splitmix(states, torch.zeros_like(states))
    return ((words >> 12 & (1 << 52) - 1).to(torch.float64) + 0.5).mul_(2.0**-52)


def _gumbel_of(halves: Any, library: Any) -> Any:
    """Return the Gumbel noise, float32, of 32-bit numbers, int32: a tensor or an array of the library, torch or numpy.
    An exponential number near 0, which wins, is as precise as float32 can hold it; the largest is 16.6."""
    sizes = library.asarray(halves & 0x7FFFFFFF, dtype=library.float32)
    sizes *= 2.0**-55 - 2.0**-31  # never -1
    sizes -= 2.0**-32
    library.negative(library.log1p(sizes, out=sizes), out=sizes)
    return library.negative(library.log(sizes, out=sizes), out=sizes)


def _states(
    seeds: Integers, positions: Integers, origins: Integers | None, stream: int | Tensor, device: torch.device | str
) -> Tensor:
    """Return the state of each row's generator, int64 [N] on the device. It is computed there if some argument is a
    tensor; else on the host, and copied."""
    given = (seeds, positions) if origins is None else (seeds, positions, origins)
    if isinstance(stream, Tensor) or any(isinstance(one, Tensor) for one in given):
        seed, position, *origin = (integers(one, device) for one in given)
        return splitmix(seed, position << 33 | (origin[0] << 2 if origin else 0) | stream)
    numbers = integers([number for one in given for number in one], "cpu").numpy().reshape(len(given), -1)
    last = numbers[2] << 2 if len(numbers) > 2 else 0
    return integers(torch.from_numpy(splitmix(numbers[0], numbers[1] << 33 | last | stream)), device)


class Rows(msgspec.Struct, frozen=True):
    """Rows start .. start + len(pending) of a packed logits tensor, all of one sequence. Row 0 predicts the token after
    the committed tokens, and row j + 1 the token after pending[j]. parents: for each pending token, the earlier row
    that it follows; empty for a chain."""

    sampler: TokenSampler
    start: int
    pending: Sequence[int]
    parents: Sequence[int] = ()

    @property
    def end(self) -> int:
        return self.start + len(self.pending) + 1

    def logit_rows(self) -> list[LogitRow]:
        before: list[Sequence[int]] = [self.pending[:at] for at in range(len(self.pending) + 1)]
        for at, parent in enumerate(self.parents):
            before[at + 1] = (*before[parent], self.pending[at])
        return [LogitRow(self.start + at, self.sampler, each) for at, each in enumerate(before)]


@dataclass(frozen=True, slots=True)
class Drafts:
    """One draft token per sequence. token_ids: int64 [S]. confidence: float32 [S]. logits: float32 [S, V], processed,
    for `verify_rejection`; None if it needs none. ranked: int64 [S, k], the tokens with the highest scores, best
    first."""

    token_ids: Tensor
    confidence: Tensor
    logits: Tensor | None
    ranked: Tensor | None = None


class Noise:
    """The target's noise in a round. A draft and its verify need the same numbers, so they are computed together, for
    `num_at_once` positions of all `samplers` that are not greedy, if these are few enough."""

    def __init__(self, samplers: Sequence[TokenSampler], num_at_once: int) -> None:
        self._samplers = [sampler for sampler in samplers if not sampler.greedy]
        self._at = {sampler: at for at, sampler in enumerate(self._samplers)}
        params = [sampler.params for sampler in self._samplers]
        self._cuts = any(one.top_p < 1 or one.top_k > 0 or one.min_p > 0 for one in params)
        self._num_at_once = num_at_once
        self._known: Tensor | None = None  # float32 [depths * sequences, V]

    def of(self, rows: Sequence[LogitRow], like: Tensor) -> Tensor | None:
        """Return the noise of each row, float32 [n, V]; None if it costs less to compute only a part of it. like:
        scores [N, V]."""
        size, depths, samplers = len(self._samplers), [len(row.before) for row in rows], [row.sampler for row in rows]
        if (known := self._up_to(max(depths), len(rows), like)) is None:
            return None
        if samplers == self._samplers and depths.count(depths[0]) == size:
            return known[depths[0] * size : (depths[0] + 1) * size]
        places = [depth * size + self._at[one] for depth, one in zip(depths, samplers, strict=True)]
        return known[integers(places, like.device)]

    def at_depth(self, depth: int, like: Tensor) -> Tensor | None:
        """Return the noise of the row of each sequence after `depth` tokens; None as above, and if one is greedy."""
        size = len(self._samplers)
        known = self._up_to(depth, size, like) if size == len(like) else None
        return None if known is None else known[depth * size : (depth + 1) * size]

    def _up_to(self, depth: int, num_rows: int, like: Tensor) -> Tensor | None:
        size, num_depths = len(self._samplers), depth + 1
        first = 0 if self._known is None else len(self._known) // size
        if self._known is None or num_depths > first:
            new = range(first, max(first + self._num_at_once, num_depths))
            most = (_MOST_AHEAD if like.device.type == "cpu" else _MOST_AHEAD_ELSEWHERE) >> 4 * self._cuts
            is_wasteful = len(new) * size > 2 * self._num_at_once * num_rows
            if is_wasteful or new.stop * size * like.shape[1] > most:
                return None
            seeds = [sampler.seed for sampler in self._samplers] * len(new)
            positions = [sampler.position + depth for depth in new for sampler in self._samplers]
            noise = gumbel(seeds, positions, like.shape[1], Stream.TARGET, like.device)
            self._known = noise if self._known is None else torch.cat((self._known, noise))
        return self._known


def target_tokens(logits: Tensor, rows: Sequence[Rows], noise: Noise | None = None) -> Tensor:
    """Return the token that plain decoding takes at every row of raw logits [N, V] by the coupled rule: int64 [N], on
    the device. Greedy rows, and rows that belong to no sequence, take the argmax."""
    if all(row.sampler.is_argmax for row in rows):
        return logits.argmax(-1)
    own = _changed(rows)
    return _with_noise(process(logits.to(torch.float32, copy=True), own), Stream.TARGET, own, noise).argmax(-1)


def draft_tokens(
    logits: Tensor, rows: Sequence[Rows], verification: Verification, *, num_ranked: int = 0, noise: Noise | None = None
) -> Drafts:
    """Draw the draft's next token for each sequence from raw draft logits [S, V]. Row i belongs to rows[i] and follows
    its committed tokens and *all* its pending tokens (the draft so far). `start` is ignored.

    "coupled": argmax with the target's noise at that position. "rejection": a sample of the processed draft logits with
    separate noise, which is new in every round. Greedy sequences take the argmax. `Drafts.ranked` orders the same
    scores as the argmax, so under the coupled rule it includes the noise.

    Confidence is the largest probability of the processed distribution (of the raw distribution where `is_argmax`). It
    must not depend on which token was drawn: see `verify` on when a draft may stop. Non-finite logits make it NaN.
    """
    if all(row.sampler.is_argmax for row in rows):
        scores = logits.to(torch.float32)
        best = scores.max(-1)
        return Drafts(best.indices, _confidence(scores, best.values), None, _ranked(scores, num_ranked))
    coupled = verification == "coupled"
    histories = [LogitRow(at, row.sampler, row.pending) for at, row in enumerate(rows)]
    scores = process(logits.to(torch.float32, copy=True), histories)
    stream = Stream.TARGET if coupled else Stream.DRAFT
    drawn = _with_noise(scores, stream, histories, noise, winner_only=num_ranked == 0)
    return Drafts(
        drawn.argmax(-1), _confidence(scores, scores.amax(-1)), None if coupled else scores, _ranked(drawn, num_ranked)
    )


class PlainSteps:
    """Chooses tokens by plain decoding at several positions of sequences that read no history, without the tokens
    between. Most preparations are made once."""

    def __init__(self, samplers: Sequence[TokenSampler], noise: Noise) -> None:
        self._is_argmax = all(sampler.is_argmax for sampler in samplers)
        self._reads_depth = any(sampler.reads_depth for sampler in samplers)
        self._samplers, self._noise = samplers, noise
        self._changes: Sequence[RowsChange] | None = None

    def tokens(self, logits: Tensor, ahead: int) -> Tensor:
        """Return the token of each sequence after `ahead` tokens, from raw logits [S, V] of the target: int64 [S], on
        the device."""
        if self._is_argmax:
            return logits.argmax(-1)
        if self._changes is None or self._reads_depth:
            self._changes = changes_of(self._rows(ahead), len(logits), logits.device)
        scores = changed(logits.to(torch.float32, copy=True), self._changes)
        known = self._noise.at_depth(ahead, scores)
        if known is not None:
            return scores.add_(known).argmax(-1)
        return _with_noise(scores, Stream.TARGET, self._rows(ahead), self._noise).argmax(-1)

    def _rows(self, ahead: int) -> list[LogitRow]:
        return [LogitRow(at, sampler, (0,) * ahead) for at, sampler in enumerate(self._samplers)]


def _changed(rows: Sequence[Rows]) -> list[LogitRow]:
    return [each for row in rows if not row.sampler.is_argmax for each in row.logit_rows()]


def finite_rows(logits: Tensor) -> Tensor:
    """Return which rows of raw logits [N, V] can be sampled from: bool [N]. False with NaN or +inf, or only -inf."""
    return logits.amax(-1).isfinite()


def top_logprobs(logits: Tensor, token_ids: Sequence[int], k: int) -> list[dict[int, Logprob]]:
    """Return, for each row of raw logits [m, V], the k most likely tokens, most likely first, and then the chosen token
    if it is not among them. Natural logarithms; rank 1 is the most likely token, and tied tokens share a rank. The host
    synchronises once with the device. Raises InvalidTokenError for a chosen token outside the vocabulary."""
    vocab_size = logits.shape[-1]
    check_tokens("token_ids", token_ids, vocab_size)
    logprobs = logits.to(torch.float32).log_softmax(-1)
    top = logprobs.topk(min(k, vocab_size), dim=-1)
    chosen = integers(token_ids, logits.device).unsqueeze(1)
    value = logprobs.gather(1, chosen)
    ranks = torch.cat(
        [(top.values.unsqueeze(1) > top.values.unsqueeze(2)).sum(2), (logprobs > value).sum(1, keepdim=True)], 1
    )
    tokens, values = torch.cat((top.indices, chosen), 1), torch.cat((top.values, value), 1)
    table = torch.stack((tokens.double(), values.double(), ranks.double() + 1), 2).tolist()
    return [{int(token): Logprob(logprob=value, rank=int(rank)) for token, value, rank in row} for row in table]


def _with_noise(
    scores: Tensor, stream: Stream, rows: Sequence[LogitRow], noise: Noise | None, *, winner_only: bool = True
) -> Tensor:
    """Return scores [N, V], float32, with noise added to the rows of sequences that are sampled. noise: of the round,
    for the stream TARGET. winner_only: see `noisy`."""
    rows = [row for row in rows if not row.sampler.greedy]
    if not rows:
        return scores
    known = noise.of(rows, scores) if noise is not None and stream is Stream.TARGET else None
    if known is not None and [row.at for row in rows] == list(range(len(scores))):
        return scores + known
    numbers = [(row.at, row.sampler.seed, row.sampler.position + len(row.before), row.sampler.position) for row in rows]
    columns = integers([number for each in numbers for number in each], scores.device)
    at, seeds, positions, origins = columns.view(-1, 4).unbind(1)
    if known is not None:
        return scores.index_add(0, at, known)
    own = origins if stream is Stream.DRAFT else None
    sampled = noisy(scores[at], seeds, positions, stream, origins=own, winner_only=winner_only)
    return scores.index_copy(0, at, sampled)


def _confidence(scores: Tensor, best: Tensor) -> Tensor:
    """Return the probability of the best score of each row. best: [N]."""
    return (scores - best.unsqueeze(-1)).exp_().sum(-1).reciprocal()


def _ranked(scores: Tensor, num_ranked: int) -> Tensor | None:
    return scores.topk(min(num_ranked, scores.shape[1]), dim=-1).indices if num_ranked else None
