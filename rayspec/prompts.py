"""What a prompt may be: the one reader of texts and messages, and conversations as tokens by a chat template."""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal, get_args

from rayspec.errors import ConfigError, InvalidMessagesError, RequestError
from rayspec.types import Role

_IDENTIFYING = ("role", "content", "name", "tool_call_id")
REASONING = ("reasoning_content", "thinking", "reasoning")
_OF_A_PART = ("type", "text", "cache_control")  # the last is for caches of other servers
_MAX_DEPTH = 32
_MOST_PARTS = 100_000  # of the arguments of a call; parsed, each takes far more memory than its text
_MAX_NAME = 64  # characters of a field's name in an error
_TEXT_PART = "{'type': 'text', 'text': '...'}"

Problem = Literal["missing", "unsupported_parameter", "invalid_value"]


class InvalidMessageError(InvalidMessagesError):
    """A message is malformed, or has a field that cannot take effect. field: its place, as "0.content"."""

    def __init__(self, field: str, problem: str, code: Problem = "invalid_value") -> None:
        super().__init__(f"messages.{field}: {problem}")
        self.field, self.problem, self.code = field, problem, code


def read_conversation(messages: object) -> list[dict[str, Any]]:
    """Return the messages in the form that chat templates take, see `read_message`. What this returns can be read
    again and does not change. Raises InvalidMessagesError."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidMessagesError(
            f"the conversation is {reprlib.repr(messages)}: give a list of {{'role': 'user', 'content': 'text'}}"
        )
    if not messages:
        raise InvalidMessagesError("the conversation has no message: give at least one")
    return [read_message(message, str(index)) for index, message in enumerate(messages)]


def parsed_messages(messages: Any) -> Any:
    """Return the messages of a column, parsed if they are JSON text. Raises InvalidMessagesError."""
    if not isinstance(messages, str):
        return messages
    try:
        return json.loads(messages)
    except (ValueError, RecursionError) as error:
        raise InvalidMessagesError(
            f"the conversation is {reprlib.repr(messages)}, no JSON of a list of messages: {error}"
        ) from error


def read_message(message: object, place: str = "0") -> dict[str, Any]:
    """Return a message with `role`, `content`, and every other field that says something.

    Line breaks join text parts, as in vLLM. A field that is null counts as left out, at every depth, and so does a
    field of the message that is an empty list or object. The content is None in a message that only calls tools, and
    empty in another assistant's message without content. place: the message's place, for errors. Raises
    InvalidMessageError.
    """
    if not isinstance(message, Mapping):
        raise InvalidMessageError(place, f"it is {reprlib.repr(message)}; give {{'role': 'user', 'content': 'text'}}")
    given = _plain(message, place, 0)
    fields = {name: value for name, value in given.items() if name == "content" or value not in ([], {})}
    role = fields.pop("role", None)
    if role not in get_args(Role):
        known = ", ".join(get_args(Role))
        raise InvalidMessageError(f"{place}.role", f"it is {reprlib.repr(role)}; give one of {known}")
    for name in ("name", "tool_call_id"):
        if not isinstance(fields.get(name, ""), str):
            raise InvalidMessageError(f"{place}.{name}", f"it is {reprlib.repr(fields[name])}; it must be text")
    if "tool_calls" in fields:
        _check_tool_calls(fields["tool_calls"], f"{place}.tool_calls")
    content = fields.pop("content", None)
    if content is None and role == "assistant":
        text = None if "tool_calls" in fields else ""
    else:
        text = _text(content, f"{place}.content")
    return {"role": "system" if role == "developer" else role, "content": text} | fields


def check_rendered(conversation: Sequence[Mapping[str, Any]], template: str) -> None:
    """Check that the chat template knows the fields of messages, because it drops others without a word. `name` and
    `tool_call_id` identify what is named elsewhere and are always accepted. Raises InvalidMessageError."""
    for index, message in enumerate(conversation):
        for name in message:
            known_by = REASONING if name in REASONING else (name,)  # transformers gives it all three names
            if name not in _IDENTIFYING and not any(one in template for one in known_by):
                name = name[:_MAX_NAME]  # noqa: PLW2901
                near = difflib.get_close_matches(name, [*_IDENTIFYING, "tool_calls"], n=1)
                hint = f"did you mean {near[0]!r}?" if near and near != [name] else "leave it out"
                raise InvalidMessageError(
                    f"{index}.{name}", f"the model's chat template has no such field; {hint}", "unsupported_parameter"
                )


_SCHEMAS = frozenset({"schema", "json", "guided_json", "parameters"})  # fields whose value is a JSON schema


def without_nulls(value: Any) -> Any:
    """Return a JSON value without the fields of objects that are null, at every depth. Null elements of lists stay, and
    so do JSON schemas, where null has a meaning. A list that begins with a number or a text holds only such: it may be
    long, and is not searched."""
    if isinstance(value, dict):
        return {
            name: item if name in _SCHEMAS else without_nulls(item) for name, item in value.items() if item is not None
        }
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [without_nulls(item) for item in value]
    return value


def text_tokens(prompt: object, tokenizer: Any, **options: Any) -> list[int]:
    """Return the tokens of a text. tokenizer: a transformers tokenizer. options: those of its call. Raises RequestError
    for a prompt that is no text or no Unicode, and for any error of the tokenizer."""
    if not isinstance(prompt, str):
        raise RequestError(f"the prompt is {reprlib.repr(prompt)}: give a text, or {{'prompt_token_ids': [...]}}")
    problem = _unicode_problem(prompt)
    if problem is not None:
        raise RequestError(problem)
    with naming_tokenizer():
        return list(tokenizer(prompt, **options)["input_ids"])


@lru_cache(maxsize=256)  # those of many take 40 ms, so the endpoint asks before the engine's thread does
def bad_word_tokens(words: tuple[str, ...], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, and of the same word after a space where these end in others. Spaces before a
    word are left out, as in vLLM, but not those of a word that has nothing else."""
    found: list[tuple[int, ...]] = []
    for word in words:
        text = word.lstrip() or word
        plain, spaced = (tuple(text_tokens(space + text, tokenizer, add_special_tokens=False)) for space in ("", " "))
        found += [plain] if spaced[1:] == plain else [plain, spaced]
    return tuple(tokens for tokens in found if tokens)


