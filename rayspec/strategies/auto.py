"""Each round uses the expected fastest of four ways: no draft, KnapSpec's plan, lookup, or plan and lookup.

"knapspec" is the same without lookup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from rayspec.config import SpeculationOptions
from rayspec.decode.strategy import Ask, BatchState, RoundPlan
from rayspec.decode.work import KeepDrafting, RoundResult
from rayspec.planning.acceptance import DraftUntilFound, best_lookup
from rayspec.planning.latency import LatencyModel
from rayspec.planning.learning import MAX_PLAN_GAIN, PRIOR_TOKENS, TEXT_HALF_LIFE, Discounted, Trigger
from rayspec.strategies.gate import PLAIN, Gate, Proposed, Taken
from rayspec.strategies.knapspec import Candidate, KnapSpec
from rayspec.types import Plan, PlanRecord, no_draft

PLAN, LOOKUP, BOTH = "plan", "prompt lookup", "plan and prompt lookup"


class Auto:
    """KnapSpec finds plans; the gate decides which rounds use them. Every round compares the proposed tokens with the
    committed tokens; so their acceptance is learned without trials. looks_up: False for the strategy "knapspec". known,
    trigger: see `KnapSpec`."""

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
        self._latency = latency
        self._gate = Gate(latency, trusted=(LOOKUP, BOTH))
        # Means over rounds with KnapSpec's draft: tokens per sequence that were committed, and drafted by the model
        # (looked-up tokens excluded), of the sequences for which it drafted; and draft steps per round.
        self._committed = Discounted(TEXT_HALF_LIFE, prior=1.0)
        self._drafted, self._num_steps = Discounted(TEXT_HALF_LIFE), Discounted(TEXT_HALF_LIFE)
        # Of the text that no lookup copies faster than any plan could generate it. Without lookup, that is all of it.
        self._new_text_share = Discounted(TEXT_HALF_LIFE, prior=0.0 if looks_up else 1.0, strength=PRIOR_TOKENS)
        self._num_rounds = self._num_looked_up = 0

    @property
    def status(self) -> str:
        share = self._num_looked_up / max(1, self._num_rounds)
        looked_up = f". {share:.0%} of decoding rounds used prompt lookup" if self._looks_up else ""
        return f"self-{self._gate.status(PLAN if self._knapspec.plan.drafts else None)}{looked_up}"

    def choose(self, state: BatchState) -> RoundPlan:
        taken = self._gate.choose(state, self._ways(state))
        return replace(taken, keep_drafting=self._rule(state, taken), capture=self._knapspec.wants_captures)

    def observe(
        self, state: BatchState, chosen: RoundPlan, result: RoundResult, num_tokens: int, seconds: float
    ) -> None:
        assert isinstance(chosen, Taken)
        plan = chosen.plan
        drafted = any(one.token_ids for one in result.drafts)
        self._gate.observe(state, chosen, num_tokens, seconds, counts=drafted or not plan.drafts)
        self._num_rounds += 1
        self._num_looked_up += any(len(one.token_ids) > one.num_drafted for one in result.drafts)
        # A round copies if lookup is expected to be faster than any plan.
        rate, plain_rate = (self._gate.rate(way, chosen.rates) for way in (chosen.way, PLAIN))
        copies = plan.num_lookup_tokens > 0 and rate > MAX_PLAN_GAIN * plain_rate
        self._new_text_share.observe(0.0 if copies else num_tokens / state.batch, num_tokens / state.batch)
        if plan.num_lookup_tokens and not result.num_draft_steps:
            return
        # KnapSpec learns from the tokens that the model drafted.
        accepted = zip(result.num_accepted, result.drafts, strict=True)
        own = msgspec.structs.replace(result, num_accepted=[min(count, one.num_drafted) for count, one in accepted])
        if result.num_draft_steps:
            drafting = [draft.num_drafted for draft in own.drafts if not draft.looked_up]
            committed = 1 + sum(own.num_accepted) / len(drafting)
            self._committed.observe(committed, age=committed)
            self._drafted.observe(sum(drafting) / len(drafting), age=committed)
            self._num_steps.observe(own.num_draft_steps, age=committed)
        self._knapspec.observe(state, chosen.proposed, own, num_tokens, seconds)

    def search(self, state: BatchState, ask: Ask) -> PlanRecord | None:
        """Let KnapSpec search, with a budget from the time of those rounds only that a plan could make faster."""
        record = self._knapspec.search(state, ask, share=self._new_text_share.value)
        if record is not None:
            self._gate.renew(PLAN)
        return record

    def _rule(self, state: BatchState, taken: Taken) -> KeepDrafting | None:
        """Return KnapSpec's rule for the end of drafts. With lookup, return a rule by which looked-up tokens may also
        complete the draft: those that followed the drafted tokens earlier in the text."""
        if not taken.plan.num_draft_tokens:
            return None
        rate, plain_rate = (self._gate.rate(way, taken.rates) for way in (taken.way, PLAIN))
        worth = self._knapspec.keep_drafting(state, max(rate, plain_rate))
        if worth is None or not self._looks_up:
            return worth
        best = max(self._gate.rate(way, taken.rates) for way in taken.rates)
        return DraftUntilFound(
            worth=worth,
            by_class=tuple(state.by_class()),
            min_survival=best * worth.row_s,
            drafting_gain=rate / plain_rate,
        )

    def _ways(self, state: BatchState) -> dict[str, Proposed]:
        """Return the ways available to the round, each with its plan and predicted rate."""
        batch, own = state.batch, self._knapspec.plan
        plain_rate = batch / self._latency.decode_step_s(context=state.context, batch=batch)
        ways = {PLAIN: Proposed(self._no_draft, plain_rate)}
        if own.drafts:
            ways[PLAN] = Proposed(
                own,
                batch * self._knapspec.rate(state),
                shorter=lambda longest: batch * self._knapspec.rate(state, longest),
            )
        if not self._has_gate and own.drafts:
            return {PLAIN: ways[PLAN]}
        if any(proposal.token_ids for proposal in state.proposals()):
            ways[LOOKUP] = self._looked_up(state, self._no_draft)
            if own.drafts and self._gate.is_known(PLAN):
                ways[BOTH] = self._looked_up(state, own)
        return ways

    def _looked_up(self, state: BatchState, base: Plan) -> Proposed:
        """Return the plan with the best numbers of looked-up tokens; sequences with 0 of them use the plan `base`."""
        context, batch, latency = state.context, state.batch, self._latency
        survivals = [one.survival for one in state.proposals()]

        def seconds(lengths: Sequence[int]) -> float:
            num_drafting = lengths.count(0) if base.drafts else 0
            step_s = latency.draft_step_s(base.choices, context=context, batch=num_drafting) if num_drafting else 0.0
            rows = round(batch + sum(lengths) + num_drafting * self._drafted.value)
            verify_s = latency.verify_s(rows=rows, context=context, batch=batch)
            if latency.rejected_s:
                kept = (one[count - 1] for one, count in zip(survivals, lengths, strict=True) if count)
                verify_s += latency.rejected_s * sum(1 - each for each in kept)
            return self._num_steps.value * step_s + verify_s + latency.round_s

        lengths, rate = best_lookup(survivals, seconds, committed_without=self._committed.value if base.drafts else 1.0)
        return Proposed(replace(base, num_lookup_tokens=max(lengths), lookup_lengths=lengths), rate)
