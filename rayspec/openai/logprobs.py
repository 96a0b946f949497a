"""Log-probabilities in the forms of both endpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rayspec.decode.output import TextOffsets, TokenTexts
from rayspec.types import CompletionOutput, Logprob

_LEAST_LOGPROB = -9999.0  # what OpenAI writes for "very unlikely"; JSON has no minus infinity


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionLogprobs:
    """One entry for each token. text_offset: characters of the completion before the token. top_logprobs: the most
    likely tokens and the chosen token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


def chat_logprobs(completion: CompletionOutput, num_top: int | None, texts: TokenTexts) -> ChatLogprobs | None:
    """Convert a completion. num_top: most likely tokens to report for each chosen token; None: no log-probabilities."""
    if num_top is None or completion.logprobs is None:
        return None
    return ChatLogprobs(content=[_token_logprob(one, row, num_top, texts) for one, row in _chosen(completion)])


def _token_logprob(token_id: int, row: dict[int, Logprob], num_top: int, texts: TokenTexts) -> TokenLogprob:
    ranked = sorted(row.items(), key=lambda item: item[1].rank)[:num_top]
    return TokenLogprob(
        token=texts.text(token_id),
        logprob=_finite(row[token_id]),
        bytes=texts.utf8(token_id),
        top_logprobs=[
            TopLogprob(token=texts.text(one), logprob=_finite(logprob), bytes=texts.utf8(one))
            for one, logprob in ranked
        ],
    )


def completion_logprobs(
    completion: CompletionOutput, texts: TokenTexts, offsets: TextOffsets
) -> CompletionLogprobs | None:
    """Convert a completion. offsets: at the end of the text so far; the call advances them over the new tokens."""
    if completion.logprobs is None:
        return None
    rows = list(_chosen(completion))
    token_ids = [token_id for token_id, _ in rows]
    return CompletionLogprobs(
        tokens=[texts.text(token_id) for token_id in token_ids],
        token_logprobs=[_finite(row[token_id]) for token_id, row in rows],
        top_logprobs=[{texts.text(one): _finite(logprob) for one, logprob in row.items()} for _, row in rows],
        text_offset=offsets.of(token_ids),
    )


def _chosen(completion: CompletionOutput) -> Iterator[tuple[int, dict[int, Logprob]]]:
    """Return each generated token with its row of log-probabilities, also the token that ended the text."""
    return zip(completion.token_ids, completion.logprobs or (), strict=True)


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, _LEAST_LOGPROB)
