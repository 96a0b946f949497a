"""What decides the rows of a job over documents."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from rayspec import SamplingParams
from rayspec.batch.document_task import DocumentTask
from rayspec.batch.long_documents import LongDocumentOptions
from rayspec.command.settings import make_settings
from rayspec.types import ConfigError
from tests.batch.test_long_documents import RecordingEngine, completed, document

SAID = "<think>Hm.</think> So."


def task(*, sampling: dict[str, Any] | None = None, **options: Any) -> DocumentTask:
    names = {"template", "chat", "long", "system", "prompt_template"}
    own = {name: value for name, value in options.items() if name in names}
    flags = {"model": "demo"} | {name: value for name, value in options.items() if name not in names}
    settings = make_settings(flags=flags, sampling=SamplingParams(**(sampling or {})))
    return DocumentTask(**{"template": "{text}", "settings": settings} | own)


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 128}, {"dtype": "float32"}, {"model": "another"}, {"verification": "rejection"},
        {"template": "Say: {text}"}, {"chat": False}, {"system": "Be kind."}, {"prompt_template": "{{ text }}"},
        {"long": LongDocumentOptions(long="refine")}, {"sampling": {"seed": 5}}, {"sampling": {"max_tokens": 3}},
    ],
)  # fmt: skip
def test_what_decides_the_texts_is_in_the_identity(options: dict[str, Any]) -> None:
    assert task().identity != task(**options).identity


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "ar"},
        {"num_threads": 1},
        {"max_num_seqs": 3},
        {"device": "cpu"},
        {"stages": 2},
        {"sampling": {"use_drafts": False}},
    ],
)
def test_what_decides_only_the_speed_is_not(options: dict[str, Any]) -> None:
    assert task().identity == task(**options).identity


@pytest.mark.parametrize(
    ("options", "prompt", "expected"),
    [
        ({"reasoning_parser": "qwen3"}, "x", ("Hm.", "So.")),
        ({"reasoning_parser": "deepseek_r1"}, "x<think>", ("<think>Hm.", "So.")),
        ({"reasoning_parser": "qwen3", "sampling": {"structured_outputs": {"regex": ".*"}}}, "x", ("Hm.", "So.")),
        ({}, "x", (None, SAID)),
    ],
)
def test_a_parser_makes_a_reasoning_column(
    options: dict[str, Any], prompt: str, expected: tuple[str | None, str]
) -> None:
    sampling = {"max_tokens": 9} | options.pop("sampling", {})
    engine: Any = RecordingEngine(answer=SAID)
    handler = task(sampling=sampling, chat=False, **options).handler(engine)
    row = completed(handler(document(prompt)))
    assert (row.reasoning, row.text) == expected


def test_a_chat_that_was_asked_for_needs_a_chat_template() -> None:
    engine: Any = RecordingEngine()
    engine.tokenizer = deepcopy(engine.tokenizer)
    engine.tokenizer.chat_template = None
    task(sampling={"max_tokens": 9}).handler(engine)
    with pytest.raises(ConfigError, match="option 'chat' needs a model with a chat template"):
        replace(task(sampling={"max_tokens": 9}), needs_chat=True).handler(engine)
