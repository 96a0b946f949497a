"""A memory across requests: finished outputs, from which texts of the same kind are copied."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from rayspec.decode.drafting.lookup import END_OF_TEXT, LookupIndex, Proposal
from rayspec.planning.lookup import CORPUS

_NGRAM, _SHORTEST_MATCH = 4, 2  # tokens that must match, and that suffice if no match is that long
_NUM_PROMPT_TOKENS = 3  # of the prompt's end, so that the beginning of an output is found, too
_MAX_CORPORA = 8


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
        text = [*prompt_token_ids[-_NUM_PROMPT_TOKENS:], *output_token_ids][: self._most_tokens - 1]
        if self._halves[0].num_tokens + len(text) >= self._most_tokens:
            self._halves.appendleft(_empty())
        self._halves[0].extend([*text, END_OF_TEXT])

    def proposals(self, newest: Sequence[int], num_tokens: int) -> list[Proposal]:
        """Return what each half proposes after the tokens `newest`, the newer half first."""
        return [half.propose_after(newest, num_tokens) for half in self._halves]


def _empty() -> LookupIndex:
    return LookupIndex(_NGRAM, _SHORTEST_MATCH, source=CORPUS)


class Corpora:
    """A corpus for each owner of requests, so that none sees by the speed of its own what another's outputs contain.
    The corpus that was not used for the longest time goes first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_owner: OrderedDict[str, Corpus] = OrderedDict()

    def of(self, owner: str) -> Corpus:
        corpus = self._by_owner.setdefault(owner, Corpus(self._capacity))
        self._by_owner.move_to_end(owner)
        if len(self._by_owner) > _MAX_CORPORA:
            self._by_owner.popitem(last=False)
        return corpus
