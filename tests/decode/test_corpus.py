import json
import pickle
import re
from array import array
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayspec import LLM, SamplingParams
from rayspec.config import SpeculationOptions
from rayspec.decode.drafting.lookup import SINGLE, Corpus, match_classes, tokenised
from rayspec.types import CompletionOutput, ConfigError
from tests.demo_model import shallow_demo

OPTIONS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_model_len": 512}
COPIED = SamplingParams(max_tokens=48, temperature=3.0, seed=5, ignore_eos=True)


def proposed(corpus: Corpus, newest: list[int], num_tokens: int = 8) -> list[tuple[int, ...]]:
    return [each.token_ids for each in corpus.proposals(array("i", newest), num_tokens)]


def test_an_output_is_copied_from_its_first_token_to_its_last() -> None:
    corpus = Corpus(1000)
    corpus.add([7, 8, 9, 10, 11, 12, 13])
    corpus.add([1, 2, 3, 20, 21])
    assert proposed(corpus, [0, 7, 8, 9]) == [(10, 11, 12, 13)]  # not on into the next output
    assert proposed(corpus, [5, 11, 12]) == [(13,)]
    assert proposed(corpus, [5, 5, 12]) == [()]  # one token is no match
    assert proposed(corpus, [7, 8, 9], 2) == [(10, 11)]


def test_tokens_of_a_corpus_have_classes_of_their_own() -> None:
    corpus = Corpus(1000)
    corpus.add([7, 8, 9, 10, 11])
    (proposal,) = corpus.proposals(array("i", [7, 8, 9]), 2)
    assert set(proposal.match_classes).isdisjoint(match_classes(3, [SINGLE] * 2))


def test_a_corpus_keeps_the_newest_outputs() -> None:
    corpus = Corpus(100)
    for number in range(50):
        corpus.add([1, *range(1000 + 10 * number, 1010 + 10 * number)])
        assert corpus.num_tokens <= 100
    assert max(proposed(corpus, [1490, 1491])) == tuple(range(1492, 1500))
    assert max(proposed(corpus, [1000, 1001])) == ()
    corpus.add([1, *range(5000, 6000)])  # longer than the corpus
    assert corpus.num_tokens <= 100


def test_a_tiny_corpus_is_no_larger_than_it_may_be() -> None:
    for capacity in range(1, 8):
        corpus = Corpus(capacity)
        for _ in range(5):
            corpus.add([1, 2, 3, *range(50)])
            assert corpus.num_tokens <= max(capacity, 2)


@pytest.mark.parametrize("corpus_tokens", [0, 1000])
def test_the_second_of_two_equal_texts_is_copied(corpus_tokens: int) -> None:
    llm = LLM(shallow_demo(), speculation={"corpus_tokens": corpus_tokens}, **OPTIONS)
    first, second = (llm.generate("The meeting of the council", COPIED, use_tqdm=False)[0].outputs[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    copied = llm.stats.accepted_by_source.get("corpus", 0)
    assert copied >= 16 if corpus_tokens else copied == 0


LETTER = "Dear customer, the council has decided on the repair of the northern bridge. Yours, the office of works."


def written(path: Path, text: str | None) -> str:
    rows = [{"id": "1", "summary": text}, {"id": "2", "summary": None}]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8-sig")
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(text or "")
    return str(path)


@cache
def plainly_generated() -> CompletionOutput:
    plain = LLM(shallow_demo(), speculation={"strategy": "ar"}, **OPTIONS)
    return plain.generate("The meeting of the council", COPIED, use_tqdm=False)[0].outputs[0]


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_a_file_fills_the_corpus_at_the_start(tmp_path: Path, suffix: str) -> None:
    name = written(tmp_path / f"texts{suffix}", LETTER + " " + plainly_generated().text)
    llm = LLM(shallow_demo(), speculation={"corpus": name}, **OPTIONS)
    llm.engine.forget_texts()  # does not forget what the user gave
    output = llm.generate("The meeting of the council", COPIED, use_tqdm=False)[0]
    assert output.outputs[0].token_ids == plainly_generated().token_ids
    assert output.metrics.accepted_by_source == llm.stats.accepted_by_source
    assert output.metrics.accepted_by_source["corpus"] >= 16


def _with_two_columns() -> bytes:
    file = pa.BufferOutputStream()
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), file)
    return file.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("none.txt", None, "cannot be read"),
        ("texts.csv", b"a,b", "its type is not known"),
        ("empty.txt", b"", "holds no text"),
        ("binary.txt", b"\xff\xfe\x00", "can't decode"),
        ("cut.md", "ä".encode()[:1], "unexpected end"),
        ("bad.jsonl", b'{"text": "a"}\n[1]\n', "line 2 is no JSON object"),
        ("other.jsonl", b'{"body": "a"}\n', "has no column 'text' or 'summary'"),
        ("number.jsonl", b'{"text": 7}\n', "column 'text' of line 1 is int"),
        ("bad.parquet", b"PAR1 no more", "arquet"),
        ("two.parquet", _with_two_columns(), "two columns are called 'text'"),
    ],
)
def test_a_file_that_is_no_corpus_is_refused(tmp_path: Path, name: str, content: bytes | None, reason: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"option 'corpus' is .*{re.escape(name)}.*{reason}.*leave the option out"):
        LLM(shallow_demo(), speculation={"corpus": str(tmp_path / name)})


@pytest.mark.parametrize("nested", [False, True])
def test_a_column_of_python_objects_is_no_corpus(tmp_path: Path, nested: bool) -> None:
    from ray.data._internal.object_extensions.arrow import ArrowPythonObjectType  # noqa: PLC0415 - it is registered

    class Code:
        def __reduce__(self) -> tuple[Any, ...]:
            return (tmp_path / "run").touch, ()

    values = pa.array([pickle.dumps(Code())], pa.large_binary())
    column = pa.ExtensionArray.from_storage(ArrowPythonObjectType(), values)
    table = pa.table({"text": pa.StructArray.from_arrays([column], names=["a"]) if nested else column})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="not text"):
        LLM(shallow_demo(), speculation={"corpus": str(tmp_path / "a.parquet")})
    assert not (tmp_path / "run").exists()


def test_of_a_large_file_only_as_much_is_read_as_the_corpus_holds(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    with path.open("wb") as file:
        file.write((LETTER + "\n").encode() * 100)
        file.truncate(2**34)  # a hole of 16 GiB, which is no text
    llm = LLM(shallow_demo(), dtype="float32", speculation={"corpus": str(path), "corpus_tokens": 500})
    assert len(llm.engine.model.given_texts) == 500


def test_tokens_that_the_model_does_not_have_are_no_drafts() -> None:
    def tokenizer(text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [5, 6, 7, 900, 8]}

    corpus = Corpus(1000)
    for part in tokenised(["some text"], tokenizer, vocab_size=100):
        corpus.add(part)
    assert proposed(corpus, [5, 6]) == [(7,)]
    assert proposed(corpus, [7, 900]) == [()]


def test_corpus_works_with_auto_only() -> None:
    for wrong in ({"strategy": "knapspec"}, {"corpus_tokens": 0}):
        with pytest.raises(ConfigError, match=r"option 'corpus' is 'a.txt', which works with strategy 'auto'"):
            SpeculationOptions(corpus="a.txt", **wrong)
