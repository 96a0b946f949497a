"""Streamed responses, in chunks with one choice each. A field that is UNSET does not appear in JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from msgspec import UNSET, UnsetType

from rayspec.decode.output import TextOffsets, TokenTexts
from rayspec.openai.logprobs import ChatLogprobs, chat_logprobs, completion_logprobs
from rayspec.openai.requests import ChatRequest, CompletionRequest, Request
from rayspec.openai.responses import (
    Completion,
    CompletionChoice,
    FinishReason,
    ServedTier,
    Stamp,
    finish_reason,
    text_offsets,
)
from rayspec.openai.usage import SpecDecodeMetrics, Usage, UsageTally
from rayspec.types import CompletionOutput, RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDelta:
    content: str
    role: Literal["assistant"] | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatChunkChoice:
    """finish_reason: None until the choice ends."""

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


Chunk = ChatCompletionChunk | Completion


class ChatChunks:
    """Makes chunks from new output. Each choice begins with its role and ends with its finish reason."""

    def __init__(self, request: ChatRequest, texts: TokenTexts, stamp: Stamp) -> None:
        self._request, self._texts = request, texts
        self._empty = ChatCompletionChunk(
            id=stamp.id,
            created=stamp.created,
            model=stamp.model,
            choices=[],
            usage=_no_usage_yet(request),
            service_tier=stamp.service_tier,
        )
        self._begun: set[int] = set()

    def of(self, prompt_index: int, piece: RequestOutput) -> Iterator[ChatCompletionChunk]:
        """Yield the chunks for new output. piece: new output of the only prompt."""
        assert prompt_index == 0, "a conversation is one prompt"
        for completion in piece.outputs:
            if completion.index not in self._begun:
                self._begun.add(completion.index)
                begin = ChatChunkChoice(index=completion.index, delta=ChatDelta(role="assistant", content=""))
                yield replace(self._empty, choices=[begin])
            if _shows(completion):
                yield replace(self._empty, choices=[self._choice(completion)])

    def end(self, tally: UsageTally) -> ChatCompletionChunk:
        return _end_of(self._empty, self._request, tally)

    def _choice(self, completion: CompletionOutput) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=completion.index,
            delta=ChatDelta(content=completion.text),
            logprobs=chat_logprobs(completion, self._request.num_logprobs, self._texts),
            finish_reason=finish_reason(completion) if completion.finished else None,
            stop_reason=completion.stop_reason,
        )


class CompletionChunks:
    """Makes chunks from new output of each prompt. The last chunk of a choice has its finish reason."""

    def __init__(self, request: CompletionRequest, texts: TokenTexts, stamp: Stamp) -> None:
        self._request, self._texts = request, texts
        self._empty = Completion(
            id=stamp.id, created=stamp.created, model=stamp.model, choices=[], usage=_no_usage_yet(request)
        )
        self._offsets: dict[int, TextOffsets] = {}

    def of(self, prompt_index: int, piece: RequestOutput) -> Iterator[Completion]:
        first_index = prompt_index * (self._request.n or 1)
        for completion in piece.outputs:
            if _shows(completion):
                yield replace(self._empty, choices=[self._choice(first_index + completion.index, completion)])

    def end(self, tally: UsageTally) -> Completion:
        return _end_of(self._empty, self._request, tally)

    def _choice(self, index: int, completion: CompletionOutput) -> CompletionChoice:
        if index not in self._offsets:
            self._offsets[index] = text_offsets(self._request, self._texts)
        return CompletionChoice(
            index=index,
            text=completion.text,
            logprobs=completion_logprobs(completion, self._texts, self._offsets[index]),
            finish_reason=finish_reason(completion) if completion.finished else None,
            stop_reason=completion.stop_reason,
        )


def chunks_of(request: Request, texts: TokenTexts, stamp: Stamp) -> ChatChunks | CompletionChunks:
    if isinstance(request, ChatRequest):
        return ChatChunks(request, texts, stamp)
    return CompletionChunks(request, texts, stamp)


def has_end(request: Request) -> bool:
    """Return whether a chunk without choices ends the stream."""
    return request.include_usage or request.return_spec_decode_metrics


def _shows(completion: CompletionOutput) -> bool:
    """Return whether there is something to send. There is not while half of a character is held back."""
    return bool(completion.text or completion.logprobs or completion.finished)


def _no_usage_yet(request: Request) -> UnsetType | None:
    return None if request.include_usage else UNSET


_Chunk = TypeVar("_Chunk", ChatCompletionChunk, Completion)


def _end_of(empty: _Chunk, request: Request, tally: UsageTally) -> _Chunk:
    usage = tally.usage if request.include_usage else UNSET
    return replace(empty, usage=usage, metrics=tally.metrics if request.return_spec_decode_metrics else UNSET)
