"""Requests on the bundled model: chunks that join to the answer, errors in time, and nothing left running."""

import asyncio
import json
import math
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from typing import Any, TypeVar

import httpx2
import msgspec
import openai
import openai.types as official
import openai.types.chat as official_chat
import pytest

from rayspec import LLM, demo, prompts
from rayspec.decode.engine_loop import EngineDeadError
from rayspec.llm import AsyncEngine
from rayspec.openai import answer as answer_module
from rayspec.openai import tokenizing
from rayspec.openai.answer import LOGPROBS_AT_ONCE, respond
from rayspec.openai.answer import stream as streamed
from rayspec.openai.items import ResponsesRequest
from rayspec.openai.places import Places
from rayspec.openai.protocol import ApiError
from rayspec.openai.requests import ChatRequest, CompletionRequest, Request
from rayspec.types import Logprob, NonFiniteLogitsError, PromptTooLongError, RayspecError, RequestError, RequestOutput
from tests.demo_model import demo_tokenizer, shallow_demo
from tests.openai.scripted import ScriptedEngine, whole_answer
from tests.openai.test_tools import NAMED, TOOLS, check_weather

SERVED = ("short-name", "/models/path")
STAMP = {"name": "7", "created": 99}
CONTEXT = 512
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "max_model_len": CONTEXT,
    "max_num_seqs": 8,
    "speculation": {"strategy": "static", "skip": [3, 4], "max_draft_tokens": 4},
}
DOCUMENT = demo.sample_documents(1, num_sentences=6, seed=11)[0].text
CHAT: dict[str, Any] = {
    "model": SERVED[0],
    "messages": [{"role": "user", "content": DOCUMENT}],
    "temperature": 0,
    "max_tokens": 16,
}
TEXT: dict[str, Any] = {"model": SERVED[0], "prompt": "Fee 5 was paid", "temperature": 0, "max_tokens": 12}
T = TypeVar("T")


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    engine = AsyncEngine(LLM(shallow_demo(), **OPTIONS))
    yield engine
    engine.llm.shutdown()


def parsed(body: dict[str, Any], **changes: Any) -> Request:
    kind = ChatRequest if "messages" in body else CompletionRequest
    return kind.parse(body | changes)


def run(work: Awaitable[T]) -> T:
    async def in_time() -> T:
        outcome = await asyncio.wait_for(work, timeout=60)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing is left running"
        return outcome

    return asyncio.run(in_time())


