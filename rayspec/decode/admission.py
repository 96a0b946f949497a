"""Check the prompts of requests and turn them into tokens."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase

from rayspec.decode.processing import check_tokens
from rayspec.prompts import text_tokens
from rayspec.types import EmptyPromptError, InvalidTokenError, PromptTooLongError, Request, RequestError


def admitted_tokens(
    request: Request, tokenizer: PreTrainedTokenizerBase | None, *, vocab_size: int, max_model_len: int
) -> list[int]:
    """Return the prompt's tokens. Raises RequestError if the prompt is invalid, empty or too long, and
    InvalidTokenError if the prompt or `logit_bias` has foreign tokens. Checked here, because a stage in another process
    cannot refuse."""
    check_tokens("logit_bias", request.params.logit_bias, vocab_size)
    token_ids = prompt_tokens(request, tokenizer)
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


def prompt_tokens(request: Request, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Return the prompt's tokens, without a check of their range. Raises RequestError if the prompt is invalid."""
    if request.prompt_token_ids is not None:
        return _whole_numbers(request.prompt_token_ids)
    prompt: Any = request.prompt
    if isinstance(prompt, str) and tokenizer is None:
        raise RequestError("the prompt is a text and the engine has no tokenizer: give `prompt_token_ids`")
    return text_tokens(prompt, tokenizer)


def _whole_numbers(token_ids: Any) -> list[int]:
    if not isinstance(token_ids, Iterable):
        raise RequestError(f"prompt_token_ids is {reprlib.repr(token_ids)}: give a list of token ids")
    return [_whole_number(token) for token in token_ids]


def _whole_number(token: Any) -> int:
    """Return an int for an integer of Python, NumPy or torch. Raises InvalidTokenError for other values."""
    try:
        number = None if isinstance(token, bool) else operator.index(token)
    except TypeError:
        number = None
    if number is None:
        raise InvalidTokenError(f"prompt token {reprlib.repr(token)} is not an integer: give token ids")
    return number
