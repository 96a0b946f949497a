"""Tokens of texts and conversations, and back."""

import asyncio
import gc
import json
import sys
import threading
import time
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer

from rayspec.openai.protocol import InvalidRequestError, bytes_in_memory, parse_json, size_of
from rayspec.openai.requests import ChatRequest, CompletionRequest
from rayspec.openai.tokenizing import DetokenizeRequest, LargeWork, Messages, TokenizeRequest, in_thread_if_large
from rayspec.prompts import Rendering, conversation_tokens
from rayspec.types import InvalidMessagesError, InvalidTokenError, PromptTooLongError, RequestError
from tests.demo_model import demo_tokenizer
from tests.tool_templates import HERMES, tokenizer_with

TOOLS = [{"type": "function", "function": {"name": "now", "description": "the time of day"}}]
SERVED = ("short-name", "/models/path")
CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo"},
    {"role": "developer", "content": "é"},
]


_PLAINLY = Rendering()


class DemoTokens:
    """The bundled model's tokenizer and template, without the model."""

    max_model_len = 77
    max_new_tokens = None
    kv_cache_tokens = 77
    tokenizer = demo_tokenizer()
    llm = property(lambda self: self)
    config = SimpleNamespace(lora_modules={})

    def chat_tokens(self, messages: Messages, rendering: Rendering = _PLAINLY) -> list[int]:
        return conversation_tokens(messages, self.tokenizer, rendering)


def asked(**body: Any) -> Any:
    return msgspec.to_builtins(TokenizeRequest.parse(body).answer(DemoTokens(), SERVED))


def test_a_text_is_told_as_vllm_tells_it() -> None:
    token_ids = demo_tokenizer()("Fee é")["input_ids"]
    assert asked(prompt="Fee é") == {
        "count": len(token_ids), "max_model_len": 77, "tokens": token_ids, "token_strs": None
    }  # fmt: skip
    strings = demo_tokenizer().convert_ids_to_tokens(token_ids)
    assert asked(prompt="Fee é", model=SERVED[1], return_token_strs=True)["token_strs"] == strings
    assert asked(prompt="") == {"count": 0, "max_model_len": 77, "tokens": [], "token_strs": None}


def test_a_conversation_goes_through_the_template() -> None:
    messages = [*CHAT[:2], {"role": "system", "content": "é"}]
    ways = (Rendering(add_generation_prompt=False), Rendering())
    whole, open_ended = (DemoTokens().chat_tokens(messages, way) for way in ways)
    assert whole != open_ended
    assert asked(messages=CHAT)["tokens"] == asked(messages=CHAT, add_generation_prompt=True)["tokens"] == open_ended
    assert asked(messages=CHAT, add_generation_prompt=False, add_special_tokens=False)["tokens"] == whole


