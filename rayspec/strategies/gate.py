"""The gate switches drafting off where it is measured to be slower: it picks each round's *way* of decoding.

Each round brings a predicted rate, in tokens per second, for every way that is available: plain decoding, a plan,
looked-up tokens. A way's *factor* is expected over measured seconds of its rounds; old rounds fade. The expected rate
is the predicted rate times the factor. The round takes the known way with the highest. Another way gets a *trial* where
it has a fair chance: its rounds alternate with those of the best way, so that a slowdown of the machine affects both.
Records fade, so every way gets another trial. The time lost in trials is bounded.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from rayspec.decode.strategy import Ask, BatchState, RoundPlan, Strategy
from rayspec.decode.work import RoundResult
from rayspec.planning.latency import LatencyModel
from rayspec.planning.learning import Discounted
from rayspec.types import Plan, PlanRecord, no_draft

Way: TypeAlias = str

PLAIN, STRATEGY = "plain decoding", "strategy"

# Rounds, of any way, after which a round counts half; also the most rounds of a trial.
HALF_LIFE = 32.0
# Standard deviation of a way's factor, measured in one round.
DEVIATION = 0.35
# Rounds of a trial before it is judged.
MIN_ROUNDS = 4
# A round counts as at most this many times its way's mean round; longer times are pauses of the machine.
MAX_CLIP = 3.0
# Share of the time that trials may lose.
LOSS_SHARE = 0.0075
# What trials may lose in addition, from the start: the time of FIRST_ROUNDS rounds, but at most a share of all known
# work. This share is FIRST_SHARE, or SAVING_SHARE times the share of the time that the way is predicted to save.
FIRST_ROUNDS, FIRST_SHARE, SAVING_SHARE = 12.0, 0.005, 0.05


@dataclass(frozen=True, slots=True)
class Proposed:
    """A way's plan, and its predicted tokens per second over the batch. shorter: this rate with drafts of at
    most a length."""

    plan: Plan
    rate: float
    shorter: Callable[[int], float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken(RoundPlan):
    """The way of a round. proposed: its plan; the round's own plan may have shorter drafts. rates: predicted, of all
    ways. rate: of this round. own: the choice of the strategy behind the gate, if it was taken."""

    way: Way
    proposed: Plan
    rates: Mapping[Way, float]
    rate: float
    own: RoundPlan | None = None


class _Record:
    """Of a way's rounds, older ones faded: mean seconds, and expected over measured seconds."""

    def __init__(self) -> None:
        self.round_s = Discounted(HALF_LIFE)
        self._factor = Discounted(HALF_LIFE, prior=1.0)

    def factor(self, prior_rounds: int = 0) -> float:
        """Return expected over measured seconds; 1 without rounds. prior_rounds: rounds exactly as expected to add."""
        return self._factor.with_prior(1.0, prior_rounds * self.round_s.value)

    def observe(self, seconds: float, expected_s: float) -> None:
        self.round_s.observe(seconds, age=0)
        self._factor.observe(expected_s, seconds, age=0)

    def fade(self, num_rounds: float) -> None:
        for one in (self.round_s, self._factor):
            one.observe(0.0, 0.0, age=num_rounds)


