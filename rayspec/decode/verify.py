"""Decide which draft tokens to accept, and which token follows. Both rules give exactly the target's distribution.

**Coupled.** The target's token is a function of the committed tokens and the noise (seed, position); drafts are only
compared with it. So the text equals plain decoding token for token, regardless of the drafts and of how often a
position was evaluated.

**Rejection** (Leviathan et al. 2023, "Fast inference from Transformers via speculative decoding", theorem 1): a draft
token x, sampled from q, is accepted with probability min(1, p(x) / q(x)). A rejected token is replaced by a sample of
norm(max(p - q, 0)). After the last draft token a bonus token is sampled from p. A draft token that was not sampled
counts as certain: q is one-hot at x.

Noise that is a function of the position does not bias the rejection rule. Proof: let s be a position and F the noise of
all positions before s. Given the committed tokens before s, which F determines, the token at s is exactly p-distributed
if (a) q at s, and whether s is drafted at all in the round that decides it, do not depend on the noise of s, and (b)
the numbers used at s are independent of F and of each other. (b) holds: a position is *decided* in one round only, by
ACCEPT and then RECOVER, or by TARGET, each used at s for nothing else. A round that rejects a token before s also
evaluates s, but its ACCEPT and RECOVER numbers there influence nothing. Only the token drafted there does: it affects
the rest of that round's draft, its confidences and statistics, and through these perhaps the next round. So DRAFT
noise is also a function of the round's origin (the number of committed tokens when it began, larger in every round),
and a later round drafts s with unused numbers. The code that ends a draft must ensure (a) within a round:
**drop a drafted token, or stop before it, only by facts known before it was drawn** (earlier draft tokens, the
confidence, which is a property of q), **never by which token it is.** Stopping after a token is always fine.

**Trees.** Under the coupled rule the target's token at every row of a tree is known. The longest path on which every
token equals the target's token is accepted. Branches share the noise of a position, so the text still equals plain
decoding. Under the rejection rule a tree that was not sampled (looked up) is compared in the same way: the target's
token is a sample of p by TARGET noise, on which the candidates do not depend. Numbers outside the accepted path
influence nothing. A draft that was sampled is never a tree.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from rayspec.decode.runner import integers
from rayspec.decode.sampling import Noise, Rows, Stream, finite_rows, gumbel, processed_logits, target_tokens, uniform


class Verdict(msgspec.Struct, frozen=True):
    """The tokens to commit for one sequence: the accepted draft tokens, then one recovered or bonus token. path: rows
    of the accepted tokens, counted from the sequence's first row 0; empty if they are rows 1, 2, ... is_finite: False
    if the logits of its rows cannot be sampled from; the tokens are then void."""

    token_ids: list[int]
    num_accepted: int
    path: tuple[int, ...] = ()
    is_finite: bool = True


def verify_coupled(logits: Tensor, rows: Sequence[Rows], noise: Noise | None = None) -> list[Verdict]:
    """Return verdicts by the coupled rule from raw target logits [N, V], for greedy and sampled sequences. `pending`
    holds the draft. noise: of the round. One copy to the host: the target's tokens, and which rows are finite."""
    tokens, finite = torch.stack((target_tokens(logits, rows, noise), finite_rows(logits))).tolist()
    return [_agreement(row, tokens[row.start : row.end], all(finite[row.start : row.end])) for row in rows]


def verify_rejection(logits: Tensor, rows: Sequence[Rows], draft_logits: Sequence[Tensor | None]) -> list[Verdict]:
    """Return verdicts by the rejection rule from raw target logits [N, V]; `pending` holds the draft, of g_i tokens.

    draft_logits: for each sequence, the processed logits [m_i, V] of its first m_i <= g_i tokens, which were sampled;
    None if no token was sampled. Other tokens (looked up, argmax) are accepted with probability p(x). Greedy sequences
    compare exactly and ignore draft_logits. An empty draft gives the token of plain decoding. One copy to the host, and
    one more with trees.
    """
    if all(row.sampler.greedy or not row.pending for row in rows):
        return verify_coupled(logits, rows)
    pairs = list(zip(rows, draft_logits, strict=True))
    is_compared = [bool(row.parents) for row in rows]
    if any(is_compared):
        compared = iter(verify_coupled(logits, list(itertools.compress(rows, is_compared))))
        others = [pair for pair, exact in zip(pairs, is_compared, strict=True) if not exact]
        drawn = iter(verify_rejection(logits, [row for row, _ in others], [given for _, given in others]))
        return [next(compared if exact else drawn) for exact in is_compared]
    accepted, last = _decided(logits, rows, draft_logits)
    decided = torch.cat((accepted, last, finite_rows(logits))).tolist()
    num_accepted, tokens, finite = decided[: len(rows)], decided[len(rows) : 2 * len(rows)], decided[2 * len(rows) :]
    return [
        Verdict([*row.pending[:count], token], count, is_finite=all(finite[row.start : row.end]))
        for row, count, token in zip(rows, num_accepted, tokens, strict=True)
    ]


