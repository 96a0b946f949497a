"""Choose tokens from the logits of a packed batch, by the coupled rule.

The coupled rule: the token at a position is argmax(processed logits + Gumbel(seed, position)), which is a sample of
softmax(processed logits), and a pure function of the committed tokens and the seed (Gumbel-max trick).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayspec.config import Verification
from rayspec.decode.noise import Stream, integers, noisy
from rayspec.decode.processing import LogitRow, TokenSampler, check_tokens, process
from rayspec.decode.work import depths_of
from rayspec.types import Logprob


@dataclass(frozen=True, slots=True)
class Rows:
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


def target_tokens(logits: Tensor, rows: Sequence[Rows]) -> Tensor:
    """Return the token that plain decoding takes at every row of raw logits [N, V] by the coupled rule: int64 [N], on
    the device. Greedy rows, and rows that belong to no sequence, take the argmax."""
    if all(row.sampler.is_argmax for row in rows):
        return logits.argmax(-1)
    noise = [
        (row.start + at, row.sampler.seed, row.sampler.position + depth, 0)
        for row in rows
        if not row.sampler.greedy
        for at, depth in enumerate(row.depths())
    ]
    return _with_noise(processed_logits(logits, rows), Stream.TARGET, noise).argmax(-1)


def draft_tokens(logits: Tensor, rows: Sequence[Rows], verification: Verification, *, num_ranked: int = 0) -> Drafts:
    """Draw the draft's next token for each sequence from raw draft logits [S, V]. Row i belongs to rows[i] and follows
    its committed tokens and *all* its pending tokens (the draft so far). `start` is ignored.

    "coupled": argmax with the target's noise at that position. "rejection": a sample of the processed draft logits with
    separate noise, which is new in every round. Greedy sequences take the argmax. `Drafts.ranked` orders the same
    scores as the argmax, so under the coupled rule it includes the noise.

    Confidence is the largest probability of the processed distribution (of the raw distribution where `is_argmax`). It
    must not depend on which token was drawn: see `verify` on when a draft may stop. Non-finite logits make it NaN.
    """
    samplers = [row.sampler for row in rows]
    if all(sampler.is_argmax for sampler in samplers):
        scores = logits.to(torch.float32)
        return Drafts(scores.argmax(-1), _confidence(scores), None, _ranked(scores, num_ranked))
    histories = [LogitRow(at, row.sampler, row.pending) for at, row in enumerate(rows)]
    scores = process(logits.to(torch.float32, copy=True), histories)
    noise = [
        (at, sampler.seed, sampler.position + len(row.pending), sampler.position)
        for at, (sampler, row) in enumerate(zip(samplers, rows, strict=True))
        if not sampler.greedy
    ]
    coupled = verification == "coupled"
    drawn = _with_noise(scores, Stream.TARGET if coupled else Stream.DRAFT, noise, winner_only=num_ranked == 0)
    return Drafts(drawn.argmax(-1), _confidence(scores), None if coupled else scores, _ranked(drawn, num_ranked))


def processed_logits(logits: Tensor, rows: Sequence[Rows]) -> Tensor:
    """Return a float32 copy of raw logits [N, V] in which the rows of all sequences are processed."""
    changed = [row for row in rows if not row.sampler.is_argmax]
    return process(logits.to(torch.float32, copy=True), [each for row in changed for each in row.logit_rows()])


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
    scores: Tensor, stream: Stream, noise: Sequence[tuple[int, int, int, int]], *, winner_only: bool = True
) -> Tensor:
    """Return scores [N, V], float32, with noise added to some rows. noise: for each of these, the row and the arguments
    of `noise.gumbel`: seed, position and origin, which only the DRAFT stream uses. winner_only: see `noise.noisy`."""
    if not noise:
        return scores
    columns = integers([number for column in zip(*noise, strict=True) for number in column], scores.device)
    rows, seeds, positions, origins = columns.view(4, -1).unbind()
    own = origins if stream is Stream.DRAFT else None
    sampled = noisy(scores[rows], seeds, positions, stream, origins=own, winner_only=winner_only)
    return scores.index_copy(0, rows, sampled)


def _confidence(scores: Tensor) -> Tensor:
    return (scores.amax(-1) - scores.logsumexp(-1)).exp()


def _ranked(scores: Tensor, num_ranked: int) -> Tensor | None:
    return scores.topk(min(num_ranked, scores.shape[1]), dim=-1).indices if num_ranked else None
