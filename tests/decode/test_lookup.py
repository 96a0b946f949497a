from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rayspec.decode.drafting.lookup import NOTHING, LookupIndex, Proposal
from rayspec.planning.lookup import AMBIGUOUS, SINGLE, UNANIMOUS, match_class

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def by_the_book(
    text: list[int], ngram: int, num_tokens: int, num_drafted: int = 0, longest: int | None = None
) -> Proposal:
    """Every earlier place at which the newest n-gram stands, the longest match first, then the latest. The last tokens
    are drafted, and are no place. Others speak for a token or against it where as many match, or `longest`, and half as
    many as at the best place."""
    places = []
    for end in range(ngram, len(text) - num_drafted):
        matched = 0
        while matched < min(end, 32) and text[end - 1 - matched] == text[-1 - matched]:
            matched += 1
        if matched >= ngram:
            places.append((matched, end))
    if not places or not num_tokens:
        return NOTHING
    matched, end = max(places)
    needed = max(min(matched, longest or ngram), matched / 2)
    going_on = list(text)
    for index in range(num_tokens):
        going_on.append(going_on[end + index])
    token_ids = going_on[len(text) :]
    match_classes = []
    for index, token in enumerate(token_ids):
        followed = {
            text[other + index]
            for count, other in places
            if other != end and count >= needed and text[other : other + index] == token_ids[:index]
            for _ in text[other + index : other + index + 1]
        }
        support = SINGLE if not followed else UNANIMOUS if followed == {token} else AMBIGUOUS
        match_classes.append(match_class(matched + index, support))
    return Proposal(tuple(token_ids), tuple(match_classes))


def alone(num_matched: int, num_tokens: int) -> tuple[int, ...]:
    return tuple(match_class(num_matched + at, SINGLE) for at in range(num_tokens))


@given(TEXTS, st.integers(1, 4), st.integers(0, 8), st.data())
def test_the_longest_of_the_latest_matches_is_found(
    text: list[int], ngram: int, num_tokens: int, data: st.DataObject
) -> None:
    """Built at once and as it grows. Few places are compared, so texts are short of them here."""
    at_once, grown = LookupIndex(ngram), LookupIndex(ngram)
    at_once.extend_to(text)
    for end in sorted(data.draw(st.lists(st.integers(0, len(text))))):
        grown.extend_to(text[:end])
    grown.extend_to(text)
    found = at_once.propose(num_tokens)
    assert grown.propose(num_tokens) == found
    newest = text[len(text) - ngram :]
    num_places = sum(text[end - ngram : end] == newest for end in range(ngram, len(text)))
    if num_places <= 8:
        assert found == by_the_book(text, ngram, num_tokens)


def test_a_repetition_goes_on_beyond_the_end() -> None:
    index = LookupIndex(2)
    index.extend_to([9, 1, 2, 3, 1, 2, 3, 1, 2])
    assert index.propose(7).token_ids == (3, 1, 2, 3, 1, 2, 3)


def test_what_is_too_short_proposes_nothing() -> None:
    index = LookupIndex(3)
    for text in ([], [1], [1, 1], [1, 1, 1]):
        index.extend_to(text)
        assert index.propose(4) == NOTHING
    index.extend_to([1, 1, 1, 1])
    assert index.propose(2) == Proposal((1, 1), alone(3, 2))


@given(TEXTS, st.lists(st.integers(0, 3), max_size=6), st.integers(1, 4), st.integers(1, 4), st.integers(0, 8))
def test_shorter_matches_do_where_there_is_no_longer_one(
    text: list[int], drafted: list[int], ngram: int, shortest: int, num_tokens: int
) -> None:
    index = LookupIndex(max(ngram, shortest), min(ngram, shortest))
    index.extend_to(text)
    found = index.propose(num_tokens, drafted)
    assert index.propose(num_tokens, drafted) == found, "the drafted tokens were kept"
    whole = text + drafted
    places = [whole[end - 1] == whole[-1] for end in range(1, len(text))] if whole else []
    if sum(places) <= 8:
        assert found == by_the_book(whole, min(ngram, shortest), num_tokens, len(drafted), max(ngram, shortest))
