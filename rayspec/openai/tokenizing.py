"""Converts texts and conversations to token ids and back, for prompts and for vLLM's /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec
from pydantic import model_validator
from typing_extensions import Self

from rayspec.openai.forms import check_tools
from rayspec.openai.protocol import InvalidRequestError, Refusals, StrictBody, invalid, utf8_length
from rayspec.openai.requests import (
    ChatRequest,
    Conversation,
    TokenIds,
    Tools,
    bytes_of_template,
    check_served,
    rendering_of,
)
from rayspec.prompts import InvalidMessageError, Rendering, conversation_text, text_tokens
from rayspec.types import ConfigError, InvalidMessagesError, InvalidTokenError, PromptTooLongError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rayspec.llm import AsyncEngine

Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")

_LONG = 20_000  # bytes or tokens; more would block the event loop for too long
_LONGEST_PAUSE_S = 0.02  # after work that holds the interpreter's lock: else an event loop waits at each system call
_MOST_CUT = 2**18  # bytes, of which all are tokenized; two such texts at once take 120 MB
_CUT_PER_TOKEN = 8  # bytes, if these are more; texts have fewer, except for those with long runs of spaces
_READ_PER_TOKEN = 4  # bytes; longer texts are tokenized in parts first
_SHORTEST_PART = 4096  # characters
_MOST_ADDED = 8  # tokens by a cut through a word
_MOST_IN_TEMPLATE = 2**22  # bytes of variables, times messages: a chat template may repeat them for each message


class LargeWork:
    """Runs work on large contents in a few threads, because megabytes take seconds of the event loop, memory, and the
    interpreter's lock. Clients take turns. Of a client's waiting work, the smallest is next, so that many megabytes do
    not hold up a document."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="rayspec-large-work")
        self._lock, self._numbers = threading.Lock(), itertools.count()
        # Heaps by client, whose turn it is first. Each work is in a list, which is emptied when nobody waits for it.
        self._waiting: dict[str, list[tuple[int, int, list[Callable[[], Any]], Future[Any]]]] = {}
        self._newest = ""  # the last that had its turn

    async def run(self, work: Callable[[], T], size: int, client: str = "") -> T:
        """Return the result. size: bytes or tokens. Cancelling drops work that has not begun, and what it
        holds."""
        if size <= _LONG:
            return work()
        result: Future[T] = Future()
        held: list[Callable[[], Any]] = [work]
        with self._lock:
            heappush(self._waiting.setdefault(client, []), (size, next(self._numbers), held, result))
        self._threads.submit(self._run_next)
        try:
            return await asyncio.wrap_future(result)
        finally:
            held.clear()
            # An error would hold itself, this frame and all bodies in it until the garbage is collected.
            del work, result

    def _run_next(self) -> None:
        with self._lock:
            self._newest = next((client for client in self._waiting if client != self._newest), self._newest)
            of_client = self._waiting.pop(self._newest)
            _, _, held, result = heappop(of_client)
            if of_client:
                self._waiting[self._newest] = of_client  # behind the others
        if not result.set_running_or_notify_cancel():
            return
        start_s = time.monotonic()
        try:
            result.set_result(held[0]())
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            result.set_exception(error)
        finally:
            del result  # as above
        time.sleep(min(time.monotonic() - start_s, _LONGEST_PAUSE_S))


in_thread_if_large = LargeWork(2).run


def prompt_tokens(
    engine: AsyncEngine, prompt: str | Messages, rendering: Rendering, *, is_cut: bool = False, num_added: int = 0
) -> list[int]:
    """Return the tokens of a text or a conversation. is_cut: only their end is used. num_added: first messages, which
    the client did not send. Raises RequestError, which names the field of a message, and PromptTooLongError before all
    of a text that is much too long is tokenized."""
    try:
        size = utf8_length(prompt) if isinstance(prompt, str) else _num_bytes(prompt, rendering)
        if is_cut:
            if size > (most := max(_CUT_PER_TOKEN * engine.max_model_len, _MOST_CUT)):
                raise PromptTooLongError(f"the prompt has {size} bytes; at most {most}, also to be cut")
        elif size > _READ_PER_TOKEN * engine.max_model_len:
            if isinstance(prompt, str):
                _check_length(prompt, engine)
            elif engine.tokenizer.chat_template:
                _check_length(conversation_text(prompt, engine.tokenizer, rendering), engine)
        if isinstance(prompt, str):
            return text_tokens(prompt, engine.tokenizer)
        return engine.llm.chat_tokens(prompt, rendering)
    except InvalidMessageError as error:
        at, *rest = error.field.split(".")
        param = ".".join(["messages", str(int(at) - num_added), *rest])
        raise InvalidRequestError.of(param, error.problem, code=error.code) from None
    except ConfigError as error:
        raise InvalidMessagesError("the model has no chat template; use /v1/completions") from error


