"""The OpenAI protocol as data: request bodies, what they mean for the engine, errors, and response bodies.

Requests are strict, because a field that is dropped in silence is a wrong answer: every field either takes effect, is
known to change no text, or is refused by name. The extras (top_k, min_p, repetition_penalty, min_tokens, ...) have the
names and meanings they have in vLLM. Nothing here imports the `openai` package; the tests hold responses against it.
"""

from __future__ import annotations

import codecs
import difflib
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError, from_json
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode
from typing_extensions import Self

from rayspec.config import SamplingParams
from rayspec.types import (
    CompletionOutput,
    ConfigError,
    Logprob,
    NonFiniteLogitsError,
    OutOfMemoryError,
    PromptTooLongError,
    RayspecError,
    RequestError,
    RequestOutput,
)

_MAX_LOGPROBS = 20
_CODES = {
    "missing": "missing_required_parameter",
    "unknown_parameter": "unknown_parameter",
    "unsupported_parameter": "unsupported_parameter",
}
_LEAST_LOGPROB = -9999.0  # what OpenAI writes for "very unlikely"; JSON has no minus infinity


Tokenize = Callable[[str | Sequence[Mapping[str, str]]], list[int]]
"""Of a text as it is, or of a conversation through the chat template."""


class InvalidRequestError(RequestError):
    """The body asks for something that is unknown, malformed or not supported.

    param: the field, dotted, as "messages.0.content". status: of HTTP.
    """

    kind = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


def parse_json(content: bytes) -> Any:
    """Raises InvalidRequestError, also for what is not UTF-8, half a surrogate pair, and NaN, which is no JSON."""
    try:
        return from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"not valid JSON: {error}", code="invalid_json") from None