def decide(
    *,
    scores: Tensor,
    drafts: Tensor,
    draft_scores: Tensor,
    draft_rows: Tensor,
    seeds: Tensor,
    positions: Tensor,
    first_rows: Tensor,
    lengths: Tensor,
    longest: int,
) -> tuple[Tensor, Tensor]:
    """Apply the rejection rule to one round of S sequences, packed. Return how many draft tokens of each sequence are
    accepted and the token after them, int64 [S] each, without host synchronisation.

    Sequence s owns rows first_rows[s] .. first_rows[s] + lengths[s]. Its last row is for the bonus token, and each
    other row has a draft token. scores: float32 [N, V], processed target logits. drafts: int64 [N], the draft token of
    each row; any value in bonus rows. draft_scores: float32 [M, V], processed draft logits. draft_rows: int64 [N], the
    row of draft_scores that a row's token was sampled from, or -1 if it was not sampled. seeds, positions (of the first
    row), first_rows, lengths: int64 [S]. longest: the largest of `lengths`, known on the host.
    """
    target, draft = scores.softmax(-1), draft_scores.softmax(-1)
    ahead = torch.arange(longest, device=target.device)
    drafted = ahead < lengths.unsqueeze(1)
    at = torch.where(drafted, first_rows.unsqueeze(1) + ahead, 0).flatten()  # [S * longest]: rows of draft tokens
    noise = uniform(
        seeds.repeat_interleave(longest), (positions.unsqueeze(1) + ahead).flatten(), Stream.ACCEPT, target.device
    )
    tokens, rows = drafts[at], draft_rows[at]
    p = target[at, tokens].double()
    q = torch.where(rows < 0, 1.0, draft[rows.clamp_min(0), tokens].double()) if len(draft) else torch.ones_like(p)
    accepts = _accepts(p, q, noise).view_as(drafted) & drafted
    num_accepted = accepts.long().cumprod(1).sum(1)

    # The recovered or bonus token.
    at = first_rows + num_accepted
    rows = draft_rows[at].unsqueeze(1)
    other = torch.zeros_like(scores[at]).scatter_(1, drafts[at].unsqueeze(1), 1.0)  # q, if it was not sampled
    if len(draft):
        other = torch.where(rows < 0, other, draft[rows.squeeze(1).clamp_min(0)])
    is_bonus = num_accepted == lengths
    stream = torch.where(is_bonus, int(Stream.TARGET), int(Stream.RECOVER))
    last_noise = gumbel(seeds, positions + num_accepted, target.shape[1], stream, target.device)
    last_scores = torch.where(is_bonus.unsqueeze(1), scores[at], _residual(target[at], other).log())
    return num_accepted, (last_scores + last_noise).argmax(-1)


def _accepts(p: Tensor, q: Tensor, noise: Tensor) -> Tensor:
    """Accept with probability min(1, p / q). All arguments are float64. The uniform noise is never 0, so p = 0 is never
    accepted. A token with q = 0 cannot have been drafted and is rejected."""
    return (q > 0) & (noise * q <= p)


def _residual(target: Tensor, draft: Tensor) -> Tensor:
    """Return max(p - q, 0), not normalised; or p itself in rows where the result is all 0 (p equals q up to
    rounding)."""
    residual = (target - draft).clamp_min_(0)
    return torch.where(residual.sum(1, keepdim=True) > 0, residual, target)


def _decided(logits: Tensor, rows: Sequence[Rows], draft_logits: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """Pack the sequences and `decide`."""
    sampled_from = [None if row.sampler.greedy else given for row, given in zip(rows, draft_logits, strict=True)]
    drafts, draft_rows, num_dense = [0] * len(logits), [-1] * len(logits), 0
    for row, given in zip(rows, sampled_from, strict=True):
        drafts[row.start : row.end - 1] = row.pending
        if given is not None:
            draft_rows[row.start : row.start + len(given)] = range(num_dense, num_dense + len(given))
            num_dense += len(given)
    scores = processed_logits(logits, rows)
    if greedy := [index for row in rows if row.sampler.greedy for index in range(row.start, row.end)]:
        # The argmax of a greedy row gets probability 1, which makes the rule an exact comparison.
        where = integers(greedy, scores.device)
        best = scores[where].argmax(1, keepdim=True)
        scores[where] = torch.full_like(scores[where], -torch.inf).scatter_(1, best, 0.0)
    dense = [given for given in sampled_from if given is not None]
    lengths = [len(row.pending) for row in rows]
    samplers = [row.sampler for row in rows]
    of_rows = integers([*drafts, *draft_rows], scores.device).view(2, -1)
    of_sequences = integers(
        [*(s.seed for s in samplers), *(s.position for s in samplers), *(row.start for row in rows), *lengths],
        scores.device,
    ).view(4, -1)
    return decide(
        scores=scores,
        drafts=of_rows[0],
        draft_scores=torch.cat(dense).float() if dense else scores[:0],
        draft_rows=of_rows[1],
        seeds=of_sequences[0],
        positions=of_sequences[1],
        first_rows=of_sequences[2],
        lengths=of_sequences[3],
        longest=max(lengths),
    )


def _agreement(row: Rows, targets: list[int], is_finite: bool) -> Verdict:
    """Accept the longest path of draft tokens that all equal the target's, and the target's token after it."""
    if not row.parents:
        num_accepted = 0
        while num_accepted < len(row.pending) and row.pending[num_accepted] == targets[num_accepted]:
            num_accepted += 1
        return Verdict(targets[: num_accepted + 1], num_accepted, (), is_finite)
    agrees = [True]
    for token, parent in zip(row.pending, row.parents, strict=True):
        agrees.append(agrees[parent] and token == targets[parent])
    deepest = max(itertools.compress(range(len(agrees)), agrees), key=row.depths().__getitem__)
    path = row.path(deepest)
    token_ids = [targets[at] for at in (0, *path)]
    return Verdict(token_ids, len(path), () if deepest == len(path) else tuple(path), is_finite)