class Gate:
    """Picks the way of each round. It reads no clock. trusted: further ways that need no trial, because their
    predictions are learned from rounds of all ways."""

    def __init__(self, latency: LatencyModel, *, trusted: Collection[Way] = ()) -> None:
        self.taken = PLAIN  # the way in use, trusted ways aside
        self._latency = latency
        self._trusted = frozenset(trusted)
        self._records: defaultdict[Way, _Record] = defaultdict(_Record)
        self.trial: Way | None = None  # the way that a trial is testing
        self._num_trial_rounds, self._trial_lost_s, self._was_trial = 0, 0.0, False
        self._last: Taken | None = None
        self._elapsed_s = self._lost_s = 0.0
        self._num_outstanding: float | None = None

    def choose(self, state: BatchState, ways: Mapping[Way, Proposed]) -> Taken:
        """Return the way of the next round. In a trial, drafts are no longer than the trial may cost: one long draft
        without an accepted token would cost a short answer several per cent of its time."""
        predicted = {way: one.rate for way, one in ways.items()}
        best = self._best(predicted)
        if self.trial is None:
            self.taken = best if best not in self._trusted else self.taken
            rates = {way: self._optimistic_rate(way, predicted) for way in predicted if not self.is_known(way)}
            way = max(rates, key=rates.__getitem__, default=best)
            may_win = way != best and rates[way] > self.rate(best, predicted)
            if may_win and state.is_observed and self._lost_s < self._allowance_s(way, predicted):
                self.trial, self._was_trial = way, False
        trial, way = self.trial, best
        if trial in predicted and state.is_observed and not self._was_trial:
            is_hopeful = self._optimistic_rate(trial, predicted) > self.rate(best, predicted)
            way = trial if is_hopeful else best
        proposed = ways[way]
        plan, rate = proposed.plan, proposed.rate
        if way == self.trial:
            step_s = self._latency.draft_step_s(plan.choices, context=state.context, batch=state.batch)
            row_s = self._latency.row_s(context=state.context, batch=state.batch)
            row_s *= state.batch * max(plan.tree_widths, default=1)
            longest = max(1, int(self.remaining_loss_s(predicted) / (step_s + row_s)))
            if plan.num_draft_tokens > longest:
                plan = replace(plan, num_draft_tokens=longest)
                rate = rate if proposed.shorter is None else proposed.shorter(longest)
        plain_rate = None if ways[PLAIN].plan.drafts else self.rate(PLAIN, predicted)
        self._last = Taken(
            plan=plan, way=way, proposed=proposed.plan, rates=predicted, rate=rate, plain_rate=plain_rate
        )
        return self._last

    def observe(
        self, state: BatchState, taken: Taken, num_tokens: float, seconds: float, *, counts: bool = True
    ) -> None:
        """num_tokens: committed over the batch. counts: whether the round says anything about the speed of its way."""
        way, predicted = taken.way, taken.rates
        self._elapsed_s += seconds
        self._num_outstanding = max(state.num_outstanding_tokens - num_tokens, 0)
        for each in self._records.values():
            each.fade(1)
        self._was_trial = way == self.trial
        if not counts:
            return
        record, expected_s = self._records[way], num_tokens / (taken.rate * self._pace(way))
        if record.round_s.is_known:
            seconds = min(seconds, MAX_CLIP * record.round_s.value)
        record.observe(seconds, expected_s)
        if not self._was_trial:
            return
        # Judge the trial. It ends when its loss, its clear result or its length is enough.
        best = self._best(predicted)
        self._num_trial_rounds += 1
        self._trial_lost_s += seconds - num_tokens / self.rate(best, predicted)
        difference = self.rate(way, predicted) - self.rate(best, predicted)
        error = math.hypot(self._error(way, predicted), self._error(best, predicted))
        is_judged = self._num_trial_rounds >= MIN_ROUNDS
        next_loss_s = max(self._trial_lost_s, 0.0) / self._num_trial_rounds
        if (
            next_loss_s > self.remaining_loss_s(predicted)
            or (is_judged and abs(difference) > error)
            or self._num_trial_rounds >= HALF_LIFE
        ):
            if is_judged and difference > 0:
                self.taken = way
            self._end_trial()

    def renew(self, way: Way) -> None:
        """Forget what was learned about a way whose plan has changed, and end its trial. A way in use stays in use."""
        if self.trial == way:
            self._end_trial()
        if self.taken == way:
            self._records[way].fade(HALF_LIFE)
        else:
            self._records.pop(way, None)

    def factor(self, way: Way) -> float:
        """Return the measured over the predicted rate of a way. For a trusted way the prediction counts as one more
        round, so that it is not abandoned forever."""
        return self._records[way].factor(prior_rounds=way in self._trusted) * self._pace(way)

    def rate(self, way: Way, predicted: Mapping[Way, float]) -> float:
        """Return the expected tokens per second of a way. predicted: tokens per second by way, as in `Taken.rates`."""
        return predicted[way] * self.factor(way)

    def is_known(self, way: Way) -> bool:
        """Whether the way needs no trial: it is plain decoding, in use, or trusted."""
        return way in {PLAIN, self.taken} or way in self._trusted

    def remaining_loss_s(self, predicted: Mapping[Way, float]) -> float:
        """Return the seconds that the current trial may still lose; below 0 where it has lost more."""
        return self._allowance_s(self.trial or PLAIN, predicted) - self._lost_s - max(self._trial_lost_s, 0.0)

    def status(self, way: Way | None) -> str:
        """Return why rounds draft, or not. way: the way that drafts; None without a plan."""
        if way is None:
            return "drafting is off (no plan is predicted to be faster)"
        switch = "off" if self.taken == PLAIN else "on"
        if self.trial is not None:
            return f"drafting is {switch} (some rounds try the {self.trial})"
        if not self._records[way].round_s.is_known or self._last is None or way not in self._last.rates:
            return f"drafting is off ({way} not tried yet)"
        gain = self.rate(way, self._last.rates) / self.rate(PLAIN, self._last.rates)
        predicted = self._last.rates[way] / self._last.rates[PLAIN]
        return f"drafting is {switch} (measured {gain:.2f}x plain decoding, predicted {predicted:.2f}x)"

    def _pace(self, way: Way) -> float:
        """Return the recent factor of plain decoding: a machine that is slower than predicted is so for all ways."""
        return 1.0 if way == PLAIN else self._records[PLAIN].factor()

    def _error(self, way: Way, predicted: Mapping[Way, float]) -> float:
        return predicted[way] * self._pace(way) * DEVIATION / math.sqrt(self._records[way].round_s.weight + 1)

    def _optimistic_rate(self, way: Way, predicted: Mapping[Way, float]) -> float:
        """Return the expected rate plus one standard error. The prediction counts as one more round."""
        factor = self._records[way].factor(prior_rounds=1) * self._pace(way)
        return predicted[way] * factor + self._error(way, predicted)

    def _best(self, predicted: Mapping[Way, float]) -> Way:
        """Return the way with the highest expected rate among the known ways that no trial is testing; else plain."""
        known = [way for way in predicted if way != self.trial and self.is_known(way)]
        return max(known, key=lambda way: self.rate(way, predicted), default=PLAIN)

    def _end_trial(self) -> None:
        self._lost_s += max(self._trial_lost_s, 0.0)
        self.trial, self._num_trial_rounds, self._trial_lost_s = None, 0, 0.0

    def _allowance_s(self, way: Way, predicted: Mapping[Way, float]) -> float:
        """Return the seconds that all trials so far may have lost before the way is tried."""
        first_s = FIRST_ROUNDS * self._records[PLAIN].round_s.value
        if self._num_outstanding is not None:
            saved = 1 - predicted[PLAIN] / predicted[way]
            share = max(FIRST_SHARE, SAVING_SHARE * saved)
            known_s = self._elapsed_s + self._num_outstanding / self.rate(PLAIN, predicted)
            first_s = min(first_s, share * known_s)
        return LOSS_SHARE * self._elapsed_s + first_s


