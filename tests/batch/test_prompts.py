from copy import deepcopy
from typing import Any

import pytest

from rayspec.batch.document_task import PromptBuilder
from rayspec.batch.documents import input_row
from rayspec.types import ConfigError, InvalidMessagesError
from tests.batch.test_long_documents import RecordingEngine

HELLO = [{"role": "user", "content": "Hello"}]
OWN = {"role": "system", "content": "Mine."}
ROLES = "{% for one in messages %}{{ one.role }}={{ one.content }}{{ '' if loop.last else ' ' }}{% endfor %}"


def builder(chat_template: str | None = "of the model", **options: Any) -> PromptBuilder:
    llm: Any = RecordingEngine()
    llm.tokenizer = deepcopy(llm.tokenizer)
    if chat_template != "of the model":
        llm.tokenizer.chat_template = chat_template
    return PromptBuilder(llm=llm, **options)


def prompt_of(builder: PromptBuilder, **content: Any) -> str:
    return str(builder.llm.tokenizer.decode(builder.tokens(input_row("d", source="d", **content))))


@pytest.mark.parametrize(
    ("options", "content", "prompt"),
    [
        (
            {"template": "Sum up: {text} Thanks."},
            {"text": "{text} {other}"},
            "<|document|>Sum up: {text} {other} Thanks.<|summary|>",
        ),
        ({"chat": False}, {"text": "Once upon"}, "Once upon"),
        ({"chat_template": None}, {"text": "Once upon"}, "Once upon"),
        ({"chat": False}, {"messages": HELLO}, "<|document|>Hello<|summary|>"),
        ({"chat_template": ROLES, "system": "Be kind."}, {"text": "Hello"}, "system=Be kind. user=Hello"),
        ({"chat_template": ROLES, "system": "Be kind."}, {"messages": HELLO}, "system=Be kind. user=Hello"),
        ({"chat_template": ROLES, "system": "No."}, {"messages": [OWN, *HELLO]}, "system=Mine. user=Hello"),
    ],
)
def test_texts_and_messages_become_prompts(options: dict[str, Any], content: dict[str, Any], prompt: str) -> None:
    assert prompt_of(builder(**options), **content) == prompt


@pytest.mark.parametrize(
    ("chat_template", "error"),
    [("{{ raise_exception('roles must alternate') }}", "roles must alternate"), (None, "chat")],
)
def test_messages_that_no_template_takes_are_one_bad_row(chat_template: str | None, error: str) -> None:
    with pytest.raises(InvalidMessagesError, match=error):
        prompt_of(builder(chat_template), messages=HELLO)


def test_a_system_message_needs_a_chat_template() -> None:
    with pytest.raises(ConfigError, match="option 'system' needs a model with a chat template"):
        builder(None, system="Be kind.")


@pytest.mark.parametrize("limit", [3, 51, 400])
def test_a_long_document_is_cut_at_its_end_to_fit(limit: int) -> None:
    text = "".join(f"Zeile {n}: 世界 ünïcode. " for n in range(300))
    cutting = builder(template="Sum: {text}!", max_prompt_tokens=limit)
    num_tokens = len(cutting.fitting_tokens(text))
    assert num_tokens <= max(limit, 7)
    body = prompt_of(cutting, text=text).removeprefix("<|document|>Sum: ").removesuffix("!<|summary|>")
    assert text.startswith(body)
    assert "\ufffd" not in body
    if limit > 100:
        assert num_tokens > limit - 8
