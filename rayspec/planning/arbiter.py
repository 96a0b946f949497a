"""The arbiter: it chooses the way of decoding for each round, by predicted and measured tokens per second.

A *way* is plain decoding, drafting by a plan, or verifying looked-up tokens, for example. Each round brings a predicted
rate for every way that is available to it. A way's *factor* is the seconds that its tokens should have taken, divided
by the seconds that they took. The factor is learned from rounds, and old rounds fade. A predicted rate times the factor
is the expected rate; so predictions serve as priors, and may differ from round to round.

The round takes the way with the highest expected rate among the known ways. Another way gets a *trial* where it has a
fair chance to be faster. In a trial, its rounds alternate with those of the best way, so that a slowdown of the machine
affects both. The record of a way that is not taken fades too, so every way gets another trial eventually. The time lost
in trials is bounded by a share of the total time.
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
    """half_life: number of rounds, of any way, after which a round counts half; also the most rounds of a trial.
    deviation: standard deviation of the factor of a single round. min_rounds: rounds of a trial before it is judged.
    max_clip: a round counts as at most this many times its way's mean round; longer times are pauses of the machine.
    loss_share: share of the time that trials may lose. first_rounds, first_share, saving_share: what trials may lose
    in addition, from the start: the time of first_rounds rounds, but at most a share of all known work. This share is
    first_share, or saving_share times the share of the time that the way is predicted to save, if that is more.
    """

    half_life: float = 32.0
    deviation: float = 0.35
    min_rounds: int = 4
    max_clip: float = 3.0
    loss_share: float = 0.0075
    first_rounds: float = 12.0
    first_share: float = 0.005
    saving_share: float = 0.05


class Arbiter:
    """Chooses a way for each round. The caller gives predictions to `choose`, takes the way that `choose` returns, and
    reports the outcome to `observe`. The arbiter reads no clock.

    home: the way to which all rounds fall back; it needs no trial.
    """

    def __init__(self, home: Way, *, trusted: Collection[Way] = (), options: ArbiterOptions | None = None) -> None:
        """trusted: other ways that need no trial, because their predictions are learned from rounds of all ways."""
        self._home = home
        self._trusted = frozenset(trusted)
        self._options = options or ArbiterOptions()
        self._records: dict[Way, _Record] = {}
        self.taken = home  # the way in use, trusted ways aside
        self._trial: _Trial | None = None
        self._elapsed_s = self._lost_s = 0.0
        self._num_outstanding: float | None = None

    @property
    def trial(self) -> Way | None:
        """The way that a trial is testing; None without a trial."""
        return self._trial.way if self._trial is not None else None

    def choose(self, predicted: Mapping[Way, float]) -> Way:
        """Return the way for the next round.

        predicted: tokens per second of each way that is available to the round, the home way included.
        """
        best = self._best(predicted)
        if self._trial is None:
            self.taken = best if best not in self._trusted else self.taken
            challenger = self._challenger(predicted, best)
            self._trial = _Trial(challenger) if challenger is not None else None
        trial = self._trial
        if trial is None or trial.way not in predicted or trial.was_last:
            return best
        return trial.way if self._optimistic_rate(trial.way, predicted) > self._rate(best, predicted) else best

    def observe(
        self,
        way: Way,
        num_tokens: float,
        seconds: float,
        *,
        predicted: Mapping[Way, float],
        predicted_now: float | None = None,
        num_outstanding: float | None = None,
    ) -> None:
        """Record a finished round: tokens committed over the batch, wall seconds, and the rates predicted for it.

        predicted_now: rate predicted for this round, if the round differs from the usual rounds of the way.
        num_outstanding: tokens still to be generated after the round; None: unknown. Raises ValueError for a negative
        number of tokens, and for times or rates that are not above 0.
        """
        rate = predicted[way] if predicted_now is None else predicted_now
        if num_tokens < 0 or seconds <= 0 or min(rate, *predicted.values()) <= 0:
            raise ValueError(f"{num_tokens} tokens in {seconds} s with {predicted} tokens/s predicted cannot be")
        self.pass_over(seconds, num_outstanding=num_outstanding)
        expected_s = num_tokens / (rate * self._pace(way))
        seconds = self._record(way).add(expected_s, seconds, self._options.max_clip)
        if self._trial is not None:
            self._learn_trial(self._trial, way, num_tokens, seconds, predicted)

    def pass_over(self, seconds: float, *, num_outstanding: float | None = None) -> None:
        """Record the time of a finished round that says nothing about the speed of any way."""
        self._elapsed_s += seconds
        self._num_outstanding = num_outstanding
        for record in self._records.values():
            record.age(1)

    def renew(self, way: Way) -> None:
        """Forget what was learned about a way whose plan has changed, and end its trial. A way in use stays in use; its
        record fades by one half-life only."""
        if self.trial == way:
            self._end_trial()
        if self.taken == way:
            self._record(way).age(self._options.half_life)
        else:
            self._records.pop(way, None)

    def factor(self, way: Way) -> float:
        """Return the measured over the predicted rate of a way. For a trusted way the prediction counts as one more
        round, so that a way that seemed slow is not abandoned forever."""
        return self._record(way).factor(prior_rounds=way in self._trusted) * self._pace(way)

    def is_known(self, way: Way) -> bool:
        """Whether the way needs no trial: it is home, in use, or trusted."""
        return way in {self._home, self.taken} or way in self._trusted

    def was_tried(self, way: Way) -> bool:
        """Whether any round of the way is on record, however long ago."""
        return self._record(way).num_rounds > 0

    def remaining_loss_s(self, predicted: Mapping[Way, float]) -> float:
        """Return the seconds that the current trial may still lose."""
        return max(self._allowance_s(self.trial or self._home, predicted) - self._all_lost_s, 0.0)

    @property
    def _all_lost_s(self) -> float:
        return self._lost_s + (max(self._trial.lost_s, 0.0) if self._trial is not None else 0.0)

    def _pace(self, way: Way) -> float:
        """Return the recent factor of the home way, which scales the other ways; 1 for the home way itself. A machine
        that is slower than predicted is slower for all ways."""
        return 1.0 if way == self._home else self._record(self._home).factor()

    def _rate(self, way: Way, predicted: Mapping[Way, float]) -> float:
        return predicted[way] * self.factor(way)

    def _error(self, way: Way, predicted: Mapping[Way, float]) -> float:
        """Return the standard error of the expected rate."""
        deviation = self._options.deviation / math.sqrt(self._record(way).num_rounds + 1)
        return predicted[way] * self._pace(way) * deviation

    def _optimistic_rate(self, way: Way, predicted: Mapping[Way, float]) -> float:
        """Return an optimistic rate of a way: the expected rate plus one standard error. The prediction counts as one
        more round."""
        factor = self._record(way).factor(prior_rounds=1) * self._pace(way)
        return predicted[way] * factor + self._error(way, predicted)

    def _best(self, predicted: Mapping[Way, float]) -> Way:
        """Return the way with the highest expected rate among the known ways that no trial is testing; else home."""
        known = [way for way in predicted if way != self.trial and self.is_known(way)]
        return max(known, key=lambda way: self._rate(way, predicted), default=self._home)

    def _challenger(self, predicted: Mapping[Way, float], best: Way) -> Way | None:
        """Return the way with the highest optimistic rate, if that beats `best` and trials may lose more time."""
        rates = {way: self._optimistic_rate(way, predicted) for way in predicted if not self.is_known(way)}
        way = max(rates, key=rates.__getitem__, default=best)
        if way == best or rates[way] <= self._rate(best, predicted):
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
        """Whether the trial ends after a round of it: its loss, its clear result or its length is enough.

        best: the best of the other ways.
        """
        if self._all_lost_s + max(trial.lost_s, 0.0) / trial.num_rounds > self._allowance_s(trial.way, predicted):
            return True
        difference = self._rate(trial.way, predicted) - self._rate(best, predicted)
        error = math.hypot(self._error(trial.way, predicted), self._error(best, predicted))
        is_clear = trial.num_rounds >= self._options.min_rounds and abs(difference) > error
        return is_clear or trial.num_rounds >= self._options.half_life

    def _allowance_s(self, way: Way, predicted: Mapping[Way, float]) -> float:
        """Return the seconds that all trials so far may have lost before the way is tried: `loss_share` of the elapsed
        time plus an initial amount."""
        options, home = self._options, self._record(self._home)
        first_s = options.first_rounds * home.round_s
        if self._num_outstanding is not None:
            saved = 1 - predicted[self._home] / predicted[way]
            share = max(options.first_share, options.saving_share * saved)
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
    """Faded sums over a way's rounds: their number, their seconds, and the seconds that were expected."""

    def __init__(self, half_life: float) -> None:
        self._expected_s = Discounted(half_life)
        self._seconds = Discounted(half_life)

    @property
    def num_rounds(self) -> float:
        return self._seconds.weight

    @property
    def round_s(self) -> float:
        """Mean seconds of a round; 0 before the first round."""
        return self._seconds.value

    def factor(self, prior_rounds: int = 0) -> float:
        """Return expected over measured seconds; 1 without rounds. prior_rounds: rounds exactly as expected to add."""
        prior_s = prior_rounds * self.round_s
        seconds = self._seconds.total + prior_s
        return (self._expected_s.total + prior_s) / seconds if seconds else 1.0

    def add(self, expected_s: float, seconds: float, max_clip: float) -> float:
        """Add a round and return the seconds that it counts as, after clipping."""
        if self.num_rounds > 0:
            seconds = min(seconds, max_clip * self.round_s)
        self._expected_s.observe(expected_s, age=0)
        self._seconds.observe(seconds, age=0)
        return seconds

    def age(self, rounds: float) -> None:
        self._expected_s.observe(0.0, 0.0, age=rounds)
        self._seconds.observe(0.0, 0.0, age=rounds)