@contextmanager
def naming_tokenizer(problem: str = "refuses the prompt") -> Iterator[None]:
    """Raise what a tokenizer, which may be anybody's code, raises as RequestError."""
    try:
        yield
    except BaseException as error:
        if not _is_problem(error):
            raise
        raise RequestError(f"the tokenizer {problem}: {type(error).__name__}: {error}") from error


def _is_problem(error: BaseException) -> bool:
    """Whether it is an error, also a panic of a library in Rust, and not the end of the program."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


_ROOM = 16  # tokens for the output where nobody says how many


def truncated(token_ids: list[int], most: int | None, max_model_len: int, max_tokens: int | None) -> list[int]:
    """Return the end of a prompt of at most `most` tokens; None: all; -1: as many as leave room for the output."""
    if most == -1:
        most = max(1, max_model_len - (max_tokens or _ROOM))
    return token_ids if most is None else token_ids[-most:]


def _unicode_problem(text: str) -> str | None:
    """Return why the text has no UTF-8 form: it has half of a surrogate pair. None for other texts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return (
            f"the text has {text[error.start]!r} at index {error.start}, half of a surrogate pair or a byte that is "
            "not UTF-8: remove it or replace it, for example by text.encode('utf-8', 'replace').decode()"
        )
    return None


def _plain(value: Any, place: str, depth: int) -> Any:
    """Return a JSON value without null fields. Raises InvalidMessageError for any other value."""
    if depth > _MAX_DEPTH:
        raise InvalidMessageError(place, f"it is nested more than {_MAX_DEPTH} levels deep")
    if isinstance(value, str):
        problem = _unicode_problem(value)
        if problem is not None:
            raise InvalidMessageError(place, problem)
        return value
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, f"{place}.{index}", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {
            name: _plain(item, f"{place}.{name[:_MAX_NAME]}", depth + 1)
            for name, item in value.items()
            if item is not None
        }
    raise InvalidMessageError(place, f"it is {reprlib.repr(value)}; give text, or a value that JSON has")


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise InvalidMessageError(place, f"it is required; give a text, or a list of {_TEXT_PART}", "missing")
    if not isinstance(content, list):
        raise InvalidMessageError(place, f"it is {reprlib.repr(content)}; give a text, or a list of {_TEXT_PART}")
    texts = []
    for part in content:
        unsupported = None
        if not isinstance(part, dict):
            unsupported = f"a part is {reprlib.repr(part)}; give {_TEXT_PART}"
        elif part.get("type") != "text":
            unsupported = f"a part of type {reprlib.repr(part.get('type'))} is not supported; give text parts only"
        elif unknown := [name for name, value in part.items() if name not in _OF_A_PART and value not in ([], {})]:
            unsupported = f"a text part has a field {unknown[0]!r}, which is not supported; leave it out"
        if unsupported is not None:
            raise InvalidMessageError(place, unsupported, "unsupported_parameter")
        if not isinstance(part.get("text"), str):
            raise InvalidMessageError(place, "a part of type 'text' must have a 'text'")
        texts.append(part["text"])
    return "\n".join(texts)


