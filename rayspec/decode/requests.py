"""Unfinished requests: their prompts as tokens, their sequences, and their outputs."""

from __future__ import annotations

import itertools
import operator
import reprlib
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from rayspec.decode.output import Detokenizer, NewOutput, TokenTexts
from rayspec.decode.processing import check_tokens
from rayspec.decode.sequence import SequenceState
from rayspec.generation import GenerationDefaults
from rayspec.prompts import text_tokens
from rayspec.types import (
    EmptyPromptError,
    InvalidTokenError,
    OutOfMemoryError,
    PromptTooLongError,
    Request,
    RequestError,
    RequestMetrics,
    RequestOutput,
)


def admitted_tokens(
    request: Request, tokenizer: PreTrainedTokenizerBase | None, *, vocab_size: int, max_model_len: int
) -> list[int]:
    """Return the prompt's tokens. Raises RequestError if the prompt is invalid, empty or too long, and
    InvalidTokenError if the prompt or `logit_bias` has foreign tokens. Checked here, because a stage in another process
    cannot refuse."""
    check_tokens("logit_bias", request.params.logit_bias, vocab_size)
    prompt: Any = request.prompt
    if request.prompt_token_ids is None:
        if isinstance(prompt, str) and tokenizer is None:
            raise RequestError("the prompt is a text and the engine has no tokenizer: give `prompt_token_ids`")
        token_ids = text_tokens(prompt, tokenizer)
    elif isinstance(request.prompt_token_ids, Iterable):
        token_ids = [_integer(token) for token in request.prompt_token_ids]
    else:
        raise RequestError(f"prompt_token_ids is {reprlib.repr(request.prompt_token_ids)}: give a list of token ids")
    if not token_ids:
        raise EmptyPromptError("the prompt has zero tokens: give it some text")
    if len(token_ids) >= max_model_len:
        raise PromptTooLongError(
            f"the prompt has {len(token_ids)} tokens, max_model_len is {max_model_len} with the output: "
            "shorten or split it, or raise max_model_len if it is below the model's own limit"
        )
    foreign = [token for token in token_ids if not 0 <= token < vocab_size]
    if foreign:
        raise InvalidTokenError(
            f"prompt token {foreign[0]} is outside the vocabulary of {vocab_size}: use the model's own tokenizer"
        )
    return token_ids


def _integer(token: Any) -> int:
    """Return an int for an integer of Python, NumPy or torch. Raises InvalidTokenError for other values."""
    try:
        number = None if isinstance(token, bool) else operator.index(token)
    except TypeError:
        number = None
    if number is None:
        raise InvalidTokenError(f"prompt token {reprlib.repr(token)} is not an integer: give token ids")
    return number


_SEED_STRIDE = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The properties of the model's tokens that the engine needs. defaults: of sampling parameters."""

    size: int
    eos_token_ids: tuple[int, ...]
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)


@dataclass(slots=True)
class LiveRequest:
    """An unfinished request and its sequences; there are `params.n` of them."""

    request: Request
    prompt_token_ids: list[int]
    sequences: list[SequenceState] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return all(sequence.finished for sequence in self.sequences)


class Requests(dict[str, LiveRequest]):
    """Requests by id, from admission to their last output. fits: says whether the KV cache can hold a sequence to its
    end."""

    def __init__(
        self,
        *,
        vocabulary: Vocabulary,
        max_model_len: int,
        tokenizer: PreTrainedTokenizerBase | None,
        fits: Callable[[SequenceState], bool],
        clock: Callable[[], float],
    ) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._max_model_len = max_model_len
        self._tokenizer = tokenizer
        self._fits = fits
        self._clock = clock
        self._texts = TokenTexts(tokenizer) if tokenizer is not None else None
        self._sequence_ids = itertools.count(1)

    def admit(self, request: Request) -> LiveRequest:
        """Return the request with its sequences, for the caller to add. Raises RequestError if the id is in use, if the
        prompt is invalid, empty, too long or has foreign tokens, or if the KV cache is too small."""
        if request.request_id in self:
            raise RequestError(f"request id {request.request_id!r} is in use: give each request its own")
        token_ids = admitted_tokens(
            request, self._tokenizer, vocab_size=self._vocabulary.size, max_model_len=self._max_model_len
        )
        live = LiveRequest(request, token_ids)
        for index in range(request.params.n):
            live.sequences.append(self._new_sequence(live, index))
        return live

    def outputs(self) -> list[NewOutput]:
        """Return and forget the finished requests, and return the new output of streaming requests."""
        outputs = []
        for live in list(self.values()):
            if live.finished:
                outputs.append(self.finish(live))
            elif live.request.stream and any(sequence.has_new_output for sequence in live.sequences):
                outputs.append(self._new_output(live))
        return outputs

    def finish(self, live: LiveRequest) -> NewOutput:
        """Return the last output of the request and forget the request."""
        del self[live.request.request_id]
        return self._new_output(live)

    def _new_output(self, live: LiveRequest) -> NewOutput:
        new = [(one, sequence) for sequence in live.sequences if (one := sequence.take_new_output()) is not None]
        output = RequestOutput(
            request_id=live.request.request_id,
            prompt=live.request.prompt,
            prompt_token_ids=tuple(live.prompt_token_ids),
            outputs=[one for one, _ in new],
            finished=live.finished,
            metrics=_summed([sequence.metrics for sequence in live.sequences]),
            error=next((sequence.error for sequence in live.sequences if sequence.error), None),
        )
        detokenizers = [None if sequence.params.stop else sequence.detokenizer for _, sequence in new]
        return NewOutput(output, detokenizers, self._texts)

    def _new_sequence(self, live: LiveRequest, index: int) -> SequenceState:
        num_prompt_tokens = len(live.prompt_token_ids)
        params = self._vocabulary.defaults.completed(
            live.request.params, num_prompt_tokens=num_prompt_tokens, max_model_len=self._max_model_len
        )
        seed = secrets.randbits(63) if params.seed is None else params.seed
        sequence = SequenceState(
            sequence_id=f"{next(self._sequence_ids)}/{live.request.request_id}/{index}",
            index=index,
            params=params,
            seed=(seed + index * _SEED_STRIDE + 2**63) % 2**64 - 2**63,  # as a signed 64-bit integer
            token_ids=list(live.prompt_token_ids),
            num_prompt_tokens=num_prompt_tokens,
            max_total_tokens=num_prompt_tokens + params.max_tokens,
            eos_token_ids=self._vocabulary.eos_token_ids,
            detokenizer=Detokenizer(self._tokenizer, params) if self._tokenizer else None,
            streams=live.request.stream,
            background=live.request.background,
            metrics=RequestMetrics(arrival_s=self._clock()),
        )
        if not self._fits(sequence):
            raise OutOfMemoryError(
                f"the request may need {sequence.max_total_tokens} tokens of KV cache, more than there are: "
                "raise kv_cache_tokens or lower max_tokens"
            )
        return sequence


def _summed(metrics: Sequence[RequestMetrics]) -> RequestMetrics:
    counts = ("rounds", "plain_rounds", "draft_tokens", "accepted_tokens", "preemptions", "replays")
    return RequestMetrics(
        **{f"num_{name}": sum(getattr(one, f"num_{name}") for one in metrics) for name in counts},
        num_cached_tokens=min(one.num_cached_tokens for one in metrics),
        arrival_s=min(one.arrival_s for one in metrics),
        first_token_s=min((one.first_token_s for one in metrics if one.first_token_s is not None), default=None),
        finished_s=max((one.finished_s or 0.0 for one in metrics), default=None),
    )
