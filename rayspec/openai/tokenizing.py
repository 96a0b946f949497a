"""Converts texts and conversations to token ids and back, for prompts and for vLLM's /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, TypeVar

from jinja2 import TemplateError
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from rayspec.openai.models import check_served
from rayspec.openai.requests import ChatMessage
from rayspec.openai.strict_body import Refusals, StrictBody
from rayspec.types import ConfigError, InvalidMessagesError, InvalidTokenError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, str]]
T = TypeVar("T")

_LONG = 20_000  # characters or tokens; more would block the event loop for too long


class Tokenizes(Protocol):
    """The interface of an engine that tokenizes. AsyncEngine has it."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def max_new_tokens(self) -> int | None: ...

    def tokens(self, prompt: str | Messages) -> list[int]: ...


async def in_thread_if_large(work: Callable[[], T], size: int) -> T:
    """Run tokenizing work and return its result. Large work runs in a thread, because megabytes take seconds and would
    block the event loop.

    size: number of characters or tokens.
    """
    return await asyncio.to_thread(work) if size > _LONG else work()


def prompt_tokens(engine: Tokenizes, prompt: str | Messages, *, add_generation_prompt: bool = True) -> list[int]:
    """Return the tokens of a text, or of a conversation through the chat template. Raises InvalidMessagesError."""
    try:
        if isinstance(prompt, str) or add_generation_prompt:
            return engine.tokens(prompt)
        return _without_generation_prompt(engine.tokenizer, prompt)
    except RequestError:
        raise
    except ConfigError as error:
        raise InvalidMessagesError("the model has no chat template; use /v1/completions") from error
    except (TemplateError, TypeError, ValueError) as error:  # a template is somebody's program and may raise either
        raise InvalidMessagesError(f"the messages cannot be made a prompt: {error}") from error


def _without_generation_prompt(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    conversation = [dict(message) for message in messages]
    encoded: Any = tokenizer.apply_chat_template(conversation, add_generation_prompt=False, return_dict=True)
    return list(encoded["input_ids"])


def check_tokens(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> None:
    """Check token ids. Raises InvalidTokenError for an id outside the tokenizer's vocabulary."""
    for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
        if not _is_token(token_id, tokenizer):
            raise InvalidTokenError(f"{token_id} is no token of this model; its tokenizer has {len(tokenizer)}")


def _is_token(token_id: int, tokenizer: PreTrainedTokenizerBase) -> bool:
    try:
        return token_id >= 0 and tokenizer.convert_ids_to_tokens(token_id) is not None
    except (IndexError, OverflowError):  # some tokenizers raise these for unknown ids
        return False


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
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
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
        return len(self.prompt or "") + sum(len(message.content) for message in self.messages or ())

    def tokens(self, engine: Tokenizes) -> list[int]:
        """Return the token ids. Raises InvalidMessagesError."""
        if self.messages is not None:
            messages = [message.for_template for message in self.messages]
            return prompt_tokens(engine, messages, add_generation_prompt=self.add_generation_prompt is not False)
        assert self.prompt is not None
        if self.add_special_tokens is False:
            return list(engine.tokenizer(self.prompt, add_special_tokens=False)["input_ids"])
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
    tokens: list[int]

    @property
    def size(self) -> int:
        """Number of tokens to decode."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeResponse:
    """prompt: the text, which includes the texts of special tokens."""

    prompt: str


def tokenize(request: TokenizeRequest, engine: Tokenizes, served: Sequence[str]) -> TokenizeResponse:
    """Answer a request. served: names of the model that a body may use. Raises RequestError."""
    check_served(request.model or served[0], served)
    token_ids = request.tokens(engine)
    strings: Any = engine.tokenizer.convert_ids_to_tokens(token_ids) if request.return_token_strs else None
    return TokenizeResponse(
        count=len(token_ids), max_model_len=engine.max_model_len, tokens=token_ids, token_strs=strings
    )


def detokenize(request: DetokenizeRequest, engine: Tokenizes, served: Sequence[str]) -> DetokenizeResponse:
    """Answer a request. served: names of the model that a body may use. Raises RequestError."""
    check_served(request.model or served[0], served)
    check_tokens(request.tokens, engine.tokenizer)
    return DetokenizeResponse(prompt=str(engine.tokenizer.decode(request.tokens)))