def _whole(engine: Any, body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    whole: dict[str, Any] = msgspec.to_builtins(run(respond(parsed(body, **changes), engine, SERVED, **STAMP)))
    return whole


def stream(request: Request, engine: Any, **options: Any) -> AsyncGenerator[bytes, None]:
    return streamed(request, engine, SERVED, failure=ApiError.of, **STAMP, **options)  # type: ignore[arg-type]


def chunks_in(content: bytes) -> list[dict[str, Any]]:
    """What the events of a stream that has ended hold."""
    assert content.endswith(b"\n\ndata: [DONE]\n\n")
    return [json.loads(one.removeprefix(b"data: ")) for one in content.split(b"\n\n")[:-2]]


async def chunks_of(request: Request, engine: Any) -> list[dict[str, Any]]:
    return chunks_in(b"".join([part async for part in stream(request, engine)]))


def check_official(chunk: dict[str, Any]) -> None:
    """The official types read it, and know all that is in it."""
    if chunk["object"] == "chat.completion.chunk":
        read: Any = official_chat.ChatCompletionChunk.model_validate(chunk, strict=True)
    else:
        # The official type knows the finish reason of whole completions only; OpenAI's own chunks have null, too.
        choices = [choice | {"finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]]
        read = official.Completion.model_validate(chunk | {"choices": choices}, strict=True)
    assert not read.model_extra
    for choice in read.choices:
        assert set(choice.model_extra) == {"stop_reason"}
        assert choice.logprobs is None or not choice.logprobs.model_extra


def check_same(chunks: Sequence[dict[str, Any]], whole: dict[str, Any]) -> None:
    """The chunks join to the choices of the answer. Log-probabilities are equal up to rounding."""
    for chunk in chunks:
        check_official(chunk)
        assert [chunk[name] for name in ("id", "created", "model")] == [whole[n] for n in ("id", "created", "model")]
    pieces = [choice for chunk in chunks for choice in chunk["choices"]]
    for expected in whole["choices"]:
        own = [one for one in pieces if one["index"] == expected["index"]]
        assert [one["finish_reason"] for one in own] == [None] * (len(own) - 1) + [expected["finish_reason"]]
        assert own[-1]["stop_reason"] == expected["stop_reason"]
        if "message" in expected:
            assert own.pop(0)["delta"] == {"role": "assistant", "content": ""}
            assert "".join(one["delta"]["content"] for one in own) == expected["message"]["content"]
        else:
            assert "".join(one["text"] for one in own) == expected["text"]
        for name, values in (expected["logprobs"] or {}).items():
            found = [item for one in own if one["logprobs"] for item in one["logprobs"][name] or []]
            assert found == rounded(values or [])
        assert any(one["logprobs"] for one in own) == (expected["logprobs"] is not None)


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-4)
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return {name: rounded(one) for name, one in value.items()} if isinstance(value, dict) else value


SENTENCE = "The agency spent 40 million dollars on roads."
SAMPLED = {"temperature": 0.8, "seed": 5}
HAN = demo_tokenizer()("世", add_special_tokens=False)["input_ids"]
HAN_PARTS = {**dict.fromkeys(map(str, HAN), 100.0), "40": 99.0}
BODIES: dict[str, dict[str, Any]] = {
    "chat with logprobs": CHAT | {"logprobs": True, "top_logprobs": 3},
    "chat with usage": CHAT | {"stream_options": {"include_usage": True}, "n": 3, **SAMPLED},
    "several prompts, several texts": TEXT | {"prompt": ["Fee 5", "In May", "The report"], "n": 2, **SAMPLED},
    "token ids with logprobs": TEXT | {"prompt": [[40, 41], [42]], "logprobs": 2},
    "special tokens": TEXT | {"logprobs": 1, "skip_special_tokens": False, "min_tokens": 3, "logit_bias": {"1": 100}},
    "parts of characters": TEXT | {"logit_bias": HAN_PARTS, "n": 4, "logprobs": 0, "temperature": 1, "seed": 3},
    "whole characters of parts": TEXT | {"logit_bias": HAN_PARTS, "n": 4, "temperature": 1, "seed": 3},
    "echoes": TEXT | {"prompt": SENTENCE, "echo": True, "n": 2},
    "only echoes, with usage": TEXT | {"prompt": [SENTENCE, "Fee 5"], "echo": True, "n": 2, "max_tokens": 0},
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_chunks_join_to_the_answer(engine: AsyncEngine, name: str) -> None:
    body = BODIES[name] | {"stream": True}
    body.setdefault("stream_options", {"include_usage": "usage" in name or "prompts" in name})
    request = parsed(body)
    assert request.stream
    whole = _whole(engine, body)
    chunks = run(chunks_of(request, engine))
    check_same(chunks, whole)
    assert len(chunks) >= 2
    if request.stream_options.include_usage:
        assert [chunk["usage"] for chunk in chunks] == [None] * (len(chunks) - 1) + [whole["usage"]]
        assert chunks[-1]["choices"] == []
    else:
        assert not any("usage" in chunk for chunk in chunks)
        assert all(chunk["choices"] for chunk in chunks)
    assert "\ufffd" in whole["choices"][0].get("text", "\ufffd") or "parts" not in name
    told = ("text", "logprobs", "finish_reason", "delta")
    assert all(any(map(one.get, told)) for chunk in chunks for one in chunk["choices"]), "no chunk is empty"


@pytest.mark.parametrize("include", [False, True])
def test_chunks_end_at_stop_strings_as_the_answer_does(engine: AsyncEngine, include: bool) -> None:
    text = _whole(engine, CHAT)["choices"][0]["message"]["content"]
    stop = text[len(text) // 2 :][:5]
    changes = {"stop": ["never there", stop], "include_stop_str_in_output": include}
    whole = _whole(engine, CHAT, **changes)
    check_same(run(chunks_of(parsed(CHAT, **changes), engine)), whole)
    (choice,) = whole["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["message"]["content"] == text[: text.index(stop)] + stop * include


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"model": "other"}, 404, "model_not_found"),
        ({"top_p": 5}, 400, "invalid_value"),
        ({"prompt": ["x", ""]}, 400, "empty_prompt"),
        ({"prompt": [[5], [-1]]}, 400, "invalid_token"),
        ({"prompt": ["x", "long " * CONTEXT]}, 400, "context_length_exceeded"),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_is_wrong_with_a_request_is_told_before_anything_runs(
    engine: AsyncEngine, is_streamed: bool, changes: dict[str, Any], status: int, code: str
) -> None:
    before = engine.client.stats.num_prompt_tokens
    with pytest.raises(RequestError) as caught:
        request = parsed(TEXT, **changes)
        run(anext(stream(request, engine)) if is_streamed else respond(request, engine, SERVED, **STAMP))
    told = ApiError.of(caught.value)
    assert (told.status, told.code) == (status, code)
    assert engine.client.stats.num_prompt_tokens == before


@pytest.mark.parametrize(
    ("changes", "fewer", "message"),
    [
        ({"prompt": [[5] * 300] * 2, "n": 6}, [{"n": 5}], "3600 tokens, n times; at most 3000"),
        (
            {"prompt": ["a"] * 512, "max_tokens": 400, "logprobs": 20},
            [{"max_tokens": 20}, {"logprobs": 0}, {"logprobs": None}],
            "lower max_tokens",
        ),
        *(
            ({"prompt": [[5] * 300] * 2, "n": 100, shown: True}, [{"n": 60}], "60000 tokens, n times; at most 40000")
            for shown in ("echo", "return_token_ids")
        ),
        (
            {"prompt": [5] * 300, "n": 128, "echo": True, "logprobs": 20, "max_tokens": 0},
            [{"n": 50}, {"logprobs": 5}],
            "^logprobs: up to 806400 for all tokens; at most 500000 here, lower logprobs or n",
        ),
        ({"prompt": "ab " * 2**18, "truncate_prompt_tokens": 5}, [], "at most 262144, also to be cut"),
    ],
)
def test_what_takes_too_much_memory_is_refused(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, changes: Any, fewer: list[Any], message: str
) -> None:
    monkeypatch.setattr(answer_module, "_MOST_PROMPT_TOKENS", 3000)
    monkeypatch.setattr(answer_module, "_MOST_REPEATED_TOKENS", 40_000)
    asked = TEXT | {"max_tokens": 1, "temperature": 1} | changes
    with pytest.raises(RequestError, match=message):
        run(answer_module._prompts(parsed(asked), engine))
    for less in fewer:
        assert run(answer_module._prompts(parsed(asked | less), engine))


def test_bad_words_are_tokenized_before_the_engine_has_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread took 40 ms for those of each request: of 400 requests, others waited 16 s."""
    engine, threads, first = ScriptedEngine(), list[str](), prompts.text_tokens

    def noted(*given: Any, **options: Any) -> list[int]:
        threads.append(threading.current_thread().name)
        return first(*given, **options)

    monkeypatch.setattr(prompts, "text_tokens", noted)
    words = [f"{time.monotonic_ns()} {number}" for number in range(256)]
    run(answer_module._prompts(parsed(TEXT | {"bad_words": words}), engine))
    assert len(threads) >= 512
    assert threading.current_thread().name not in threads[:512]
    del threads[:]
    assert len(prompts.bad_word_tokens(tuple(words), engine.client.tokenizer)) >= 256
    assert not threads


def test_a_chat_shows_the_logprobs_of_its_prompt_once(engine: AsyncEngine) -> None:
    messages = [{"role": "user", "content": "word " * 140}]
    asked = parsed(CHAT, messages=messages, n=128, temperature=1, max_tokens=1, prompt_logprobs=20)
    assert run(answer_module._prompts(asked, engine))


def test_events_that_repeat_all_logprobs_have_fewer() -> None:
    scripted: Any = ScriptedEngine()
    scripted.max_model_len = scripted.client.info.config.kv_cache_tokens = 10_000
    asked = {"model": SERVED[0], "input": "a", "top_logprobs": 20, "max_output_tokens": 8000}
    assert run(answer_module._prompts(ResponsesRequest.parse(asked), scripted))
    with pytest.raises(RequestError, match="at most 125000 here, lower max_tokens"):
        run(answer_module._prompts(ResponsesRequest.parse(asked | {"stream": True}), scripted))


def test_large_answers_are_made_beside_the_event_loop(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    made_in, whole = list[str](), answer_module.Answer.whole

    def noted(*args: Any) -> Any:
        made_in.append(threading.current_thread().name)
        return whole(*args)

    monkeypatch.setattr(answer_module.Answer, "whole", noted)
    for num_prompts, n in ((1, 1), (12, 1), (1, 12)):
        prompts = [[5] * 100] * num_prompts
        request = parsed(TEXT, prompt=prompts, n=n, temperature=1, max_tokens=1, prompt_logprobs=20)
        response = run(respond(request, engine, SERVED, name="x", created=1))
        assert len(response.choices[-1].prompt_logprobs) == 100
    assert made_in[0] == threading.main_thread().name
    monkeypatch.setattr(tokenizing, "_LONG", 0)  # a text of any length
    run(respond(parsed(TEXT, prompt=[[5] * 100], max_tokens=4), engine, SERVED, name="x", created=1))
    assert all(name.startswith("rayspec-large-work") for name in made_in[1:])


@pytest.mark.parametrize(("shape", "as_chat"), [("ab ", True), ("😀", False)])
def test_a_text_much_too_long_is_refused_before_it_is_tokenized(engine: AsyncEngine, shape: str, as_chat: bool) -> None:
    text = shape * (4_000_000 // len(shape))
    body = CHAT | {"messages": [{"role": "user", "content": text}]} if as_chat else TEXT | {"prompt": ["a", text]}
    start_s = time.process_time()
    with pytest.raises(PromptTooLongError, match="maximum context length is 512"):
        run(respond(parsed(body), engine, SERVED, **STAMP))
    assert time.process_time() - start_s < 0.7


def test_what_waits_to_be_tokenized_is_dropped_when_its_client_goes() -> None:
    tokenized: list[str] = []
    begun, go = threading.Event(), threading.Event()

    def tokenizer(prompt: str, **_: Any) -> dict[str, list[int]]:
        tokenized.append(prompt[0])
        begun.set()
        assert go.wait(30)
        return {"input_ids": [5]}

    engine: Any = ScriptedEngine()
    engine.tokenizer = tokenizer

    async def work() -> None:
        texts = [letter + "b" * 3000 for letter in "xyz"]
        asked = parsed(TEXT, prompt=texts * 3)
        tasks = [asyncio.create_task(answer_module._prompts(asked, engine)) for _ in range(5)]
        assert await asyncio.to_thread(begun.wait, 30)
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0.01)
        go.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(work())
    assert set(tokenized) == {"x"}, "no prompt after the first"


LONG = TEXT | {"prompt": ["Fee 5", "In May", "The report"], "n": 2, "max_tokens": 400, "ignore_eos": True, **SAMPLED}


async def is_idle(engine: AsyncEngine) -> bool:
    for _ in range(500):
        load = engine.client.load
        if load.num_running == load.num_waiting == load.kv_used_tokens == 0:
            return True
        await asyncio.sleep(0.01)
    return False


def test_who_leaves_ends_all_prompts(engine: AsyncEngine) -> None:
    async def work() -> None:
        chunks = stream(parsed(LONG), engine)
        for _ in range(20):
            await anext(chunks)
        assert engine.client.load.num_running + engine.client.load.num_waiting > 0
        await chunks.aclose()
        assert await is_idle(engine)
        task = asyncio.ensure_future(respond(parsed(LONG), engine, SERVED, **STAMP))
        while engine.client.load.num_running + engine.client.load.num_waiting < 6:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await is_idle(engine)

    before = engine.client.stats.num_generated_tokens
    run(work())
    assert engine.client.stats.num_generated_tokens - before < 6 * 400


def test_a_template_without_tools_takes_forced_calls_only(engine: AsyncEngine) -> None:
    body = CHAT | {"tools": TOOLS, "messages": [{"role": "user", "content": "Is it cold?"}], "max_tokens": 120}
    with pytest.raises(RequestError, match="chat template does not describe tools: give tool_choice 'required'"):
        _whole(engine, body)
    check_weather(_whole(engine, body, tool_choice=NAMED)["choices"][0]["message"]["tool_calls"][0])


@pytest.mark.parametrize("error", [NonFiniteLogitsError("NaN"), EngineDeadError("gone")])
def test_a_prompt_that_fails_later_ends_the_others_after_what_came_before(error: RayspecError) -> None:
    engine = ScriptedEngine({41: error})

    async def work() -> bytes:
        return b"".join([part async for part in stream(parsed(TEXT, prompt=[[40], [41], [42]]), engine)])

    content = run(work())
    assert engine.num_open == 0
    *chunks, told = chunks_in(content)
    assert [chunk["choices"][0]["index"] for chunk in chunks].count(1) == 3
    assert told == ApiError.of(error).body
    answer = httpx2.MockTransport(lambda _: httpx2.Response(200, content=content))
    with openai.OpenAI(api_key="k", http_client=httpx2.Client(transport=answer)) as client:
        read = client.completions.create(model="m", prompt="x", stream=True)
        with pytest.raises(openai.APIError) as caught:
            list(read)
    assert (caught.value.code, caught.value.type) == (error.kind, "server_error")


def test_requests_for_many_log_probabilities_run_in_turn() -> None:
    """Half a million take 250 MB, of all requests together. A request with few does not wait."""

    async def work() -> None:
        engine: Any = ScriptedEngine({41: "wait"})
        limit = Places(LOGPROBS_AT_ONCE)
        asked = TEXT | {"prompt": [41], "logprobs": 5}

        async def settled(num_asked: int) -> None:
            for _ in range(20):
                await asyncio.sleep(0)
            assert engine.num_asked == num_asked

        tasks = []
        many, some = {"max_tokens": 400, "n": 100}, {"max_tokens": 400, "n": 10}
        for client, changes, num_asked in (
            ("", many, 1),
            ("", some, 1),
            ("", {}, 2),
            ("other", some, 3),  # within its share
            ("other", many, 3),
            ("third", some, 4),
        ):
            engine.client_name = client
            tasks.append(
                asyncio.create_task(respond(parsed(asked, **changes), engine, SERVED, logprobs=limit, **STAMP))
            )
            await settled(num_asked)
        tasks[0].cancel()
        await settled(5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(work())


def test_an_echoed_prompt_is_scored_as_evaluation_harnesses_ask(engine: Any) -> None:
    """By text and by token ids, several at once, with a generated token and without."""
    token_ids = demo_tokenizer()(SENTENCE)["input_ids"]
    asked = {"model": "short-name", "temperature": 0, "echo": True, "logprobs": 1}
    by_text = _whole(engine, asked | {"prompt": SENTENCE, "max_tokens": 2})
    by_ids = _whole(engine, asked | {"prompt": [token_ids, token_ids[:5]], "max_tokens": 0, "return_token_ids": True})
    (choice,) = by_text["choices"]
    scores = choice["logprobs"]
    plain = _whole(engine, asked | {"prompt": SENTENCE, "max_tokens": 2, "echo": False})["choices"][0]
    assert choice["text"] == SENTENCE + plain["text"]
    assert scores["token_logprobs"][-2:] == rounded(plain["logprobs"]["token_logprobs"])
    assert len(scores["tokens"]) == len(scores["token_logprobs"]) == len(scores["top_logprobs"]) == len(token_ids) + 2
    assert (scores["token_logprobs"][0], scores["top_logprobs"][0]) == (None, None)
    columns = (scores[name][1:] for name in ("tokens", "token_logprobs", "top_logprobs"))
    for token, logprob, top in zip(*columns, strict=True):
        assert top[token] == logprob <= max(top.values()) <= 0
    for offset, token in list(zip(scores["text_offset"], scores["tokens"], strict=True))[1:]:
        assert choice["text"][offset:].startswith(token)
    for one, ids in zip(by_ids["choices"], (token_ids, token_ids[:5]), strict=True):
        assert one["logprobs"]["token_logprobs"] == rounded(scores["token_logprobs"][: len(ids)])
        assert one["text"] == demo_tokenizer().decode(ids, skip_special_tokens=True)
        assert (one["prompt_token_ids"], one["token_ids"], one["finish_reason"]) == (ids, [], "length")
    assert by_ids["usage"]["completion_tokens"] == 0
    assert by_text["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("body", [CHAT, {"model": "short-name", "prompt": SENTENCE}], ids=["chat", "text"])
def test_vllms_fields_about_tokens(engine: Any, body: dict[str, Any]) -> None:
    asked = {"temperature": 0, "max_tokens": 8, "return_token_ids": True}
    whole = _whole(engine, body, **asked, prompt_logprobs=1)
    (choice,) = whole["choices"]
    holder = whole if "messages" in body else choice
    assert demo_tokenizer().decode(choice["token_ids"], skip_special_tokens=True) == text_of(choice)
    assert len(holder["prompt_logprobs"]) == len(holder["prompt_token_ids"])
    for row, token in list(zip(holder["prompt_logprobs"], holder["prompt_token_ids"], strict=True))[1:]:
        assert row[str(token)]["logprob"] <= 0 < row[str(token)]["rank"]
        assert "decoded_token" in row[str(token)]
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = run(chunks_of(parsed(body, **asked, stream=True, stream_options=options), engine))
    choices = [one for chunk in chunks for one in chunk["choices"]]
    assert [token for one in choices for token in one.get("token_ids", ())] == choice["token_ids"]
    given = [one["prompt_token_ids"] for one in ([*chunks, *choices]) if "prompt_token_ids" in one]
    assert given == [holder["prompt_token_ids"]]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == len(choice["token_ids"])
    assert chunks[-1]["usage"] | {"prompt_tokens_details": None} == whole["usage"] | {"prompt_tokens_details": None}


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def test_an_echoed_prompt_is_decoded_once_for_all_completions(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids, decoded, decode = demo_tokenizer()(SENTENCE)["input_ids"], [], engine.tokenizer.decode
    monkeypatch.setattr(engine.tokenizer, "decode", lambda ids, **how: (decoded.append(ids), decode(ids, **how))[1])
    choices = _whole(engine, TEXT | {"prompt": token_ids, "n": 3, "echo": True, "max_tokens": 0})["choices"]
    assert [one["text"] for one in choices] == [SENTENCE] * 3
    assert decoded.count(token_ids) == 1


def test_a_last_message_is_continued(engine: Any) -> None:
    """And a prompt that is too long is cut, if the request says so."""
    begun = [*CHAT["messages"], {"role": "assistant", "content": "The agency"}]
    whole = _whole(
        engine,
        CHAT,
        messages=begun,
        add_generation_prompt=False,
        continue_final_message=True,
        max_tokens=1,
        return_token_ids=True,
    )
    assert demo_tokenizer().decode(whole["prompt_token_ids"]).endswith("The agency")
    cut = {"model": "short-name", "prompt": f"{SENTENCE} " * 1000, "truncate_prompt_tokens": 9}
    assert len(_whole(engine, cut, return_token_ids=True)["choices"][0]["prompt_token_ids"]) == 9
    with pytest.raises(RequestError, match="the model's chat template has no variable 'enable_thinking': leave it out"):
        _whole(engine, CHAT, chat_template_kwargs={"enable_thinking": False})


def test_cached_tokens_are_counted_and_an_impossible_token_has_a_number() -> None:
    class Known(ScriptedEngine):
        def _output(self, token_ids: Sequence[int], outcome: object, reason: Any = None) -> RequestOutput:
            output = super()._output(token_ids, outcome, reason)
            output.metrics.num_cached_tokens = 2
            output.outputs[0].logprobs = [{token: Logprob(logprob=-math.inf, rank=1)} for token in token_ids]
            return output

    body = CompletionRequest.parse({"model": "m", "prompt": "A sentence", "logprobs": 1})
    answer = whole_answer(body, Known())
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert set(answer["choices"][0]["logprobs"]["token_logprobs"]) == {-9999.0}, "JSON has no minus infinity"