def _check_tool_calls(calls: Any, place: str) -> None:
    if not isinstance(calls, list):
        raise InvalidMessageError(place, f"it is {reprlib.repr(calls)}; give a list of calls")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            problem = f"it is {reprlib.repr(call)}; give {{'function': {{'name': ..., 'arguments': ...}}}}"
            raise InvalidMessageError(f"{place}.{index}", problem)
        if not isinstance(function.get("arguments", ""), str | dict):
            problem = f"it is {reprlib.repr(function['arguments'])}; give a JSON object, or its text"
            raise InvalidMessageError(f"{place}.{index}.function.arguments", problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """How a conversation becomes a prompt.

    add_generation_prompt: the prompt ends with what begins an answer. continue_final_message: it ends with the text of
    the last message, which the answer continues; both raise ConfigError. template: None: the tokenizer's chat template.
    tools: definitions of tools, for the template. variables: others of the template, as `enable_thinking`.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str | None = None
    tools: Sequence[Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.continue_final_message and self.add_generation_prompt:
            raise ConfigError("argument 'continue_final_message' is True: give add_generation_prompt=False, too")

    def template_of(self, tokenizer: Any) -> str:
        """Return the chat template. Raises ConfigError as `chat_template` does, and InvalidMessagesError if it does not
        know the tools or a variable: it would drop them without a word."""
        template = chat_template(tokenizer, self.tools) if self.template is None else self.template
        for name in self.variables:
            if name in _OF_RENDERING or name not in template:
                raise InvalidMessagesError(
                    f"the model's chat template has no variable {reprlib.repr(name)}: leave it out"
                )
        if self.tools and "tools" not in template:
            raise InvalidMessagesError("the model's chat template has no tools: leave them out")
        return template


_OF_RENDERING = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"})
_PLAINLY = Rendering()
# As DeepSeek's templates. Others take objects, and add a text only in place of one.
_TAKES_TEXT = re.compile(r"""\+\s*[\w.\[\]'"]*\barguments['"\]]*\s*\+|\barguments['"\]]*\s*\|\s*string\b""")
_TAKES_OBJECTS = re.compile(r"""\barguments['"\]]*\s*(?:is\s+mapping|\|\s*items)\b""")
# As DeepSeek's templates find messages that only call tools. Transformers leaves out a content that is null.
_ASKS_FOR_NONE = re.compile(r"""(\.content\b|\[['"]content['"]\])(?=\s+is\s+(?:not\s+)?none\b)""")


def conversation_tokens(messages: Sequence[Any], tokenizer: Any, rendering: Rendering = _PLAINLY) -> list[int]:
    """Return the tokens of the conversation by the chat template. Arguments of tool calls that are the text of a JSON
    object become an object, as in vLLM, unless the template adds them to a text. Raises InvalidMessagesError, also for
    any error of the template."""
    return list(_templated(messages, tokenizer, rendering, return_dict=True)["input_ids"])


def conversation_text(messages: Sequence[Any], tokenizer: Any, rendering: Rendering = _PLAINLY) -> str:
    """Return the text of the conversation. Raises InvalidMessagesError."""
    return str(_templated(messages, tokenizer, rendering, tokenize=False))


def _templated(messages: Sequence[Any], tokenizer: Any, rendering: Rendering, **options: Any) -> Any:
    conversation, template = read_conversation(messages), rendering.template_of(tokenizer)
    check_rendered(conversation, template)
    takes_parts = _takes_parts_only(tokenizer, template)
    takes_text = _TAKES_TEXT.search(template) is not None and _TAKES_OBJECTS.search(template) is None
    template, num_of_none = _ASKS_FOR_NONE.subn(r"\1|default(none)", template)
    for message in conversation:
        if takes_parts and message["content"] is not None:
            message["content"] = _as_parts(message["content"])
        if num_of_none and "tool_calls" in message:
            message["content"] = message["content"] or None
        for call in message.get("tool_calls", ()):
            arguments = _as_object(call["function"].get("arguments") or {})
            is_made_text = takes_text and isinstance(arguments, dict)
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False) if is_made_text else arguments
    render = partial(
        tokenizer.apply_chat_template,
        tools=rendering.tools or None,
        chat_template=template,
        add_generation_prompt=rendering.add_generation_prompt,
        continue_final_message=rendering.continue_final_message,
        **options,
        **rendering.variables,
    )
    try:
        return render(conversation)
    except BaseException as error:  # a template is anybody's program, which may raise anything
        if not _is_problem(error):
            raise
        is_of_jinja = type(error).__module__.startswith("jinja2")  # whose messages say all
        told = str(error) if is_of_jinja else f"{type(error).__name__}: {error}"
        if is_of_jinja and conversation[1:] and conversation[0]["role"] == "system":
            with suppress(Exception):
                render(conversation[1:])
                told += (
                    "; without the system message they can: put its text into the first message of the user. Tools "
                    "that the chat template does not describe need a system message"
                )
        raise InvalidMessagesError(f"the messages cannot be made a prompt: {told}") from error


