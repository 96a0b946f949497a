"""Prompts with the bundled tokenizer; no model runs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rayspec import demo
from rayspec.bench.options import WorkloadOptions
from rayspec.bench.workloads import Workload, demo_prompts, make_workloads, read_questions
from rayspec.types import ConfigError
from tests.demo_model import demo_tokenizer


class Tokenizer:
    """What workloads ask of an LLM, without the model."""

    tokenizer = demo_tokenizer()

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        conversation = [dict(message) for message in messages]
        encoded = self.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])


LLM: Any = Tokenizer()


def text(prompt: list[int]) -> str:
    return str(LLM.tokenizer.decode(prompt))


def make(*inputs: str, template: str = "{text}", **changes: Any) -> list[Workload]:
    options = {"input": inputs, "context": (200,), "num_prompts": 3} | changes
    return make_workloads(LLM, WorkloadOptions(**options), template=template)


class TestDemo:
    @pytest.mark.parametrize("name", list(demo.DOMAINS))
    def test_prompts_are_as_large_as_fit(self, name: str) -> None:
        for context in (100, 300):
            lengths = [len(prompt) for prompt in demo_prompts(LLM, name, context=context, num_prompts=5)]
            assert max(lengths) <= context
            if name in ("summary", "question"):  # the others have an end
                assert max(lengths) > 0.75 * context

    def test_a_domain_that_there_is_not_and_a_context_that_holds_none(self) -> None:
        with pytest.raises(ConfigError, match="domain 'poems' is none of summary, question, ledger, schedule"):
            make("demo:poems")
        with pytest.raises(ConfigError, match="option 'context' is 10, and the smallest prompts of domain 'summary'"):
            make("demo", context=(10,))


class TestInputs:
    def test_demo_is_its_summaries(self) -> None:
        (short,) = make("demo")
        assert short.name == "summary-200"
        assert (short.domain, short.context, short.num_left_out) == ("summary", 200, 0)
        assert make("demo", "demo:summary") == [short]

    def test_documents_of_a_file_are_cut_to_the_context(self, tmp_path: Path) -> None:
        rows = [{"text": f"Number {index}. " + "A long document. " * 100} for index in range(5)]
        (tmp_path / "docs.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        (workload,) = make(str(tmp_path / "docs.jsonl"), template="Read: {text}")
        assert workload.name == "docs-200"
        assert [190 < len(prompt) <= 200 for prompt in workload.prompts] == [True] * 3
        assert text(workload.prompts[2]).startswith("<|document|>Read: Number 2. A long")

    def test_questions_are_a_workload_for_each_category(self, tmp_path: Path) -> None:
        rows = [
            {"question_id": index, "category": category, "turns": [question, "More?"]}
            for index, (category, question) in enumerate(
                [("qa", "a " * 500), *[("qa", f"Who is {n}?") for n in range(4)], ("math", "1 + 1?")]
            )
        ]
        (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        qa, math = make(str(tmp_path / "q.jsonl"))
        assert (qa.name, len(qa.prompts), qa.num_left_out) == ("qa-200", 3, 1)
        assert text(qa.prompts[0]) == "<|document|>Who is 0?<|summary|>"
        assert (math.name, len(math.prompts), math.num_left_out) == ("math-200", 1, 0)
        shorter = make(str(tmp_path / "q.jsonl"), context=(7,))
        assert [(one.name, len(one.prompts), one.num_left_out) for one in shorter] == [("qa-7", 0, 5), ("math-7", 1, 0)]
        with pytest.raises(ConfigError, match="option 'context' is 3, and none of the prompts is as short"):
            make(str(tmp_path / "q.jsonl"), context=(3,))

    @pytest.mark.parametrize("content", [b'{"text": "A."}', b"[1]", b"", b"\xff{"])
    def test_question_files_are_known_by_their_first_row(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "q.jsonl").write_bytes(content)
        assert read_questions(str(tmp_path / "q.jsonl")) is None
        assert read_questions(str(tmp_path / "absent.jsonl")) is None

    @pytest.mark.parametrize(
        ("second", "what"),
        [
            ({"question_id": 1, "category": "qa", "turns": "Who?"}, "Expected `array`, got `str`"),
            ({"question_id": 1, "category": "qa", "turns": [" "]}, "no first turn"),
            ({"question_id": 1, "turns": ["a"]}, "missing required field `category`"),
        ],
    )
    def test_a_row_that_is_no_question_is_named(self, tmp_path: Path, second: object, what: str) -> None:
        rows = [{"question_id": 7, "category": "qa", "turns": ["Who?"]}, second]
        (tmp_path / "q.jsonl").write_text("\n \n".join(map(json.dumps, rows)), encoding="utf-8")
        with pytest.raises(ConfigError, match=rf"q\.jsonl:3 .*{what}"):
            make(str(tmp_path / "q.jsonl"))
