"""The plan that a strategy currently drafts by, and the record of this plan."""

from __future__ import annotations

from rayspec.choices import Choices, num_leading_full
from rayspec.decode.search import FoundDraft
from rayspec.decode.selection.base import BatchState
from rayspec.decode.work import RoundResult
from rayspec.planning.acceptance import best_choice, shrink
from rayspec.planning.latency import LatencyModel
from rayspec.strategies.tested_tokens import Tested
from rayspec.types import Plan, PlanRecord, no_draft


class CurrentPlan:
    """Current plan of a strategy that chooses how to run each sublayer; the gate decides whether drafting pays.

    source: the strategy's name. `plan` drafts nothing before the first `take`.
    """

    def __init__(self, source: str, latency: LatencyModel) -> None:
        self.plan = no_draft(len(latency.sublayers), f"{source}: no draft")
        self._no_draft = self.plan
        self._source = source
        self._latency = latency
        self._record: PlanRecord | None = None

    def observe(self, state: BatchState, plan: Plan, result: RoundResult, num_tokens: int, seconds: float) -> None:
        """Add a round to the current plan's record; ignore rounds by other plans."""
        if self._record is not None and plan is self._record.plan:
            Tested.of(plan, result).add_to(self._record, num_tokens, seconds * state.batch)

    def take(
        self,
        state: BatchState,
        choices: Choices,
        num_draft_tokens: int,
        *,
        acceptance: float,
        reason: str,
        optimise_s: float,
        reuse_prefix: bool = True,
        tree_widths: tuple[int, ...] = (),
    ) -> PlanRecord:
        """Draft by these choices from now on; do not draft if all of them are full. Return the new plan's record.

        acceptance: expected acceptance of a token. The record's prediction assumes the best draft length and, with
        `reuse_prefix`, verifies that reuse the draft's leading sublayers in full.
        """
        drafts = num_leading_full(choices) < len(choices) and num_draft_tokens > 0
        drafting = Plan(
            choices=choices, num_draft_tokens=num_draft_tokens, source=self._source, tree_widths=tree_widths
        )
        self.plan = drafting if drafts else self._no_draft
        decision = best_choice(
            [self.plan.choices],
            [acceptance],
            self._latency,
            context=state.context,
            batch=state.batch,
            max_draft_tokens=num_draft_tokens,
            reuse_prefix=reuse_prefix,
            min_gain=-1.0,
        )
        self._record = PlanRecord(
            elapsed_s=state.elapsed_s,
            context=state.context,
            batch=state.batch,
            plan=self.plan,
            reason=reason,
            estimated_acceptance=acceptance if drafts else 0.0,
            predicted_tpt=decision.tpt,
            plain_tpt=decision.plain_tpt,
            optimise_s=optimise_s,
        )
        return self._record


def estimated_acceptance(draft: FoundDraft, num_tokens: int) -> float:
    """Estimate a draft's acceptance by the share of the tapped tokens on which it agreed, with its similarity as the
    prior."""
    return shrink(draft.num_agreed, num_tokens, min(max(draft.similarity, 0.0), 1.0))
