"""SWIFT: each round tries one set of sublayers on recent tokens, and the best set so far drafts (Xia et al., 2025).

As published: the first set of the search, the sizes of sets, and the share of agreeing tokens as the score. Also when
a Gaussian process suggests the set, when the search ends, the confidence at which drafts end, and their trees. Ours:
the tokens are the newest of each sequence, not the first of an answer. The first set is tried like any other set
before it drafts.
"""

from __future__ import annotations

from concurrent.futures import Future

from rayspec.choices import choices_of
from rayspec.config import SpeculationOptions
from rayspec.decode.search import Answer, Found, Trial
from rayspec.decode.strategy import Ask, BatchState
from rayspec.planning.latency import LatencyModel
from rayspec.strategies.mask_search import Keep, MaskSearch
from rayspec.strategies.periodic import PlanStrategy, answer_of
from rayspec.types import ConfigError, PlanRecord

# Published values.
_NUM_SEARCH_TOKENS = 32
_MAX_SCORE = 0.95  # share of agreeing tokens above which the search ends
_MAX_TRIES_WITHOUT_GAIN = 300
_MAX_TRIES = 1000
_SKIP_RATIO = 0.45  # of the sublayers between the first and the last layer
# Alternatives, itself counted, of a token whose top-1 probability is above .95, .8, .5, or less. The published code has
# 3, 5, 8, 10 for greedy decoding.
_TREE_WIDTHS = (1, 3, 5, 10)


class Swift(PlanStrategy):
    """Until the search ends, each round tries one set, and each new best set becomes the plan. The seconds of tries
    without a gain are reported with the next gain. Raises ConfigError for a model of too few layers."""

    source = "swift"

    def __init__(self, options: SpeculationOptions, latency: LatencyModel) -> None:
        num_sublayers = len(latency.sublayers)
        free = range(2, num_sublayers - 2)
        num_skipped = int(len(free) * _SKIP_RATIO)
        if num_skipped < 1:
            raise ConfigError(
                f"strategy 'swift' keeps the first and the last layer; of the {len(free)} sublayers between them, "
                f"{_SKIP_RATIO:.0%} leave none to skip: choose another strategy"
            )
        threshold = 0.8 if options.draft_threshold is None else options.draft_threshold
        super().__init__(self.no_draft(latency), threshold=threshold)
        self._latency = latency
        self._num_search_tokens = options.num_search_tokens or _NUM_SEARCH_TOKENS
        self._max_draft_tokens = options.max_draft_tokens
        self._sets = MaskSearch(num_sublayers, free, num_skipped=num_skipped, suggest_every=25, seed=1)
        self._best, self._best_score = odd_layers_skipped(num_sublayers), 0.0
        self._num_tries = self._num_without_gain = 0
        self._trying: Keep | None = self._best
        self._asked: Future[Answer] | None = None
        self._spent_s = 0.0

    @property
    def _end(self) -> str | None:
        if self._best_score > _MAX_SCORE:
            return f"a set agrees on {self._best_score:.1%} of the tokens"
        if self._num_without_gain >= _MAX_TRIES_WITHOUT_GAIN:
            return f"{self._num_without_gain} sets were tried in vain"
        return f"{self._num_tries} sets were tried" if self._num_tries >= _MAX_TRIES else None

    @property
    def wants_captures(self) -> bool:
        return self._end is None

    def search(self, state: BatchState, ask: Ask) -> PlanRecord | None:
        """Begin a trial, or conclude the one under way."""
        if self._end is not None:
            return None
        self._trying = self._trying or self._sets.propose()
        if self._asked is None:
            self._asked = ask(Trial(num_tokens=self._num_search_tokens, patterns=(choices_of(self._trying),)))
        if self._asked is None or not self._asked.done():
            return None
        asked, self._asked = self._asked, None
        if (found := answer_of(asked)) is None:  # the same set is tried on other tokens
            return None
        assert isinstance(found, Found)
        tried, self._trying = self._trying, None
        score = found.drafts[0].num_agreed / found.num_tokens
        self._sets.observe(tried, score)
        self._num_tries += 1
        self._num_without_gain += 1
        self._spent_s += found.seconds
        if score > self._best_score:
            self._best, self._best_score, self._num_without_gain = tried, score, 0
        elif self._end is None:
            return None
        spent_s, self._spent_s = self._spent_s, 0.0
        return self.take(
            state,
            self._latency,
            choices_of(self._best),
            self._max_draft_tokens,
            acceptance=self._best_score,
            reason="the best set so far" if self._end is None else f"the search is over: {self._end}",
            optimise_s=spent_s,
            tree_widths=_TREE_WIDTHS,
        )


def odd_layers_skipped(num_sublayers: int) -> Keep:
    """Return the set that skips both sublayers of layers 1, 3, ..., but never the last layer. Layers count from 0."""
    last = num_sublayers // 2 - 1
    return tuple(index // 2 % 2 == 0 or index // 2 == last for index in range(num_sublayers))
