"""Response bodies, whole and in chunks, and their form as JSON and events. UNSET fields do not appear in JSON."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from typing_extensions import Self

from rayspec.decode.output import TextOffsets, TokenTexts
from rayspec.openai.parsers import CallPiece, OutputParser, Thought
from rayspec.openai.protocol import ApiError
from rayspec.openai.requests import ChatRequest, CompletionRequest, Request
from rayspec.types import CompletionOutput, Logprob, RequestOutput

FinishReason = Literal["stop", "length", "tool_calls"]
END_OF_EVENTS = b"data: [DONE]\n\n"
_VERY_UNLIKELY = -9999.0  # OpenAI's log-probability of what cannot be; JSON has no minus infinity
_MOST_SPACES = 256  # pieces of white space in a row that wait for the text after them


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """created: Unix seconds. Fields of vLLM's: max_model_len, the most prompt and output tokens of a request, or None
    while not known; parent, the model of an adapter."""

    id: str
    created: int
    max_model_len: int | None = None
    parent: str | None = None
    owned_by: str = "rayspec"
    object: Literal["model"] = "model"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    data: Sequence[ModelCard]
    object: Literal["list"] = "list"


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """cached_tokens: prompt tokens that were found in the KV cache and not computed."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """reasoning_tokens: about, in proportion to the characters."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a request. A prompt with several completions counts once. OpenAI's `accepted_prediction_tokens`
    are of a prediction that the client sent, and so are not here."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """bytes: UTF-8 bytes of the token, which may be a part of a character; None if they are unknown."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob, frozen=True, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None

    @classmethod
    def of(cls, completion: CompletionOutput, num_top: int | None, texts: TokenTexts) -> Self | None:
        """num_top: most likely tokens to report for each chosen token; None: no log-probabilities."""
        if num_top is None or completion.logprobs is None:
            return None

        def named(token_id: int, logprob: Logprob) -> dict[str, Any]:
            return {"token": texts.text(token_id), "logprob": _finite(logprob), "bytes": texts.utf8(token_id)}

        content = []
        for token_id, row in zip(completion.token_ids, completion.logprobs, strict=True):
            ranked = sorted(row.items(), key=lambda item: item[1].rank)[:num_top]
            top = [TopLogprob(**named(*one)) for one in ranked]
            content.append(TokenLogprob(**named(token_id, row[token_id]), top_logprobs=top))
        return cls(content=content)


Row = Mapping[int, Logprob] | None
"""The log-probabilities of a token and of the most likely ones at its place; None for the first of a prompt."""


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """One entry for each token. text_offset: characters of the completion before the token. top_logprobs: the most
    likely tokens and the chosen token. The first token of an echoed prompt has no probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    @classmethod
    def of(cls, token_ids: Sequence[int], rows: Sequence[Row], texts: TokenTexts, offsets: TextOffsets) -> Self:
        """rows: one for each token. offsets: at the end of the text so far; the call advances them over the tokens."""
        pairs = list(zip(token_ids, rows, strict=True))
        return cls(
            tokens=[texts.text(token_id) for token_id in token_ids],
            token_logprobs=[None if row is None else _finite(row[token_id]) for token_id, row in pairs],
            top_logprobs=[
                None if row is None else {texts.text(one): _finite(logprob) for one, logprob in row.items()}
                for row in rows
            ],
            text_offset=offsets.of(token_ids),
        )


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """arguments: text of a JSON object."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call, or what a chunk adds to it. A call begins with its id and its name; only in chunks it has an index."""

    function: FunctionCall
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatText(msgspec.Struct, frozen=True, kw_only=True):
    """A whole message, or what a chunk adds to it. A stream begins with the role. content: null without text.
    reasoning_content: DeepSeek's name, reasoning: vLLM's; both have the same text."""

    content: str | UnsetType | None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    role: Literal["assistant"] | UnsetType = UNSET
    refusal: UnsetType | None = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """message: in a whole response. delta: in a chunk. finish_reason: None until the choice ends. stop_reason, here and
    below: vLLM's extra field, the stop string or token that ended the text."""

    index: int
    message: ChatText | UnsetType = UNSET
    delta: ChatText | UnsetType = UNSET
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


PromptLogprobs = list[dict[str, Logprob] | None]
"""By the token's id as text, as in vLLM."""


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A chat completion, or a chunk of one. id, created, model: as in `Answer`. prompt_token_ids, prompt_logprobs, and
    token_ids of a choice, here and below: vLLM's extra fields, if the request asks for them."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion", "chat.completion.chunk"] = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """text, logprobs: of an echoed prompt, too. token_ids: only those that were generated."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A text completion, or a chunk of a text completion: OpenAI gives both the same fields."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


StreamEvent = dict[str, Any]
"""An event of the Responses API, by its `type`, or a response."""
Response = ChatCompletion | Completion | StreamEvent


