"""Conversations as prompts, through a tokenizer's chat template."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rayspec.decode.admission import require_unicode
from rayspec.types import InvalidMessagesError, Role, role_for_template


def conversation_tokens(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    *,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Return the tokens of the conversation, followed by those that begin an answer unless `add_generation_prompt` is
    false. Raises InvalidMessagesError."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InvalidMessagesError(
            f"the conversation is {reprlib.repr(messages)}: give a list of {{'role': 'user', 'content': 'text'}}"
        )
    conversation = [_for_template(message) for message in messages]
    try:
        encoded: Any = tokenizer.apply_chat_template(
            conversation, chat_template=template, add_generation_prompt=add_generation_prompt, return_dict=True
        )
    except (TemplateError, TypeError, ValueError) as error:  # a template is a user's program and may raise any of these
        raise InvalidMessagesError(f"the messages cannot be made a prompt: {error}") from error
    return list(encoded["input_ids"])


def _for_template(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidMessagesError(f"a message is {reprlib.repr(message)}: give {{'role': 'user', 'content': 'text'}}")
    role: Any = message.get("role")
    content = message.get("content")
    if role not in get_args(Role):
        raise InvalidMessagesError(
            f"the role of a message is {reprlib.repr(role)}: give one of {', '.join(get_args(Role))}"
        )
    if content is None and message.get("tool_calls"):
        return dict(message)
    return dict(message) | {"role": role_for_template(role), "content": _text(content)}


def _text(content: Any) -> str:
    """Return the message's text. Text parts are joined by line breaks, as in vLLM."""
    parts = content if isinstance(content, list | tuple) else [{"type": "text", "text": content}]
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidMessagesError(
            f"the content of a message is {reprlib.repr(content)}: give a text, or a list of "
            "{'type': 'text', 'text': '...'}"
        )
    joined = "\n".join(map(str, texts))
    require_unicode(joined)
    return joined
