"""Which of several ways the next round takes, by tokens per second as predicted and as measured.

A way is, say, plain decoding, a draft by some plan, or verifying what was looked up. Each round has a prediction for
every way that is open to it. The seconds that a way's tokens should have taken, over the seconds that they took, are
its *factor*, which is learned and fades; so the prediction is a prior, and may differ from round to round.

The round takes the way with the highest expected rate among those that are known. Another way gets a *trial* where it
may well be faster. In a trial, its rounds alternate with those of the best way, so that a machine that becomes slower
is slower for both. What is known of a way that is not taken fades too: so every way gets another trial some day. What
trials lose is bounded by a share of the time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from rayspec.planning.discounted import Discounted

Way: TypeAlias = str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArbiterOptions:
    """half_life: rounds, of any way, after which a round counts half; a trial is no longer. deviation: of the factor,
    as one round shows it. min_rounds: of a trial, before it is judged. max_clip: a round counts as so many times the
    seconds of its way's mean round, at most: a machine's pauses say nothing of the way.
    loss_share: of the time, that trials may lose. first_rounds, first_share, promised_share: what they may lose before
    that is earned: so many rounds, but no more than first_share of all known work, or promised_share of what a way is
    predicted to save of it, if that is more.
    """

    half_life: float = 32.0
    deviation: float = 0.35
    min_rounds: int = 4
    max_clip: float = 3.0
    loss_share: float = 0.0075
    first_rounds: float = 12.0
    first_share: float = 0.005
    promised_share: float = 0.05


class Arbiter:
    """Give predictions to `choose`, take the way that it names, and tell the outcome to `observe`. It keeps no clock.

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
        self._elapsed_s = self._lost_s = 0.0
        self._num_outstanding: float | None = None

    @property
    def trial(self) -> Way | None:
        """The way on trial."""
        return self._trial.way if self._trial is not None else None

    def choose(self, predicted: Mapping[Way, float]) -> Way:
        """predicted: tokens per second of each way that is open to the round, the home way among them."""
        best = self._best(predicted)
        if self._trial is None:
            self.taken = best if best not in self._trusted else self.taken
            challenger = self._challenger(predicted, best)
            self._trial = _Trial(challenger) if challenger is not None else None
        trial = self._trial
        if trial is None or trial.way not in predicted or trial.was_last:
            return best
        return trial.way if self._hope(trial.way, predicted) > self._rate(best, predicted) else best

    def observe(
        self,
        way: Way,
        num_tokens: float,
        seconds: float,
        *,
        predicted: Mapping[Way, float],
        num_outstanding: float | None = None,
    ) -> None:
        """A finished round: tokens committed over the batch, wall seconds, and what was predicted for it.
        num_outstanding: tokens that are known to be wanted after it; None: that is not known."""
        if num_tokens < 0 or seconds <= 0 or min(predicted.values()) <= 0:
            raise ValueError(f"{num_tokens} tokens in {seconds} s with {predicted} tokens/s predicted cannot be")
        self.pass_over(seconds, num_outstanding=num_outstanding)
        expected_s = num_tokens / (predicted[way] * self._pace(way))
        seconds = self._record(way).add(expected_s, seconds, self._options.max_clip)
        if self._trial is not None:
            self._learn_trial(self._trial, way, num_tokens, seconds, predicted)

    def pass_over(self, seconds: float, *, num_outstanding: float | None = None) -> None:
        """A finished round that tells nothing of any way."""
        self._elapsed_s += seconds
        self._num_outstanding = num_outstanding
        for record in self._records.values():
            record.age(1)

    def renew(self, way: Way) -> None:
        """The way has become another one: a new plan. Where it is taken it goes on, and is judged afresh."""
        if self.trial == way:
            self._end_trial()
        if self.taken == way:
            self._record(way).age(self._options.half_life)
        else:
            self._records.pop(way, None)

    def factor(self, way: Way) -> float:
        """What its rounds make of the rates that are predicted for them. A trusted prediction counts as a round: a way
        that seemed slow is not left for good."""
        return self._record(way).factor(prior_rounds=way in self._trusted) * self._pace(way)

    def is_known(self, way: Way) -> bool:
        """Whether it needs no trial."""
        return way in {self._home, self.taken} or way in self._trusted

    def was_tried(self, way: Way) -> bool:
        """Whether there was a round of it, be it long ago."""
        return self._record(way).num_rounds > 0

    def spare_s(self, predicted: Mapping[Way, float]) -> float:
        """Seconds that the trial may still lose."""
        return max(self._allowance_s(self.trial or self._home, predicted) - self._all_lost_s, 0.0)

    @property
    def _all_lost_s(self) -> float:
        return self._lost_s + (max(self._trial.lost_s, 0.0) if self._trial is not None else 0.0)

    def _pace(self, way: Way) -> float:
        """By which the way's own record counts. A machine that is slower than predicted is so for all ways: the others
        are held against the home way, as it is lately."""
        return 1.0 if way == self._home else self._record(self._home).factor()

    def _rate(self, way: Way, predicted: Mapping[Way, float]) -> float:
        return predicted[way] * self.factor(way)

    def _error(self, way: Way, predicted: Mapping[Way, float]) -> float:
        """Standard error of the rate."""
        deviation = self._options.deviation / math.sqrt(self._record(way).num_rounds + 1)
        return predicted[way] * self._pace(way) * deviation

    def _hope(self, way: Way, predicted: Mapping[Way, float]) -> float:
        """The rate that a way may well have, for all that is known: the prediction counts as a round, too."""
        factor = self._record(way).factor(prior_rounds=1) * self._pace(way)
        return predicted[way] * factor + self._error(way, predicted)

    def _best(self, predicted: Mapping[Way, float]) -> Way:
        """Of the ways that are known, and not on trial. Home, if there is no other."""
        known = [way for way in predicted if way != self.trial and self.is_known(way)]
        return max(known, key=lambda way: self._rate(way, predicted), default=self._home)

    def _challenger(self, predicted: Mapping[Way, float], best: Way) -> Way | None:
        """The way with the most to gain by a trial, if there is one, and if a trial may be lost."""
        hopes = {way: self._hope(way, predicted) for way in predicted if not self.is_known(way)}
        way = max(hopes, key=hopes.__getitem__, default=best)
        if way == best or hopes[way] <= self._rate(best, predicted):
            return None
        return way if self._lost_s < self._allowance_s(way, predicted) else None

    def _learn_trial(
        self, trial: _Trial, way: Way, num_tokens: float, seconds: float, predicted: Mapping[Way, float]
    ) -> None:
        trial.was_last = way == trial.way
        if not trial.was_last:
            return
        best = self._best(predicted)
        trial.num_rounds += 1
        trial.lost_s += seconds - num_tokens / self._rate(best, predicted)
        if self._is_over(trial, best, predicted):
            if trial.num_rounds >= self._options.min_rounds and self._rate(way, predicted) > self._rate(
                best, predicted
            ):
                self.taken = way
            self._end_trial()

    def _end_trial(self) -> None:
        self._lost_s, self._trial = self._all_lost_s, None

    def _is_over(self, trial: _Trial, best: Way, predicted: Mapping[Way, float]) -> bool:
        """After a round of the trial. best: of the other ways."""
        if self._all_lost_s + max(trial.lost_s, 0.0) / trial.num_rounds > self._allowance_s(trial.way, predicted):
            return True
        difference = self._rate(trial.way, predicted) - self._rate(best, predicted)
        error = math.hypot(self._error(trial.way, predicted), self._error(best, predicted))
        is_clear = trial.num_rounds >= self._options.min_rounds and abs(difference) > error
        return is_clear or trial.num_rounds >= self._options.half_life

    def _allowance_s(self, way: Way, predicted: Mapping[Way, float]) -> float:
        """What trials of the way may have lost by now: a share of the time, and something to start with."""
        options, home = self._options, self._record(self._home)
        first_s = options.first_rounds * home.round_s
        if self._num_outstanding is not None:
            saved = 1 - predicted[self._home] / predicted[way]
            share = max(options.first_share, options.promised_share * saved)
            known_s = self._elapsed_s + self._num_outstanding / self._rate(self._home, predicted)
            first_s = min(first_s, share * known_s)
        return options.loss_share * self._elapsed_s + first_s

    def _record(self, way: Way) -> _Record:
        return self._records.setdefault(way, _Record(self._options.half_life))


