"""Who chooses the plan. A selector is asked before every round and told what came of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

from rayspec.choices import FULL, SKIP, Choice, nearest
from rayspec.decode.drafting.lookup import Proposal
from rayspec.decode.drafting.skip_draft import KeepDrafting
from rayspec.decode.questions import Answer, Question
from rayspec.decode.rounds import RoundResult
from rayspec.types import Plan, PlanRecord, no_draft


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchState:
    """What a plan is chosen for. context: mean tokens a sequence holds; elapsed_s: engine time so far;
    num_outstanding_tokens: tokens that running and waiting requests may still want. sequence_ids: the batch, each the
    same as long as it lives. proposals: what can be looked up for each sequence; found when it is asked for."""

    context: int
    batch: int
    elapsed_s: float
    num_outstanding_tokens: int
    sequence_ids: Sequence[str] = ()
    proposals: Callable[[], Sequence[Proposal]] = tuple


class Search(Protocol):
    """Asks the tokens tapped last, of one sequence where it is named; None while there are too few. It is cancelled
    when they are gone."""

    def __call__(self, question: Question, sequence_id: str | None = None) -> Future[Answer] | None: ...


class Selector(Protocol):
    """`plan` is pure bookkeeping and costs nothing; `improve` may have time spent, within the selector's budget.

    Of each round it is asked `plan`, `keep_drafting` and `wants_taps`, in this order, and told the end by `observe` and
    `improve`, with the same state. Meanwhile it may be asked of rounds of other sequences, never of these.
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
    """The same plan in every round: "ar" (no draft) and "static"."""

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
    """choice: of the sublayers that are not skipped, or the nearest to it that is among a sublayer's `ways`; None: all
    sublayers have all. Raises ValueError when a sublayer does not exist."""
    foreign = [index for index in skip if not 0 <= index < num_sublayers]
    if foreign:
        raise ValueError(f"option 'skip' names sublayer {foreign[0]}; the model has 0 to {num_sublayers - 1}")
    possible = [(choice,)] * num_sublayers if ways is None else ways
    choices = tuple(SKIP if index in set(skip) else nearest(choice, each) for index, each in enumerate(possible))
    return Plan(choices=choices, num_draft_tokens=num_draft_tokens, source="static")


def lookup_plan(num_sublayers: int, num_tokens: int) -> Plan:
    """Drafts of at most so many tokens, from the sequence's own text (prompt lookup, Saxena 2023)."""
    return replace(no_draft(num_sublayers, "lookup"), num_lookup_tokens=num_tokens)
