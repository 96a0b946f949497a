"""Base of strategies that ask a question about tapped tokens at an interval, and choose their plan by the answer."""

from __future__ import annotations

from abc import ABC, abstractmethod

from rayspec.decode.search import Answer, Question
from rayspec.decode.selection.base import BatchState, Search
from rayspec.decode.work import KeepDrafting, RoundResult
from rayspec.planning.latency import LatencyModel
from rayspec.strategies.current_plan import CurrentPlan
from rayspec.strategies.inquiry import Inquiry
from rayspec.types import Plan, PlanRecord


class Inquiring(ABC):
    """Selector without a gate. It does not draft before an answer has led to a plan.

    source: the strategy's name. interval: tokens of one sequence between two questions.
    """

    gate_reason = "the gate is off"

    def __init__(self, source: str, latency: LatencyModel, *, interval: int) -> None:
        self._current = CurrentPlan(source, latency)
        self._inquiry = Inquiry(interval)

    @property
    def wants_taps(self) -> bool:
        return self._inquiry.wants_taps

    def plan(self, state: BatchState) -> Plan:
        return self._current.plan

    @abstractmethod
    def keep_drafting(self, state: BatchState) -> KeepDrafting | None: ...

    def observe(self, state: BatchState, plan: Plan, result: RoundResult, num_tokens: int, seconds: float) -> None:
        self._current.observe(state, plan, result, num_tokens, seconds)
        self._inquiry.observe(num_tokens / state.batch)

    def improve(self, state: BatchState, search: Search) -> PlanRecord | None:
        answer = self._inquiry.advance(state, search, self._question(state))
        return None if answer is None else self._decide(state, answer)

    @abstractmethod
    def _question(self, state: BatchState) -> Question: ...

    @abstractmethod
    def _decide(self, state: BatchState, answer: Answer) -> PlanRecord | None:
        """Choose the plan by the answer. Return the new plan's record, or None if the plan stays."""