class Gated:
    """A strategy behind a gate of its own, which judges it as a whole, because its plan may change every round. It gets
    its trial regardless of its predicted gain. The time of its searches counts as time of its rounds. While plain
    decoding is faster, it may search only after the rounds that try it again. clock: seconds, any origin."""

    def __init__(
        self, strategy: Strategy, latency: LatencyModel, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._strategy = strategy
        self._clock = clock
        self._latency = latency
        self._no_draft = no_draft(len(latency.sublayers), "not faster: no draft")
        self._gate = Gate(latency)
        self._has_drafted = False
        self._is_taken = True  # whether the last round took the strategy
        self._gain = 1.0  # the last gain that the strategy predicted
        self._searching_s = 0.0  # seconds of searches that no round was charged with yet

    @property
    def status(self) -> str:
        return self._gate.status(STRATEGY if self._has_drafted else None)

    def choose(self, state: BatchState) -> RoundPlan:
        plain_rate = state.batch / self._latency.decode_step_s(context=state.context, batch=state.batch)
        ways = {PLAIN: Proposed(self._no_draft, plain_rate)}
        own = self._strategy.choose(state)
        self._has_drafted = self._has_drafted or own.plan.drafts
        if self._has_drafted and self._may_pay(own.plan, state, plain_rate):
            ways[STRATEGY] = Proposed(own.plan, plain_rate * max(self._gain, 1.0))
        taken = self._gate.choose(state, ways)
        captures = own.capture and self._may_search
        is_own = taken.way == STRATEGY
        return replace(taken, keep_drafting=own.keep_drafting, capture=captures, own=own if is_own else None)

    def observe(
        self, state: BatchState, chosen: RoundPlan, result: RoundResult, num_tokens: int, seconds: float
    ) -> None:
        assert isinstance(chosen, Taken)
        self._strategy.observe(state, chosen.own or RoundPlan(plan=chosen.proposed), result, num_tokens, seconds)
        self._is_taken = chosen.way == STRATEGY
        # A round may draft nothing though its plan drafts: sequences have one token left. It says nothing of drafting.
        counts = not chosen.plan.drafts or any(one.token_ids for one in result.drafts) or any(result.probed)
        counts = counts and not result.is_unready
        if self._is_taken and counts:
            seconds, self._searching_s = seconds + self._searching_s, 0.0
        self._gate.observe(state, chosen, num_tokens, seconds, counts=counts)

    def search(self, state: BatchState, ask: Ask) -> PlanRecord | None:
        if not self._may_search:
            return None
        started = self._clock()
        record = self._strategy.search(state, ask)
        if record is not None and record.plain_tpt > 0:
            self._gain = record.predicted_tpt / record.plain_tpt
        self._searching_s += self._clock() - started
        return record

    def _may_pay(self, plan: Plan, state: BatchState, plain_rate: float) -> bool:
        """Whether copies would be faster than plain decoding if all were right. If not, they get no trial either."""
        num_tokens = state.batch * (1 + plan.num_lookup_tokens)
        verify_s = self._latency.verify_s(rows=num_tokens, context=state.context, batch=state.batch)
        return plan.num_lookup_tokens == 0 or plan.num_draft_tokens > 0 or num_tokens > plain_rate * verify_s

    @property
    def _may_search(self) -> bool:
        """Whether the last round took the strategy, or it never had a plan that drafts."""
        return self._is_taken or not self._has_drafted