def test_tools_are_in_the_prompt(tmp_path: Path) -> None:
    class WithTools(DemoTokens):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_with(HERMES, tmp_path))

    found = TokenizeRequest.parse({"messages": CHAT, "tools": TOOLS}).answer(WithTools(), SERVED)
    assert "the time of day" in WithTools.tokenizer.decode(found.tokens)
    with pytest.raises(InvalidMessagesError, match="chat template has no tools"):
        asked(messages=CHAT, tools=TOOLS)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "prompt", "invalid_value"),
        ({"prompt": "x", "messages": CHAT}, "prompt", "invalid_value"),
        ({"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt", "invalid_value"),
        ({"messages": CHAT, "add_special_tokens": True}, "add_special_tokens", "invalid_value"),
        ({"messages": CHAT, "continue_final_message": True}, "continue_final_message", "invalid_value"),
        ({"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "invalid_value"),
        ({"prompt": "x", "tools": TOOLS}, "tools", "invalid_value"),
        ({"prompt": "x", "model": "other"}, "model", "model_not_found"),
    ],
)
def test_what_cannot_be_tokenized_is_refused_by_name(body: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        asked(**body)
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize("text", ["Fee é was <|assistant|> paid", ""])
def test_tokens_become_the_text_that_they_came_of(text: str) -> None:
    tokens = asked(prompt=text)["tokens"]
    assert msgspec.to_builtins(DetokenizeRequest.parse({"tokens": tokens}).answer(DemoTokens(), SERVED)) == {
        "prompt": text
    }


@pytest.mark.parametrize("token_id", [-1, len(demo_tokenizer()), 10**30])
def test_tokens_of_another_model_are_refused(token_id: int) -> None:
    tokens = [5, token_id, 6]
    with pytest.raises(InvalidTokenError, match=f"{token_id} is no token"):
        DetokenizeRequest.parse({"tokens": tokens}).answer(DemoTokens(), SERVED)


def test_a_field_that_the_template_drops_is_named() -> None:
    with pytest.raises(InvalidRequestError, match=r"messages.1.reasoning: the model's chat template") as caught:
        asked(messages=[CHAT[0], {"role": "assistant", "content": "x", "reasoning": "hm"}])
    assert (caught.value.param, caught.value.code) == ("messages.1.reasoning", "unsupported_parameter")


def test_variables_of_the_template_count_as_often_as_it_may_write_them() -> None:
    messages = [CHAT[0], *[CHAT[1]] * 99]  # the demo's template ends each answer with `eos_token`
    with pytest.raises(PromptTooLongError, match="the first 4096 of your prompt's"):
        asked(messages=messages, chat_template_kwargs={"eos_token": "x" * 1000})
    for size, num_messages in ((45_000, 100), (10_000_000, 1)):
        with pytest.raises(InvalidRequestError, match="at most 4194304 here") as caught:
            asked(messages=messages[:num_messages], chat_template_kwargs={"eos_token": "x" * size})
        assert caught.value.param == "chat_template_kwargs"
    with_variable = {"messages": messages, "chat_template_kwargs": {"eos_token": "x" * 300}}
    with_effort = {"model": "m", "messages": messages, "reasoning_effort": "x" * 300}
    chats = [ChatRequest.parse(body) for body in ({"model": "m", **with_variable}, with_effort)]
    for request in (*chats, TokenizeRequest.parse(with_variable)):
        assert request.num_bytes > 30_000, "else all of it would be tokenized on the event loop"


def test_a_text_that_is_too_long_is_no_longer_than_it_is() -> None:
    with pytest.raises(PromptTooLongError, match="the first 1000 of your prompt's 1000 characters have about"):
        asked(prompt="\N{GRINNING FACE}" * 1000)


def test_tools_have_the_limits_of_chats() -> None:
    function = {"name": "f", "description": "x" * 140_000, "parameters": {}}
    with pytest.raises(InvalidRequestError, match="at most 131072 here"):
        TokenizeRequest.parse({"messages": CHAT, "tools": [{"type": "function", "function": function}]})


def test_small_work_overtakes_large_work_that_waits() -> None:
    begun: list[int] = []

    def work(size: int) -> int:
        time.sleep(0.02)
        begun.append(size)
        return size

    async def run() -> list[int]:
        sizes = [10**6] * 20 + [30_000]
        other = asyncio.create_task(in_thread_if_large(lambda: work(40_000), 40_000))
        tasks = [asyncio.create_task(in_thread_if_large(partial(work, size), size)) for size in [10**6] * 4]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(in_thread_if_large(partial(work, size), size)) for size in sizes]
        await asyncio.sleep(0)
        return [*(await asyncio.gather(*tasks)), await other]

    assert asyncio.run(run()) == [10**6] * 24 + [30_000, 40_000]
    assert begun.index(30_000) < 8


def test_clients_take_turns_at_large_work() -> None:
    begun: list[str] = []
    large = LargeWork(1)

    def work(client: str) -> None:
        time.sleep(0.01)
        begun.append(client)

    async def run() -> None:
        asked = [("greedy", 30_000)] * 20 + [("other", 10**6)]
        await asyncio.gather(*(large.run(partial(work, client), size, client) for client, size in asked))

    asyncio.run(run())
    assert begun.index("other") <= 2
    assert begun.count("greedy") == 20


def test_work_that_nobody_waits_for_holds_nothing() -> None:
    class Body: ...

    large, may_end = LargeWork(1), threading.Event()

    async def run() -> None:
        first = asyncio.create_task(large.run(may_end.wait, 30_000))
        bodies = [Body()]
        is_there = weakref.ref(bodies[0])
        second = asyncio.create_task(large.run(partial(id, bodies.pop()), 30_000))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait({second})
        del second
        assert is_there() is None
        may_end.set()
        await first

    asyncio.run(run())


def test_work_that_has_failed_holds_nothing() -> None:
    """Refused bodies of 8 MB stayed in memory until the garbage was collected: 30 of them 430 MB."""

    class Body: ...

    def fail(body: Body) -> None:
        raise RequestError(type(body).__name__)

    async def run() -> None:
        bodies = [Body()]
        is_there = weakref.ref(bodies[0])
        with suppress(RequestError):
            await LargeWork(1).run(partial(fail, bodies.pop()), 30_000)
        await asyncio.sleep(0.05)  # until the thread has ended, too
        assert is_there() is None

    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()


@pytest.mark.parametrize("letter", ["a", "é", "€", "\N{GRINNING FACE}"])
@pytest.mark.parametrize("is_ascii", [True, False])
def test_the_memory_of_a_text_is_that_of_its_widest_character(letter: str, is_ascii: bool) -> None:
    """A body of 16 MB with an emoji was counted as 16 MB, and took 64 more."""
    content = json.dumps("a" * 10_000 + letter, ensure_ascii=is_ascii).encode()
    assert bytes_in_memory(content) + len(content) >= sys.getsizeof(parse_json(content)) - 100
    assert bytes_in_memory(content) == 0 or letter != "a"


def test_the_size_of_what_is_to_be_tokenized() -> None:
    assert CompletionRequest.parse({"model": "m", "prompt": ["ab", "c"]}).num_bytes == 3
    assert CompletionRequest.parse({"model": "m", "prompt": [1, 2, 3]}).num_bytes == 0
    emoji = "\N{GRINNING FACE}" * 100
    for request in (
        CompletionRequest.parse({"model": "m", "prompt": emoji}),
        TokenizeRequest.parse({"prompt": emoji}),
        ChatRequest.parse({"model": "m", "messages": [{"role": "user", "content": emoji}]}),
    ):
        assert 400 <= request.num_bytes < 700, "it may have as many tokens"
    empty = [{"role": "user", "content": ""}] * 2000
    assert ChatRequest.parse({"model": "m", "messages": empty}).num_bytes > 100_000, "no message is free"
    assert size_of(json.dumps(empty[:600]).encode()) > 100_000, "they take longer to be read than their characters"
    assert size_of(b"a" * 1000) == 1000
