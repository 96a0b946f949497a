from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from transformers import AutoTokenizer

from rayspec import demo
from rayspec.batch.document_task import PromptBuilder, fitting_prompt_tokens
from rayspec.batch.documents import input_row
from rayspec.batch.rows import Row
from rayspec.config import SamplingParams
from rayspec.prompts import conversation_tokens
from rayspec.types import ConfigError, InvalidMessagesError

PARAMS = SamplingParams(max_tokens=10)


class DemoTokens:
    """The bundled tokenizer, as an LLM would offer it."""

    def __init__(self) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(demo.tokenizer_path())

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return conversation_tokens(messages, self.tokenizer, self.tokenizer.chat_template)


@pytest.fixture(scope="module")
def llm() -> DemoTokens:
    return DemoTokens()


def document(text: str) -> Row:
    return input_row("d", source="d", text=text)


def prompt_of(builder: PromptBuilder, document: Row) -> str:
    tokenizer = builder.llm.tokenizer
    return str(tokenizer.decode(list(builder.request("r", document).prompt_token_ids or ())))


def test_the_template_wraps_the_text_only(llm: DemoTokens) -> None:
    builder = PromptBuilder(llm=llm, params=PARAMS, template="Sum up: {text} Thanks.")
    assert prompt_of(builder, document("{text} {other}")) == "<|document|>Sum up: {text} {other} Thanks.<|summary|>"


def test_without_chat_the_text_is_the_prompt(llm: DemoTokens) -> None:
    assert prompt_of(PromptBuilder(llm=llm, params=PARAMS, chat=False), document("Once upon")) == "Once upon"


def test_without_a_chat_template_the_text_is_the_prompt() -> None:
    llm = DemoTokens()
    llm.tokenizer.chat_template = None
    assert prompt_of(PromptBuilder(llm=llm, params=PARAMS), document("Once upon")) == "Once upon"


def test_messages_go_through_the_chat_template(llm: DemoTokens) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    chat = input_row("d", source="d", messages=messages)
    assert prompt_of(PromptBuilder(llm=llm, params=PARAMS, chat=False), chat) == "<|document|>Hello<|summary|>"


def test_messages_the_template_refuses_are_one_bad_row() -> None:
    llm = DemoTokens()
    llm.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    chat = input_row("d", source="d", messages=[{"role": "user", "content": "Hello"}])
    with pytest.raises(InvalidMessagesError, match="roles must alternate"):
        PromptBuilder(llm=llm, params=PARAMS).request("r", chat)


def test_messages_for_a_model_without_chats_are_one_bad_row() -> None:
    class Untemplated(DemoTokens):
        def chat_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
            raise ConfigError("the tokenizer of 'm' has no chat template: use generate()")

    chat = input_row("d", source="d", messages=[{"role": "user", "content": "Hello"}])
    with pytest.raises(InvalidMessagesError, match="has no chat template"):
        PromptBuilder(llm=Untemplated(), params=PARAMS).request("r", chat)


@pytest.mark.parametrize("limit", [3, 51, 400])
def test_a_long_document_is_cut_at_its_end_to_fit(llm: DemoTokens, limit: int) -> None:
    text = "".join(f"Zeile {n}: 世界 ünïcode. " for n in range(300))
    builder = PromptBuilder(llm=llm, params=PARAMS, template="Sum: {text}!", max_prompt_tokens=limit)
    tokens = builder.request("r", document(text)).prompt_token_ids or ()
    assert len(tokens) <= max(limit, 7)
    prompt = prompt_of(builder, document(text))
    body = prompt.removeprefix("<|document|>Sum: ").removesuffix("!<|summary|>")
    assert text.startswith(body)
    assert "\ufffd" not in body
    if limit > 100:
        assert len(tokens) > limit - 8


def test_an_output_has_its_room() -> None:
    assert fitting_prompt_tokens(1000, SamplingParams(max_tokens=300)) == 700
    assert fitting_prompt_tokens(100, SamplingParams(max_tokens=300)) == 1
