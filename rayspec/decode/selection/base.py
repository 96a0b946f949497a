"""Selectors, which choose the plan of every round before it, and observe its result after it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

from rayspec.choices import FULL, SKIP, Choice, nearest
from rayspec.decode.drafting.lookup import Proposal
from rayspec.decode.search import Answer, Question
from rayspec.decode.work import KeepDrafting, RoundResult
from rayspec.types import Plan, PlanRecord, no_draft


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchState:
    """The batch that a plan is chosen for. context: mean number of tokens that a sequence holds. elapsed_s: engine time
    so far. num_outstanding_tokens: expected number of tokens still to generate for running and waiting requests.
    sequence_ids: the sequences of the batch; an id is constant. proposals: function that looks up tokens for each
    sequence."""

    context: int
    batch: int
    elapsed_s: float
    num_outstanding_tokens: float
    sequence_ids: Sequence[str] = ()
    proposals: Callable[[], Sequence[Proposal]] = tuple


class Search(Protocol):
    """Asks a question about the newest tapped tokens, of one sequence if `sequence_id` is given. A token is tapped if
    the target keeps its hidden states before and after each sublayer. The call returns None while too few tokens are
    tapped; the future is cancelled if their states are lost."""

    def __call__(self, question: Question, sequence_id: str | None = None) -> Future[Answer] | None: ...


class Selector(Protocol):
    """Chooses the plan of each round. `plan` must be cheap; `improve` may start searches, within the selector's budget.

    Before a round, the planner reads `plan`, `keep_drafting` and `wants_taps`, in this order. After the round, it calls
    `observe` and `improve` with the same state. In between, it may plan rounds of other sequences, never of the same.
    """

    @property
    def wants_taps(self) -> bool: ...

    @property
    def gate_reason(self) -> str: ...

    def plan(self, state: BatchState) -> Plan: ...

    def keep_drafting(self, state: BatchState) -> KeepDrafting | None: ...

    def observe(self, state: BatchState, plan: Plan, result: RoundResult, num_tokens: int, seconds: float) -> None: ...

    def improve(self, state: BatchState, search: Search) -> PlanRecord | None: ...


class FixedPlan:
    """Selector with the same plan in every round: "ar" (no draft), "static", "lookup", "lookahead", "layerskip"."""

    wants_taps = False
    gate_reason = "the strategy has no gate"

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def plan(self, state: BatchState) -> Plan:
        return self._plan

    def keep_drafting(self, state: BatchState) -> KeepDrafting | None:
        return None

    def observe(self, state: BatchState, plan: Plan, result: RoundResult, num_tokens: int, seconds: float) -> None:
        pass

    def improve(self, state: BatchState, search: Search) -> PlanRecord | None:
        return None


def static_plan(
    skip: Sequence[int],
    num_sublayers: int,
    num_draft_tokens: int,
    *,
    choice: Choice = FULL,
    ways: Sequence[Collection[Choice]] | None = None,
) -> Plan:
    """Return the plan that skips the sublayers `skip` and runs the others by `choice`, or the nearest possible choice.

    ways: the possible choices of each sublayer; None: `choice` is always possible. Raises ValueError for a sublayer
    that does not exist.
    """
    foreign = [index for index in skip if not 0 <= index < num_sublayers]
    if foreign:
        raise ValueError(f"option 'skip' names sublayer {foreign[0]}; the model has 0 to {num_sublayers - 1}")
    possible = [(choice,)] * num_sublayers if ways is None else ways
    choices = tuple(SKIP if index in set(skip) else nearest(choice, each) for index, each in enumerate(possible))
    return Plan(choices=choices, num_draft_tokens=num_draft_tokens, source="static")


def lookup_plan(num_sublayers: int, num_tokens: int) -> Plan:
    """Return the plan of drafts of at most `num_tokens` tokens, from the sequence's own text (prompt lookup, Saxena
    2023)."""
    return replace(no_draft(num_sublayers, "lookup"), num_lookup_tokens=num_tokens)
