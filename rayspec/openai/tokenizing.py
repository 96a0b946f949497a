"""Converts texts and conversations to token ids and back, for prompts and for vLLM's /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from pydantic import model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from rayspec.openai.errors import InvalidRequestError
from rayspec.openai.requests import Conversation, TokenIds, check_served, num_characters
from rayspec.openai.strict_body import Refusals, StrictBody
from rayspec.prompts import InvalidMessageError, chat_template, conversation_text, text_tokens
from rayspec.types import ConfigError, InvalidMessagesError, InvalidTokenError, PromptTooLongError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rayspec.llm import AsyncEngine

Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")

_LONG = 20_000  # characters or tokens; more would block the event loop for too long
_CHARACTERS_PER_TOKEN = 8  # texts have fewer, except for those with long runs of spaces
# Few threads, because texts take memory while they are tokenized. Work that waits is dropped when its caller ends.
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="rayspec-large-work")
_NUMBERS, _LOCK = itertools.count(), threading.Lock()


@dataclass(slots=True, order=True)
class _Waiting:
    size: int
    number: int
    work: Callable[[], Any] | None = field(compare=False)
    result: Future[Any] = field(compare=False)


_WAITING: list[_Waiting] = []


async def in_thread_if_large(work: Callable[[], T], size: int) -> T:
    """Run work on a request's content and return its result. Large work runs in one of few threads, because megabytes
    take seconds and would block the event loop. The smallest waiting work is next, so that many bodies of a megabyte
    do not hold up a document. Cancelling the call drops work that has not begun.

    size: number of characters, bytes or tokens.
    """
    if size <= _LONG:
        return work()
    waiting = _Waiting(size, next(_NUMBERS), work, Future())
    with _LOCK:
        heapq.heappush(_WAITING, waiting)
    _THREADS.submit(_run_smallest)
    try:
        return cast(T, await asyncio.wrap_future(waiting.result))
    finally:
        waiting.work = None  # frees the content of work that was dropped


def _run_smallest() -> None:
    with _LOCK:
        waiting = heapq.heappop(_WAITING)
    work = waiting.work
    if work is None or not waiting.result.set_running_or_notify_cancel():
        return
    try:
        waiting.result.set_result(work())
    except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
        waiting.result.set_exception(error)


def prompt_tokens(engine: AsyncEngine, prompt: str | Messages, *, add_generation_prompt: bool = True) -> list[int]:
    """Return the tokens of a text, or of a conversation through the chat template. Raises RequestError: an
    InvalidRequestError names the field of a message, and PromptTooLongError comes before all of a text that is much too
    long is tokenized."""
    try:
        if len(prompt if isinstance(prompt, str) else repr(prompt)) > _CHARACTERS_PER_TOKEN * engine.max_model_len:
            _check_length(prompt if isinstance(prompt, str) else _rendered(engine.tokenizer, prompt), engine)
        if isinstance(prompt, str):
            return engine.tokens(prompt)
        return engine.chat_tokens(prompt, add_generation_prompt=add_generation_prompt)
    except InvalidMessageError as error:
        raise InvalidRequestError(str(error), param=f"messages.{error.field}", code=error.code) from None
    except ConfigError as error:
        raise InvalidMessagesError("the model has no chat template; use /v1/completions") from error


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> str:
    if not tokenizer.chat_template:
        return ""
    return conversation_text(messages, tokenizer, chat_template(tokenizer))


def _check_length(text: str, engine: AsyncEngine) -> None:
    """Refuse a text if a beginning of it has more tokens than a prompt may have. Raises PromptTooLongError.

    The beginnings grow, so that no text costs much more than a prompt of the model's longest length.
    """
    most, length = engine.max_model_len, _CHARACTERS_PER_TOKEN * engine.max_model_len
    while length < len(text):
        num_tokens = len(text_tokens(text[:length], engine.tokenizer, add_special_tokens=False))
        if num_tokens > most + most // 8:  # a cut through a word may add tokens
            raise PromptTooLongError(
                f"This model's maximum context length is {most} tokens. However, the first {length} of your prompt's "
                f"{len(text)} characters have {num_tokens} tokens. Please reduce the length of the prompt."
            )
        length *= 4


def check_tokens(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> None:
    """Check token ids. Raises InvalidTokenError for an id outside the tokenizer's vocabulary."""
    for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
        is_token = False
        with suppress(IndexError, OverflowError):  # some tokenizers raise these for unknown ids
            is_token = token_id >= 0 and tokenizer.convert_ids_to_tokens(token_id) is not None
        if not is_token:
            raise InvalidTokenError(f"{token_id} is no token of this model; its tokenizer has {len(tokenizer)}")


class TokenizeRequest(StrictBody):
    """The body of /tokenize: a text, or a conversation that goes through the chat template."""

    refused: ClassVar[Refusals] = {
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "mm_processor_kwargs": ({},),
        "tools": ([],),
    }

    model: str | None = None
    prompt: str | None = None
    messages: Conversation | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("invalid_value", "give it or messages, and not both", {"field": "prompt"})
        if self.messages is not None and self.add_special_tokens:
            message = "the chat template adds its own; leave it out"
            raise PydanticCustomError("invalid_value", message, {"field": "add_special_tokens"})
        if self.messages is None and self.add_generation_prompt is not None:
            raise PydanticCustomError("invalid_value", "only with messages", {"field": "add_generation_prompt"})
        return self

    @property
    def size(self) -> int:
        """Number of characters to tokenize."""
        return len(self.prompt or "") + num_characters(self.messages or ())

    def tokens(self, engine: AsyncEngine) -> list[int]:
        """Return the token ids. Raises InvalidMessagesError."""
        if self.messages is not None:
            messages = [message.for_template for message in self.messages]
            return prompt_tokens(engine, messages, add_generation_prompt=self.add_generation_prompt is not False)
        assert self.prompt is not None
        if self.add_special_tokens is False:
            _check_length(self.prompt, engine)
            return text_tokens(self.prompt, engine.tokenizer, add_special_tokens=False)
        return prompt_tokens(engine, self.prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeResponse:
    """token_strs: the vocabulary entries, if the request asks for them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(StrictBody):
    """The body of /detokenize."""

    model: str | None = None
    tokens: TokenIds

    @property
    def size(self) -> int:
        """Number of tokens to decode."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeResponse:
    """prompt: the text, which includes the texts of special tokens."""

    prompt: str


def tokenize(request: TokenizeRequest, engine: AsyncEngine, served: Sequence[str]) -> TokenizeResponse:
    """Answer a request. served: names of the model that a body may use. Raises RequestError."""
    check_served(request.model or served[0], served)
    token_ids = request.tokens(engine)
    strings: Any = engine.tokenizer.convert_ids_to_tokens(token_ids) if request.return_token_strs else None
    return TokenizeResponse(
        count=len(token_ids), max_model_len=engine.max_model_len, tokens=token_ids, token_strs=strings
    )


def detokenize(request: DetokenizeRequest, engine: AsyncEngine, served: Sequence[str]) -> DetokenizeResponse:
    """Answer a request. served: names of the model that a body may use. Raises RequestError."""
    check_served(request.model or served[0], served)
    if len(request.tokens) > engine.max_model_len:
        raise PromptTooLongError(f"tokens: {len(request.tokens)}; at most {engine.max_model_len} of this model at once")
    check_tokens(request.tokens, engine.tokenizer)
    return DetokenizeResponse(prompt=str(engine.tokenizer.decode(request.tokens)))
