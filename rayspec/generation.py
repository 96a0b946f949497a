"""The sampling parameters of a request, completed by the checkpoint's generation_config.json."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from rayspec.config import SamplingParams

TokenSequence = Annotated[tuple[int, ...], Field(min_length=1)]


class DecodingParams(SamplingParams):
    """The parameters that a sequence is decoded with: no field is unset. The defaults of SamplingParams' fields are
    vLLM's neutral values.

    The fields of its own are those of transformers' GenerationConfig that a request cannot state. They have the same
    names and meanings there. eos tokens are the engine's.
    """

    repetition_penalty: float = Field(1.0, gt=0.0)
    temperature: float = Field(1.0, ge=0.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    stop: tuple[str, ...] = ()
    max_tokens: int = Field(16, ge=1)
    min_tokens: int = Field(0, ge=0)

    no_repeat_ngram_size: int = Field(0, ge=0)
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    bad_words_ids: tuple[TokenSequence, ...] = ()
    sequence_bias: tuple[tuple[TokenSequence, float], ...] = ()
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What the checkpoint says about decoding.

    params: the values of unset fields, and the rules of every request. max_new_tokens: the output's length where nobody
    states one; None: the checkpoint states none. min_length: the least tokens of prompt and output together.
    """

    params: DecodingParams = field(default_factory=DecodingParams)
    max_new_tokens: int | None = None
    min_length: int = 0

    def completed(self, asked: SamplingParams, *, num_prompt_tokens: int, max_model_len: int) -> DecodingParams:
        """Return the parameters for a prompt of that many tokens. Each value that the request states wins. `max_tokens`
        of the result is a number, and no more than the context has room for; nor is `min_tokens`."""
        room = max_model_len - num_prompt_tokens
        max_tokens = room if asked.max_tokens is None else min(asked.max_tokens, room)
        min_tokens = asked.min_tokens
        if min_tokens is None:
            min_tokens = max(self.params.min_tokens, self.min_length - num_prompt_tokens)
        values = dict(self.params) | {name: value for name, value in asked if value is not None}
        values |= {"max_tokens": max_tokens, "min_tokens": min(min_tokens, max_tokens)}
        # Not validated again: both sides are valid, and a request may have thousands of biases.
        return DecodingParams.model_construct(**values)