class StrictBody(pydantic.BaseModel):
    """An object of the protocol. `null` is a field left out.

    refused: fields that cannot be served, with the values besides null that ask for nothing. ignored: fields of any
    value that change no text.
    """

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )
    refused: ClassVar[Mapping[str, Sequence[Any]]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_asks_for_nothing(cls, body: Any) -> Any:
        if not isinstance(body, Mapping):
            raise PydanticCustomError("invalid_value", "it must be a JSON object")
        return {name: value for name, value in body.items() if cls._takes_effect(name, value)}

    @classmethod
    def _takes_effect(cls, name: str, value: Any) -> bool:
        if name in cls.model_fields:
            return value is not None
        if name in cls.ignored:
            return False
        if name not in cls.refused:
            near = difflib.get_close_matches(name, [*cls.model_fields, *cls.refused, *cls.ignored], n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out"
            raise PydanticCustomError("unknown_parameter", "unknown field; {hint}", {"field": name, "hint": hint})
        if value is not None and value not in cls.refused[name]:
            raise PydanticCustomError("unsupported_parameter", "not supported here; leave it out", {"field": name})
        return False

    @classmethod
    def parse(cls, body: object) -> Self:
        """Of what `parse_json` gave. Raises InvalidRequestError, which names the first field that is wrong."""
        try:
            return cls.model_validate(body)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False)[0]
            names = [*first["loc"], *filter(None, [first.get("ctx", {}).get("field")])]
            param = ".".join(map(str, names)) or None
            message = first["msg"].removeprefix("Value error, ")
            raise InvalidRequestError(
                f"{param or 'body'}: {message}", param=param, code=_CODES.get(first["type"], "invalid_value")
            ) from None


class ChatMessage(StrictBody):
    """One turn. Content in parts is text parts joined by line breaks, as vLLM joins them."""

    refused = {"tool_calls": ([],), "function_call": (), "audio": (), "refusal": ()}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str
    name: str | None = None
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, content: Any) -> Any:
        return "\n".join(map(_text_of_part, content)) if isinstance(content, list) else content

    @property
    def for_template(self) -> dict[str, str]:
        """As chat templates take it. They know "developer" by its older name."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role} | self.model_dump(exclude={"role"}, exclude_none=True)


def _text_of_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text":
        raise PydanticCustomError(
            "unsupported_parameter",
            "a part of type {kind} is not supported; give text parts only",
            {"kind": repr(kind)},
        )
    if not isinstance(part.get("text"), str):
        raise PydanticCustomError("invalid_value", "a part of type 'text' must have a 'text'")
    return str(part["text"])


class StreamOptions(StrictBody):
    ignored = frozenset({"include_obfuscation"})

    include_usage: bool = False


class GenerationRequest(StrictBody):
    """What both endpoints take. None leaves a parameter at its default; defaults and limits are SamplingParams'."""

    ignored = frozenset(
        {
            "metadata",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
        }
    )

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_or_many(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("invalid_value", "only with stream: true", {"field": "stream_options"})
        return self

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Most likely tokens to report beside each chosen one; None: no log-probabilities at all."""

    @abstractmethod
    def num_output_tokens(self, room: int) -> int:
        """The most tokens asked for; `room` is what the context has left."""

    @abstractmethod
    def prompts(self, tokenize: Tokenize) -> list[list[int]]:
        """The token ids of each prompt."""

    def sampling_params(self, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
        """Of a prompt of that many tokens. Raises PromptTooLongError where prompt and output together exceed the
        context, which OpenAI refuses too, and InvalidRequestError for a value that SamplingParams refuses."""
        num_output_tokens = self.num_output_tokens(max(1, max_model_len - num_prompt_tokens))
        if num_prompt_tokens + num_output_tokens > max_model_len:
            raise PromptTooLongError(
                f"This model's maximum context length is {max_model_len} tokens. However, you requested "
                f"{num_prompt_tokens + num_output_tokens} tokens ({num_prompt_tokens} in the prompt, "
                f"{num_output_tokens} in the completion). Please reduce the length of the prompt or completion."
            )
        asked = {name: value for name, value in self if name in SamplingParams.model_fields and value is not None}
        try:
            return SamplingParams(**asked | {"max_tokens": num_output_tokens, "logprobs": self.num_logprobs})
        except ConfigError as error:
            raise InvalidRequestError(str(error), param=_first_named(asked, str(error)), code="invalid_value") from None


def _first_named(fields: Mapping[str, Any], message: str) -> str | None:
    found = {name: re.search(rf"\b{name}\b", message) for name in fields}
    return min((match.start(), name) for name, match in found.items() if match)[1] if any(found.values()) else None


class ChatRequest(GenerationRequest):
    """The body of /v1/chat/completions. Without a limit the answer may fill the context.

    `prediction` is ignored because it is a hint for speed; the model drafts for itself.
    """

    refused = {
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "reasoning_effort": ("none",),
        "response_format": ({"type": "text"},),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
    ignored = GenerationRequest.ignored | {"parallel_tool_calls", "prediction"}

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=_MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("invalid_value", "only with logprobs: true", {"field": "top_logprobs"})
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise PydanticCustomError(
                "invalid_value", "not together with max_completion_tokens; give one", {"field": "max_tokens"}
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def num_output_tokens(self, room: int) -> int:
        asked = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return room if asked is None else asked

    def prompts(self, tokenize: Tokenize) -> list[list[int]]:
        return [tokenize([message.for_template for message in self.messages])]


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions: one prompt or several, each as text or as token ids."""

    refused = {"best_of": (1,), "echo": (False,), "suffix": ("",)}

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=_MAX_LOGPROBS)] | None = None

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _prompt_or_prompts(cls, prompt: Any, validate: pydantic.ValidatorFunctionWrapHandler) -> Any:
        try:
            valid = validate(prompt)
        except pydantic.ValidationError:
            valid = []
        if valid == []:
            raise PydanticCustomError("invalid_value", "it must be text, token ids, or a list of texts or of token ids")
        return valid

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def num_output_tokens(self, room: int) -> int:
        default: int = SamplingParams.model_fields["max_tokens"].default
        return min(default, room) if self.max_tokens is None else self.max_tokens

    def prompts(self, tokenize: Tokenize) -> list[list[int]]:
        prompt: Any = self.prompt
        many = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
        return [tokenize(one) if isinstance(one, str) else one for one in many]


