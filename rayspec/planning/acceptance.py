"""From acceptance to a decision: expected tokens, the best draft and its length, and when a draft should end.
Acceptance is the probability that a draft token equals the target's, given that all earlier draft tokens did."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, takewhile
from operator import itemgetter, mul

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from rayspec.choices import FULL, Choices, num_leading_full
from rayspec.planning.latency import LatencyModel
from rayspec.planning.learning import NEVER, PRIOR_TOKENS, CalibrationCurve, StopRule, expected_draft

Floats = NDArray[np.float64]


def shrink(matches: float, total: float, prior: float) -> float:
    """Estimate acceptance from `matches` of `total` tokens that agreed. `prior` counts as PRIOR_TOKENS more tokens."""
    return (matches + PRIOR_TOKENS * prior) / (total + PRIOR_TOKENS)


def estimated_acceptance(similarity: float, num_agreed: int, num_tokens: int) -> float:
    """Estimate a draft's acceptance by the captured tokens on which it agreed, with its similarity as the prior."""
    return shrink(num_agreed, num_tokens, min(max(0.0, similarity), 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The best candidate and draft length. candidate: index, or None for no draft. tpt, plain_tpt: predicted tokens per
    second of one sequence, with this draft and by plain decoding."""

    candidate: int | None
    num_draft_tokens: int
    tpt: float
    plain_tpt: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRates:
    """Rates of rounds with drafts of at most `max_draft_tokens` tokens, which `stop_rule` may end. With `reuse_prefix`,
    the verify runs the leading sublayers that the draft runs in full for the last drafted token only."""

    latency: LatencyModel
    context: float
    batch: int
    max_draft_tokens: int
    stop_rule: StopRule = NEVER
    reuse_prefix: bool = True

    def best_choice(self, patterns: Sequence[Choices], acceptance: ArrayLike, *, min_gain: float = 0.0) -> Decision:
        """Return the candidate and draft length with the most `tokens_per_time`; no draft without a gain above
        `min_gain`. A candidate that runs all sublayers in full equals plain decoding and is never chosen."""
        plain_tpt = 1.0 / self.latency.decode_step_s(context=self.context, batch=self.batch)
        plain = Decision(candidate=None, num_draft_tokens=0, tpt=plain_tpt, plain_tpt=plain_tpt)
        is_plain = [num_leading_full(choices) == len(choices) for choices in patterns]
        if all(is_plain) or self.max_draft_tokens < 1:
            return plain
        tpt = self.tokens_per_time(patterns, acceptance)
        tpt[is_plain] = 0.0
        candidate, length = np.unravel_index(int(tpt.argmax()), tpt.shape)
        best_tpt = float(tpt[candidate, length])
        if best_tpt <= plain_tpt * (1 + min_gain):
            return plain
        return Decision(candidate=int(candidate), num_draft_tokens=int(length) + 1, tpt=best_tpt, plain_tpt=plain_tpt)

    def tokens_per_time(self, patterns: Sequence[Choices], acceptance: ArrayLike) -> Floats:
        """Return [num_candidates, max_draft_tokens]: tokens per second of one sequence, by draft length (1, 2, ...).
        This is KnapSpec's eq. 4 with head, overheads, hops, the true cost of the verify's rows, and early ends."""
        num_drafted, num_accepted = expected_draft(acceptance, self.max_draft_tokens, self.stop_rule)
        latency, context, batch = self.latency, self.context, self.batch
        # A draft step takes place while any sequence of the batch still drafts, and runs only the rows of those
        # sequences. So in a large batch the longest draft sets the number of steps.
        drafting = np.diff(num_drafted, axis=1, prepend=0.0).clip(0.0, 1.0)  # share of the sequences, by step
        happens = 1 - (1 - drafting) ** batch
        rows = batch * drafting / np.maximum(happens, 1e-12)
        knots = sorted({min(2**power, batch) for power in range(batch.bit_length() + 1)})
        table = [
            [latency.draft_step_s(choices, context=context, batch=count) for count in knots] for choices in patterns
        ]
        step_s = np.stack([np.interp(wanted, knots, seconds) for wanted, seconds in zip(rows, table, strict=True)])
        draft_s = np.cumsum(happens * step_s, axis=1)
        # A verify of so many draft tokens, by the leading sublayers that run one row per sequence; interpolated between
        # whole numbers of tokens.
        lengths = np.arange(int(np.ceil(num_drafted.max())) + 1)
        leading = np.concatenate([[0.0], np.cumsum(latency.sublayers_s(rows=batch, context=context, batch=batch))])
        columns = []
        for num_rows in (batch * (lengths + 1)).tolist():
            rest = np.cumsum(latency.sublayers_s(rows=num_rows, context=context, batch=batch)[::-1])[::-1]
            columns.append(leading + np.append(rest, 0.0) + latency.head_s(num_rows))
        by_prefix = np.stack(columns, axis=1) + latency.overhead_s + latency.hops_s((FULL,) * len(latency.sublayers))
        prefixes = [num_leading_full(choices) * self.reuse_prefix for choices in patterns]
        verify_s = np.stack(
            [np.interp(row, lengths, by_prefix[at]) for row, at in zip(num_drafted, prefixes, strict=True)]
        )
        tpt: Floats = (1 + num_accepted) / (draft_s + verify_s + latency.round_s)
        return tpt


class DraftWhileWorth(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Draft while the next token is worth its time; a rule that can be sent to the process that drafts.

    curve: acceptance of a drafted token by its confidence. usual: of a token not drafted yet. rate: tokens per second
    of the whole batch. step_s: fixed seconds of a draft step. row_s: extra seconds for each sequence that takes part,
    its row in the verify included. By the renewal-reward argument, the best policy drafts while marginal tokens - rate
    * seconds is not negative; as the survival of a draft only falls, looking one token ahead is enough.
    """

    curve: CalibrationCurve
    usual: float
    rate: float
    step_s: float
    row_s: float

    def __call__(self, confidences: Sequence[Sequence[float]]) -> list[bool]:
        surplus = np.asarray(self.survivals(confidences)) * self.usual - self.rate * self.row_s
        takes_part = surplus > 0
        pays = float(surplus[takes_part].sum()) > self.rate * self.step_s
        worth: list[bool] = (takes_part & pays).tolist()
        return worth

    def survivals(self, confidences: Sequence[Sequence[float]]) -> list[float]:
        """Return for each sequence the probability that all its drafted tokens are accepted."""
        acceptance = iter(self.curve.acceptance([each for one in confidences for each in one]).tolist())
        return [math.prod(islice(acceptance, len(one))) for one in confidences]


def survival(by_class: Sequence[float], match_classes: Sequence[int]) -> list[float]:
    """Return for each looked-up token the probability that it and all looked-up tokens before it are right."""
    return list(accumulate(map(by_class.__getitem__, match_classes), mul))


def best_lookup(
    survivals: Sequence[Sequence[float]], seconds: Callable[[Sequence[int]], float], *, committed_without: float = 1.0
) -> tuple[tuple[int, ...], float]:
    """Return how many looked-up tokens of each sequence to verify for the most tokens per second, and that rate: the
    likeliest tokens of the batch, a power of two of them or all. As survival falls, these are the first of a sequence.

    survivals: `survival` of each sequence's looked-up tokens; at least one is not empty. seconds: function from the
    number of verified tokens of each sequence to the seconds of the round. committed_without: expected tokens of a
    sequence without verified tokens.
    """
    batch, chances = len(survivals), np.array(list(itertools.chain(*survivals)))
    order = np.argsort(-chances, kind="stable")
    likeliest, owners = chances[order], np.repeat(np.arange(batch), [len(one) for one in survivals])[order]
    sums, most = likeliest.cumsum(), len(chances)
    rounds = []
    for number in sorted({min(2**power, most) for power in range(most.bit_length() + 1)}):
        last = int((-likeliest).searchsorted(-likeliest[number - 1], side="right"))  # with all that are as likely
        lengths = tuple(np.bincount(owners[:last], minlength=batch).tolist())
        num_without = lengths.count(0)
        committed = batch - num_without + float(sums[last - 1]) + committed_without * num_without
        rounds.append((lengths, committed / seconds(lengths)))
    return max(rounds, key=itemgetter(1))


class DraftUntilFound(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A serializable rule for drafts that may continue with looked-up tokens. It can be sent where drafts are made.

    worth: whether the model drafts one more token if no looked-up tokens are taken. by_class: see `LookupRecord`.
    min_survival: the probability above which a looked-up token is worth its row in the verify. drafting_gain: speed of
    drafting over that of plain decoding.
    """

    worth: DraftWhileWorth
    by_class: tuple[float, ...]
    min_survival: float
    drafting_gain: float

    def __call__(self, confidences: Sequence[Sequence[float]]) -> list[bool]:
        return self.worth(confidences)

    def num_looked_up(self, sound: float, match_classes: Sequence[int]) -> int:
        """Return how many looked-up tokens, of these classes, complete a draft; 0: the model continues to draft. sound:
        the probability that all its tokens are accepted.

        At a rate of r tokens per second, a correct draft adds r times the seconds of a verify, minus the one token that
        comes without a draft. If a verify takes as long as a plain step, that is the gain minus 1. Looked-up tokens
        must add more: the number of tokens that they are expected to add, minus the cost of their rows.
        """
        reached = [sound * one for one in survival(self.by_class, match_classes)]
        taken = list(takewhile(lambda one: one > self.min_survival, reached))
        earned = sum(taken) - self.min_survival * len(taken)
        return len(taken) if earned > sound * (self.drafting_gain - 1) else 0
