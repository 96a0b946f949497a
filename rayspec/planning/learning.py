"""What the engine learns while it runs, and the constants that it decides by; docs/internals.md has a table of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

# Number of tested draft tokens after which an observation counts half in estimates of acceptance.
TOKENS_HALF_LIFE = 512.0
# Weight of a prior expectation of acceptance, in tested tokens.
PRIOR_TOKENS = 8.0
# Logits added to estimates before any draft was in use: first plans on the demo model were estimated at 0.93 and
# reached 0.75, because the search computes its drafts from the target's own keys.
FIRST_OFFSET = -1.0
# Mean confidence of drafted tokens, until some are known.
USUAL_CONFIDENCE = 0.7
# Prior shares: of the tokens to be rejected, and of the tokens to be accepted, how many end their draft.
DETECTS, MISFIRES = 0.6, 0.05

# Number of committed tokens after which an observation about the text counts half: the next document may differ.
TEXT_HALF_LIFE = 16.0
# Speed-up over plain decoding beyond which no plan is expected to beat a round that uses lookup.
MAX_PLAN_GAIN = 2.5

# The first search is an investment: it may take this share of the time that its plan is expected to save.
FIRST_SEARCH_SHARE = 0.2
# Number of answers that ended by themselves, after which an earlier one counts half in the expected length of answers.
ANSWERS_HALF_LIFE = 8.0
# Rounds between two checks whether another known candidate is better now, or a search is due.
ROUNDS_TO_REVIEW = 16
# A search is due when context or batch change by more than this factor, or acceptance by more standard errors.
MAX_RATIO = 1.5
NUM_ERRORS = 3.0
# Minimum tokens of one sequence between two searches, and the bound for it after searches that changed nothing.
COOLDOWN_TOKENS = 64
MAX_PATIENCE_TOKENS = 16384
# A cheaper way to run a sublayer is a choice only if it takes less than this share of the time.
CHEAPER_COST = 0.9
# Width of the band of saved times in which the search keeps states, as a share of the most time that can be saved.
BAND = 0.2


_NUM_BINS = 16
_EXTREME = 1e-6  # probabilities are kept this far from 0 and 1 where logits are taken
# A chunk takes as long as the round it shares: the gap between tokens doubles, and the prompt gets half of the time.
_CHUNK_PER_ROUND = 1.0
# Rows of the first chunk, and of the smallest: in smaller chunks each row costs more.
_SMALLEST_CHUNK = 32
_HALF_LIFE = 1.0  # rounds, or chunks


class Discounted:
    """An exponentially discounted mean: observed totals over observed weights. Both halve whenever `half_life` of
    further weight, or of explicit age, has been added. prior: the first value, an observation of weight `strength`."""

    def __init__(self, half_life: float, *, prior: float = 0.0, strength: float = 0.0) -> None:
        self._half_life = half_life
        self._prior = prior
        self._strength = strength
        self.total = 0.0  # of all observations, without the prior
        self.weight = 0.0

    @property
    def value(self) -> float:
        return self.with_prior(self._prior, self._strength)

    @property
    def is_known(self) -> bool:
        return self.weight > 0

    def with_prior(self, prior: float, strength: float) -> float:
        """Return the value that results from another prior."""
        weight = self.weight + strength
        return (self.total + strength * prior) / weight if weight else prior

    def observe(self, total: float, weight: float = 1.0, *, age: float | None = None) -> None:
        """Add observations of this summed value and weight. age: that earlier ones get older by; None: the weight."""
        fade = 0.5 ** ((weight if age is None else age) / self._half_life)
        self.total = self.total * fade + total
        self.weight = self.weight * fade + weight


class Correction:
    """One offset, in logits, between estimated and observed acceptance of all candidates. Old tokens fade; PRIOR_TOKENS
    virtual tokens keep the offset near `prior_offset` at first."""

    def __init__(self, *, prior_offset: float = 0.0) -> None:
        self.prior_offset = prior_offset
        self._accepted = Discounted(TOKENS_HALF_LIFE)
        self._expected = Discounted(TOKENS_HALF_LIFE)

    def observe(self, estimated: float, *, num_accepted: int, num_tested: int) -> None:
        """Record tested tokens of a plan. estimated: its acceptance before correction."""
        self._accepted.observe(num_accepted, num_tested)
        self._expected.observe(num_tested * estimated, num_tested)

    @property
    def offset(self) -> float:
        """Logits to add to an estimate; `prior_offset` before the first observation."""
        if not self._expected.is_known:
            return self.prior_offset
        expected = self._expected.value
        believed = 1 / (1 + np.exp(-_logit(expected) - self.prior_offset))
        observed = self._accepted.with_prior(believed, PRIOR_TOKENS)
        return float(_logit(observed) - _logit(expected))

    def apply(self, acceptance: ArrayLike) -> Floats:
        """Return corrected estimates of the same shape. 0 and 1 do not change."""
        a = np.asarray(acceptance, float)
        odds = np.exp(self.offset)
        return np.asarray(np.where(a == 1, 1.0, a * odds / (a * odds + 1 - a)))


@dataclass(frozen=True, slots=True)
class CalibrationCurve:
    """Acceptance minus confidence (`excess`) at some confidences in rising order; linear between them."""

    confidence: tuple[float, ...]
    excess: tuple[float, ...]

    def acceptance(self, confidence: ArrayLike) -> Floats:
        """Return the acceptance at each confidence: same shape, between 0 and 1."""
        values = np.asarray(confidence, float)
        return np.asarray(np.clip(values + np.interp(values, self.confidence, self.excess), 0.0, 1.0))


class Calibration:
    """Acceptance of a draft token, given its confidence (the draft's top-1 probability): the confidence plus the
    observed difference, in bins that are narrow near 1, where most tokens are. Old tokens fade; PRIOR_TOKENS virtual
    tokens in each bin count for what one offset for all confidences says, which few tokens suffice to learn: the tokens
    of a copy of the model are right also where it is not sure. At first the offset is the one by which tokens of usual
    confidence have the acceptance that is expected of the draft."""

    def __init__(self) -> None:
        self._edges = 1.0 - np.linspace(1.0, 0.0, _NUM_BINS + 1) ** 2
        self._excess = [Discounted(TOKENS_HALF_LIFE) for _ in range(_NUM_BINS)]
        self._offset = Correction()

    def observe(self, confidence: ArrayLike, accepted: ArrayLike) -> None:
        """Record tested tokens: those of a draft up to and including its first rejected token."""
        # Numbers of a draft may overflow in 16 bits. A mean that has taken in a NaN would stay NaN.
        values, hits = np.nan_to_num(np.asarray(confidence, float)), np.asarray(accepted, bool)
        if len(values):
            self._offset.observe(float(values.mean()), num_accepted=int(hits.sum()), num_tested=len(values))
        bins = np.searchsorted(self._edges[1:-1], values, side="right")
        counts, sums = np.bincount(bins, minlength=_NUM_BINS), np.bincount(bins, hits - values, _NUM_BINS)
        for excess, total, count in zip(self._excess, sums.tolist(), counts.tolist(), strict=True):
            excess.observe(total, count)

    def curve(self, usual: float) -> CalibrationCurve:
        """Return the correction learned so far. usual: the acceptance that is expected of the draft's tokens."""
        self._offset.prior_offset = _logit(usual) - _logit(USUAL_CONFIDENCE)
        middles = (self._edges[1:] + self._edges[:-1]) / 2
        priors = (self._offset.apply(middles) - middles).tolist()
        excess = (one.with_prior(prior, PRIOR_TOKENS) for one, prior in zip(self._excess, priors, strict=True))
        return CalibrationCurve(tuple(middles.tolist()), tuple(excess))


def _logit(probability: float) -> float:
    inside = min(max(probability, _EXTREME), 1 - _EXTREME)
    return float(np.log(inside) - np.log1p(-inside))


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """How often a rule ends drafts early, after a token that will be rejected (detects), or accepted (misfires)."""

    detects: float = 0.0
    misfires: float = 0.0


NEVER = StopRule()


def expected_draft(acceptance: ArrayLike, max_length: int, rule: StopRule) -> tuple[Floats, Floats]:
    """Return the expected drafted and the expected accepted tokens, [num_candidates, max_length] each, by the maximum
    draft length (1, 2, ...). acceptance: [num_candidates].

    The computation tracks that a draft is sound (all tokens so far are accepted), or lost (a token was rejected, but
    the rule did not end the draft). With StopRule(), a + a^2 + ... tokens are accepted (Leviathan et al., eq. 1).
    """
    accepted = np.asarray(acceptance, float)
    sound, lost = np.ones_like(accepted), np.zeros_like(accepted)
    drafted, kept = [], []
    for _ in range(max_length):
        drafted.append(sound + lost)
        kept.append(sound * accepted)
        lost = (1 - rule.detects) * (lost + sound * (1 - accepted))
        sound = (1 - rule.misfires) * sound * accepted
    return np.cumsum(drafted, 0).T, np.cumsum(kept, 0).T


class DraftWhileSure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Continue a draft until its last token's probability is below `threshold`: the rule of other self-speculative
    decoders. The rule is serializable, and can be sent to the process that drafts."""

    threshold: float

    def __call__(self, confidences: Sequence[Sequence[float]]) -> list[bool]:
        return [one[-1] >= self.threshold for one in confidences]


class StopRecord:
    """Estimates the stop rule's probabilities from use. Old tokens fade; the priors are DETECTS and MISFIRES."""

    def __init__(self) -> None:
        self._detects = Discounted(TOKENS_HALF_LIFE, prior=DETECTS, strength=PRIOR_TOKENS)
        self._misfires = Discounted(TOKENS_HALF_LIFE, prior=MISFIRES, strength=PRIOR_TOKENS)

    def observe(self, *, num_accepted: int, num_tested: int, ended: bool) -> None:
        """Record one draft. num_tested: its tokens up to and including the first rejected token. ended: whether the
        rule ended the draft at the last of these. A draft without tokens, as a form may leave, was not ended by it."""
        num_rejected, ended = num_tested - num_accepted, ended and num_tested > 0
        self._detects.observe(ended and num_rejected > 0, num_rejected, age=num_tested)
        self._misfires.observe(ended and num_rejected == 0, num_accepted, age=num_tested)

    @property
    def rule(self) -> StopRule:
        return StopRule(detects=self._detects.value, misfires=self._misfires.value)


class AnswerLength:
    """Learns how likely a token is the last of an answer that ends by itself. Tokens of unfinished answers count too;
    so short answers, which end first, do not bias it."""

    def __init__(self) -> None:
        self._ends = Discounted(ANSWERS_HALF_LIFE)  # ends per token

    def observe(self, *, num_tokens: int, num_ends: int) -> None:
        """num_ends: of the tokens, those that ended an answer before its limit."""
        self._ends.observe(num_ends, num_tokens, age=num_ends)

    def expected(self, limit: int) -> float:
        """Return how many tokens of at most `limit` are expected; `limit` until an answer has ended by itself."""
        chance = self._ends.value
        return (1 - (1 - chance) ** limit) / chance if chance else float(limit)


class PrefillPace:
    """Learns the seconds of a round without a chunk, and of a row of a chunk, from the rounds and chunks that ran."""

    def __init__(self) -> None:
        self._round_s = Discounted(_HALF_LIFE)
        self._row_s = Discounted(_HALF_LIFE)

    def observe(self, seconds: float, *, num_chunk_rows: int, has_round: bool) -> None:
        """Record the seconds of a round, of chunks, or of both together. num_chunk_rows: 0 without chunks."""
        if num_chunk_rows == 0:
            self._round_s.observe(seconds)
        else:
            chunk_s = max(seconds - self._round_s.value * has_round, 0.0)
            self._row_s.observe(chunk_s / num_chunk_rows)

    def num_rows(self, most: int) -> int:
        """Return the number of rows of the next chunk, `most` at most."""
        if not self._round_s.value or not self._row_s.value:
            return min(_SMALLEST_CHUNK, most)
        return min(max(int(_CHUNK_PER_ROUND * self._round_s.value / self._row_s.value), _SMALLEST_CHUNK), most)


class Trigger:
    """Requests the first search, and another one when context or batch changed by more than the factor MAX_RATIO, when
    observed acceptance differs from the expectation by more than NUM_ERRORS standard errors, and after
    `patience_tokens` of one sequence. At least `cooldown_tokens` lie between two searches. Each search that leaves the
    decision unchanged doubles both numbers, up to `max_patience_tokens`."""

    cooldown_tokens, patience_tokens, max_patience_tokens = COOLDOWN_TOKENS, TOKENS_HALF_LIFE, MAX_PATIENCE_TOKENS

    def __init__(self) -> None:
        # Context and batch of the last decision (a plan, or no draft), and the acceptance that was expected then.
        self._decided: tuple[float, float, float | None] | None = None
        self._num_unchanged = 0
        self._num_tokens = 0.0
        self._acceptance = Discounted(TOKENS_HALF_LIFE)

    def observe(self, *, num_tokens: float, num_accepted: int = 0, num_tested: int = 0) -> None:
        """Record a round. num_tokens: committed per sequence. num_accepted, num_tested: draft tokens over the batch; a
        token is tested if no token before it in its draft was rejected."""
        self._acceptance.observe(num_accepted, num_tested)
        self._num_tokens += num_tokens

    def planned(self, *, changed: bool, context: float, batch: float, expected_acceptance: float | None = None) -> None:
        """Record the end of a search. changed: the decision. expected_acceptance: of the plan; None for no draft."""
        self._decided = (context, batch, expected_acceptance)
        self._num_unchanged = 0 if changed else self._num_unchanged + 1
        self._num_tokens = 0.0
        self._acceptance = Discounted(TOKENS_HALF_LIFE)

    def reason(self, *, context: float, batch: float) -> str | None:
        """Return why a search is due now; None if no search is due."""
        if self._decided is None:
            return "no plan yet"
        if self._num_tokens < self._backed_off(self.cooldown_tokens):
            return None
        context_then, batch_then, expected = self._decided
        for name, now, then in (("context", context, context_then), ("batch", batch, batch_then)):
            if max(now, then) > MAX_RATIO * max(min(now, then), 1.0):
                return f"{name} has gone from {then:g} to {now:g}"
        if expected is not None and self._acceptance.is_known:
            inside = self._acceptance.with_prior(0.5, 2.0)
            error = math.sqrt(inside * (1 - inside) / self._acceptance.weight)
            if abs(self._acceptance.value - expected) > NUM_ERRORS * error:
                return f"acceptance is {self._acceptance.value:.2f}, not {expected:.2f} as expected"
        if self._num_tokens >= self._backed_off(self.patience_tokens):
            return f"{self._num_tokens:.0f} tokens since the last search"
        return None

    def _backed_off(self, num_tokens: float) -> float:
        return min(num_tokens * 2.0 ** min(self._num_unchanged, 30), self.max_patience_tokens)
