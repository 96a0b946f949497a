"""Conversations as prompts, through a tokenizer's chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rayspec.prompts import check_rendered, read_conversation
from rayspec.types import ConfigError, InvalidMessagesError


def conversation_tokens(
    messages: Sequence[Any], tokenizer: PreTrainedTokenizerBase, template: str, *, add_generation_prompt: bool = True
) -> list[int]:
    """Return the tokens of the conversation, followed by those that begin an answer unless `add_generation_prompt` is
    False. Arguments of tool calls that are the text of a JSON object become an object, as in vLLM.

    Raises InvalidMessagesError: see `read_conversation`, and for any error of the template.
    """
    encoded = _templated(messages, tokenizer, template, add_generation_prompt=add_generation_prompt, return_dict=True)
    return list(encoded["input_ids"])


def conversation_text(messages: Sequence[Any], tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    """Return the text of the conversation, without what begins an answer. Raises InvalidMessagesError."""
    return str(_templated(messages, tokenizer, template, tokenize=False))


def _templated(messages: Sequence[Any], tokenizer: PreTrainedTokenizerBase, template: str, **options: Any) -> Any:
    conversation = read_conversation(messages)
    check_rendered(conversation, template)
    for message in conversation:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = _as_object(call["function"].get("arguments") or {})
    try:
        return tokenizer.apply_chat_template(conversation, chat_template=template, **options)
    except Exception as error:  # a template is anybody's program, which may raise anything
        told = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        raise InvalidMessagesError(f"the messages cannot be made a prompt: {told}") from error


def chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the template of a tokenizer that has one. Raises ConfigError if it has several and none is the default."""
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise ConfigError(f"the tokenizer's chat template cannot be used: {error}") from error


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
