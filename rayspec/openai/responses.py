"""Response bodies, whole and in chunks, and their form as JSON and server-sent events.

A field that is UNSET does not appear in JSON.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from typing_extensions import Self

from rayspec.decode.output import TextOffsets, TokenTexts
from rayspec.openai.errors import ApiError
from rayspec.openai.requests import ChatRequest, CompletionRequest, Request
from rayspec.types import CompletionOutput, Logprob, RequestMetrics, RequestOutput

FinishReason = Literal["stop", "length"]
ServedTier = Literal["default"]
END_OF_EVENTS = b"data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0  # what OpenAI writes for "very unlikely"; JSON has no minus infinity


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """created: Unix seconds. max_model_len: vLLM's extra field, the most prompt and output tokens of a request."""

    id: str
    created: int
    max_model_len: int
    owned_by: str = "rayspec"
    object: Literal["model"] = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelList:
    data: Sequence[ModelCard]
    object: Literal["list"] = "list"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokensDetails:
    """cached_tokens: prompt tokens that were found in the KV cache and not computed."""

    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a request. A prompt with several completions counts once.

    There are no `accepted_prediction_tokens`. In OpenAI's API they count tokens of a prediction that the *client* sent,
    and `completion_tokens` includes the rejected tokens. Tokens that the model drafts for itself are neither.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, outputs: Collection[RequestOutput], num_output_tokens: int | None = None) -> Self:
        """outputs: one for each prompt. num_output_tokens: None: those in `outputs`."""
        if num_output_tokens is None:
            num_output_tokens = sum(_num_output_tokens(output) for output in outputs)
        num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        num_cached = sum(output.metrics.num_cached_tokens for output in outputs)
        return cls(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_output_tokens,
            total_tokens=num_prompt_tokens + num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecDecodeMetrics:
    """Statistics of drafting, with the names and meanings of vLLM's `--per-request-spec-decode-metrics summary`.

    num_spec_steps: rounds with a draft. mean_acceptance_length: tokens that such a round commits, 1 + accepted /
    rounds. mean_acceptance_length and draft_acceptance_rate are None if nothing was drafted.
    """

    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_spec_steps: int

    @classmethod
    def of(cls, metrics: Iterable[RequestMetrics]) -> Self:
        """Add up the metrics of several prompts."""
        num_steps = num_drafted = num_accepted = 0
        for one in metrics:
            num_steps += one.num_rounds - one.num_plain_rounds
            num_drafted += one.num_draft_tokens
            num_accepted += one.num_accepted_tokens
        return cls(
            mean_acceptance_length=1 + num_accepted / num_steps if num_steps else None,
            draft_acceptance_rate=num_accepted / num_drafted if num_drafted else None,
            num_draft_tokens=num_drafted,
            num_accepted_draft_tokens=num_accepted,
            num_spec_steps=num_steps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprob:
    """bytes: UTF-8 bytes of the token, which may be a part of a character; None if they are unknown."""

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

    @classmethod
    def of(cls, completion: CompletionOutput, num_top: int | None, texts: TokenTexts) -> Self | None:
        """num_top: most likely tokens to report for each chosen token; None: no log-probabilities."""
        if num_top is None or completion.logprobs is None:
            return None
        content = []
        for token_id, row in _chosen(completion):
            ranked = sorted(row.items(), key=lambda item: item[1].rank)[:num_top]
            top = [
                TopLogprob(token=texts.text(one), logprob=_finite(logprob), bytes=texts.utf8(one))
                for one, logprob in ranked
            ]
            token, logprob = texts.text(token_id), _finite(row[token_id])
            content.append(TokenLogprob(token=token, logprob=logprob, bytes=texts.utf8(token_id), top_logprobs=top))
        return cls(content=content)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionLogprobs:
    """One entry for each token. text_offset: characters of the completion before the token. top_logprobs: the most
    likely tokens and the chosen token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]

    @classmethod
    def of(cls, completion: CompletionOutput, texts: TokenTexts, offsets: TextOffsets) -> Self | None:
        """offsets: at the end of the text so far; the call advances them over the new tokens."""
        if completion.logprobs is None:
            return None
        rows = list(_chosen(completion))
        token_ids = [token_id for token_id, _ in rows]
        return cls(
            tokens=[texts.text(token_id) for token_id in token_ids],
            token_logprobs=[_finite(row[token_id]) for token_id, row in rows],
            top_logprobs=[{texts.text(one): _finite(logprob) for one, logprob in row.items()} for _, row in rows],
            text_offset=offsets.of(token_ids),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """The fields that identify a response. created: Unix seconds. model: the served name. service_tier: the tier that
    served the request, if a chat request names a tier."""

    id: str
    created: int
    model: str
    service_tier: ServedTier | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantMessage:
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


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
    service_tier: ServedTier | UnsetType = UNSET
    metrics: SpecDecodeMetrics | UnsetType = UNSET
    object: Literal["chat.completion"] = "chat.completion"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDelta:
    content: str
    role: Literal["assistant"] | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatChunkChoice:
    """finish_reason, here and below: None until the choice ends."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCompletionChunk:
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: ServedTier | UnsetType = UNSET
    metrics: SpecDecodeMetrics | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionChoice:
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None

    @classmethod
    def of(cls, index: int, completion: CompletionOutput, texts: TokenTexts, offsets: TextOffsets) -> Self:
        return cls(
            index=index,
            text=completion.text,
            logprobs=CompletionLogprobs.of(completion, texts, offsets),
            finish_reason=_finish_reason(completion) if completion.finished else None,
            stop_reason=completion.stop_reason,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A text completion, or a chunk of a text completion: OpenAI gives both the same fields."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: SpecDecodeMetrics | UnsetType = UNSET
    object: Literal["text_completion"] = "text_completion"


Response = ChatCompletion | Completion
Chunk = ChatCompletionChunk | Completion


def response(request: Request, outputs: Sequence[RequestOutput], texts: TokenTexts, stamp: Stamp) -> Response:
    """Make the response from `outputs`, one for each prompt, all finished and without an error. Their completions
    become choices in this order."""
    usage, metrics = Usage.of(outputs), SpecDecodeMetrics.of(output.metrics for output in outputs)
    named: Any = {"id": stamp.id, "created": stamp.created, "model": stamp.model, "usage": usage}
    named["metrics"] = metrics if request.return_spec_decode_metrics else UNSET
    completions = [one for output in outputs for one in output.outputs]
    if isinstance(request, CompletionRequest):
        texts_of = [CompletionChoice.of(n, one, texts, _offsets(request, texts)) for n, one in enumerate(completions)]
        return Completion(choices=texts_of, **named)
    choices = [
        ChatChoice(
            index=one.index,
            message=AssistantMessage(content=one.text),
            logprobs=ChatLogprobs.of(one, request.num_logprobs, texts),
            finish_reason=_finish_reason(one),
            stop_reason=one.stop_reason,
        )
        for one in completions
    ]
    return ChatCompletion(choices=choices, service_tier=stamp.service_tier, **named)


class Chunks:
    """Makes the chunks of a stream, with one choice each, from new output of each prompt, and counts the usage. The
    last chunk of a choice has its finish reason."""

    def __init__(self, request: Request, texts: TokenTexts, stamp: Stamp) -> None:
        self._request, self._texts = request, texts
        usage = None if request.include_usage else UNSET
        named: Any = {"id": stamp.id, "created": stamp.created, "model": stamp.model, "choices": [], "usage": usage}
        self._chat = ChatCompletionChunk(service_tier=stamp.service_tier, **named)
        self._text = Completion(**named)
        self._begun: set[int] = set()  # choices of a chat
        self._offsets: dict[int, TextOffsets] = {}
        self._latest: dict[int, RequestOutput] = {}
        self._num_output_tokens = 0

    @property
    def usage(self) -> Usage:
        return Usage.of(self._latest.values(), self._num_output_tokens)

    def of(self, prompt_index: int, piece: RequestOutput) -> Iterator[Chunk]:
        """Yield the chunks for new output of a prompt."""
        self._latest[prompt_index] = piece
        self._num_output_tokens += _num_output_tokens(piece)
        for one in piece.outputs:
            # There is nothing to send while half of a character is held back.
            is_shown = bool(one.text or one.logprobs or one.finished)
            if isinstance(self._request, ChatRequest):
                yield from self._of_chat(self._request, one, is_shown=is_shown)
            elif is_shown:
                index = prompt_index * (self._request.n or 1) + one.index
                if index not in self._offsets:
                    self._offsets[index] = _offsets(self._request, self._texts)
                choice = CompletionChoice.of(index, one, self._texts, self._offsets[index])
                yield replace(self._text, choices=[choice])

    def end(self) -> Iterator[Chunk]:
        """Yield the chunk without choices that ends the stream, if the request asks for it."""
        request = self._request
        if request.include_usage or request.return_spec_decode_metrics:
            metrics = SpecDecodeMetrics.of(piece.metrics for piece in self._latest.values())
            yield replace(
                self._chat if isinstance(request, ChatRequest) else self._text,
                usage=self.usage if request.include_usage else UNSET,
                metrics=metrics if request.return_spec_decode_metrics else UNSET,
            )

    def _of_chat(self, request: ChatRequest, one: CompletionOutput, *, is_shown: bool) -> Iterator[Chunk]:
        """Yield the chunks of a choice, which begins with its role."""
        if one.index not in self._begun:
            self._begun.add(one.index)
            begin = ChatChunkChoice(index=one.index, delta=ChatDelta(role="assistant", content=""))
            yield replace(self._chat, choices=[begin])
        if is_shown:
            choice = ChatChunkChoice(
                index=one.index,
                delta=ChatDelta(content=one.text),
                logprobs=ChatLogprobs.of(one, request.num_logprobs, self._texts),
                finish_reason=_finish_reason(one) if one.finished else None,
                stop_reason=one.stop_reason,
            )
            yield replace(self._chat, choices=[choice])


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Chunks of a stream that are sent together. is_last: no part follows. Only the last part may have no chunks."""

    chunks: Sequence[Chunk]
    is_last: bool


def json_body(body: Any) -> bytes:
    """Encode a body, or an ApiError, as compact JSON in UTF-8."""
    return msgspec.json.encode(body.body if isinstance(body, ApiError) else body)


def plain_body(body: Any) -> dict[str, Any]:
    """Return a body in the types that `json.loads` returns."""
    plain: dict[str, Any] = msgspec.to_builtins(body)
    return plain


def event(body: Chunk | ApiError) -> bytes:
    return b"data: " + json_body(body) + b"\n\n"


async def events(
    parts: AsyncGenerator[Part, None], told: Callable[[Exception], ApiError]
) -> AsyncGenerator[bytes, None]:
    """Yield the whole body of a streamed response, a part at a time.

    An error before the first part is raised, because the HTTP status can still change. A later error becomes an event.
    told: converts an error to the form for clients. Closing the generator closes the parts.
    """
    has_begun = False
    async with aclosing(parts):
        try:
            async for part in parts:
                yield b"".join(map(event, part.chunks)) + (END_OF_EVENTS if part.is_last else b"")
                has_begun = True
        except Exception as error:
            if not has_begun:
                raise
            yield event(told(error)) + END_OF_EVENTS


def _finish_reason(completion: CompletionOutput) -> FinishReason:
    """Return the finish reason of a completion that has ended without an error."""
    reason = completion.finish_reason
    assert reason in {"stop", "length"}, f"a completion without an error has the finish reason {reason!r}"
    return "stop" if reason == "stop" else "length"


def _offsets(request: CompletionRequest, texts: TokenTexts) -> TextOffsets:
    """Make the offsets for the tokens of one completion."""
    return TextOffsets(texts, skip_special=request.skip_special_tokens is not False)


def _chosen(completion: CompletionOutput) -> Iterator[tuple[int, dict[int, Logprob]]]:
    """Return each generated token with its row of log-probabilities, also the token that ended the text."""
    return zip(completion.token_ids, completion.logprobs or (), strict=True)


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, _LEAST_LOGPROB)


def _num_output_tokens(output: RequestOutput) -> int:
    return sum(len(one.token_ids) for one in output.outputs)
