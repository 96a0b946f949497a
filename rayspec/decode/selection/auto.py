"""KnapSpec and lookup together: each round takes the draft that is expected to earn the most tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter

from rayspec.config import SpeculationOptions
from rayspec.decode.drafting.skip_draft import KeepDrafting
from rayspec.decode.rounds import RoundResult
from rayspec.decode.selection.base import Search, Situation
from rayspec.decode.selection.knapspec import Candidate, KnapSpec
from rayspec.planning.latency import LatencyModel
from rayspec.planning.lookup import LookupRecord, best_lookup
from rayspec.planning.round_costs import RecentMean, RoundCosts, RoundShape
from rayspec.types import Plan, PlanRecord, no_draft

# By how much another kind of round must promise more than KnapSpec's own: promises of the best of several are high.
_MARGIN = 1.05


class _SkipRounds:
    """What the rounds of KnapSpec's draft were like lately, by sequence: tokens committed, tokens drafted; and their
    draft steps."""

    def __init__(self) -> None:
        self.committed = RecentMean(1.0)
        self.drafted = RecentMean(0.0)
        self.num_steps = RecentMean(0.0)

    def observe(self, result: RoundResult, num_tokens: int) -> None:
        batch = len(result.drafts)
        self.committed.observe(num_tokens / batch)
        self.drafted.observe(sum(len(one.token_ids) for one in result.drafts) / batch)
        self.num_steps.observe(result.num_draft_steps)


class Auto:
    """Selector. KnapSpec's plan, gate and searches are its own; beside it stand a round that verifies what was looked
    up, and one in which the model drafts only for those sequences for which nothing was found.

    What lookup would have proposed is held against what was committed in every round, so nothing has to be tried to
    learn its acceptance; and rounds are priced by what rounds have taken (`RoundCosts`).
    """

    def __init__(self, options: SpeculationOptions, latency: LatencyModel, *, known: Sequence[Candidate] = ()) -> None:
        self._knapspec = KnapSpec(options, latency, known=known)
        self._lookup_plan = no_draft(len(latency.sublayers), "lookup")
        self._costs = RoundCosts(latency)
        self._lookup = LookupRecord()
        self._skip_rounds = _SkipRounds()
        self._num_rounds = self._num_looked_up = 0

    @property
    def wants_taps(self) -> bool:
        return self._knapspec.wants_taps

    @property
    def gate_reason(self) -> str:
        share = self._num_looked_up / max(1, self._num_rounds)
        return f"{self._knapspec.gate_reason}; {share:.0%} of the rounds verified looked-up tokens"

    def plan(self, situation: Situation) -> Plan:
        base = self._knapspec.plan(situation)
        if not any(proposal.token_ids for proposal in situation.proposals()):
            return base
        ways = [(self._base_rate(situation, base) * _MARGIN, base), self._looked_up(situation, self._lookup_plan)]
        if base.drafts and self._skip_rounds.committed.known:
            ways.append(self._looked_up(situation, base))
        return max(ways, key=itemgetter(0))[1]

    def keep_drafting(self, situation: Situation) -> KeepDrafting | None:
        return self._knapspec.keep_drafting(situation)

    def observe(self, situation: Situation, plan: Plan, result: RoundResult, num_tokens: int, seconds: float) -> None:
        for proposal, committed in zip(situation.proposals(), result.committed, strict=True):
            if proposal.token_ids:
                self._lookup.observe(proposal.num_matched, proposal.token_ids, committed.token_ids)
        shape = _shape_of(situation, plan, result)
        self._costs.observe(shape, draft_s=result.draft_s, verify_s=result.verify_s, seconds=seconds)
        self._num_rounds += 1
        self._num_looked_up += any(one.looked_up for one in result.drafts)
        if not plan.num_lookup_tokens:
            if result.num_draft_steps:
                self._skip_rounds.observe(result, num_tokens)
            self._knapspec.observe(situation, plan, result, num_tokens, seconds)

    def improve(self, situation: Situation, search: Search) -> PlanRecord | None:
        return self._knapspec.improve(situation, search)

    def _base_rate(self, situation: Situation, base: Plan) -> float:
        """Tokens per second of KnapSpec's own round."""
        context, batch, rounds = situation.context, situation.batch, self._skip_rounds
        if not base.drafts:
            return batch / self._costs.seconds(RoundShape(rows=batch, context=context, batch=batch))
        if not rounds.committed.known:
            return self._knapspec.promised_tpt * batch
        shape = RoundShape(
            keep=base.keep,
            num_draft_steps=rounds.num_steps.value,
            num_drafting=batch,
            rows=batch * (1 + rounds.drafted.value),
            context=context,
            batch=batch,
        )
        return batch * rounds.committed.value / self._costs.seconds(shape)

    def _looked_up(self, situation: Situation, base: Plan) -> tuple[float, Plan]:
        """The best number of looked-up tokens, and tokens per second, where the others go on by `base`."""
        context, batch, rounds = situation.context, situation.batch, self._skip_rounds
        proposals = situation.proposals()
        available = [len(proposal.token_ids) for proposal in proposals]
        acceptance = [self._lookup.acceptance(proposal.num_matched) for proposal in proposals]
        num_others = available.count(0) if base.drafts else 0

        def seconds(taken: Sequence[int]) -> float:
            return self._costs.seconds(
                RoundShape(
                    keep=base.keep,
                    num_draft_steps=rounds.num_steps.value if num_others else 0.0,
                    num_drafting=num_others,
                    rows=batch + sum(taken) + num_others * rounds.drafted.value,
                    context=context,
                    batch=batch,
                )
            )

        more = num_others * (rounds.committed.value - 1)
        found = best_lookup(acceptance, available, seconds, num_tokens_beside=more)
        return found.rate, replace(base, num_lookup_tokens=found.num_tokens)


def _shape_of(situation: Situation, plan: Plan, result: RoundResult) -> RoundShape:
    return RoundShape(
        keep=plan.keep,
        num_draft_steps=result.num_draft_steps,
        num_drafting=sum(not one.looked_up for one in result.drafts),
        rows=situation.batch + sum(len(one.token_ids) for one in result.drafts),
        context=situation.context,
        batch=situation.batch,
    )
