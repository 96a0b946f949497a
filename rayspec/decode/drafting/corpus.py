"""A memory across requests: finished outputs, from which texts of the same kind are copied."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rayspec.decode.drafting.lookup import END_OF_TEXT, LookupIndex, Proposal
from rayspec.planning.lookup import CORPUS

_NGRAM, _SHORTEST_MATCH = 4, 2  # tokens that must match, and that suffice if no match is that long
_NUM_PROMPT_TOKENS = 3  # of the prompt's end, so that the beginning of an output is found, too


class Corpus:
    """The newest outputs, of `capacity` tokens at most. They are kept in two halves. When the newer half is full, the
    older half is forgotten."""

    def __init__(self, capacity: int) -> None:
        self._most_tokens = capacity // 2
        self._halves = deque((_empty(),), maxlen=2)  # the newer first

    @property
    def num_tokens(self) -> int:
        return sum(half.num_tokens for half in self._halves)

    def add(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        """Add an output. Of one that is too long, the end is left out."""
        text = [*prompt_token_ids[-_NUM_PROMPT_TOKENS:], *output_token_ids][: max(0, self._most_tokens - 1)]
        if self._halves[0].num_tokens + len(text) >= self._most_tokens:
            self._halves.appendleft(_empty())
        self._halves[0].extend([*text, END_OF_TEXT])

    def proposals(self, newest: Sequence[int], num_tokens: int) -> list[Proposal]:
        """Return what each half proposes after the tokens `newest`, the newer half first."""
        return [half.propose_after(newest, num_tokens) for half in self._halves]


def _empty() -> LookupIndex:
    return LookupIndex(_NGRAM, _SHORTEST_MATCH, source=CORPUS)