_PROBE = "rayspec"


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


@lru_cache(maxsize=16)
def _takes_parts_only(tokenizer: Any, template: str) -> bool:
    """Return whether the template shows the parts of a content, and drops a content that is a text, as LLaVA's."""

    def shows(content: Any) -> bool:
        message = {"role": "user", "content": content}
        with suppress(Exception):  # a template is anybody's program
            return _PROBE in tokenizer.apply_chat_template([message], chat_template=template, tokenize=False)
        return False

    return not shows(_PROBE) and shows(_as_parts(_PROBE))


def chat_template(tokenizer: Any, tools: Sequence[Any] | None = None) -> str:
    """Return the template of a tokenizer that has one. Raises ConfigError if it has several and none is the default."""
    try:
        return str(tokenizer.get_chat_template(tools=tools or None))
    except ValueError as error:
        raise ConfigError(f"the tokenizer's chat template cannot be used: {error}") from error


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    if sum(map(arguments.count, "{[:")) > _MOST_PARTS:
        raise InvalidMessagesError(f"a tool call has more than {_MOST_PARTS} objects, arrays and fields: shorten it")
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    # JSON can spell half of a surrogate pair, and no tokenizer takes it.
    if "\\u" in arguments and (problem := _unicode_problem(json.dumps(parsed, ensure_ascii=False))) is not None:
        raise InvalidMessagesError(f"the arguments of a tool call: {problem}")
    return parsed if isinstance(parsed, dict) else arguments
