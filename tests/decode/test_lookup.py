"""Tokens that are looked up, recycled and proposed."""

from collections.abc import Sequence
from unittest.mock import Mock, patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayspec import LLM, SamplingParams
from rayspec.config import SpeculationOptions
from rayspec.decode.drafting import lookup
from rayspec.decode.drafting.lookup import AMBIGUOUS, NOTHING, SINGLE, UNANIMOUS, LookupIndex, Proposal, match_classes
from rayspec.decode.requests import SequenceState
from rayspec.decode.round_planner import NUM_SUCCESSORS, Likeliest, Proposer, Successors
from rayspec.decode.work import Draft, RoundEntry
from tests.decode.samplers import sequence_of
from tests.demo_model import shallow_demo

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
    """Built at once, as it grows, and from a part of another index, with hashes that are sorted in sooner or later."""
    lengths = max(ngram, shortest), min(ngram, shortest)
    expected = by_the_book(text + drafted, lengths[0], num_tokens, num_drafted=len(drafted), shortest=lengths[1])
    with patch.object(lookup, "_MAX_UNSORTED", data.draw(st.integers(0, 30))):
        at_once, grown, continued = LookupIndex(*lengths), LookupIndex(*lengths), LookupIndex(*lengths)
        at_once.extend_to(text)
        for end in data.draw(st.lists(st.integers(0, len(text)))):
            grown.extend_to(text, end)
        grown.extend_to(text)
        continued.begin_as(grown, data.draw(st.integers(0, len(text))))
        continued.extend_to(text)
    for index in (at_once, grown, grown, continued):  # the drafted tokens are not kept
        assert index.propose(num_tokens, drafted) == expected


def test_the_sequences_of_a_request_index_its_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_MAX_UNSORTED", 100)
    monkeypatch.setattr(lookup, "_hashes", hashes := Mock(wraps=lookup._hashes))
    llm = LLM(shallow_demo(), dtype="float32", num_threads=1, max_model_len=512)
    prompt = {"prompt_token_ids": [token % 89 for token in range(5, 400)]}
    params = SamplingParams(n=4, max_tokens=4, temperature=1.0, seed=1, ignore_eos=True)
    llm.generate([prompt], params, use_tqdm=False)
    num_hashed = sum(len(call.args[0]) for call in hashes.call_args_list)
    assert 300 <= num_hashed / 3 <= 500, "of three lengths of n-grams"


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


def likeliest(*token_ids: int, first: float = 0.9) -> Likeliest:
    """These tokens, then others."""
    others = [token for token in range(90, 100) if token not in token_ids]
    token_ids = (*token_ids, *others)[:NUM_SUCCESSORS]
    return token_ids, [first, *[(1 - first) / NUM_SUCCESSORS] * (NUM_SUCCESSORS - 1)]


def proposer_for(strategy: str, sequence: SequenceState) -> Proposer:
    proposer = Proposer(SpeculationOptions(strategy=strategy))
    proposer.begin(sequence)
    return proposer


def entry_of(sequence: SequenceState) -> RoundEntry:
    length = sequence.num_tokens
    return RoundEntry(sequence_id="a", runs=(), length=length, last_token=sequence.token_ids[-1], max_draft_tokens=0)


def play(
    proposer: Proposer, sequence: SequenceState, committed: Sequence[int], rows: Sequence[Likeliest], draft: Draft
) -> None:
    """A round of this draft, in which the target found these tokens likeliest after each row."""
    entry, proposal = entry_of(sequence), proposer.propose(sequence, 16)
    sequence.token_ids.extend(committed)
    proposer.learn(sequence, entry, proposal, draft, committed, rows)


