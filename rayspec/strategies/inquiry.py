"""A question to tapped tokens, again and again: tokens are tapped for it, it is asked, it is answered."""

from __future__ import annotations

import logging
from concurrent.futures import Future

from rayspec.decode.questions import Answer, Question
from rayspec.decode.selection.base import BatchState, Search

logger = logging.getLogger(__name__)


class Inquiry:
    """One question at a time, the first one at once. Before each, as many tokens are tapped as it is about.

    interval: tokens of one sequence from the beginning of a question to that of the next.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._num_tokens = float(interval)  # of one sequence since the last question began
        self._num_tapped: int | None = None  # tokens, for the question that is due; None: none is
        self._under_way: Future[Answer] | None = None

    @property
    def wants_taps(self) -> bool:
        return self._num_tapped is not None and self._under_way is None

    def observe(self, num_tokens: float) -> None:
        """A round: tokens committed per sequence."""
        self._num_tokens += num_tokens

    def advance(self, state: BatchState, search: Search, question: Question) -> Answer | None:
        """A round has ended: begin, ask, or take the answer, whatever is due. A question whose tokens were lost on the
        way is asked again; from one that failed nothing comes."""
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
