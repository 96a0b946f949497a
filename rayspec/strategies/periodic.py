"""What CLaSp, DEL and ASD share: they ask about captured tokens at an interval, and choose their plan by the answer.

SWIFT and Self-SD use `CurrentPlan` and `Tested`, too.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass

from rayspec.choices import Choices, num_leading_full
from rayspec.decode.search import Answer, Question
from rayspec.decode.strategy import Ask, BatchState, RoundPlan
from rayspec.decode.work import KeepDrafting, RoundResult
from rayspec.planning.acceptance import best_choice
from rayspec.planning.latency import LatencyModel
from rayspec.types import Plan, PlanRecord, no_draft

logger = logging.getLogger(__name__)

# The status of a strategy that is not behind a gate.
ALWAYS_DRAFTS = "rounds draft whenever there is a plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """Draft tokens of a round, over the batch; a tree counts by its longest path. num_tested: up to and with the first
    rejected token of each draft. reached_length: no draft ended before the plan's length."""

    num_accepted: int
    num_tested: int
    num_drafted: int
    reached_length: bool

    @classmethod
    def of(cls, plan: Plan, result: RoundResult) -> Tested:
        lengths = [one.length for one in result.drafts]
        tested = [min(accepted + 1, length) for accepted, length in zip(result.num_accepted, lengths, strict=True)]
        return cls(
            num_accepted=sum(result.num_accepted),
            num_tested=sum(tested),
            num_drafted=sum(lengths),
            reached_length=all(length == plan.num_draft_tokens for length in lengths if length),
        )

    def add_to(self, record: PlanRecord, num_tokens: int, sequence_s: float) -> None:
        record.add_round(
            num_tokens=num_tokens,
            sequence_s=sequence_s,
            num_accepted=self.num_accepted,
            num_tested=self.num_tested,
        )


def answer_of(asked: Future[Answer]) -> Answer | None:
    """Return the answer to a question that is done; None if the search was cancelled, or failed, which is logged."""
    if asked.cancelled():
        return None
    if (error := asked.exception()) is not None:
        logger.warning("a plan search failed, the plan stays: %s", error)
        return None
    return asked.result()


class CurrentPlan:
    """Current plan of a strategy that chooses how to run each sublayer. It drafts nothing before the first `take`."""

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
        acceptance: expected, of a token. reuse_prefix: whether verifies reuse the draft's leading sublayers in full."""
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
        expected = acceptance if drafts else 0.0
        self._record = state.record(
            self.plan, decision, reason=reason, estimated_acceptance=expected, optimise_s=optimise_s
        )
        return self._record


class PeriodicStrategy(ABC):
    """Asks one question at a time, each when enough new tokens are captured; no drafts before an answer has led to a
    plan. interval: tokens of one sequence from the start of a question to the start of the next. A question is asked
    again if its tokens were lost. If it fails, the plan stays."""

    status = ALWAYS_DRAFTS

    def __init__(self, source: str, latency: LatencyModel, *, interval: int) -> None:
        self._current = CurrentPlan(source, latency)
        self._interval = interval
        self._num_tokens = float(interval)  # tokens of one sequence since the last question began
        self._num_captured: int | None = None  # for the question that is due; None: no question is due
        self._asked: Future[Answer] | None = None

    def choose(self, state: BatchState) -> RoundPlan:
        capture = self._num_captured is not None and self._asked is None
        return RoundPlan(plan=self._current.plan, keep_drafting=self._rule(), capture=capture)

    def observe(
        self, state: BatchState, chosen: RoundPlan, result: RoundResult, num_tokens: int, seconds: float
    ) -> None:
        self._current.observe(state, chosen.plan, result, num_tokens, seconds)
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
    def _rule(self) -> KeepDrafting | None:
        """Return the rule that ends drafts."""

    @abstractmethod
    def _question(self, state: BatchState) -> Question: ...

    @abstractmethod
    def _decide(self, state: BatchState, answer: Answer) -> PlanRecord | None:
        """Choose the plan by the answer. Return the new plan's record, or None if the plan stays."""
