"""Each round takes what is expected to make the most tokens per second: no draft, KnapSpec's plan, lookup, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rayspec.config import SpeculationOptions
from rayspec.decode.drafting.lookup import SHORTEST_MATCH
from rayspec.decode.drafting.skip_draft import KeepDrafting
from rayspec.decode.rounds import RoundResult
from rayspec.decode.selection.base import BatchState, Search
from rayspec.decode.selection.knapspec import Candidate, KnapSpec
from rayspec.decode.selection.trials import Proposed, Taken, Trials
from rayspec.planning.budget import Trigger
from rayspec.planning.discounted import Discounted
from rayspec.planning.latency import LatencyModel
from rayspec.planning.lookup import DraftUntilFound, LookupRecord, best_lookup, survival
from rayspec.types import Plan, PlanRecord, no_draft

PLAIN, PLAN, LOOKUP, BOTH = "plain decoding", "the plan", "lookup", "the plan and lookup"
# Where looked-up rounds make so many times the tokens per second of plain ones, no plan is expected to do better.
_MOST_OF_PLANS = 2.5
# Tokens of a sequence: those after which one counts half, and how many are taken to be beyond plans to begin with.
_SHARE_HALF_LIFE, _PRIOR_TOKENS = 32.0, 4.0
_HALF_LIFE = 16.0  # rounds


class _PlanRounds:
    """What the rounds of KnapSpec's draft were like lately. By sequence: tokens committed and drafted, without those
    that were looked up; their draft steps."""

    def __init__(self) -> None:
        self.committed = Discounted(_HALF_LIFE, prior=1.0)
        self.drafted = Discounted(_HALF_LIFE)
        self.num_steps = Discounted(_HALF_LIFE)

    def observe(self, own: RoundResult, num_tokens: int) -> None:
        batch = len(own.drafts)
        self.committed.observe(num_tokens / batch)
        self.drafted.observe(sum(one.num_drafted for one in own.drafts) / batch)
        self.num_steps.observe(own.num_draft_steps)


class Auto:
    """Selector. KnapSpec finds plans; the arbiter decides which rounds go by them.

    What lookup would have proposed is held against what was committed in every round, so nothing has to be tried in
    order to learn its acceptance. looks_up: False for drafts by plans alone, the strategy "knapspec". known, trigger:
    see `KnapSpec`.
    """

    def __init__(
        self,
        options: SpeculationOptions,
        latency: LatencyModel,
        *,
        known: Sequence[Candidate] = (),
        looks_up: bool = True,
        trigger: Trigger | None = None,
    ) -> None:
        self._knapspec = KnapSpec(options, latency, known=known, trigger=trigger)
        self._looks_up = looks_up
        self._no_draft = no_draft(len(latency.sublayers), "no draft")
        self._has_gate = options.gate
        self._ngram = options.lookup_ngram
        self._latency = latency
        self._trials = Trials(latency, PLAIN, trusted=(LOOKUP, BOTH))
        self._lookup = LookupRecord()
        self._plan_rounds = _PlanRounds()
        self._open_share = Discounted(_SHARE_HALF_LIFE, strength=_PRIOR_TOKENS)
        self._num_rounds = self._num_looked_up = 0

    @property
    def wants_taps(self) -> bool:
        return self._knapspec.wants_taps

    @property
    def gate_reason(self) -> str:
        share = self._num_looked_up / max(1, self._num_rounds)
        looked_up = f"; {share:.0%} of the rounds verified looked-up tokens" if self._looks_up else ""
        return self._trials.reason(PLAN if self._knapspec.plan.drafts else None) + looked_up

    def plan(self, state: BatchState) -> Plan:
        return self._trials.take(state, self._ways(state))

    def keep_drafting(self, state: BatchState) -> KeepDrafting | None:
        """As KnapSpec has it; but where the drafted tokens stand in the text already, what followed them there may go
        on the draft, and ends it."""
        taken = self._trials.taken(state)
        if taken is None or not taken.plan.num_draft_tokens:
            return None
        rate, plain_rate = (self._trials.rate(taken, way) for way in (taken.way, PLAIN))
        worth = self._knapspec.keep_drafting(state, max(rate, plain_rate))
        if worth is None or not self._looks_up:
            return worth
        best = max(self._trials.rate(taken, way) for way in taken.rates)
        return DraftUntilFound(
            worth=worth,
            ngram=self._ngram,
            shortest=SHORTEST_MATCH,
            by_class=self._lookup.by_class,
            min_survival=best * self._row_s(state),
            drafting_gain=rate / plain_rate,
        )

    def observe(self, state: BatchState, plan: Plan, result: RoundResult, num_tokens: int, seconds: float) -> None:
        if self._looks_up:
            self._learn_lookup(state, result)
        drafted = any(one.token_ids for one in result.drafts)
        taken = self._trials.observe(state, num_tokens, seconds, tells=drafted or not plan.drafts)
        self._num_rounds += 1
        self._num_looked_up += any(len(one.token_ids) > one.num_drafted for one in result.drafts)
        if taken is None:
            return
        copies = plan.num_lookup_tokens > 0 and self._copies(taken)
        self._open_share.observe(0.0 if copies else num_tokens / state.batch, num_tokens / state.batch)
        if plan.num_lookup_tokens and not result.num_draft_steps:
            return
        own = _of_the_model(result)
        num_added = sum(result.num_accepted) - sum(own.num_accepted)
        if result.num_draft_steps:
            self._plan_rounds.observe(own, num_tokens - num_added)
        self._knapspec.observe(state, taken.plan, own, num_tokens, seconds)

    def improve(self, state: BatchState, search: Search) -> PlanRecord | None:
        """A search is for the rounds that a plan could make faster: only their time pays for it."""
        record = self._knapspec.improve(state, search, share=self._open_share.value)
        if record is not None:
            self._trials.arbiter.renew(PLAN)
        return record

    def _ways(self, state: BatchState) -> dict[str, Proposed]:
        """What the round may go by."""
        batch, own = state.batch, self._knapspec.plan
        plain_rate = batch / self._latency.decode_step_s(context=state.context, batch=batch)
        ways = {PLAIN: Proposed(self._no_draft, plain_rate)}
        if own.drafts:
            ways[PLAN] = Proposed(own, batch * self._knapspec.rate(state))
        if not self._has_gate and own.drafts:
            return {PLAIN: ways[PLAN]}
        if self._looks_up and any(proposal.token_ids for proposal in state.proposals()):
            ways[LOOKUP] = self._looked_up(state, self._no_draft)
            if own.drafts and self._trials.arbiter.is_known(PLAN):
                ways[BOTH] = self._looked_up(state, own)
        return ways

    def _copies(self, taken: Taken) -> bool:
        """Whether lookup makes more than any plan could."""
        return self._trials.rate(taken, taken.way) > _MOST_OF_PLANS * self._trials.rate(taken, PLAIN)

    def _row_s(self, state: BatchState) -> float:
        """Of one more row of a sequence in a verify."""
        return self._latency.row_s(context=state.context, batch=state.batch)

    def _learn_lookup(self, state: BatchState, result: RoundResult) -> None:
        """From what could have been looked up before the round, and from what was while it drafted."""
        for proposal, committed in zip(state.proposals(), result.committed, strict=True):
            if proposal.token_ids:
                self._lookup.observe(proposal.evidence, proposal.token_ids, committed.token_ids)
        for one, committed, num_accepted in zip(result.drafts, result.committed, result.num_accepted, strict=True):
            if one.evidence and num_accepted >= one.num_drafted:
                added, came = one.token_ids[one.num_drafted :], committed.token_ids[one.num_drafted :]
                self._lookup.observe(one.evidence, added, came)

    def _looked_up(self, state: BatchState, base: Plan) -> Proposed:
        """The best number of looked-up tokens, where the sequences without any go on by `base`."""
        context, batch, latency = state.context, state.batch, self._latency
        survivals = [survival(self._lookup.by_class, one.evidence) for one in state.proposals()]
        num_drafting = survivals.count([]) if base.drafts else 0
        draft_s, num_drafted, num_beside = 0.0, 0.0, 0.0
        if num_drafting:
            step_s = latency.draft_step_s(base.choices, context=context, batch=num_drafting)
            draft_s = self._plan_rounds.num_steps.value * step_s
            num_drafted = num_drafting * self._plan_rounds.drafted.value
            num_beside = num_drafting * (self._plan_rounds.committed.value - 1)

        def seconds(taken: Sequence[int]) -> float:
            rows = round(batch + sum(taken) + num_drafted)
            return draft_s + latency.verify_s(rows=rows, context=context, batch=batch) + latency.round_s

        found = best_lookup(survivals, seconds, num_tokens_beside=num_beside)
        return Proposed(replace(base, num_lookup_tokens=found.num_tokens), found.rate)


def _of_the_model(result: RoundResult) -> RoundResult:
    """The round with the accepted tokens that the model had drafted only."""
    accepted = zip(result.num_accepted, result.drafts, strict=True)
    return replace(result, num_accepted=[min(count, one.num_drafted) for count, one in accepted])
