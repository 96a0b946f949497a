"""Choose tokens from the logits of a packed batch, by the coupled rule.

The coupled rule: the token at a position is argmax(processed logits + Gumbel(seed, position)), which is a sample of
softmax(processed logits), and a pure function of the committed tokens and the seed (Gumbel-max trick).

The noise is counter-based: every number is a pure function of (seed, position, stream), on any device, in any batch.
See `rayspec.model.noise`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import msgspec
import torch
from torch import Tensor

from rayspec.config import Verification
from rayspec.decode.processing import LogitRows, RowsChange, TokenSampler, changed, changes_of, check_tokens, process
from rayspec.decode.runner import Operators, integers
from rayspec.model.noise import gumbel_of_tokens
from rayspec.types import Logprob

Integers = Sequence[int] | Tensor

# The most numbers of noise that are computed ahead. On a CPU, a 16th of it if only the likeliest tokens may be sampled.
_MOST_AHEAD, _MOST_AHEAD_ELSEWHERE = 1 << 18, 1 << 26
_POSITION_BITS = 33  # a key's position begins at this bit
_SPREAD = 27.0  # more than the width of the Gumbel noise's range (-2.9, 22.2), plus rounding


class Stream(IntEnum):
    """The purpose of a random number. Streams are independent of each other at every position. TARGET: the token plain
    decoding takes, and the bonus token. DRAFT: the draft's token under the rejection rule. ACCEPT: whether a draft
    token is accepted. RECOVER: the token that replaces a rejected one."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3


def row_keys(
    seeds: Integers,
    positions: Integers,
    stream: int | Tensor,
    device: torch.device | str,
    *,
    origins: Integers | None = None,
) -> Tensor:
    """Return the key of each row's generator, int64 [2, N] on the device: the seed, and a number of all else. seeds:
    64-bit integers (negative ones are taken modulo 2**64). positions, origins: in [0, 2**30). stream: one `Stream`, or
    int64 [N]."""
    others = [0] * len(positions) if origins is None else origins
    if isinstance(stream, Tensor) or isinstance(seeds, Tensor) or isinstance(positions, Tensor):
        places = integers(positions, device) << _POSITION_BITS | integers(others, device) << 2 | stream
        return torch.stack((integers(seeds, device), places))
    both = zip(positions, others, strict=True)
    own = [position << _POSITION_BITS | origin << 2 | stream for position, origin in both]
    return integers([*seeds, *own], device).view(2, -1)


def noisy(scores: Tensor, keys: Tensor, operators: Operators, *, winner_only: bool = True) -> Tensor:
    """Return new scores: `scores` [N, V], float32, plus noise. keys: of `row_keys`. winner_only: on a CPU, tokens too
    unlikely to have the largest sum in their row may get no noise. Elsewhere the host would have to wait for the device
    to know these tokens."""
    if scores.device.type == "cpu":
        least = scores.amax(1, keepdim=True) - (_SPREAD if winner_only else math.inf)
        row, token = (scores > least).nonzero().unbind(1)
        if 4 * len(row) < scores.numel():  # else it costs less not to choose
            sums = scores.clone()
            sums[row, token] += gumbel_of_tokens(keys[:, row], token)
            return sums
    return scores + operators.gumbel(keys, scores.shape[1])


class Rows(msgspec.Struct, frozen=True, gc=False):
    """Rows start .. start + len(pending) of packed logits, all of one sequence. Row 0 predicts the token after the
    committed tokens, and row j + 1 that after pending[j]. parents: by pending token, the row before; () for a chain."""

    sampler: TokenSampler
    start: int
    pending: Sequence[int]
    parents: Sequence[int] = ()

    @property
    def end(self) -> int:
        return self.start + len(self.pending) + 1

    def befores(self) -> list[Sequence[int]]:
        """Return the pending tokens that each row follows."""
        befores: list[Sequence[int]] = [self.pending[:at] for at in range(len(self.pending) + 1)]
        for at, parent in enumerate(self.parents):
            befores[at + 1] = (*befores[parent], self.pending[at])
        return befores


def logit_rows(rows: Sequence[Rows]) -> LogitRows:
    """Return all rows of these sequences."""
    at, samplers, depths, befores = list[int](), list[TokenSampler](), list[int](), list[Sequence[int]]()
    for row in rows:
        num_rows = len(row.pending) + 1
        at += range(row.start, row.start + num_rows)
        samplers += [row.sampler] * num_rows
        reads = row.parents or row.sampler.reads_history
        befores += (of_row := row.befores()) if reads else [()] * num_rows
        depths += map(len, of_row) if reads else range(num_rows)
    return LogitRows(at, samplers, depths, befores)


