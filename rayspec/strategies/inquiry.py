"""A question about tapped tokens that is repeated at an interval: tokens are tapped, then the question is asked.

A token is tapped if the target keeps its hidden states before and after each sublayer.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future

from rayspec.decode.search import Answer, Question
from rayspec.decode.selection.base import BatchState, Search

logger = logging.getLogger(__name__)


class Inquiry:
    """Asks one question at a time, the first one without delay. Each question waits until enough tokens are tapped.

    interval: tokens of one sequence from the start of a question to the start of the next question.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._num_tokens = float(interval)  # tokens of one sequence since the last question began
        self._num_tapped: int | None = None  # tokens tapped for the question that is due; None: no question is due
        self._under_way: Future[Answer] | None = None

    @property
    def wants_taps(self) -> bool:
        return self._num_tapped is not None and self._under_way is None

    def observe(self, num_tokens: float) -> None:
        """Count a round's tokens, committed per sequence."""
        self._num_tokens += num_tokens

    def advance(self, state: BatchState, search: Search, question: Question) -> Answer | None:
        """Take the step that is due after a round: start to tap, ask the question, or return its answer.

        A question is asked again if its tokens were lost meanwhile. A question that failed is logged and has no answer.
        """
        answer = self._ask(state, search, question) if self._num_tapped is not None else None
        if self._num_tapped is None and self._num_tokens >= self._interval:
            self._num_tapped, self._num_tokens = 0, 0.0
        return answer

    def _ask(self, state: BatchState, search: Search, question: Question) -> Answer | None:
        assert self._num_tapped is not None
        self._num_tapped += state.batch
        if self._under_way is None and self._num_tapped >= question.num_tokens:
            self._under_way = search(question)
        if self._under_way is None or not self._under_way.done():
            return None
        asked, self._under_way = self._under_way, None
        if asked.cancelled():
            return None
        self._num_tapped = None
        if (error := asked.exception()) is not None:
            logger.warning("a plan search failed, the plan stays: %s", error)
            return None
        return asked.result()