def _num_bytes(messages: Messages, rendering: Rendering) -> int:
    """Return about how many bytes a chat template makes of the messages, at most. Raises InvalidRequestError."""
    num_repeated = utf8_length(repr(rendering.variables)) * len(messages)
    if num_repeated > (most := _MOST_IN_TEMPLATE):
        problem = f"{num_repeated} bytes for {len(messages)} messages; at most {most} here, shorten it"
        raise InvalidRequestError.of("chat_template_kwargs", problem)
    return utf8_length(repr((messages, rendering.tools))) + num_repeated


def _check_length(text: str, engine: AsyncEngine) -> None:
    """Raise PromptTooLongError if the text is too long. Its parts are tokenized one after another until it is known:
    a token takes 200 bytes while the tokenizer works, so all of a long text would take much memory."""
    most, num_tokens = engine.max_model_len, 0
    length = max(most, _SHORTEST_PART)
    for start in range(0, len(text), length):
        end = min(start + length, len(text))
        part = text_tokens(text[start:end], engine.tokenizer, add_special_tokens=False)
        num_tokens += len(part) - _MOST_ADDED
        if num_tokens > most + most // 8:
            raise PromptTooLongError(
                f"This model's maximum context length is {most} tokens. However, the first {end} of your prompt's "
                f"{len(text)} characters have about {num_tokens} tokens. Please reduce the length of the prompt."
            )


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

    refused: ClassVar[Refusals] = {"chat_template": (), "mm_processor_kwargs": ({},)}
    most_items = ChatRequest.most_items

    model: str | None = None
    prompt: str | None = None
    messages: Conversation | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "give it or messages, and not both")
        if self.messages is not None and self.add_special_tokens:
            raise invalid("add_special_tokens", "the chat template adds its own; leave it out")
        if self.messages is None:
            for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
                if getattr(self, name) not in (None, False):
                    raise invalid(name, "only with messages")
        self.rendering  # noqa: B018 - raises
        check_tools(self.tools or ())
        return self

    @property
    def rendering(self) -> Rendering:
        plain = rendering_of(self.add_generation_prompt, self.continue_final_message, self.chat_template_kwargs)
        return replace(plain, tools=[tool.for_template for tool in self.tools or ()])

    @property
    def num_bytes(self) -> int:
        """Number of bytes that must be tokenized."""
        if self.messages is None:
            return utf8_length(str(self.prompt))
        return bytes_of_template(self.messages, self.tools, self.chat_template_kwargs)

    def answer(self, engine: AsyncEngine, served: Sequence[str]) -> TokenizeResponse:
        """served: names of the model that a body may use. Raises RequestError."""
        check_served(self.model or served[0], (*served, *engine.llm.config.lora_modules))
        if self.messages is None and self.add_special_tokens is False:
            _check_length(str(self.prompt), engine)
            token_ids = text_tokens(str(self.prompt), engine.tokenizer, add_special_tokens=False)
        else:
            messages = [message.for_template for message in self.messages or ()]
            token_ids = prompt_tokens(engine, messages or str(self.prompt), self.rendering)
        strings: Any = engine.tokenizer.convert_ids_to_tokens(token_ids) if self.return_token_strs else None
        length = engine.max_model_len
        return TokenizeResponse(count=len(token_ids), max_model_len=length, tokens=token_ids, token_strs=strings)


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
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
    def num_bytes(self) -> int:
        """About as many as the tokens have."""
        return 4 * len(self.tokens)

    def answer(self, engine: AsyncEngine, served: Sequence[str]) -> DetokenizeResponse:
        """served: names of the model that a body may use. Raises RequestError."""
        check_served(self.model or served[0], (*served, *engine.llm.config.lora_modules))
        if len(self.tokens) > engine.max_model_len:
            message = f"tokens: {len(self.tokens)}; at most {engine.max_model_len} of this model at once"
            raise PromptTooLongError(message)
        check_tokens(self.tokens, engine.tokenizer)
        return DetokenizeResponse(prompt=str(engine.tokenizer.decode(self.tokens)))


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """prompt: the text, which includes the texts of special tokens."""

    prompt: str