@dataclass(frozen=True, slots=True)
class Drafts:
    """One draft token per sequence. token_ids: int64 [S]. confidence: float32 [S]. logits: float32 [S, V], processed,
    for `verify_rejection`, if it needs them. ranked: int64 [S, k], the tokens with the highest scores, best first."""

    token_ids: Tensor
    confidence: Tensor
    logits: Tensor | None
    ranked: Tensor | None = None


class Noise:
    """The target's noise in a round. A draft and its verify need the same numbers, so they are computed together, for
    `num_at_once` positions of all `samplers` that are not greedy, if these are few enough."""

    def __init__(self, samplers: Sequence[TokenSampler] = (), num_at_once: int = 0) -> None:
        self._samplers = [sampler for sampler in samplers if not sampler.greedy]
        self._at = {sampler: at for at, sampler in enumerate(self._samplers)}
        params = [sampler.params for sampler in self._samplers]
        self._cuts = any(one.top_p < 1 or one.top_k > 0 or one.min_p > 0 for one in params)
        self._num_at_once = num_at_once
        self._known: Tensor | None = None  # float32 [sequences, depths, V]

    def added(self, scores: Tensor, stream: Stream, rows: LogitRows, *, winner_only: bool = True) -> Tensor:
        """Return scores [N, V], float32, with noise added to the rows of sequences that are sampled: new ones, if there
        are any. winner_only: see `noisy`."""
        if any(greedy := [sampler.greedy for sampler in rows.samplers]):
            rows = rows.only([not one for one in greedy])
        if not rows.at:
            return scores
        known = self._of(rows, scores) if stream is Stream.TARGET else None
        at = None if rows.at == list(range(len(scores))) else integers(rows.at, scores.device)
        if known is not None:
            return scores + known if at is None else scores.index_add(0, at, known)
        begins = [sampler.position for sampler in rows.samplers]
        keys = row_keys(
            [sampler.seed for sampler in rows.samplers],
            list(map(operator.add, begins, rows.depths)),
            stream,
            scores.device,
            origins=begins if stream is Stream.DRAFT else None,
        )
        operators = rows.samplers[0].operators
        sampled = noisy(scores if at is None else scores[at], keys, operators, winner_only=winner_only)
        return sampled if at is None else scores.index_copy(0, at, sampled)

    def of_steps(self, num_steps: int, like: Tensor) -> Tensor | None:
        """Return the noise of the tokens after 0 to `num_steps - 1` more tokens of all sequences, float32 [num_steps,
        S, V]; None as in `_of`, and if one is greedy. like: scores [S, V]."""
        known = self._up_to(num_steps - 1, len(like), like) if len(self._samplers) == len(like) else None
        return None if known is None else known[:, :num_steps].transpose(0, 1)

    def _of(self, rows: LogitRows, like: Tensor) -> Tensor | None:
        """Return the noise of each row, float32 [n, V]; None if a part of it costs less. like: scores [N, V]."""
        size, depths = len(self._samplers), rows.depths
        if (known := self._up_to(max(depths), len(depths), like)) is None:
            return None
        num_depths = known.shape[1]
        if rows.samplers == self._samplers and depths.count(depths[0]) == size:
            return known[:, depths[0]]
        if depths == size * list(range(num_depths)) and rows.samplers[::num_depths] == self._samplers:
            return known.flatten(0, 1)
        places = [self._at[one] * num_depths + depth for depth, one in zip(depths, rows.samplers, strict=True)]
        return known.flatten(0, 1)[integers(places, like.device)]

    def _up_to(self, depth: int, num_rows: int, like: Tensor) -> Tensor | None:
        size, num_depths = len(self._samplers), depth + 1
        if not size:
            return None
        first = 0 if self._known is None else self._known.shape[1]
        if self._known is None or num_depths > first:
            new = range(first, max(first + self._num_at_once, num_depths))
            most = _MOST_AHEAD >> 4 * self._cuts if like.device.type == "cpu" else _MOST_AHEAD_ELSEWHERE
            is_wasteful = len(new) * size > 2 * self._num_at_once * num_rows
            if is_wasteful or new.stop * size * like.shape[1] > most:
                return None
            seeds, begins = [one.seed for one in self._samplers], [one.position for one in self._samplers]
            keys = row_keys(seeds, begins, Stream.TARGET, like.device).unsqueeze(2) + _later_positions(new, like.device)
            noise = self._samplers[0].operators.gumbel(keys.flatten(1), like.shape[1]).view(size, len(new), -1)
            self._known = noise if self._known is None else torch.cat((self._known, noise), 1)
        return self._known


@lru_cache(maxsize=64)
def _later_positions(depths: range, device: torch.device) -> Tensor:
    """Return what makes a key of `row_keys` that of so many positions later: int64 [2, 1, D]."""
    return integers([0] * len(depths) + [depth << _POSITION_BITS for depth in depths], device).view(2, 1, -1)


