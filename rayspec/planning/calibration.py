"""How observed acceptance relates to its estimate and to the draft's confidence, learned while drafts are in use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rayspec.planning.constants import PRIOR_TOKENS, TOKENS_HALF_LIFE
from rayspec.planning.discounted import Discounted

Floats = NDArray[np.float64]

_NUM_BINS = 16
EXTREME = 1e-6  # probabilities are kept this far from 0 and 1 where logits are taken


class Correction:
    """One offset, in logits, between estimated and observed acceptance; it applies to every candidate's estimate.

    A drafted token is tested only if no token before it was rejected; untested tokens do not count. Old tokens fade.
    PRIOR_TOKENS virtual tokens keep the offset near `prior_offset` at first.
    """

    def __init__(self, *, prior_offset: float = 0.0) -> None:
        self._prior_offset = prior_offset
        self._accepted = Discounted(TOKENS_HALF_LIFE)
        self._expected = Discounted(TOKENS_HALF_LIFE)

    def observe(self, estimated: float, *, num_accepted: int, num_tested: int) -> None:
        """Record tested tokens of a plan. estimated: its acceptance before correction. Raises ValueError unless
        0 <= num_accepted <= num_tested."""
        if not 0 <= num_accepted <= num_tested:
            raise ValueError(f"{num_accepted} of {num_tested} tokens accepted cannot be")
        self._accepted.observe(num_accepted, num_tested)
        self._expected.observe(num_tested * estimated, num_tested)

    @property
    def offset(self) -> float:
        """Logits to add to an estimate; `prior_offset` before the first observation."""
        if not self._expected.is_known:
            return self._prior_offset
        expected = self._expected.value
        believed = 1 / (1 + np.exp(-_logit(expected) - self._prior_offset))
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
    """Acceptance of a draft token, given its confidence (the draft's top-1 probability).

    The estimate is the confidence plus the observed difference, kept in bins of confidence and interpolated between
    them. Bins are narrow near 1, where most tokens are. In each bin, PRIOR_TOKENS virtual tokens count for a difference
    of 0. Old tokens fade.
    """

    def __init__(self) -> None:
        self._edges = 1.0 - np.linspace(1.0, 0.0, _NUM_BINS + 1) ** 2
        self._excess = [Discounted(TOKENS_HALF_LIFE, strength=PRIOR_TOKENS) for _ in range(_NUM_BINS)]

    def observe(self, confidence: ArrayLike, accepted: ArrayLike) -> None:
        """Record tested tokens: those of a draft up to and including its first rejected token.

        confidence, accepted: [num_tested]. Raises ValueError for unequal shapes and for confidences outside 0 to 1.
        """
        values, hits = np.atleast_1d(np.asarray(confidence, float)), np.atleast_1d(np.asarray(accepted, bool))
        if values.shape != hits.shape or not ((values >= 0) & (values <= 1)).all():
            raise ValueError("need as many confidences, between 0 and 1, as outcomes")
        bins = np.searchsorted(self._edges[1:-1], values, side="right")
        counts, sums = np.bincount(bins, minlength=_NUM_BINS), np.bincount(bins, hits - values, _NUM_BINS)
        for excess, total, count in zip(self._excess, sums.tolist(), counts.tolist(), strict=True):
            excess.observe(total, count)

    @property
    def curve(self) -> CalibrationCurve:
        """The correction learned so far; at first, acceptance equals confidence."""
        middles = (self._edges[1:] + self._edges[:-1]) / 2
        return CalibrationCurve(tuple(middles.tolist()), tuple(excess.value for excess in self._excess))


def _logit(probability: float) -> float:
    inside = min(max(probability, EXTREME), 1 - EXTREME)
    return float(np.log(inside) - np.log1p(-inside))
