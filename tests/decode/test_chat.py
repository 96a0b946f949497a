"""Chat templates: what they are given, and whatever they do."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rayspec.decode.chat import chat_template, conversation_text, conversation_tokens
from rayspec.types import ConfigError, InvalidMessagesError
from tests.demo_model import demo_tokenizer

TOKENIZER: PreTrainedTokenizerBase = demo_tokenizer()
USER = {"role": "user", "content": "Hi"}
HOSTILE = {
    "raise": "{{ raise_exception('roles must alternate') }}",
    "raise nothing": "{{ raise_exception() }}",
    "division": "{{ 1 / 0 }}",
    "undefined": "{{ absent.role }}",
    "recursion": "{% macro deep() %}{{ deep() }}{% endmacro %}{{ deep() }}",
    "sandbox": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "changes its input": "{{ messages.append(1) }}",
    "huge range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "syntax": "{% if %}",
    "unknown template": "{% include 'other' %}",
    "half a pair": "{{ '\\ud800' }}",
}


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE)
def test_whatever_a_template_raises_is_an_error_of_the_conversation(template: str) -> None:
    with pytest.raises(InvalidMessagesError, match=r"the messages cannot be made a prompt: \S"):
        conversation_tokens([USER], TOKENIZER, template)


def test_an_error_without_a_message_has_its_type() -> None:
    with pytest.raises(InvalidMessagesError, match="ZeroDivisionError: division by zero"):
        conversation_tokens([USER], TOKENIZER, "{{ 1 / 0 }}")


def rendered(arguments: Any, template: str = "{{ messages[0].tool_calls[0].function.arguments | tojson }}") -> str:
    call = {"function": {"name": "f", "arguments": arguments}}
    return conversation_text([{"role": "assistant", "tool_calls": [call]}], TOKENIZER, template)


def test_arguments_of_tool_calls_are_objects_as_in_vllm() -> None:
    """Clients send their text; templates make JSON of them, and the JSON of a text would have quotes around it."""
    for arguments in ('{"a": 6, "b": null}', {"a": 6}):
        assert rendered(arguments).startswith('{"a": 6')
    assert rendered('{"a": 6, "b": null}') == '{"a": 6, "b": null}'
    assert rendered("") == rendered(None) == rendered({}) == rendered("{}") == "{}"
    assert rendered("{'a': 6}") == "\"{'a': 6}\""
    assert rendered("[" * 100_000) == f'"{"[" * 100_000}"'


def test_several_templates_without_a_default_are_named() -> None:
    tokenizer = demo_tokenizer()
    before = tokenizer.chat_template
    try:
        tokenizer.chat_template = {"rag": "x", "tool_use": "y"}
        with pytest.raises(ConfigError, match=r"the tokenizer's chat template cannot be used: .*rag"):
            chat_template(tokenizer)
    finally:
        tokenizer.chat_template = before
