"""Choose tokens from the logits of a packed batch, by the coupled rule.

The coupled rule: the token at a position is argmax(processed logits + Gumbel(seed, position)), which is a sample of
softmax(processed logits), and a pure function of the committed tokens and the seed (Gumbel-max trick).

The noise is counter-based: every number is a pure function of (seed, position, stream), on any device, in any batch.
Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11; constants and known answers from
Random123). The seed is the key; the counter is (block, position, origin, stream) and yields four 32-bit words. Floats
are made from them in float64 and rounded once, so devices agree up to the last bit of their float64 logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import pad

from rayspec.config import Verification
from rayspec.decode.processing import LogitRow, TokenSampler, check_tokens, process
from rayspec.decode.runner import integers
from rayspec.decode.work import depths_of
from rayspec.types import Logprob

Integers = Sequence[int] | Tensor

_NUM_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_NUM_WORDS = 4
_CHUNK_BLOCKS = {"cpu": 1 << 16}  # blocks computed at once: few enough to stay in the cache
_CHUNK_BLOCKS_ELSEWHERE = 1 << 22  # the same on other devices: well under a GB
# The most numbers of noise that are computed ahead. If only the likeliest tokens may be sampled, a 16th of it.
_MOST_AHEAD, _MOST_AHEAD_ELSEWHERE = 1 << 18, 1 << 26
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
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)  # type: ignore[no-untyped-call]
    even, odd = torch.stack((c0, c2)), torch.stack((c1, c3))
    keys = torch.stack(list(key))
    factors = integers([*_MULTIPLIERS, *(one * at for at in range(_NUM_ROUNDS) for one in _WEYL)], c0.device)
    factors = factors.view(_NUM_ROUNDS + 1, 2, *[1] * c0.dim())
    for step in factors[1:].unbind():  # int64 products wrap: their 64 bits are the unsigned ones
        products = (even * factors[0]).flip(0)
        even, odd = (products >> 32).bitwise_xor_(odd).bitwise_xor_(keys + step).bitwise_and_(_LOW), products
    odd = odd & _LOW  # until here, only the low 32 bits of `odd` and of the keys count
    return even[0], odd[0], even[1], odd[1]


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

    def depths(self) -> Sequence[int]:
        """Return how many pending tokens precede the token that each row predicts."""
        if not self.parents:
            return range(len(self.pending) + 1)
        return depths_of(self.parents)

    def path(self, row: int) -> list[int]:
        """Return the rows on the path from row 0 to `row`, without row 0."""
        if not self.parents:
            return list(range(1, row + 1))
        path = []
        while row > 0:
            path.append(row)
            row = self.parents[row - 1]
        return path[::-1]

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
        sampled = [sampler for sampler in samplers if not sampler.greedy]
        self._at = {sampler: at for at, sampler in enumerate(sampled)}
        self._cuts = any(one.params.top_p < 1 or one.params.top_k > 0 or one.params.min_p > 0 for one in sampled)
        self._num_at_once = num_at_once
        self._known: Tensor | None = None  # float32 [depths * sequences, V]

    def of(self, rows: Sequence[LogitRow], like: Tensor) -> Tensor | None:
        """Return the noise of each row, float32 [n, V]; None if it costs less to compute only a part of it. like:
        scores [N, V]."""
        size, device, num_depths = len(self._at), like.device, 1 + max(len(row.before) for row in rows)
        first = 0 if self._known is None else len(self._known) // size
        if self._known is None or num_depths > first:
            depths = range(first, max(first + self._num_at_once, num_depths))
            most = (_MOST_AHEAD if device.type == "cpu" else _MOST_AHEAD_ELSEWHERE) >> 4 * self._cuts
            is_wasteful = len(depths) * size > 2 * self._num_at_once * len(rows)
            if is_wasteful or depths.stop * size * like.shape[1] > most:
                return None
            seeds = [sampler.seed for sampler in self._at] * len(depths)
            positions = [sampler.position + depth for depth in depths for sampler in self._at]
            new = gumbel(seeds, positions, like.shape[1], Stream.TARGET, device)
            self._known = new if self._known is None else torch.cat((self._known, new))
        return self._known[integers([len(row.before) * size + self._at[row.sampler] for row in rows], device)]


def target_tokens(logits: Tensor, rows: Sequence[Rows], noise: Noise | None = None) -> Tensor:
    """Return the token that plain decoding takes at every row of raw logits [N, V] by the coupled rule: int64 [N], on
    the device. Greedy rows, and rows that belong to no sequence, take the argmax."""
    if all(row.sampler.is_argmax for row in rows):
        return logits.argmax(-1)
    changed = _changed(rows)
    return _with_noise(process(logits.to(torch.float32, copy=True), changed), Stream.TARGET, changed, noise).argmax(-1)


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
    coupled, histories = verification == "coupled", _histories(rows)
    scores = process(logits.to(torch.float32, copy=True), histories)
    stream = Stream.TARGET if coupled else Stream.DRAFT
    drawn = _with_noise(scores, stream, histories, noise, winner_only=num_ranked == 0)
    return Drafts(
        drawn.argmax(-1), _confidence(scores, scores.amax(-1)), None if coupled else scores, _ranked(drawn, num_ranked)
    )


def tokens_after(logits: Tensor, rows: Sequence[Rows], noise: Noise) -> Tensor:
    """Return the token that plain decoding takes after *all* pending tokens of each sequence, from raw logits [S, V] of
    the target: int64 [S], on the device. `start` is ignored."""
    if all(row.sampler.is_argmax for row in rows):
        return logits.argmax(-1)
    histories = _histories(rows)
    scores = process(logits.to(torch.float32, copy=True), histories)
    return _with_noise(scores, Stream.TARGET, histories, noise).argmax(-1)


def processed_logits(logits: Tensor, rows: Sequence[Rows]) -> Tensor:
    """Return a float32 copy of raw logits [N, V] in which the rows of all sequences are processed."""
    return process(logits.to(torch.float32, copy=True), _changed(rows))


def _changed(rows: Sequence[Rows]) -> list[LogitRow]:
    return [each for row in rows if not row.sampler.is_argmax for each in row.logit_rows()]


def _histories(rows: Sequence[Rows]) -> list[LogitRow]:
    """Return a row for each sequence: after all its pending tokens."""
    return [LogitRow(at, row.sampler, row.pending) for at, row in enumerate(rows)]


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
