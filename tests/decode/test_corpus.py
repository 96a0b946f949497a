from __future__ import annotations

import pytest

from rayspec import LLM, SamplingParams
from rayspec.decode.drafting.corpus import Corpus
from rayspec.planning.lookup import SINGLE, match_class


def proposed(corpus: Corpus, newest: list[int], num_tokens: int = 8) -> list[tuple[int, ...]]:
    return [each.token_ids for each in corpus.proposals(newest, num_tokens)]


def test_an_output_is_copied_from_its_first_token_to_its_last() -> None:
    corpus = Corpus(1000)
    corpus.add([7, 8, 9], [10, 11, 12, 13])
    corpus.add([1, 2, 3], [20, 21])
    assert proposed(corpus, [0, 7, 8, 9]) == [(10, 11, 12, 13)]  # not on into the next output
    assert proposed(corpus, [5, 11, 12]) == [(13,)]
    assert proposed(corpus, [5, 5, 12]) == [()]  # one token is no match
    assert proposed(corpus, [7, 8, 9], 2) == [(10, 11)]


def test_tokens_of_a_corpus_have_classes_of_their_own() -> None:
    corpus = Corpus(1000)
    corpus.add([7, 8, 9], [10, 11])
    (proposal,) = corpus.proposals([7, 8, 9], 2)
    assert set(proposal.match_classes).isdisjoint(match_class(length, SINGLE) for length in (3, 4))


def test_a_corpus_keeps_the_newest_outputs() -> None:
    corpus = Corpus(100)
    for number in range(50):
        corpus.add([1], list(range(1000 + 10 * number, 1010 + 10 * number)))
        assert corpus.num_tokens <= 100
    assert max(proposed(corpus, [1490, 1491])) == tuple(range(1492, 1500))
    assert max(proposed(corpus, [1000, 1001])) == ()
    corpus.add([1], list(range(5000, 6000)))  # longer than the corpus
    assert corpus.num_tokens <= 100


def test_a_tiny_corpus_is_no_larger_than_it_may_be() -> None:
    for capacity in range(1, 8):
        corpus = Corpus(capacity)
        for _ in range(5):
            corpus.add([1, 2, 3], list(range(50)))
            assert corpus.num_tokens <= max(capacity, 2)


@pytest.mark.parametrize("corpus_tokens", [0, 1000])
def test_the_second_of_two_equal_texts_is_copied(corpus_tokens: int) -> None:
    llm = LLM("demo", dtype="float32", num_threads=1, speculation={"corpus_tokens": corpus_tokens})
    params = SamplingParams(max_tokens=48, temperature=3.0, seed=5, ignore_eos=True)
    first, second = (llm.generate("The meeting of the council", params, use_tqdm=False)[0].outputs[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    copied = llm.stats.accepted_by_source.get("corpus", 0)
    assert copied >= 16 if corpus_tokens else copied == 0
