"""The form that a request's output must have: a JSON schema, a regular expression, one of several texts, a grammar."""

from __future__ import annotations

import dataclasses
import json as json_format
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rayspec.errors import ConfigError

FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
THINK, END_OF_THINK = "<think>", "</think>"
CHANNELS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")  # of gpt-oss, around its reasoning and its answer
THINKING = ("deepseek_r1", "qwen3")  # values of option reasoning_parser whose models write these
MOST_TOKENS_OF_THINK = 16  # with what stands around them at the end of a prompt
MAX_CHARACTERS = 1 << 18


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """The form of an output; exactly one of `json`, `regex`, `choice`, `grammar` and `json_object`. Names are vLLM's.

    json: a JSON schema, as text, as a mapping, or as a pydantic class; kept as text. regex: of the whole output, in the
    syntax of Rust's `regex`. choice: the output is one of these texts. grammar: in Lark's syntax, or in that of
    llama.cpp (GBNF). json_object: any JSON object.
    disable_any_whitespace: JSON on one line, with no space except after "," and ":"; then more of it is known
    beforehand, which is faster. whitespace_pattern: a regular expression of the space between two parts of JSON; by
    default one space, or a line break and at most 32 spaces or tabs. disable_additional_properties: an object has only
    the properties that the schema names. reasoning: what may stand before the form, see `after`; "channels": the form
    is the answer of gpt-oss, in its last channel.

    Raises ConfigError for none or several forms, and for a value of another type. The engine compiles the form, and
    fails the request if that is impossible.
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    reasoning: Literal["before", "inside", "channels"] | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            named = f"{' and '.join(given)} are set" if given else "nothing is set"
            raise ConfigError(f"structured_outputs: {named}; give one of {', '.join(FORMS[:-1])}")
        if self.structural_tag is not None:
            raise ConfigError("structured_outputs: 'structural_tag' is not supported; write the form as a 'grammar'")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            given_texts: Any = self.choice
            texts = list(given_texts) if isinstance(given_texts, list | tuple) else []
            if not texts or not all(isinstance(text, str) and text for text in texts):
                raise _wrong("choice", self.choice, "a list of texts that are not empty")
            object.__setattr__(self, "choice", _Texts(texts))
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise _wrong(name, value, "a text that is not empty")
        _check_options(self)
        num_characters = len(repr((self.json, self.regex, self.choice, self.grammar, self.whitespace_pattern)))
        if num_characters > MAX_CHARACTERS:
            raise ConfigError(f"structured_outputs: {given[0]} has more than {MAX_CHARACTERS} characters: shorten it")
        of_form: Any = (self.json, self.regex, self.grammar, self.whitespace_pattern, *(self.choice or ()))
        try:
            "".join(filter(None, of_form)).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ConfigError(f"structured_outputs: {given[0]} has half a character ({half!a}): leave it out") from None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> StructuredOutputsParams:
        """Make it of a mapping. Raises ConfigError, also for an unknown name."""
        valid = [field.name for field in dataclasses.fields(cls)]
        unknown = [name for name in values if name not in valid]
        if unknown:
            raise ConfigError(f"structured_outputs: unknown field {unknown[0]!r}; valid: {', '.join(valid[:-1])}")
        return cls(**values)

    def after(self, prompt: str) -> StructuredOutputsParams:
        """Return the form with room for reasoning in <think> and </think> before it: "before", it may be left out;
        "inside", the prompt has begun it. There is no room after a prompt that has ended it. prompt: its end."""
        end = prompt.rstrip()
        if self.reasoning is not None or end.endswith(END_OF_THINK):
            return self
        return dataclasses.replace(self, reasoning="inside" if end.endswith(THINK) else "before")


class _Texts(tuple[str, ...]):  # noqa: SLOT001 - it keeps its hash
    """Texts whose hash is computed once: there may be thousands of them, and each sequence looks for its form."""

    _hash: int

    def __hash__(self) -> int:
        if "_hash" not in vars(self):
            self._hash = super().__hash__()
        return self._hash

    def __reduce__(self) -> tuple[type, tuple[list[str]]]:
        return type(self), (list(self),)  # the hash is another one in another process


def _check_options(form: StructuredOutputsParams) -> None:
    for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
        if not isinstance(getattr(form, name), bool | None):
            raise _wrong(name, getattr(form, name), "true or false")
    if form.reasoning not in (None, "before", "inside", "channels"):
        raise _wrong("reasoning", form.reasoning, "'before', 'inside', 'channels' or nothing")


def _schema_text(schema: Any) -> str:
    """Return a JSON schema as text. Raises ConfigError."""
    if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, str) and len(schema) > MAX_CHARACTERS:
        raise ConfigError(f"structured_outputs: json has more than {MAX_CHARACTERS} characters: shorten it")
    try:
        schema = json_format.loads(schema) if isinstance(schema, str) else schema
        if isinstance(schema, Mapping):
            return json_format.dumps(dict(schema), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"structured_outputs: json is no JSON: {error}") from None
    raise _wrong("json", schema, "a JSON schema, which is an object")


def _wrong(name: str, value: Any, remedy: str) -> ConfigError:
    return ConfigError(f"structured_outputs: {name} is {reprlib.repr(value)}: give {remedy}")
