from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayspec.decode.drafting import lookup
from rayspec.decode.drafting.lookup import AMBIGUOUS, NOTHING, SINGLE, UNANIMOUS, LookupIndex, Proposal, match_classes

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def by_the_book(
    text: list[int], ngram: int, num_tokens: int, *, num_drafted: int = 0, shortest: int | None = None
) -> Proposal:
    """The places at which the newest n-gram stands earlier, for the longest n-gram that has any, and the eight latest
    of them only. The best is that with the longest match, then the latest. The last tokens are drafted, and are no
    place. Others speak for a token or against it where half as many match as at the best place."""
    for length in range(ngram, (shortest or ngram) - 1, -1):
        newest = text[len(text) - length :] if len(text) >= length else [-1]
        ends = [end for end in range(length, len(text) - num_drafted) if text[end - length : end] == newest][-8:]
        if ends and num_tokens:
            break
    else:
        return NOTHING
    places = []
    for end in ends:
        matched = length
        while matched < min(end, 32) and text[end - 1 - matched] == text[-1 - matched]:
            matched += 1
        places.append((matched, end))
    matched, end = max(places)
    going_on = list(text)
    for index in range(num_tokens):
        going_on.append(going_on[end + index])
    token_ids = going_on[len(text) :]
    supports = []
    for index, token in enumerate(token_ids):
        followed = {
            text[other + index]
            for count, other in places
            if other != end and count >= matched / 2 and text[other : other + index] == token_ids[:index]
            for _ in text[other + index : other + index + 1]
        }
        support = SINGLE if not followed else UNANIMOUS if followed == {token} else AMBIGUOUS
        supports.append(support)
    return Proposal(tuple(token_ids), match_classes(matched, supports))


@given(
    TEXTS, st.lists(st.integers(0, 3), max_size=6), st.integers(1, 4), st.integers(1, 4), st.integers(0, 8), st.data()
)
def test_the_longest_of_the_latest_matches_is_found(
    text: list[int], drafted: list[int], ngram: int, shortest: int, num_tokens: int, data: st.DataObject
) -> None:
    """Built at once and as it grows, with hashes that are sorted in sooner or later."""
    lengths = max(ngram, shortest), min(ngram, shortest)
    expected = by_the_book(text + drafted, lengths[0], num_tokens, num_drafted=len(drafted), shortest=lengths[1])
    with patch.object(lookup, "_MAX_UNSORTED", data.draw(st.integers(0, 30))):
        at_once, grown = LookupIndex(*lengths), LookupIndex(*lengths)
        at_once.extend_to(text)
        for end in data.draw(st.lists(st.integers(0, len(text)))):
            grown.extend_to(text, end)
        grown.extend_to(text)
    for index in (at_once, grown, grown):  # the drafted tokens are not kept
        assert index.propose(num_tokens, drafted) == expected


def test_n_grams_with_the_same_hash_are_told_apart() -> None:
    with (
        patch.object(lookup, "_MAX_UNSORTED", 0),
        patch.object(lookup, "_hashes", lambda tokens, length: np.zeros(len(tokens) - length + 1, np.uint64)),
        patch.object(lookup, "_hash_of", lambda ngram: 0),
    ):
        index = LookupIndex(2)
        index.extend_to([1, 2, 3, 4, 5, 6, 7, 5, 6])
        assert index.propose(2).token_ids == (7, 5)
        index.extend_to([1, 2, 3, 4, 5, 6, 7, 5, 6, 1, 5])
        assert index.propose(2) == NOTHING
