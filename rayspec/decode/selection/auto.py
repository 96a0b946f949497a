"""KnapSpec and lookup together: each round takes the draft that is expected to earn the most tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter

from rayspec.config import SpeculationOptions
from rayspec.decode.drafting.lookup import SHORTEST_MATCH
from rayspec.decode.drafting.skip_draft import KeepDrafting
from rayspec.decode.rounds import RoundResult
from rayspec.decode.selection.base import BatchState, Search
from rayspec.decode.selection.knapspec import Candidate, KnapSpec
from rayspec.planning.acceptance import DraftWhileWorth
from rayspec.planning.latency import LatencyModel
from rayspec.planning.lookup import DraftUntilFound, LookupRecord, best_lookup, survival
from rayspec.planning.round_costs import RecentMean, RecentRate, RoundCosts, RoundShape
from rayspec.types import Plan, PlanRecord, no_draft

# By how much another kind of round must promise more than KnapSpec's own: promises of the best of several are high.
_MARGIN = 1.05
# Of a round's seconds, that looked-up tokens on its drafts may count for.
_MOST_SAVED = 0.5
# Seconds, in those that plain decoding takes for a token, for which a promise counts beside what was seen.
_PROMISE_S = 24.0
# Where looked-up rounds make so many times the tokens per second of plain ones, no plan is expected to do better.
_MOST_OF_PLANS = 2.5
# Tokens of a sequence: those after which one counts half, and how many are taken to be beyond plans to begin with.
_SHARE_HALF_LIFE, _PRIOR_TOKENS = 32.0, 4.0


class _SkipRounds:
    """What the rounds of KnapSpec's draft were like lately. By sequence: tokens committed and drafted, without those
    that were looked up; their draft steps. gain: over plain decoding, looked-up tokens and all."""

    def __init__(self) -> None:
        self.committed = RecentMean(1.0)
        self.drafted = RecentMean(0.0)
        self.num_steps = RecentMean(0.0)
        self.gain = RecentRate()

    def observe(self, own: RoundResult, num_tokens: int) -> None:
        batch = len(own.drafts)
        self.committed.observe(num_tokens / batch)
        self.drafted.observe(sum(one.num_drafted for one in own.drafts) / batch)
        self.num_steps.observe(own.num_draft_steps)


class _OpenShare:
    """Of the tokens lately, those of rounds that a better plan could make faster; few at first, until there were some.

    Tokens, not rounds: what a plan may save is the time that plain decoding takes for them.
    """

    def __init__(self) -> None:
        self._open = self._all = 0.0

    @property
    def value(self) -> float:
        return self._open / (self._all + _PRIOR_TOKENS)

    def observe(self, num_tokens: float, *, is_open: bool) -> None:
        fade = 0.5 ** (num_tokens / _SHARE_HALF_LIFE)
        self._open = self._open * fade + num_tokens * is_open
        self._all = self._all * fade + num_tokens


class Auto:
    """Selector. KnapSpec's plan, gate and searches are its own; beside it stand a round that verifies what was looked
    up, and one in which the model drafts only for those sequences for which nothing was found.

    What lookup would have proposed is held against what was committed in every round, so nothing has to be tried to
    learn its acceptance; and rounds are priced by what rounds have taken (`RoundCosts`).
    """

    def __init__(self, options: SpeculationOptions, latency: LatencyModel, *, known: Sequence[Candidate] = ()) -> None:
        self._knapspec = KnapSpec(options, latency, known=known)
        self._lookup_plan = no_draft(len(latency.sublayers), "lookup")
        self._ngram = options.lookup_ngram
        self._chosen = self._lookup_plan  # for the round that begins
        self._latency = latency
        self._costs = RoundCosts(latency)
        self._lookup = LookupRecord()
        self._lookup_rounds = RecentRate()
        self._skip_rounds = _SkipRounds()
        self._open_share = _OpenShare()
        self._num_rounds = self._num_looked_up = 0

    @property
    def wants_taps(self) -> bool:
        return self._knapspec.wants_taps

    @property
    def gate_reason(self) -> str:
        share = self._num_looked_up / max(1, self._num_rounds)
        return f"{self._knapspec.gate_reason}; {share:.0%} of the rounds verified looked-up tokens"

    def plan(self, state: BatchState) -> Plan:
        self._chosen = self._best(state)
        return self._chosen

    def keep_drafting(self, state: BatchState) -> KeepDrafting | None:
        """As KnapSpec has it; but where the drafted tokens stand in the text already, what followed them there may go
        on the draft, and ends it."""
        if not self._chosen.num_draft_tokens:
            return None
        worth = self._knapspec.keep_drafting(state)
        if not isinstance(worth, DraftWhileWorth):
            return worth
        gain = self._gain(state)
        rate = max(gain * self._plain_rate(state), self._lookup_rounds.value)
        return DraftUntilFound(
            worth=worth,
            ngram=self._ngram,
            shortest=SHORTEST_MATCH,
            by_class=self._lookup.by_class,
            min_survival=rate * self._costs.row_s(context=state.context, batch=state.batch),
            drafting_gain=gain,
        )

    def observe(self, state: BatchState, plan: Plan, result: RoundResult, num_tokens: int, seconds: float) -> None:
        self._learn_lookup(state, result)
        shape = _shape_of(state, plan, result)
        self._costs.observe(shape, draft_s=result.draft_s, verify_s=result.verify_s, seconds=seconds)
        self._num_rounds += 1
        self._num_looked_up += any(len(one.token_ids) > one.num_drafted for one in result.drafts)
        if plan.num_lookup_tokens and not result.num_draft_steps:
            self._lookup_rounds.observe(num_tokens, seconds)
        copies = self._lookup_rounds.value > _MOST_OF_PLANS * self._plain_rate(state)
        self._open_share.observe(num_tokens / state.batch, is_open=not (plan.num_lookup_tokens and copies))
        if plan.num_lookup_tokens:
            self._knapspec.pass_over(state, num_tokens, seconds)
            return
        own = _of_the_model(result)
        num_added = sum(result.num_accepted) - sum(own.num_accepted)
        saved_s = min(self._lookup_rounds.seconds(num_added), _MOST_SAVED * seconds)
        if result.num_draft_steps and not self._knapspec.on_trial:  # trials are judged by the gate
            self._skip_rounds.observe(own, num_tokens - num_added)
            self._skip_rounds.gain.observe(num_tokens, seconds * self._plain_rate(state))
        self._knapspec.observe(state, plan, own, num_tokens - num_added, seconds - saved_s)

    def improve(self, state: BatchState, search: Search) -> PlanRecord | None:
        """A search is for the rounds that a plan could make faster: only their time pays for it."""
        return self._knapspec.improve(state, search, share=self._open_share.value)

    def _best(self, state: BatchState) -> Plan:
        base = self._knapspec.plan(state)
        if not any(proposal.token_ids for proposal in state.proposals()):
            return base
        ways = [(self._base_rate(state, base) * _MARGIN, base), self._looked_up(state, self._lookup_plan)]
        if base.drafts and self._skip_rounds.committed.known:
            ways.append(self._looked_up(state, base))
        return max(ways, key=itemgetter(0))[1]

    def _learn_lookup(self, state: BatchState, result: RoundResult) -> None:
        """From what could have been looked up before the round, and from what was while it drafted."""
        for proposal, committed in zip(state.proposals(), result.committed, strict=True):
            if proposal.token_ids:
                self._lookup.observe(proposal.evidence, proposal.token_ids, committed.token_ids)
        for one, committed, num_accepted in zip(result.drafts, result.committed, result.num_accepted, strict=True):
            if one.evidence and num_accepted >= one.num_drafted:
                added, came = one.token_ids[one.num_drafted :], committed.token_ids[one.num_drafted :]
                self._lookup.observe(one.evidence, added, came)

    def _base_rate(self, state: BatchState, base: Plan) -> float:
        """Tokens per second of KnapSpec's own round. One without a draft, that its gate needs to compare a plan with,
        counts as that plan's: it is what a trial takes."""
        drafts = base.drafts or self._knapspec.is_open
        return self._plain_rate(state) * (self._gain(state) if drafts else 1.0)

    def _plain_rate(self, state: BatchState) -> float:
        context, batch = state.context, state.batch
        return batch / self._costs.seconds(RoundShape(rows=batch, context=context, batch=batch))

    def _gain(self, state: BatchState) -> float:
        """Of drafting over plain decoding: what may be hoped of the plan, until rounds have shown what it makes. Were
        it what is promised, which is on the low side, lookup would keep a plan from ever being tried."""
        step_s = self._latency.decode_step_s(context=state.context, batch=state.batch)
        return self._skip_rounds.gain.with_prior(self._knapspec.hoped_tpt(state) * step_s, _PROMISE_S)

    def _looked_up(self, state: BatchState, base: Plan) -> tuple[float, Plan]:
        """The best number of looked-up tokens, and tokens per second, where the others go on by `base`."""
        context, batch, rounds = state.context, state.batch, self._skip_rounds
        proposals = state.proposals()
        by_class = self._lookup.by_class
        survivals = [survival(by_class, one.evidence) for one in proposals]
        num_others = survivals.count([]) if base.drafts else 0

        def seconds(taken: Sequence[int]) -> float:
            return self._costs.seconds(
                RoundShape(
                    choices=base.choices,
                    num_draft_steps=rounds.num_steps.value if num_others else 0.0,
                    num_drafting=num_others,
                    rows=batch + sum(taken) + num_others * rounds.drafted.value,
                    context=context,
                    batch=batch,
                )
            )

        more = num_others * (rounds.committed.value - 1)
        found = best_lookup(survivals, seconds, num_tokens_beside=more)
        return found.rate, replace(base, num_lookup_tokens=found.num_tokens)


def _shape_of(state: BatchState, plan: Plan, result: RoundResult) -> RoundShape:
    return RoundShape(
        choices=plan.choices,
        num_draft_steps=result.num_draft_steps,
        num_drafting=sum(not one.looked_up for one in result.drafts),
        rows=state.batch + sum(len(one.token_ids) for one in result.drafts),
        context=state.context,
        batch=state.batch,
    )


def _of_the_model(result: RoundResult) -> RoundResult:
    """The round with the accepted tokens that the model had drafted only."""
    accepted = zip(result.num_accepted, result.drafts, strict=True)
    return replace(result, num_accepted=[min(count, one.num_drafted) for count, one in accepted])
