"""The protocol of strategies: `choose` a plan for each round, `observe` its result, `search` for a better plan.

docs/adding_a_strategy.md shows how to write a strategy; rayspec/strategies has one file for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from rayspec.decode.drafting.lookup import Proposal
from rayspec.decode.search import Answer, Question
from rayspec.decode.work import KeepDrafting, RoundResult
from rayspec.planning.acceptance import Decision
from rayspec.types import Plan, PlanRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchState:
    """The batch of a round. context: mean number of tokens that a sequence holds. batch: number of sequences.
    elapsed_s: engine time with this strategy so far; searched_s: the part of it that searches took.
    num_outstanding_tokens: expected number of tokens still to generate for running and waiting requests, except
    those that want no drafts. sequence_ids: the sequences of the batch, with the same exception; an id is constant
    until a preemption.
    proposals: function that looks up tokens for each sequence. by_class: function to the acceptance of looked-up
    tokens by their class. is_observed: whether `observe` will be called for the round; if not, try nothing in it."""

    context: int
    batch: int
    elapsed_s: float
    num_outstanding_tokens: float
    searched_s: float = 0.0
    sequence_ids: Sequence[str] = ()
    proposals: Callable[[], Sequence[Proposal]] = tuple
    by_class: Callable[[], Sequence[float]] = tuple
    is_observed: bool = True

    def record(
        self, plan: Plan, decision: Decision, *, reason: str, estimated_acceptance: float, optimise_s: float
    ) -> PlanRecord:
        """Return the record of a plan that was chosen for this batch."""
        return PlanRecord(
            elapsed_s=self.elapsed_s,
            context=self.context,
            batch=self.batch,
            plan=plan,
            reason=reason,
            estimated_acceptance=estimated_acceptance,
            predicted_tpt=decision.tpt,
            plain_tpt=decision.plain_tpt,
            optimise_s=optimise_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """How a round drafts. keep_drafting: the rule that ends drafts early; None: drafts have the plan's length.
    capture: whether to capture the target's hidden states of the newest token of each sequence, before and after each
    sublayer. `Strategy.search` can ask questions about captured tokens. plain_rate: tokens per second over the batch by
    plain decoding, where that is known."""

    plan: Plan
    keep_drafting: KeepDrafting | None = None
    capture: bool = False
    plain_rate: float | None = None


class Ask(Protocol):
    """Asks a question about the newest captured tokens, of one sequence if `sequence_id` is given. The call returns
    None while too few tokens are captured; the future is cancelled if their states are lost."""

    def __call__(self, question: Question, sequence_id: str | None = None) -> Future[Answer] | None: ...


class Strategy(Protocol):
    """Chooses how each round drafts. No choice can change a token: the verify runs the whole model.

    The engine calls `choose` before a round, and `observe` and `search` after it, with the same state and the choice
    that was made for it. In between it may choose for rounds of other sequences, never of the same sequences. A round
    that also prefills prompts is not observed, nor is one with sequences that want no drafts (`use_drafts`). For rounds
    in which no sequence wants drafts, no method is called.
    """

    @property
    def status(self) -> str:
        """A phrase for reports and `/status`. "drafting is on (...)" or "drafting is off (...)", also with "self-"
        before it, sets the metric `rayspec_gate_open`."""

    def choose(self, state: BatchState) -> RoundPlan:
        """Return the plan of the next round. This must be cheap."""

    def observe(
        self, state: BatchState, chosen: RoundPlan, result: RoundResult, num_tokens: int, seconds: float
    ) -> None:
        """Learn from a round. num_tokens: committed over the batch. seconds: from the choice to the commit."""

    def search(self, state: BatchState, ask: Ask) -> PlanRecord | None:
        """Look for a better plan, at the strategy's own expense. Return the record of a new plan, else None."""