class Answer:
    """Makes the response to one request, as a whole or in chunks with one choice each. name: the end of its id. model:
    the served name. make_parser: of a choice's output; None: all is content. has_short_ids: as in ToolFormat."""

    end_of_events = END_OF_EVENTS

    def __init__(
        self,
        request: Request,
        texts: TokenTexts,
        *,
        name: str,
        created: int,
        model: str,
        make_parser: Callable[[], OutputParser] | None = None,
        has_short_ids: bool = False,
    ) -> None:
        self._request, self._texts, self._name = request, texts, name
        self._make_parser, self._has_short_ids = make_parser, has_short_ids
        self._called: set[int] = set()  # choices with calls
        self._parsers: dict[int, OutputParser] = {}
        self._spaces: dict[int, list[str]] = {}  # what parsers get with the text after it
        self._num_characters = self._num_of_reasoning = 0
        self._is_chat = isinstance(request, ChatRequest)
        self._id = f"chatcmpl-{name}" if self._is_chat else f"cmpl-{name}"
        self._created, self._model = created, model
        self._begun: set[int] = set()  # choices that were shown
        self._offsets: dict[int, TextOffsets] = {}
        self._echoed: dict[int, str] = {}  # prompts as text
        self._latest: dict[int, RequestOutput] = {}
        self._num_output_tokens = 0
        self._skips_special = request.skip_special_tokens is not False

    def whole(self, outputs: Sequence[RequestOutput]) -> Response:
        """Make the response of finished outputs without errors, with their completions as choices in this order."""
        completions = [(at, one) for at, output in enumerate(outputs) for one in output.outputs]
        choices = []
        for index, (at, one) in enumerate(completions):
            one, calls, thought = self._divided(index, one)  # noqa: PLW2901
            choices.append(self._choice(index, at, outputs[at], one, "message", calls, thought))
        fields = self._of_prompt(outputs[0]) if self._is_chat else {}
        num_output_tokens = sum(len(one.token_ids) for _, one in completions)
        return self._body(choices, usage=self._usage(outputs, num_output_tokens), **fields)

    def chunks(self, prompt_index: int, piece: RequestOutput) -> Iterator[Response]:
        self._latest[prompt_index] = piece
        self._num_output_tokens += sum(len(one.token_ids) for one in piece.outputs)
        for one in piece.outputs:
            index = prompt_index * (self._request.n or 1) + one.index
            if self._is_chat and index not in self._begun:
                fields = {} if self._begun else self._of_prompt(piece)
                self._begun.add(index)
                yield self._chunk([ChatChoice(index=index, delta=ChatText(role="assistant", content=""))], **fields)
            one, calls, thought = self._divided(index, one)  # noqa: PLW2901
            has_tokens = self._request.return_token_ids and len(one.token_ids) > 0
            # Nothing is shown while half of a character, or what may begin a call, is held back.
            if one.text or calls or thought or one.logprobs or one.finished or has_tokens:
                yield self._chunk([self._choice(index, prompt_index, piece, one, "delta", calls, thought)])

    def end(self) -> Iterator[Response]:
        """Yield the chunk without choices that ends the stream, if the request asks for it."""
        if self._request.stream_options.include_usage:
            yield self._chunk([], usage=self._usage(self._latest.values(), self._num_output_tokens))

    def _usage(self, outputs: Collection[RequestOutput], num_output_tokens: int) -> Usage:
        """outputs: one for each prompt."""
        num_output_tokens = 0 if self._only_echoes else num_output_tokens
        num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        num_cached = sum(output.metrics.num_cached_tokens for output in outputs)
        details: CompletionTokensDetails | UnsetType = UNSET
        if self._num_of_reasoning:
            num_tokens = num_output_tokens * self._num_of_reasoning // self._num_characters
            details = CompletionTokensDetails(reasoning_tokens=num_tokens)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_output_tokens,
            total_tokens=num_prompt_tokens + num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
            completion_tokens_details=details,
        )

    @property
    def _only_echoes(self) -> bool:
        return isinstance(self._request, CompletionRequest) and self._request.only_echoes

    def _choice(
        self,
        index: int,
        prompt_index: int,
        output: RequestOutput,
        one: CompletionOutput,
        place: Literal["message", "delta"],
        calls: list[ToolCall],
        thought: str,
    ) -> ChatChoice | CompletionChoice:
        """Return the choice of a completion of the output of a prompt."""
        reason: str | None = one.finish_reason
        assert reason in {None, "stop", "length"}, f"a completion without an error has the finish reason {reason!r}"
        self._called |= {index} if calls else set()
        if reason == "stop" and index in self._called:
            reason = "tool_calls"
        common: Any = {"index": index, "finish_reason": reason, "stop_reason": one.stop_reason}
        if self._only_echoes:
            one = replace(one, text="", token_ids=(), logprobs=None)
            common |= {"finish_reason": "length", "stop_reason": None}
        if self._request.return_token_ids:
            common["token_ids"] = list(one.token_ids)
        if isinstance(self._request, ChatRequest):
            whole: Any = {"role": "assistant", "refusal": None} if place == "message" else {}
            logprobs = ChatLogprobs.of(one, self._request.num_logprobs, self._texts)
            content: Any = one.text
            if calls or thought:
                content = content or (None if place == "message" else UNSET)
            if thought and self._request.include_reasoning:
                whole |= {"reasoning_content": thought, "reasoning": thought}
            if calls:
                calls = [msgspec.structs.replace(call, index=UNSET) for call in calls] if place == "message" else calls
                whole["tool_calls"] = calls
            common[place] = ChatText(content=content, **whole)
            return ChatChoice(**common, logprobs=logprobs)
        is_first = index not in self._begun
        self._begun.add(index)
        text, token_ids, rows = one.text, list(one.token_ids), list[Row](one.logprobs or ())
        if is_first and self._request.echo:
            text = self._prompt_text(self._request, prompt_index, output) + text
            token_ids = [*output.prompt_token_ids, *token_ids]
            rows = [*(output.prompt_logprobs or ()), *rows]
        if index not in self._offsets:
            self._offsets[index] = TextOffsets(self._texts, skip_special=self._skips_special)
        shown = None
        if self._request.logprobs is not None:
            shown = CompletionLogprobs.of(token_ids, rows, self._texts, self._offsets[index])
        return CompletionChoice(**common, text=text, logprobs=shown, **(self._of_prompt(output) if is_first else {}))

    def _prompt_text(self, request: CompletionRequest, prompt_index: int, output: RequestOutput) -> str:
        """Return the text of a prompt, which is decoded once for all its completions."""
        if prompt_index not in self._echoed:
            prompt: Any = request.prompts[prompt_index]
            if not isinstance(prompt, str) or request.truncate_prompt_tokens is not None:
                ids, skip = list(output.prompt_token_ids), self._skips_special
                prompt = self._texts.tokenizer.decode(ids, skip_special_tokens=skip)
            self._echoed[prompt_index] = prompt
        return self._echoed[prompt_index]

    def _divided(self, index: int, one: CompletionOutput) -> tuple[CompletionOutput, list[ToolCall], str]:
        """Return new output of a choice with its content as text, what it adds to calls, and its reasoning."""
        if self._make_parser is None:
            return one, [], ""
        if index not in self._parsers:
            self._parsers[index], self._spaces[index] = self._make_parser(), []
        spaces = self._spaces[index]
        spaces.append(one.text)
        # Parsers would search all of a long run of spaces for each token.
        if not one.finished and len(spaces) < _MOST_SPACES and not one.text.strip(" \t\r\n"):
            return replace(one, text=""), [], ""
        pieces = self._parsers[index].feed("".join(spaces), finished=one.finished)
        spaces.clear()
        thought = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
        calls = []
        for number, of_call in itertools.groupby(
            (piece for piece in pieces if isinstance(piece, CallPiece)), key=lambda piece: piece.index
        ):
            parts = list(of_call)
            function = {"arguments": "".join(part.arguments for part in parts)}
            begun: Any = {}
            if parts[0].name is not None:
                digest = hashlib.sha256(f"{self._name} {index} {number}".encode()).hexdigest()
                begun = {"id": digest[:9] if self._has_short_ids else f"call_{digest[:24]}", "type": "function"}
                function["name"] = parts[0].name
            calls.append(ToolCall(index=number, function=FunctionCall(**function), **begun))
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        self._num_of_reasoning += len(thought)
        self._num_characters += len(thought) + len(content) + sum(len(call.function.arguments) for call in calls)
        return replace(one, text=content), calls, thought

    def _of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """Return the fields about a prompt, if the request asks for them."""
        fields: dict[str, Any] = {}
        if self._request.return_token_ids:
            fields["prompt_token_ids"] = list(output.prompt_token_ids)
        if self._request.prompt_logprobs is not None:
            fields["prompt_logprobs"] = [
                None if row is None else {str(token): _with_finite(one) for token, one in row.items()}
                for row in output.prompt_logprobs or ()
            ]
        return fields

    def _chunk(self, choices: Sequence[Any], **fields: Any) -> Response:
        kind = {"object": "chat.completion.chunk"} if self._is_chat else {}
        usage: Usage | UnsetType | None = None if self._request.stream_options.include_usage else UNSET
        if self._request.stream_options.continuous_usage_stats:
            usage = self._usage(self._latest.values(), self._num_output_tokens)
        return self._body(choices, **{"usage": usage, **kind, **fields})

    def _body(self, choices: Sequence[Any], **fields: Any) -> Response:
        make: Any = ChatCompletion if self._is_chat else Completion
        body: Response = make(id=self._id, created=self._created, model=self._model, choices=list(choices), **fields)
        return body


def json_body(body: Any) -> bytes:
    """Encode a body, or an ApiError, as compact JSON in UTF-8."""
    return msgspec.json.encode(body.body if isinstance(body, ApiError) else body)


def event(body: Response | ApiError) -> bytes:
    name = f"event: {body['type']}\n".encode() if isinstance(body, dict) else b""
    return name + b"data: " + json_body(body) + b"\n\n"


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, _VERY_UNLIKELY)


def _with_finite(logprob: Logprob) -> Logprob:
    return logprob if logprob.logprob >= _VERY_UNLIKELY else replace(logprob, logprob=_VERY_UNLIKELY)
