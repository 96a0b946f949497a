"""Whether to draft at all, by tokens per second as measured with and without.

Most rounds run the mode that is known to be faster (the incumbent). Now and then a burst of rounds probes the other,
and what those bursts cost is bounded: they are short when the probe clearly loses, rarer each time it does, and
together they lose no more than a share of the time, to begin with of the time that the known work will take.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Mode = Literal["draft", "plain"]

CLIP = 3.0  # seconds of a round count up to this many medians: tails are heavy, and say nothing about the mode
LOOK_EVERY = 8  # rounds between looks at the incumbent's own rate
CHANGE_ROUNDS, CHANGE_ERRORS = 32, 4.0  # a change is when this many rounds differ by this many errors from those before
FIRST_TRIALS = 12  # rounds' worth of time that probes may cost before they have earned it,
FIRST_SHARE = 0.01  # and at most this share of the time that all known work takes,
PROMISED_SHARE = 0.08  # or this one of the time that the plan promises to save, if that is more
TYPICAL_ROUNDS = 4  # what a round took in the last probe counts as this many, where it is decided what an outlier is
PRIOR_ROUNDS = 8  # what is known of a mode's spread counts as this many rounds
PROBE_EVERY, MAX_PROBE_EVERY = 64, 256  # rounds between probes; doubled after each that changes nothing
BURST, MIN_BURST = 32, 4  # most and fewest rounds of a probe; a new plan's first trial takes twice the fewest
WINDOW = 96  # rounds by which the incumbent is judged
HYSTERESIS = 0.03  # by how much the other mode must be faster to take over
MAX_LOSS_SHARE = 0.0075  # of all time, that probes may cost
WINNING_ERRORS, LOSING_ERRORS = 2.0, 1.0  # standard errors of a difference that end a probe early


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rate:
    """Tokens per second, its standard error, and the relative variance of one round."""

    mean: float
    error: float
    variance: float

    def clearly_below(self, other: _Rate, num_errors: float) -> bool:
        return self.mean + num_errors * math.hypot(self.error, other.error) < other.mean

    def clearly_above(self, other: _Rate, num_errors: float) -> bool:
        return other.clearly_below(self, num_errors)


class _Rounds:
    """The last rounds of one mode."""

    def __init__(self, length: int, prior_variance: float, typical_s: float | None = None) -> None:
        self._rounds: deque[tuple[float, float]] = deque(maxlen=length)
        self._prior_variance = prior_variance
        self._typical_s = typical_s

    def __len__(self) -> int:
        return len(self._rounds)

    def add(self, num_tokens: float, seconds: float) -> None:
        self._rounds.append((num_tokens, seconds))

    def extend(self, rounds: _Rounds) -> None:
        self._rounds.extend(rounds._rounds)

    def forget_before_change(self, num_recent: int, num_errors: float) -> None:
        """Drops all but the last `num_recent` rounds where these are clearly faster or slower than those before."""
        if len(self) < 2 * num_recent:
            return
        older, newer = (_Rounds(len(self), self._prior_variance) for _ in range(2))
        for k, (num_tokens, seconds) in enumerate(self._rounds):
            (newer if k >= len(self) - num_recent else older).add(num_tokens, seconds)
        before, now = older.rate(), newer.rate()
        if now.clearly_below(before, num_errors) or now.clearly_above(before, num_errors):
            self._rounds = deque(newer._rounds, maxlen=self._rounds.maxlen)

    @property
    def median_s(self) -> float:
        return float(np.median([seconds for _, seconds in self._rounds]))

    def loss_s(self, rate: float) -> float:
        """Seconds that these rounds took longer than their tokens take at `rate`; negative if they were faster."""
        tokens, seconds = self._clipped()
        return float(seconds.sum() - tokens.sum() / rate) if rate > 0 else 0.0

    def rate(self) -> _Rate:
        """Ratio of the sums, not mean of the ratios, since rounds differ in length; and the error of that.

        The spread of a few rounds is itself uncertain, so `prior_variance` stands in for more of them.
        """
        tokens, seconds = self._clipped()
        mean = float(tokens.sum() / seconds.sum())
        if mean == 0:
            return _Rate(mean=0.0, error=0.0, variance=self._prior_variance)
        squares = float(np.sum((tokens / (mean * seconds.mean()) - seconds / seconds.mean()) ** 2))
        variance = (squares + PRIOR_ROUNDS * self._prior_variance) / (len(tokens) + PRIOR_ROUNDS)
        return _Rate(mean=mean, error=mean * math.sqrt(variance / len(tokens)), variance=variance)

    def _clipped(self) -> tuple[Floats, Floats]:
        tokens, seconds = np.asarray(self._rounds, float).T
        known = [] if self._typical_s is None else [self._typical_s] * TYPICAL_ROUNDS
        return tokens, np.minimum(seconds, CLIP * np.median([*seconds.tolist(), *known]))


class Gate:
    """Says which mode the next round should use. Feed it every round; it keeps no clock."""

    def __init__(self) -> None:
        self._may_draft = False
        self._incumbent: Mode = "plain"
        self._variance: dict[Mode, float] = {"draft": 0.25, "plain": 0.01}  # of one round; learned from probes
        self._typical_s: dict[Mode, float] = {}  # of one round, in the last probe
        self._recent = self._rounds("plain", WINDOW)  # of the incumbent
        self._rival: _Rate | None = None  # the other mode, when last probed
        self._probe: _Rounds | None = None
        self._probe_min = MIN_BURST
        self._interval = PROBE_EVERY
        self._rounds_to_probe = 0
        self._elapsed_s = 0.0
        self._lost_s = 0.0
        self._num_outstanding: int | None = None  # tokens; None: what is to come is not known
        self._predicted_gain = 1.0
        self._reason: str | None = None  # as told last; None: something has changed since

    def choose(self) -> Mode:
        """The mode of the next round. Changes nothing."""
        return self._incumbent if self._probe is None else _other(self._incumbent)

    def observe(
        self,
        mode: Mode,
        num_tokens: int,
        seconds: float,
        *,
        reference_rate: float = 1.0,
        num_outstanding_tokens: int | None = None,
    ) -> None:
        """A finished round: tokens committed over the batch, wall seconds.

        reference_rate: tokens per second that plain decoding should make of this batch and context by the latency
        model. With it, rounds are compared relative to that, so that a batch that shrinks between two probes is not
        taken for a mode that has become slower. Leave it out, always, if there is no model.

        num_outstanding_tokens: what is known to be wanted after it; where that is little, first trials are cheap.
        """
        if num_tokens < 0 or seconds <= 0 or reference_rate <= 0:
            raise ValueError(
                f"{num_tokens} tokens in {seconds} s at a reference of {reference_rate} tokens/s cannot be"
            )
        relative_s = seconds * reference_rate
        self._elapsed_s += relative_s
        self._num_outstanding = num_outstanding_tokens
        if self._probe is not None and mode != self._incumbent:
            self._observe_probe(self._probe, num_tokens, relative_s)
        elif mode == self._incumbent:
            self._recent.add(num_tokens, relative_s)
            self._rounds_to_probe -= 1
            if self._rounds_to_probe % LOOK_EVERY == 0:
                self._reason = None
                self._recent.forget_before_change(CHANGE_ROUNDS, CHANGE_ERRORS)
            self._begin_due_probe()

    def pass_over(self, seconds: float, *, reference_rate: float = 1.0, num_outstanding_tokens: int | None) -> None:
        """A finished round that was of neither mode: time goes by, and the next probe comes nearer."""
        self._elapsed_s += seconds * reference_rate
        self._num_outstanding = num_outstanding_tokens
        self._rounds_to_probe -= 1
        self._begin_due_probe()

    def new_plan(self, predicted_gain: float) -> None:
        """A plan has arrived that should be `predicted_gain` times as fast as plain decoding; up to 1: do not draft.

        Where drafting is on, it goes on and is judged afresh; where it is off, the plan gets a trial, as soon as plain
        rounds are known to compare with and probes have not cost too much already.
        """
        self._may_draft = predicted_gain > 1
        self._predicted_gain = predicted_gain
        self._probe = self._reason = None
        self._typical_s.pop("draft", None)
        if self._incumbent == "plain":
            self._rival = None
        else:
            if not self._may_draft:
                self._incumbent, self._rival = "plain", None
            self._recent = self._rounds(self._incumbent, WINDOW)
        self._interval = PROBE_EVERY
        self._rounds_to_probe = self._interval if self._incumbent == "draft" else 0
        self._probe_min = min(2 * MIN_BURST, BURST)
        self._begin_due_probe()

    @property
    def is_open(self) -> bool:
        """Whether drafts go on or are tried, or will be as soon as there are plain rounds to compare with."""
        waits = self._rival is None and len(self._recent) < MIN_BURST
        return self._may_draft and (self._incumbent == "draft" or self._probe is not None or waits)

    @property
    def on_trial(self) -> bool:
        """Whether the next round tries a draft that plain decoding is faster than, for all that is known."""
        return self._probe is not None and self._incumbent == "plain"

    @property
    def spare_tokens(self) -> float | None:
        """What the draft on trial may still lose, in tokens that plain decoding makes in that time. None: there is no
        trial of a draft."""
        if self._probe is None or not self.on_trial:
            return None
        rate = self._recent.rate().mean
        lost_s = max(self._probe.loss_s(rate), 0.0) if len(self._probe) else 0.0
        return rate * max(self._allowance_s - self._lost_s - lost_s, 0.0)

    @property
    def reason(self) -> str:
        """One sentence for reports. Between changes it is some rounds old: to tell it costs as much as to decide."""
        if self._reason is None:
            self._reason = self._describe()
        return self._reason

    def _describe(self) -> str:
        if not self._may_draft:
            return "not drafting: there is no plan that promises to be faster"
        doing = "drafting" if self._incumbent == "draft" else "not drafting"
        if self._probe is not None:
            other = "plain decoding" if self._incumbent == "draft" else "the draft"
            return f"{doing}, but trying {other} for up to {BURST} rounds"
        if self._rival is None or not len(self._recent):
            return f"{doing}: the plan promises x{self._predicted_gain:.2f} and has not been tried yet"
        rates = {self._incumbent: self._recent.rate().mean, _other(self._incumbent): self._rival.mean}
        gain = rates["draft"] / rates["plain"] if rates["plain"] else math.inf
        return f"{doing}: measured x{gain:.2f} of plain decoding, x{self._predicted_gain:.2f} predicted"

    def _begin_due_probe(self) -> None:
        if self._probe is None and self._should_probe():
            rival = _other(self._incumbent)
            self._probe = _Rounds(BURST, self._variance[rival], self._typical_s.get(rival))
            self._reason = None

    def _should_probe(self) -> bool:
        if not self._may_draft or len(self._recent) < MIN_BURST:
            return False
        due = self._rounds_to_probe <= 0
        if not due and self._rival is not None and self._rounds_to_probe % LOOK_EVERY == 0:
            due = self._recent.rate().clearly_below(self._rival, LOSING_ERRORS)
        return due and self._lost_s <= self._allowance_s

    def _observe_probe(self, probe: _Rounds, num_tokens: int, relative_s: float) -> None:
        probe.add(num_tokens, relative_s)
        rival, recent = probe.rate(), self._recent.rate()
        loss_s = max(probe.loss_s(recent.mean), 0.0)
        too_dear = self._lost_s + loss_s * (1 + 1 / len(probe)) > self._allowance_s  # with one more round like these
        if len(probe) < MIN_BURST and not too_dear:
            return
        self._variance[_other(self._incumbent)] = rival.variance
        judged = len(probe) >= self._probe_min
        wins = rival.mean > recent.mean * (1 + HYSTERESIS)
        enough = WINNING_ERRORS if len(probe) < BURST else LOSING_ERRORS
        if judged and wins and rival.clearly_above(recent, enough):
            self._take_over(probe, recent)
        elif len(probe) >= BURST or (judged and rival.clearly_below(recent, LOSING_ERRORS)) or too_dear:
            self._end_probe(probe, rival, loss_s)

    def _rounds(self, mode: Mode, length: int) -> _Rounds:
        return _Rounds(length, self._variance[mode])

    def _take_over(self, probe: _Rounds, recent: _Rate) -> None:
        self._incumbent, self._rival = _other(self._incumbent), recent
        self._recent = self._rounds(self._incumbent, WINDOW)
        self._recent.extend(probe)
        self._probe, self._interval, self._reason = None, PROBE_EVERY, None
        self._rounds_to_probe = self._interval
        self._probe_min = MIN_BURST

    def _end_probe(self, probe: _Rounds, rival: _Rate, loss_s: float) -> None:
        self._typical_s[_other(self._incumbent)] = probe.median_s
        self._rival, self._probe, self._reason = rival, None, None
        self._lost_s += loss_s
        self._interval = min(2 * self._interval, MAX_PROBE_EVERY)
        self._rounds_to_probe = self._interval
        self._probe_min = MIN_BURST

    @property
    def _allowance_s(self) -> float:
        """What probes may have cost by now: a share of the time, and something to start with."""
        start_s = FIRST_TRIALS * self._recent.median_s
        rate = self._recent.rate().mean
        if self._num_outstanding is not None and rate > 0:
            share = max(FIRST_SHARE, PROMISED_SHARE * (1 - 1 / max(self._predicted_gain, 1.0)))
            start_s = min(start_s, share * (self._elapsed_s + self._num_outstanding / rate))
        return MAX_LOSS_SHARE * self._elapsed_s + start_s


def _other(mode: Mode) -> Mode:
    return "plain" if mode == "draft" else "draft"