@dataclass(slots=True)
class _Trial:
    way: Way
    num_rounds: int = 0
    lost_s: float = 0.0
    was_last: bool = False


class _Record:
    """A way's rounds, faded: how many, their seconds, and those expected for their tokens."""

    def __init__(self, half_life: float) -> None:
        self._expected_s = Discounted(half_life)
        self._seconds = Discounted(half_life)

    @property
    def num_rounds(self) -> float:
        return self._seconds.weight

    @property
    def round_s(self) -> float:
        """Of a typical round; 0 before there is any."""
        return self._seconds.value

    def factor(self, prior_rounds: int = 0) -> float:
        """1 where there are no rounds. prior_rounds: that were just as expected, beside those that were."""
        prior_s = prior_rounds * self.round_s
        seconds = self._seconds.total + prior_s
        return (self._expected_s.total + prior_s) / seconds if seconds else 1.0

    def add(self, expected_s: float, seconds: float, max_clip: float) -> float:
        """A round. Returns the seconds that it counts as."""
        if self.num_rounds > 0:
            seconds = min(seconds, max_clip * self.round_s)
        self._expected_s.observe(expected_s, age=0)
        self._seconds.observe(seconds, age=0)
        return seconds

    def age(self, rounds: float) -> None:
        self._expected_s.observe(0.0, 0.0, age=rounds)
        self._seconds.observe(0.0, 0.0, age=rounds)
