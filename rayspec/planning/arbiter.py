"""Which of several ways the next round takes, by tokens per second as predicted and as measured.

A way is, say, plain decoding, a draft by some plan, or verifying what was looked up. Each round has a prediction for
every way that is open to it. What rounds of a way made, over what was predicted for them, is learned and fades; so the
prediction is a prior, and may differ from round to round.

The round takes the way with the highest expected rate among those that are known. Another one gets a *trial* where it
may well be faster, for all that is known. In a trial, rounds of both alternate, so that a machine that becomes slower
is slower for both. What is known of a way that is not taken fades too: so every way gets another trial some day, one
that was much slower much later. What trials lose is bounded by a share of the time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

Way: TypeAlias = str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArbiterOptions:
    """All are numbers without a unit.

    half_life: rounds, of any way, after which a round counts half. prior_rounds: as how many a prediction counts.
    variance: of one round's tokens over those predicted, before there are any, and as if there were `variance_rounds`.
    max_clip: rounds count as this many times their way's mean, at most: tails are heavy and say nothing about the way.
    min_rounds: after which a way is known. max_trial_rounds: after which the better mean decides. hysteresis: by how
    much another way must be faster. lost_errors, won_errors: standard errors of the difference that end a trial.
    loss_share: of the time, that trials may lose. first_rounds, first_share, promised_share: what they may lose before
    that is earned: so many rounds, but no more than this share of all known work, or this share of what a way promises
    to save of it, if that is more.
    """

    half_life: float = 40.0
    prior_rounds: float = 1.0
    variance: float = 0.2
    variance_rounds: float = 8.0
    max_clip: float = 3.0
    min_rounds: float = 4.0
    max_trial_rounds: int = 32
    hysteresis: float = 0.03
    lost_errors: float = 0.7
    won_errors: float = 1.5
    loss_share: float = 0.0075
    first_rounds: float = 12.0
    first_share: float = 0.01
    promised_share: float = 0.08


class Arbiter:
    """Say what is predicted, take the way that `choose` names, and tell the outcome to `observe`. It keeps no clock.

    home: the way that needs no trial, because everything falls back to it.
    """

    def __init__(self, home: Way, *, trusted: Collection[Way] = (), options: ArbiterOptions | None = None) -> None:
        """trusted: ways that need no trial either, as their predictions are made of what rounds of all ways showed."""
        self._home = home
        self._trusted = frozenset(trusted)
        self._options = options or ArbiterOptions()
        self._records: dict[Way, _Record] = {}
        self.taken = home  # by the last round that was no trial
        self._trial: _Trial | None = None
        self._price_s: dict[Way, float] = {}  # of a trial, by what the last one lost
        self._elapsed_s = self._lost_s = self._round_s = 0.0
        self._num_outstanding: float | None = None

    @property
    def trial(self) -> Way | None:
        """The way on trial."""
        return self._trial.way if self._trial is not None else None

    def choose(self, predicted: Mapping[Way, float]) -> Way:
        """predicted: tokens per second of each way that is open to the round, the home way among them."""
        if self._trial is not None and self._trial.way in predicted:
            return self._best(predicted, without=self._trial.way) if self._trial.was_last else self._trial.way
        best = self.taken = self._best(predicted)
        challenger = self._challenger(predicted, best)
        if challenger is None:
            return best
        self._trial = _Trial(challenger)
        return challenger

    def observe(
        self,
        way: Way,
        num_tokens: float,
        seconds: float,
        *,
        predicted: Mapping[Way, float],
        num_outstanding: float | None = None,
    ) -> None:
        """A finished round: tokens committed over the batch, wall seconds, and what was predicted for it. num_
        outstanding: tokens that are known to be wanted after it; None: that is not known."""
        if num_tokens < 0 or seconds <= 0 or min(predicted.values()) <= 0:
            raise ValueError(f"{num_tokens} tokens in {seconds} s with {predicted} tokens/s predicted cannot be")
        self._pass(seconds, num_outstanding)
        record = self._record(way)
        seconds = record.add(num_tokens, predicted[way] * seconds) / predicted[way]
        self._round_s += 0.1 * (seconds - self._round_s) if self._round_s else seconds
        if self._trial is not None:
            self._learn_trial(self._trial, way, num_tokens, seconds, predicted)

    def pass_over(self, seconds: float, *, num_outstanding: float | None = None) -> None:
        """A finished round that tells nothing of any way."""
        self._pass(seconds, num_outstanding)

    def renew(self, way: Way) -> None:
        """The way has become another one: a new plan. Where it is taken it goes on, and is judged afresh."""
        self._price_s.pop(way, None)
        if self._trial is not None and self._trial.way == way:
            self._trial = None
        if self.taken == way:
            self._record(way).fade_to(self._options.min_rounds)
        else:
            self._records.pop(way, None)

    def close(self, way: Way) -> None:
        """The way is no longer there."""
        self._records.pop(way, None)
        if self._trial is not None and self._trial.way == way:
            self._trial = None
        if self.taken == way:
            self.taken = self._home

    def factor(self, way: Way) -> float:
        """What its rounds made over what was predicted for them. A machine that is slower than predicted is so for all
        ways: what the home way makes of its predictions is the prior of the others."""
        return self._record(way).mean(1.0 if way == self._home else self.factor(self._home))

    def _error(self, way: Way) -> float:
        """Standard error of the factor."""
        return self._record(way).error(self.factor(way), self.factor(self._home))

    def is_known(self, way: Way) -> bool:
        is_taken = way in {self._home, self.taken} or way in self._trusted
        return is_taken or self._record(way).num_rounds >= self._options.min_rounds

    def was_tried(self, way: Way) -> bool:
        """Whether there was a round of it, be it long ago."""
        return self._record(way).num_rounds > 0

    def spare_s(self, predicted: Mapping[Way, float]) -> float:
        """Seconds that the trial may still lose."""
        lost_s = self._lost_s + (max(self._trial.lost_s, 0.0) if self._trial is not None else 0.0)
        return max(self._allowance_s(self.trial or self._home, predicted) - lost_s, 0.0)

    def _pass(self, seconds: float, num_outstanding: float | None) -> None:
        self._elapsed_s += seconds
        self._num_outstanding = num_outstanding
        fade = 0.5 ** (1 / self._options.half_life)
        for record in self._records.values():
            record.fade(fade)

    def _best(self, predicted: Mapping[Way, float], *, without: Way | None = None) -> Way:
        """Of the ways that are known; the one taken last has an advantage. Home, if there is no other."""

        def rate(way: Way) -> float:
            bonus = 1 + self._options.hysteresis if way == self.taken else 1.0
            return predicted[way] * self.factor(way) * bonus

        known = [way for way in predicted if way != without and self.is_known(way)]
        return max(known, key=rate, default=self._home)

    def _challenger(self, predicted: Mapping[Way, float], best: Way) -> Way | None:
        """The way with the most to gain by a trial, if there is one, and if a trial may be lost."""
        aim = predicted[best] * self.factor(best) * (1 + self._options.hysteresis)
        hopes = {
            way: predicted[way] * (self.factor(way) + self._options.lost_errors * self._error(way)) for way in predicted
        }
        others = [way for way in predicted if way != best and way not in self._trusted and hopes[way] > aim]
        if not others:
            return None
        way = max(others, key=hopes.__getitem__)
        return way if self._lost_s + self._price_s.get(way, 0.0) < self._allowance_s(way, predicted) else None

    def _learn_trial(
        self, trial: _Trial, way: Way, num_tokens: float, seconds: float, predicted: Mapping[Way, float]
    ) -> None:
        trial.was_last = way == trial.way
        if not trial.was_last:
            return
        best = self._best(predicted, without=trial.way)
        trial.num_rounds += 1
        trial.lost_s += seconds - num_tokens / (predicted[best] * self.factor(best))
        if self._is_over(trial, best, predicted):
            lost_s = max(trial.lost_s, 0.0)
            self._lost_s += lost_s
            self._price_s[way] = lost_s / trial.num_rounds * self._options.min_rounds
            self._trial = None

    def _is_over(self, trial: _Trial, best: Way, predicted: Mapping[Way, float]) -> bool:
        """After a round of the trial. best: of the other ways."""
        options, way = self._options, trial.way
        rate, aim = predicted[way], predicted[best]
        difference = rate * self.factor(way) - aim * self.factor(best) * (1 + options.hysteresis)
        error = math.hypot(rate * self._error(way), aim * self._error(best))
        spent = self._lost_s + max(trial.lost_s, 0.0) * (1 + 1 / trial.num_rounds)
        if spent > self._allowance_s(way, predicted):
            self._record(way).know(options.min_rounds)
            return True
        if trial.num_rounds < options.min_rounds:
            return False
        is_clear = difference < -options.lost_errors * error or difference > options.won_errors * error
        return is_clear or trial.num_rounds >= options.max_trial_rounds

    def _allowance_s(self, way: Way, predicted: Mapping[Way, float]) -> float:
        """What trials of the way may have lost by now: a share of the time, and something to start with."""
        options = self._options
        first_s = options.first_rounds * self._round_s
        if self._num_outstanding is not None:
            saved = 1 - predicted[self._home] / predicted[way]
            share = max(options.first_share, options.promised_share * saved)
            home_rate = predicted[self._home] * self.factor(self._home)
            first_s = min(first_s, share * (self._elapsed_s + self._num_outstanding / home_rate))
        return options.loss_share * self._elapsed_s + first_s

    def _record(self, way: Way) -> _Record:
        if way not in self._records:
            self._records[way] = _Record(self._options, 0.0 if way == self._home else self._options.prior_rounds)
        return self._records[way]


@dataclass(slots=True)
class _Trial:
    way: Way
    num_rounds: int = 0
    lost_s: float = 0.0
    was_last: bool = False


class _Record:
    """Tokens of a way's rounds over those predicted, faded; a prediction counts as some rounds."""

    def __init__(self, options: ArbiterOptions, prior_rounds: float) -> None:
        self._options = options
        self._prior_rounds = prior_rounds
        self.num_rounds = 0.0
        self._made = self._expected = 0.0
        self._squares = (0.0, 0.0, 0.0)  # of made, made times expected, expected

    @property
    def _typical(self) -> float:
        """Tokens expected of a round."""
        return self._expected / self.num_rounds if self.num_rounds else 1.0

    def mean(self, prior: float) -> float:
        """Tokens made over those expected. prior: that before anything was seen."""
        tokens = self._prior_rounds * self._typical
        return (self._made + prior * tokens) / (self._expected + tokens) if self._expected + tokens else prior

    def error(self, mean: float, prior: float) -> float:
        """Standard error of the mean."""
        options = self._options
        of_made, of_both, of_expected = self._squares
        residual = max(of_made - 2 * mean * of_both + mean**2 * of_expected, 0.0) / self._typical**2
        variance = (residual + options.variance_rounds * options.variance * prior**2) / (
            self.num_rounds + options.variance_rounds
        )
        return math.sqrt(variance / (self.num_rounds + options.prior_rounds))

    def add(self, made: float, expected: float) -> float:
        """A round. Returns what it counts as expected."""
        if self.num_rounds > 0:
            expected = min(expected, self._options.max_clip * self._expected / self.num_rounds)
        self.num_rounds += 1
        self._made += made
        self._expected += expected
        self._squares = tuple(  # type: ignore[assignment]
            total + more for total, more in zip(self._squares, (made * made, made * expected, expected**2), strict=True)
        )
        return expected

    def fade(self, factor: float) -> None:
        self.num_rounds *= factor
        self._made *= factor
        self._expected *= factor
        self._squares = tuple(total * factor for total in self._squares)  # type: ignore[assignment]

    def fade_to(self, num_rounds: float) -> None:
        if self.num_rounds > num_rounds:
            self.fade(num_rounds / self.num_rounds)

    def know(self, num_rounds: float) -> None:
        """Count what was seen as so many rounds, if it is less."""
        if 0 < self.num_rounds < num_rounds:
            self.fade(num_rounds / self.num_rounds)