Request = ChatRequest | CompletionRequest
ENDPOINTS: Mapping[str, type[ChatRequest | CompletionRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiError:
    """An error as HTTP and the protocol tell it. `code` is stable."""

    status: int
    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str

    @classmethod
    def of(cls, error: RayspecError) -> ApiError:
        """400 for what the request is to blame for, 500 for what failed on it, 503 for an engine that is gone. What is
        wrong with the server itself is not told to its clients."""
        if not isinstance(error, RequestError):
            message = "The engine cannot serve this request now. Please try again later."
            return cls(status=503, message=message, type="server_error", param=None, code=error.kind)
        if isinstance(error, OutOfMemoryError | NonFiniteLogitsError):
            return cls(status=500, message=str(error), type="server_error", param=None, code=error.kind)
        status, param, code = 400, None, error.kind
        if isinstance(error, PromptTooLongError):
            code = "context_length_exceeded"
        elif isinstance(error, InvalidRequestError):
            status, param, code = error.status, error.param, error.code or error.kind
        return cls(status=status, message=str(error), type="invalid_request_error", param=param, code=code)

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What makes a response one of its own. created: Unix seconds. model: the served name."""

    id: str
    created: int
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens. A prompt with several completions counts once.

    There are no `accepted_prediction_tokens`: they count a prediction that the *client* sent, and the rejected ones are
    part of `completion_tokens` there. Tokens that the model drafts for itself are neither.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput]) -> Usage:
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        num_completion = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        return cls(prompt_tokens=num_prompt, completion_tokens=num_completion, total_tokens=num_prompt + num_completion)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprob:
    """bytes: of the token in UTF-8, where it may be a part of a character; None where they are unknown."""

    token: str
    logprob: float
    bytes: list[int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatLogprobs:
    content: list[TokenLogprob]
    refusal: None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantMessage:
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatChoice:
    """stop_reason, here and below: vLLM's extra field, the stop string or token that ended the text."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCompletion:
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"

    @classmethod
    def of(cls, request: ChatRequest, output: RequestOutput, texts: TokenTexts, stamp: Stamp) -> ChatCompletion:
        """`output` is finished, without an error."""
        choices = [
            ChatChoice(
                index=one.index,
                message=AssistantMessage(content=one.text),
                logprobs=_chat_logprobs(one, request.num_logprobs, texts),
                finish_reason=_finish_reason(one),
                stop_reason=one.stop_reason,
            )
            for one in output.outputs
        ]
        return cls(id=stamp.id, created=stamp.created, model=stamp.model, choices=choices, usage=Usage.of([output]))


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionLogprobs:
    """One entry a token. text_offset: characters of the completion before the token. top_logprobs: the most likely
    tokens and the chosen one."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionChoice:
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    object: Literal["text_completion"] = "text_completion"

    @classmethod
    def of(
        cls, request: CompletionRequest, outputs: Sequence[RequestOutput], texts: TokenTexts, stamp: Stamp
    ) -> Completion:
        """`outputs` are finished, without an error, one a prompt; their completions become choices in that order."""
        completions = [one for output in outputs for one in output.outputs]
        skip_special = request.skip_special_tokens is not False
        choices = [
            CompletionChoice(
                index=index,
                text=one.text,
                logprobs=_completion_logprobs(one, texts, skip_special=skip_special),
                finish_reason=_finish_reason(one),
                stop_reason=one.stop_reason,
            )
            for index, one in enumerate(completions)
        ]
        return cls(id=stamp.id, created=stamp.created, model=stamp.model, choices=choices, usage=Usage.of(outputs))


Response = ChatCompletion | Completion


def _finish_reason(completion: CompletionOutput) -> FinishReason:
    reason = completion.finish_reason
    assert reason in {"stop", "length"}, f"a completion without an error has the finish reason {reason!r}"
    return "stop" if reason == "stop" else "length"


def _chat_logprobs(completion: CompletionOutput, num_top: int | None, texts: TokenTexts) -> ChatLogprobs | None:
    if num_top is None or completion.logprobs is None:
        return None
    content = []
    for token_id, row in _chosen(completion):
        ranked = sorted(row.items(), key=lambda item: item[1].rank)[:num_top]
        top = [
            TopLogprob(token=texts.text(one), logprob=_finite(logprob), bytes=texts.utf8(one))
            for one, logprob in ranked
        ]
        content.append(
            TokenLogprob(
                token=texts.text(token_id),
                logprob=_finite(row[token_id]),
                bytes=texts.utf8(token_id),
                top_logprobs=top,
            )
        )
    return ChatLogprobs(content=content)


def _completion_logprobs(
    completion: CompletionOutput, texts: TokenTexts, *, skip_special: bool
) -> CompletionLogprobs | None:
    if completion.logprobs is None:
        return None
    rows = list(_chosen(completion))
    token_ids = [token_id for token_id, _ in rows]
    return CompletionLogprobs(
        tokens=[texts.text(token_id) for token_id in token_ids],
        token_logprobs=[_finite(row[token_id]) for token_id, row in rows],
        top_logprobs=[{texts.text(one): _finite(logprob) for one, logprob in row.items()} for _, row in rows],
        text_offset=list(texts.offsets(token_ids, skip_special=skip_special)),
    )


def _chosen(completion: CompletionOutput) -> Iterator[tuple[int, dict[int, Logprob]]]:
    """Each generated token with its row of log-probabilities. They include the token that ended the text."""
    return zip(completion.token_ids, completion.logprobs or (), strict=True)


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, _LEAST_LOGPROB)


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """How single tokens read in a running text, each by itself. A token that is a part of a character reads
    "bytes:\\xe4", as OpenAI writes it, so that two such tokens differ."""

    tokenizer: PreTrainedTokenizerBase
    _known: dict[int, tuple[str, list[int] | None]] = field(default_factory=dict)

    def text(self, token_id: int) -> str:
        return self._look_up(token_id)[0]

    def utf8(self, token_id: int) -> list[int] | None:
        return self._look_up(token_id)[1]

    def offsets(self, token_ids: Sequence[int], *, skip_special: bool) -> Iterator[int]:
        """Whole characters of the text before each token."""
        special = set(self.tokenizer.all_special_ids) if skip_special else set()
        decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        offset = 0
        for token_id in token_ids:
            yield offset
            if token_id not in special:
                offset += len(decoder.decode(bytes(self.utf8(token_id) or ())))

    def _look_up(self, token_id: int) -> tuple[str, list[int] | None]:
        if token_id not in self._known:
            self._known[token_id] = self._read(token_id)
        return self._known[token_id]

    def _read(self, token_id: int) -> tuple[str, list[int] | None]:
        # After another token, for at the start of a text sentencepiece drops a token's space.
        before = self._decode(self._before)
        text = self._decode([*self._before, token_id])[len(before) :]
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text, list(text.encode())
        piece = self.tokenizer.convert_ids_to_tokens(token_id)
        content = _bytes_of_piece(piece) if isinstance(piece, str) else None
        return text if content is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in content), content

    @property
    def _before(self) -> list[int]:
        return list(self.tokenizer("a", add_special_tokens=False)["input_ids"])

    def _decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))


def _bytes_of_piece(piece: str) -> list[int] | None:
    """Of a vocabulary entry: "<0xE4>" of sentencepiece, or characters that stand for bytes as in GPT-2."""
    fallback = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
    if fallback:
        return [int(fallback[1], 16)]
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
    return [byte_of[character] for character in piece] if set(piece) <= set(byte_of) else None
