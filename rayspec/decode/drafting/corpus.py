"""A memory across requests: finished outputs, from which texts of the same kind are copied."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from rayspec.decode.drafting.lookup import END_OF_TEXT, LookupIndex, Proposal
from rayspec.planning.lookup import CORPUS

_NGRAM, _SHORTEST_MATCH = 4, 2  # tokens that must match, and that suffice if no match is that long
_MOST_AT_ONCE = 8192  # tokens of a text that is added
_CHARACTERS_AT_ONCE = 2**16  # that are tokenised together

OwnedText: TypeAlias = tuple[str, "array[int]"]
"""The owner of a text, see `Request.owner`, and its tokens: END_OF_TEXT stands between several texts."""


class Corpus:
    """The newest outputs, of `capacity` tokens at most. They are kept in two halves. When the newer half is full, the
    older half is forgotten. given: texts that are never forgotten, in addition."""

    def __init__(self, capacity: int, given: LookupIndex | None = None) -> None:
        self._most_tokens = capacity // 2
        self._given = (given,) if given is not None else ()
        self._halves = deque((_empty(),), maxlen=2)  # the newer first

    @property
    def num_tokens(self) -> int:
        return sum(half.num_tokens for half in self._halves)

    def add(self, token_ids: Sequence[int]) -> None:
        """Add a text. Of one that is too long, the end is left out."""
        text = token_ids[: max(0, self._most_tokens - 1)]
        if self._halves[0].num_tokens + len(text) >= self._most_tokens:
            self._halves.appendleft(_empty())
        self._halves[0].extend([*text, END_OF_TEXT])

    def proposals(self, newest: Sequence[int], num_tokens: int) -> list[Proposal]:
        """Return what each half proposes after the tokens `newest`, the newer half first, and what the given texts
        propose."""
        return [one.propose_after(newest, num_tokens) for one in (*self._halves, *self._given)]


def index_of(token_ids: Sequence[int]) -> LookupIndex | None:
    """Return the index of given texts, END_OF_TEXT between them; None without any."""
    if not token_ids:
        return None
    index = _empty()
    index.extend(token_ids)
    return index


def tokenised(texts: Iterable[str], tokenizer: Any, *, vocab_size: int) -> Iterator[array[int]]:
    """Yield the tokens of texts, several short texts together and a long text in parts, END_OF_TEXT after each. It also
    stands in place of tokens that the model does not have."""
    found = array("i")
    parts = (text[at : at + _CHARACTERS_AT_ONCE] for text in texts for at in range(0, len(text), _CHARACTERS_AT_ONCE))
    for part in parts:
        token_ids = tokenizer(part, add_special_tokens=False)["input_ids"]
        found.extend(one if one < vocab_size else END_OF_TEXT for one in token_ids)
        found.append(END_OF_TEXT)
        if len(found) >= _MOST_AT_ONCE:
            yield from (found[at : at + _MOST_AT_ONCE] for at in range(0, len(found), _MOST_AT_ONCE))
            found = array("i")
    if found:
        yield found


def _empty() -> LookupIndex:
    return LookupIndex(_NGRAM, _SHORTEST_MATCH, source=CORPUS)
