import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayspec.demo import example_documents, sample_documents
from rayspec.demo.corpus import WORDS, generate_report

sizes = st.integers(1, 60).flatmap(lambda sentences: st.tuples(st.just(sentences), st.integers(1, sentences)))


@given(seed=st.integers(0, 2**48), size=sizes)
def test_a_summary_is_extracted_word_for_word_and_in_order(seed: int, size: tuple[int, int]) -> None:
    num_sentences, num_findings = size
    report = generate_report(seed, num_sentences=num_sentences, num_findings=num_findings)
    title, *findings = report.summary.split("\n")
    assert report.text.startswith(f"{title}\n")
    assert len(findings) == num_findings
    places = [report.text.index(finding) for finding in findings]
    assert places == sorted(places)
    assert [finding.split(":")[0] for finding in findings] == [f"Finding {n + 1}" for n in range(num_findings)]
    assert report.text.count("Finding ") == num_findings


@pytest.mark.parametrize("kind", ["place", "program", "items"])
def test_findings_share_no_names_with_each_other_or_the_background(kind: str) -> None:
    for seed in range(20):
        report = generate_report(seed, num_sentences=40, num_findings=8)
        named = [word for line in report.findings for word in re.findall(r"\w+", line) if word in WORDS[kind]]
        assert len(named) == len(set(named))
        background = report.text
        for line in report.summary.split("\n"):
            background = background.replace(line, "")
        assert not set(named) & set(re.findall(r"\w+", background))


def test_sample_documents_are_distinct_and_repeatable() -> None:
    documents = sample_documents(5, num_sentences=12, seed=4)
    assert documents == sample_documents(5, num_sentences=12, seed=4)
    assert len({document.text for document in documents + sample_documents(5, num_sentences=12, seed=5)}) == 10
    assert len({document.id for document in documents}) == 5
    assert sample_documents(0) == []
    with pytest.raises(ValueError, match="n=-1"):
        sample_documents(-1)


@pytest.mark.parametrize("pages", [True, False])
def test_the_examples_are_twelve_documents_of_different_lengths(pages: bool) -> None:
    documents = example_documents(pages=pages)
    lengths = [len(document.text.split()) for document in documents]
    assert len({document.id for document in documents}) == 12
    assert min(lengths) > 100
    assert max(lengths) < 2500
    assert sum(document.summary is None for document in documents) == (6 if pages else 0)