def paths_of(proposal: Proposal) -> set[tuple[int, ...]]:
    """The texts from the root to each token."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(proposal.token_ids, proposal.parents or range(len(proposal.token_ids)), strict=True):
        paths.append((*paths[parent], token))
    return set(paths[1:])


def test_successors_of_a_pair_come_before_those_of_a_token_and_those_of_prompts_last() -> None:
    successors = Successors()
    assert successors.after(1, 2) == ([], [])
    successors.note_text([1, 2, 3, 2, 4])
    assert successors.after(7, 2)[0] == [4], "the later of two in the text"
    successors.note([(1, 2)], [likeliest(5)])
    successors.note_text([2, 6])
    assert successors.after(9, 2)[0][0] == 5, "what the target found stays"
    successors.note([(8, 2)], [likeliest(7)])
    assert [successors.after(before, 2)[0][0] for before in (1, 8, 9)] == [5, 7, 7]


def test_a_tree_holds_what_was_likely_after_rejected_rows_too() -> None:
    sequence = sequence_of([1, 2])
    proposer = proposer_for("recycling", sequence)
    assert paths_of(proposer.propose(sequence, 8)) == set(), "nothing follows 2 in the prompt"
    rows = [likeliest(3), likeliest(4), likeliest(5)]
    play(proposer, sequence, [3], rows, Draft([8, 9], parents=[0, 0]))  # both are wrong
    sequence.token_ids += [1, 2]
    assert (3,) in paths_of(proposer.propose(sequence, 8))
    sequence.token_ids += [2, 8]
    assert (4,) in paths_of(proposer.propose(sequence, 8)), "the row of 8, which was rejected"


def test_the_likeliest_tokens_come_first_and_every_token_after_its_parent() -> None:
    sequence = sequence_of([1, 2, 3, 4, 5, 6, 7, 1, 2, 3])
    proposer = proposer_for("auto", sequence)
    for before, token in ((2, 3), (3, 4), (4, 5)):
        proposer._memory("").successors.note([(before, token)], [likeliest(token + 10, token + 1)])  # type: ignore[union-attr]
    found = proposer.propose(sequence, 12)
    assert found.parents, "the copy and what is recycled are two branches"
    assert {(4,), (4, 5), (13,)} <= paths_of(found)
    assert list(found.survival) == sorted(found.survival, reverse=True)
    assert all(parent <= at for at, parent in enumerate(found.parents))
    siblings = [(parent, token) for token, parent in zip(found.token_ids, found.parents, strict=True)]
    assert len(set(siblings)) == len(siblings), "no token twice after the same row"
    sequence.max_total_tokens = sequence.num_tokens + 4
    assert len(proposer.propose(sequence, 12).token_ids) == 3


def test_acceptance_is_learned_without_the_draft_being_used() -> None:
    """Plain rounds in which what was likeliest comes again, or never."""
    for comes in (True, False):
        sequence = sequence_of([1, 2])
        proposer = proposer_for("recycling", sequence)
        for _ in range(30):
            play(proposer, sequence, [3 if comes else 4], [likeliest(3)], Draft())
            sequence.token_ids += [1, 2]
        survival = dict(
            zip(paths_of(proposer.propose(sequence, 1)), proposer.propose(sequence, 1).survival, strict=True)
        )
        assert (survival.get((3,), 0.0) > 0.9) == comes
        assert (survival.get((3,), 0.0) < 0.1) != comes


@pytest.mark.parametrize("num_right", [1, 2, 4, 6])
def test_looked_up_tokens_behind_a_draft_count_only_where_the_draft_was_right(num_right: int) -> None:
    """A draft of two tokens of the model and four looked-up ones."""
    sequence = sequence_of([1, 2])
    proposer = proposer_for("auto", sequence)
    before = proposer.record.by_class
    draft = Draft([5, 6, 1, 1, 1, 1], [0.9, 0.8], match_classes=list(match_classes(4, [SINGLE] * 4)))
    play(proposer, sequence, [*draft.token_ids[:num_right], 9], [], draft)
    learned = [now > then for now, then in zip(proposer.record.by_class, before, strict=True)]
    assert any(learned) == (num_right > 2)
    assert (proposer.record.by_class != before) == (num_right >= 2)


def test_without_recycling_the_copy_is_a_chain() -> None:
    sequence = sequence_of([1, 2, 3, 4, 1, 2, 3])
    found = proposer_for("lookup", sequence).propose(sequence, 3)
    assert (found.token_ids, found.parents) == ((4, 1, 2), ())
    assert proposer_for("ar", sequence_of([1, 2])).propose(sequence_of([1, 2]), 3) == NOTHING


def test_the_likeliest_tokens_are_wanted_rarely_while_nothing_is_recycled() -> None:
    sequence = sequence_of([1, 2])
    proposer = proposer_for("recycling", sequence)
    wanted = [proposer.num_likeliest(1) for _ in range(132)]
    assert all(wanted[:32])
    assert sum(map(bool, wanted[32:])) == 12
    play(proposer, sequence, [3], [likeliest(3)], Draft())
    sequence.token_ids += [1, 2]
    play(proposer, sequence, [3, 4], [], Draft([3]))
    assert all(proposer.num_likeliest(1) for _ in range(32))
    of_many = proposer_for("auto", sequence)  # whose drafts have no recycled tokens
    assert sum(of_many.num_likeliest(64) > 0 for _ in range(32)) == 4


def test_short_matches_are_looked_up_rarely_while_nothing_is_copied() -> None:
    sequence = sequence_of([9, 1, 2, 3, 9, 1, 2, 3, 4, 4, 4, 2])
    proposer = proposer_for("auto", sequence)

    def found_in(num_rounds: int) -> list[bool]:
        return [
            proposer.num_likeliest(64) >= 0 and proposer.propose(sequence, 3, batch=64) != NOTHING
            for _ in range(num_rounds)
        ]

    assert all(found_in(32)), "after a match of one token"
    assert sum(found_in(32)) == 4
    sequence.token_ids += [9, 1, 2]
    assert all(found_in(32)), "after a match of three tokens"
    sequence.token_ids += [5, 2]
    play(proposer, sequence, [3, 9], [], Draft([3]))  # a draft that is copied from after 2
    sequence.token_ids += [2]
    assert all(found_in(32))


def test_owners_share_neither_outputs_nor_what_was_likely() -> None:
    proposer = Proposer(SpeculationOptions(strategy="auto"))

    def proposed_to(owner: str) -> set[tuple[int, ...]]:
        sequence = sequence_of([7, 8, 9])
        sequence.owner = owner
        proposer.begin(sequence)
        return paths_of(proposer.propose(sequence, 4))

    finished = sequence_of([7, 8, 9])
    finished.owner = "a"
    proposer.begin(finished)
    finished.num_prompt_tokens = 3
    play(proposer, finished, [20, 21], [likeliest(30)], Draft())
    proposer.remember(finished)
    assert {(20,), (30,)} <= proposed_to("a")
    assert proposed_to("b") == set()
    for number in range(20):  # others come and go
        proposed_to(str(number))
        assert (20,) in proposed_to("a")
