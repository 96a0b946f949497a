"""Learning, in use, how acceptance relates to what was estimated and to how confident the draft is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

EXTREME = 1e-6  # probabilities are kept this far from 0 and 1 where logits are taken


class Correction:
    """One offset, in logits, between estimated and observed acceptance; applied to every candidate's estimate.

    Of the tokens drafted, only those up to the first rejected one were tested; what follows it says nothing. Old tokens
    fade with a half-life; `strength` tokens of faith keep the offset near `prior_offset` at first.
    """

    def __init__(self, *, half_life_tokens: float = 512.0, strength: float = 32.0, prior_offset: float = 0.0) -> None:
        if half_life_tokens <= 0 or strength <= 0:
            raise ValueError(f"half_life_tokens ({half_life_tokens}) and strength ({strength}) must be above 0")
        self._half_life_tokens = half_life_tokens
        self._strength = strength
        self._prior_offset = prior_offset
        self._num_tested = 0.0
        self._num_accepted = 0.0
        self._num_expected = 0.0

    def observe(self, estimated: float, *, num_accepted: int, num_tested: int) -> None:
        """Some rounds of a plan whose acceptance was estimated, before correction, as `estimated`."""
        _check_counts(num_accepted, num_tested)
        fade = 0.5 ** (num_tested / self._half_life_tokens)
        self._num_tested = self._num_tested * fade + num_tested
        self._num_accepted = self._num_accepted * fade + num_accepted
        self._num_expected = self._num_expected * fade + num_tested * estimated

    @property
    def offset(self) -> float:
        """Logits to add. `prior_offset` until something was observed."""
        if self._num_tested == 0:
            return self._prior_offset
        expected = self._num_expected / self._num_tested
        believed = 1 / (1 + np.exp(-_logit(expected) - self._prior_offset))
        observed = (self._num_accepted + self._strength * believed) / (self._num_tested + self._strength)
        return float(_logit(observed) - _logit(expected))

    def apply(self, acceptance: ArrayLike) -> Floats:
        """Estimates, corrected; same shape. 0 and 1 stay what they are."""
        a = np.asarray(acceptance, float)
        odds = np.exp(self.offset)
        return np.asarray(np.where(a == 1, 1.0, a * odds / (a * odds + 1 - a)))


@dataclass(frozen=True, slots=True)
class CalibrationCurve:
    """By how much acceptance exceeds confidence, at some confidences by rising order; linear between them."""

    confidence: tuple[float, ...]
    excess: tuple[float, ...]

    def acceptance(self, confidence: ArrayLike) -> Floats:
        """Same shape, between 0 and 1."""
        values = np.asarray(confidence, float)
        return np.asarray(np.clip(values + np.interp(values, self.confidence, self.excess), 0.0, 1.0))


class Calibration:
    """Acceptance of a draft token, given its confidence (the draft's top-1 probability).

    The confidence itself, plus what bins of it were observed to be off by, interpolated between bins. Bins are narrow
    near 1, where most tokens are. `strength` tokens a bin of faith in the confidence; old tokens fade.
    """

    def __init__(self, *, num_bins: int = 16, half_life_tokens: float = 1024.0, strength: float = 16.0) -> None:
        if num_bins < 2 or half_life_tokens <= 0 or strength <= 0:
            raise ValueError("num_bins must be 2 or more, half_life_tokens and strength above 0")
        self._edges = 1.0 - np.linspace(1.0, 0.0, num_bins + 1) ** 2
        self._half_life_tokens = half_life_tokens
        self._strength = strength
        self._num_tested = np.zeros(num_bins)
        self._num_accepted = np.zeros(num_bins)
        self._sum_confidence = np.zeros(num_bins)

    def observe(self, confidence: ArrayLike, accepted: ArrayLike) -> None:
        """[num_tested] each: tokens that were tested, that is, up to and with the first rejected one of a draft."""
        values, hits = np.atleast_1d(np.asarray(confidence, float)), np.atleast_1d(np.asarray(accepted, bool))
        if values.shape != hits.shape or not ((values >= 0) & (values <= 1)).all():
            raise ValueError("need as many confidences, between 0 and 1, as outcomes")
        num_bins = len(self._num_tested)
        bins = np.searchsorted(self._edges[1:-1], values, side="right")
        counts = np.bincount(bins, minlength=num_bins)
        fade = 0.5 ** (counts / self._half_life_tokens)
        self._num_tested = self._num_tested * fade + counts
        self._num_accepted = self._num_accepted * fade + np.bincount(bins, hits, num_bins)
        self._sum_confidence = self._sum_confidence * fade + np.bincount(bins, values, num_bins)

    def acceptance(self, confidence: ArrayLike) -> Floats:
        """Same shape, between 0 and 1. Before any observation: the confidence itself."""
        return self.curve.acceptance(confidence)

    @property
    def curve(self) -> CalibrationCurve:
        """What has been learned so far."""
        excess = (self._num_accepted - self._sum_confidence) / (self._num_tested + self._strength)
        middles = (self._edges[1:] + self._edges[:-1]) / 2
        return CalibrationCurve(tuple(middles.tolist()), tuple(excess.tolist()))


def _check_counts(num_accepted: int, num_tested: int) -> None:
    if not 0 <= num_accepted <= num_tested:
        raise ValueError(f"{num_accepted} of {num_tested} tokens accepted cannot be")


def _logit(probability: float) -> float:
    inside = min(max(probability, EXTREME), 1 - EXTREME)
    return float(np.log(inside) - np.log1p(-inside))
