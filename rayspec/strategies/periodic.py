"""What the strategies of the papers share: one plan at a time, and questions about captured tokens at an interval.

SWIFT and Self-SD use `PlanStrategy` only.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import ClassVar

from rayspec.choices import Choices, num_leading_full
from rayspec.decode.search import Answer, Question
from rayspec.decode.strategy import Ask, BatchState, RoundPlan
from rayspec.decode.work import RoundResult
from rayspec.planning.acceptance import DraftRates
from rayspec.planning.latency import LatencyModel
from rayspec.planning.learning import DraftWhileSure
from rayspec.types import Plan, PlanRecord, no_draft

logger = logging.getLogger(__name__)

# Of a threshold that follows the acceptance: values of the published code of Self-SD.
TARGET_ACCEPTANCE = 0.9
_MATCHED_MEMORY = 0.5
_THRESHOLD_MEMORY = 0.9
_STEP = 0.01


def num_tested(result: RoundResult) -> int:
    """Return the draft tokens up to and with the first rejected one of each draft; of a tree, of its longest path."""
    return sum(min(count + 1, one.length) for count, one in zip(result.num_accepted, result.drafts, strict=True))


def answer_of(asked: Future[Answer]) -> Answer | None:
    """Return the answer to a question that is done; None if the search was cancelled, or failed, which is logged."""
    if asked.cancelled():
        return None
    if (error := asked.exception()) is not None:
        logger.warning("a plan search failed, the plan stays: %s", error)
        return None
    return asked.result()


class PlanStrategy:
    """Drafts by one plan at a time, and adds its rounds to its record. plan: the first.

    threshold: the confidence below which a draft ends; None: drafts reach their length. adapts: whether it follows the
    acceptance. It rises while the accepted share of the drafted tokens is below TARGET_ACCEPTANCE; else it falls, or
    stays if drafts reach their length. It changes by at most 0.001 per verify.
    """

    status = "rounds draft whenever there is a plan"
    source: ClassVar[str]

    def __init__(self, plan: Plan, *, threshold: float | None = None, adapts: bool = False) -> None:
        self.threshold = threshold
        self.record: PlanRecord | None = None
        self._plan, self._adapts = plan, adapts
        self._matched = 0.0  # accepted share of the drafted tokens, moving average over verifies

    @classmethod
    def no_draft(cls, latency: LatencyModel) -> Plan:
        return no_draft(len(latency.sublayers), f"{cls.source}: no draft")

    @property
    def wants_captures(self) -> bool:
        return False

    def choose(self, state: BatchState) -> RoundPlan:
        rule = None if self.threshold is None else DraftWhileSure(threshold=self.threshold)
        return RoundPlan(plan=self._plan, keep_drafting=rule, capture=self.wants_captures)

    def observe(
        self, state: BatchState, chosen: RoundPlan, result: RoundResult, num_tokens: int, seconds: float
    ) -> None:
        num_accepted, lengths = sum(result.num_accepted), [one.length for one in result.drafts]
        if self.record is not None and chosen.plan is self.record.plan:
            self.record.add_round(
                num_tokens=num_tokens,
                sequence_s=seconds * state.batch,
                num_accepted=num_accepted,
                num_tested=num_tested(result),
            )
        if not self._adapts or self.threshold is None or not any(lengths):
            return
        self._matched = _MATCHED_MEMORY * self._matched + (1 - _MATCHED_MEMORY) * num_accepted / sum(lengths)
        if self._matched < TARGET_ACCEPTANCE:
            wanted = self.threshold + _STEP
        else:
            reach_length = all(length == chosen.plan.num_draft_tokens for length in lengths if length)
            wanted = self.threshold if reach_length else self.threshold - _STEP
        adapted = _THRESHOLD_MEMORY * self.threshold + (1 - _THRESHOLD_MEMORY) * wanted
        self.threshold = min(max(adapted, 0.0), 1.0)

    def take(
        self,
        state: BatchState,
        latency: LatencyModel,
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
        acceptance: expected, of a token. reuse_prefix: whether verifies reuse the draft's leading sublayers in full."""
        drafts = num_leading_full(choices) < len(choices) and num_draft_tokens > 0
        drafting = Plan(choices=choices, num_draft_tokens=num_draft_tokens, source=self.source, tree_widths=tree_widths)
        self._plan = drafting if drafts else self.no_draft(latency)
        rates = DraftRates(
            latency=latency,
            context=state.context,
            batch=state.batch,
            max_draft_tokens=num_draft_tokens,
            reuse_prefix=reuse_prefix,
        )
        decision = rates.best_choice([self._plan.choices], [acceptance], min_gain=-1.0)
        expected = acceptance if drafts else 0.0
        self.record = state.record(
            self._plan, decision, reason=reason, estimated_acceptance=expected, optimise_s=optimise_s
        )
        return self.record


class PeriodicStrategy(PlanStrategy, ABC):
    """Asks one question at a time, each when enough new tokens are captured; no drafts before an answer has led to a
    plan. interval: tokens of one sequence from the start of a question to the start of the next. A question is asked
    again if its tokens were lost. If it fails, the plan stays."""

    def __init__(
        self, latency: LatencyModel, *, interval: int, threshold: float | None = None, adapts: bool = False
    ) -> None:
        super().__init__(self.no_draft(latency), threshold=threshold, adapts=adapts)
        self._latency = latency
        self._interval = interval
        self._num_tokens = float(interval)  # tokens of one sequence since the last question began
        self._num_captured: int | None = None  # for the question that is due; None: no question is due
        self._asked: Future[Answer] | None = None

    @property
    def wants_captures(self) -> bool:
        return self._num_captured is not None and self._asked is None

    def observe(
        self, state: BatchState, chosen: RoundPlan, result: RoundResult, num_tokens: int, seconds: float
    ) -> None:
        super().observe(state, chosen, result, num_tokens, seconds)
        self._num_tokens += num_tokens / state.batch

    def search(self, state: BatchState, ask: Ask) -> PlanRecord | None:
        """Take the step that is due after a round: begin to capture, ask the question, or decide by its answer."""
        asked = None
        if self._num_captured is not None:
            self._num_captured += state.batch
            question = self._question(state)
            if self._asked is None and self._num_captured >= question.num_tokens:
                self._asked = ask(question)
            if self._asked is not None and self._asked.done():
                asked, self._asked = self._asked, None
                self._num_captured = self._num_captured if asked.cancelled() else None
        if self._num_captured is None and self._num_tokens >= self._interval:
            self._num_captured, self._num_tokens = 0, 0.0
        answer = None if asked is None else answer_of(asked)
        return None if answer is None else self._decide(state, answer)

    @abstractmethod
    def _question(self, state: BatchState) -> Question: ...

    @abstractmethod
    def _decide(self, state: BatchState, answer: Answer) -> PlanRecord | None:
        """Choose the plan by the answer. Return the new plan's record, or None if the plan stays."""