def argmax(scores: Tensor) -> Tensor:
    """Return the token with the highest of these scores [..., V], the first of equal ones: int64 [...]."""
    return scores.max(-1).indices  # on a CPU, torch's argmax takes four times as long


def target_tokens(logits: Tensor, rows: Sequence[Rows], noise: Noise | None = None) -> Tensor:
    """Return the token that plain decoding takes at every row of raw logits [N, V] by the coupled rule: int64 [N].
    Greedy rows, and rows that belong to no sequence, take the argmax."""
    if all(row.sampler.is_argmax for row in rows):
        return argmax(logits)
    own = logit_rows([row for row in rows if not row.sampler.is_argmax])
    scores = process(logits, own)
    return argmax((noise or Noise()).added(scores, Stream.TARGET, own))


class _Steps:
    """What choices at several steps of the same sequences share. What does not depend on the step is prepared once."""

    def __init__(self, samplers: Sequence[TokenSampler]) -> None:
        self._samplers = samplers
        self._is_argmax = all(sampler.is_argmax for sampler in samplers)
        self._reads_depth = any(sampler.reads_depth for sampler in samplers)
        self._in_order = list(range(len(samplers)))
        self._changes: Sequence[RowsChange] | None = None

    def _processed(self, logits: Tensor, rows: LogitRows) -> Tensor:
        """Do as `process` for one row of each sequence."""
        if self._changes is None or self._reads_depth:
            self._changes = changes_of(rows, len(logits), logits.device)
        return changed(logits, self._changes)


class DraftSteps(_Steps):
    """Draws the next tokens of the drafts of some sequences.

    "coupled": argmax with the target's noise at that position. "rejection": a sample of the processed draft logits with
    separate noise, which is new in every round. Greedy sequences take the argmax. `Drafts.ranked` orders the same
    scores as the argmax, so under the coupled rule it includes the noise.

    Confidence is the largest probability of the processed distribution (of the raw distribution where `is_argmax`). It
    must not depend on which token was drawn: see `verify` on when a draft may stop. Non-finite logits make it NaN.
    """

    def __init__(
        self, samplers: Sequence[TokenSampler], verification: Verification, noise: Noise, *, num_ranked: int = 0
    ) -> None:
        super().__init__(samplers)
        self._is_coupled, self._noise, self._num_ranked = verification == "coupled", noise, num_ranked
        self._is_shifted = all(sampler.is_shifted for sampler in samplers)

    def draw(self, logits: Tensor, pending: Sequence[Sequence[int]], ahead: int = 0) -> Drafts:
        """Draw the token of each sequence after its pending tokens and `ahead` more, whose values only matter to
        sequences that read their history, from raw draft logits [S, V]."""
        if self._is_argmax:
            scores = logits.to(torch.float32)
            best = scores.max(-1)
            confidence = _confidence(scores - best.values.unsqueeze(-1))
            return Drafts(best.indices, confidence, None, _ranked(scores, self._num_ranked))
        rows = LogitRows(self._in_order, self._samplers, [len(one) + ahead for one in pending], pending)
        scores = self._processed(logits, rows)
        stream = Stream.TARGET if self._is_coupled else Stream.DRAFT
        drawn = self._noise.added(scores, stream, rows, winner_only=self._num_ranked == 0)
        confidence = _confidence(scores if self._is_shifted else scores - scores.amax(-1, keepdim=True))
        given = None if self._is_coupled else scores
        return Drafts(argmax(drawn), confidence, given, _ranked(drawn, self._num_ranked))


class PlainSteps(_Steps):
    """Chooses tokens by plain decoding at `num_steps` positions of sequences that read no history."""

    def __init__(self, samplers: Sequence[TokenSampler], num_steps: int) -> None:
        super().__init__(samplers)
        self._num_steps, self._noise = num_steps, Noise(samplers, num_steps)
        self._known: Tensor | None = None

    def tokens(self, logits: Tensor, ahead: int) -> Tensor:
        """Return the token of each sequence after `ahead` tokens, from raw target logits [S, V]: int64 [S]."""
        if self._is_argmax:
            return argmax(logits)
        num_rows = len(self._samplers)
        rows = LogitRows(self._in_order, self._samplers, [ahead] * num_rows, [()] * num_rows)
        scores = self._processed(logits, rows)
        if not ahead:
            self._known = self._noise.of_steps(self._num_steps, scores)
        if self._known is not None:
            return argmax(scores + self._known[ahead])
        return argmax(self._noise.added(scores, Stream.TARGET, rows))


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


def _confidence(scores: Tensor) -> Tensor:
    """Return the probability of the best score of each row, which is 0."""
    return scores.exp().sum(-1).reciprocal()


def _ranked(scores: Tensor, num_ranked: int) -> Tensor | None:
    return scores.topk(min(num_ranked, scores.shape[1]), dim=-1).indices if num_ranked else None
