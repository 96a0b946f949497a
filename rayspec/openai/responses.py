"""Response bodies. A field that is UNSET does not appear in JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec import UNSET, UnsetType

from rayspec.decode.output import TextOffsets, TokenTexts
from rayspec.openai.logprobs import ChatLogprobs, CompletionLogprobs, chat_logprobs, completion_logprobs
from rayspec.openai.requests import ChatRequest, CompletionRequest, Request
from rayspec.openai.usage import SpecDecodeMetrics, Usage
from rayspec.types import CompletionOutput, RequestOutput

ServedTier = Literal["default"]


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
    service_tier: ServedTier | UnsetType = UNSET
    metrics: SpecDecodeMetrics | UnsetType = UNSET
    object: Literal["chat.completion"] = "chat.completion"

    @classmethod
    def of(cls, request: ChatRequest, output: RequestOutput, texts: TokenTexts, stamp: Stamp) -> ChatCompletion:
        """Make the response from `output`, which is finished and has no error."""
        choices = [
            ChatChoice(
                index=one.index,
                message=AssistantMessage(content=one.text),
                logprobs=chat_logprobs(one, request.num_logprobs, texts),
                finish_reason=finish_reason(one),
                stop_reason=one.stop_reason,
            )
            for one in output.outputs
        ]
        return cls(
            id=stamp.id,
            created=stamp.created,
            model=stamp.model,
            choices=choices,
            usage=Usage.of([output]),
            service_tier=stamp.service_tier,
            metrics=_metrics(request, [output]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionChoice:
    """finish_reason: None until the choice ends."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


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

    @classmethod
    def of(
        cls, request: CompletionRequest, outputs: Sequence[RequestOutput], texts: TokenTexts, stamp: Stamp
    ) -> Completion:
        """Make the response from `outputs`, one for each prompt, all finished and without an error. Their completions
        become choices in this order."""
        completions = [one for output in outputs for one in output.outputs]
        choices = [
            CompletionChoice(
                index=index,
                text=one.text,
                logprobs=completion_logprobs(one, texts, text_offsets(request, texts)),
                finish_reason=finish_reason(one),
                stop_reason=one.stop_reason,
            )
            for index, one in enumerate(completions)
        ]
        return cls(
            id=stamp.id,
            created=stamp.created,
            model=stamp.model,
            choices=choices,
            usage=Usage.of(outputs),
            metrics=_metrics(request, outputs),
        )


Response = ChatCompletion | Completion


def finish_reason(completion: CompletionOutput) -> FinishReason:
    """Return the finish reason of a completion that has ended without an error."""
    reason = completion.finish_reason
    assert reason in {"stop", "length"}, f"a completion without an error has the finish reason {reason!r}"
    return "stop" if reason == "stop" else "length"


def text_offsets(request: CompletionRequest, texts: TokenTexts) -> TextOffsets:
    """Make the offsets for the tokens of one completion."""
    return TextOffsets(texts, skip_special=request.skip_special_tokens is not False)


def _metrics(request: Request, outputs: Sequence[RequestOutput]) -> SpecDecodeMetrics | UnsetType:
    return SpecDecodeMetrics.of(output.metrics for output in outputs) if request.return_spec_decode_metrics else UNSET
