"""The arbiter (`planning.arbiter`) applied to an engine's rounds: it chooses each round's plan, and explains it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from rayspec.decode.selection.base import BatchState
from rayspec.planning.arbiter import Arbiter, Way
from rayspec.planning.latency import LatencyModel
from rayspec.types import Plan

# The most rounds under way, one of each cohort.
_MOST_UNDER_WAY = 64


@dataclass(frozen=True, slots=True)
class Proposed:
    """A plan for the round, and its predicted tokens per second over the batch. shorter: gives the rate with drafts of
    at most so many tokens; None: it is not known."""

    plan: Plan
    rate: float
    shorter: Callable[[int], float] | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """The way and plan of a round. plan: as proposed; the round's drafts may be shorter. rates: predicted tokens per
    second of all ways that were available. rate: the same of this round; a trial with shorter drafts makes fewer."""

    way: Way
    plan: Plan
    rates: Mapping[Way, float]
    rate: float


class Trials:
    """Takes one of the plans that are proposed for a round. In a trial, drafts are no longer than the trial may cost:
    one long draft without an accepted token would cost a short answer several per cent of its time."""

    def __init__(self, latency: LatencyModel, home: Way, *, trusted: Collection[Way] = ()) -> None:
        self.arbiter = Arbiter(home, trusted=trusted)
        self._latency = latency
        self._home = home
        self._under_way: dict[tuple[str, ...], Taken] = {}  # by the sequences of the round
        self._last: Taken | None = None

    def take(self, state: BatchState, ways: Mapping[Way, Proposed]) -> Plan:
        rates = {way: proposed.rate for way, proposed in ways.items()}
        way = self.arbiter.choose(rates)
        proposed = ways[way]
        plan, rate = proposed.plan, proposed.rate
        if way == self.arbiter.trial:
            plan, rate = self._shortened(state, proposed, rates)
        self._last = Taken(way, proposed.plan, rates, rate)
        self._under_way.pop(tuple(state.sequence_ids), None)
        self._under_way[tuple(state.sequence_ids)] = self._last
        if len(self._under_way) > _MOST_UNDER_WAY:
            del self._under_way[next(iter(self._under_way))]
        return plan

    def taken(self, state: BatchState) -> Taken | None:
        """Return the choice for the round of these sequences that is under way; None without one."""
        return self._under_way.get(tuple(state.sequence_ids))

    def observe(self, state: BatchState, num_tokens: int, seconds: float, *, tells: bool = True) -> Taken | None:
        """Record the end of the round of this state, and return its choice. tells: whether the round says anything of
        the speed of its way."""
        taken = self._under_way.pop(tuple(state.sequence_ids), None)
        if taken is None:
            return None
        num_outstanding = max(state.num_outstanding_tokens - num_tokens, 0)
        if tells:
            self.arbiter.observe(
                taken.way,
                num_tokens,
                seconds,
                predicted=taken.rates,
                predicted_now=taken.rate,
                num_outstanding=num_outstanding,
            )
        else:
            self.arbiter.pass_over(seconds, num_outstanding=num_outstanding)
        return taken

    def rate(self, taken: Taken, way: Way) -> float:
        """Return the expected tokens per second of an available way: the predicted rate times the learned factor."""
        return taken.rates[way] * self.arbiter.factor(way)

    def reason(self, way: Way | None) -> str:
        """Return one sentence for reports. way: the way that drafts; None without a plan."""
        if way is None:
            return "not drafting: there is no plan that promises to be faster"
        doing = "drafting" if self.arbiter.taken != self._home else "not drafting"
        if self.arbiter.trial is not None:
            return f"{doing}, but trying {self.arbiter.trial}"
        if not self.arbiter.was_tried(way) or self._last is None or way not in self._last.rates:
            return "not drafting: the plan has not been tried yet"
        gain = self.rate(self._last, way) / self.rate(self._last, self._home)
        predicted = self._last.rates[way] / self._last.rates[self._home]
        return f"{doing}: measured x{gain:.2f} of plain decoding, x{predicted:.2f} predicted"

    def _shortened(self, state: BatchState, proposed: Proposed, rates: Mapping[Way, float]) -> tuple[Plan, float]:
        """Return the plan with drafts that the trial can afford, and the rate that is predicted for them."""
        plan, context, batch = proposed.plan, state.context, state.batch
        step_s = self._latency.draft_step_s(plan.choices, context=context, batch=batch)
        row_s = self._latency.row_s(context=context, batch=batch) * batch * max(plan.tree_widths, default=1)
        longest = max(1, int(self.arbiter.remaining_loss_s(rates) / (step_s + row_s)))
        if plan.num_draft_tokens <= longest:
            return plan, proposed.rate
        rate = proposed.rate if proposed.shorter is None else proposed.shorter(longest)
        return replace(plan, num_draft_tokens=longest), rate
