"""Batch files in and out: bad lines stay alone, ids stay the same, and the bundled model answers a whole file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import openai.types as official
import openai.types.chat as official_chat
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayspec import LLM, SamplingParams, demo
from rayspec.async_engine import AsyncEngine
from rayspec.decode.engine_loop import EngineDeadError
from rayspec.decode.stages import StageLostError
from rayspec.openai.batch import BatchLine, BatchResult, answer, read_batch
from rayspec.types import (
    CompletionOutput,
    ConfigError,
    EmptyPromptError,
    InvalidMessagesError,
    OutOfMemoryError,
    RayspecError,
    RequestOutput,
)
from tests.demo_model import demo_tokenizer

CHAT_URL, TEXT_URL = "/v1/chat/completions", "/v1/completions"
SERVED = ("short-name", "/models/path")
CONTEXT = 512


def line_of(custom_id: str, url: str = TEXT_URL, **body: Any) -> bytes:
    default = {"messages": [{"role": "user", "content": "x"}]} if url == CHAT_URL else {"prompt": "x"}
    row = {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": SERVED[0]} | default | body}
    return json.dumps(row).encode() + b"\n"


def read(*lines: bytes, source: str = "in.jsonl") -> list[BatchLine | BatchResult]:
    return list(read_batch(lines, source=source))


def request(custom_id: str = "a", url: str = TEXT_URL, **body: Any) -> BatchLine:
    (line,) = read(line_of(custom_id, url, **body))
    assert isinstance(line, BatchLine)
    return line


def body_of(result: BatchResult) -> Any:
    assert result.response is not None
    return result.response.body


def error_of(result: BatchResult) -> official.ErrorObject:
    assert result.failed
    return official.ErrorObject.model_validate(body_of(result)["error"])


GOOD = json.loads(line_of("good"))


@pytest.mark.parametrize(
    ("line", "custom_id", "code", "param"),
    [
        (b'{"custom_id": "a", ', None, "invalid_json", None),
        (b'{"custom_id": "\xff"}', None, "invalid_json", None),
        (b"[1, 2]", None, "invalid_value", None),
        ({"custom_id": None}, None, "missing_required_parameter", "custom_id"),
        ({"custom_id": ""}, None, "invalid_value", "custom_id"),
        ({"custom_id": 5}, None, "invalid_value", "custom_id"),
        ({"custom_id": "seen"}, "seen", "duplicate_custom_id", "custom_id"),
        ({"custom_id": "seen", "url": "/v2"}, "seen", "duplicate_custom_id", "custom_id"),
        ({"method": "GET"}, "good", "invalid_value", "method"),
        ({"url": "/v1/embeddings"}, "good", "invalid_value", "url"),
        ({"body": None}, "good", "missing_required_parameter", "body"),
        ({"body": "text"}, "good", "invalid_value", "body"),
        ({"bodi": {}}, "good", "unknown_parameter", "bodi"),
    ],
)
def test_a_line_that_is_no_request_is_reported_and_the_others_are_read(
    line: bytes | dict[str, Any], custom_id: str | None, code: str, param: str | None
) -> None:
    content = line if isinstance(line, bytes) else json.dumps(GOOD | line).encode()
    before, bad, after = read(line_of("seen"), content + b"\n", line_of("other"))
    assert isinstance(before, BatchLine)
    assert isinstance(after, BatchLine)
    assert isinstance(bad, BatchResult)
    assert bad.failed
    told = json.loads(bad.json_line())
    assert (told["custom_id"], told["response"]) == (custom_id, None)
    error = official.BatchError.model_validate(told["error"], strict=True)
    assert (error.code, error.param, error.line) == (code, param, 2)
    assert error.message is not None
    assert error.message.startswith("line 2: ")


def test_a_bad_line_keeps_its_custom_id_to_itself() -> None:
    _, second = read(json.dumps(GOOD | {"method": "GET"}).encode(), line_of("good"))
    assert isinstance(second, BatchResult)
    assert second.error is not None
    assert second.error.code == "duplicate_custom_id"


def test_empty_lines_and_a_byte_order_mark_are_passed_over() -> None:
    first, second, third = read(b"\xef\xbb\xbf" + line_of("a"), b"\n", b" \r\n", line_of("b").rstrip(), b"oops")
    assert [one.custom_id for one in (first, second)] == ["a", "b"]
    assert isinstance(third, BatchResult)
    assert third.error is not None
    assert third.error.line == 5


def _ids(lines: Sequence[bytes], source: str) -> list[str]:
    found = read(*lines, source=source)
    return [one.id if isinstance(one, BatchResult) else one.result(200, {}).id for one in found]


def test_ids_depend_on_the_file_and_the_custom_id_only() -> None:
    lines = [line_of("1"), line_of("2"), line_of("1"), b"oops", line_of("3")]
    ids = _ids(lines, "in")
    assert len(set(ids)) == 5
    assert all(one.startswith("batch_req_") for one in ids)
    assert _ids(lines, "in") == ids
    assert _ids([line_of("3", temperature=0.5)], "in") == ids[4:]
    assert not set(_ids(lines, "out")) & set(ids)


@given(lines=st.lists(st.binary(max_size=20) | st.sampled_from([line_of("a"), line_of("b")]), max_size=8))
def test_every_line_that_holds_something_gives_one_result(lines: list[bytes]) -> None:
    found = read(*lines)
    contents = [line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line for number, line in enumerate(lines)]
    assert len(found) == sum(bool(content.strip()) for content in contents)
    assert len(set(_ids(lines, "in"))) == len(found)
    custom_ids = [one.custom_id for one in found if isinstance(one, BatchLine)]
    assert len(set(custom_ids)) == len(custom_ids)
    for one in found:
        if isinstance(one, BatchResult):
            assert json.loads(one.json_line())["error"]["code"]


class ScriptedEngine:
    """Answers a prompt with its own tokens, or as `outcomes` says of the prompt; "wait" for good."""

    tokenizer = demo_tokenizer()
    max_model_len = CONTEXT
    max_new_tokens = None

    def __init__(self, outcomes: Mapping[tuple[int, ...], RayspecError | str] | None = None) -> None:
        self.outcomes = outcomes or {}
        self.params: list[SamplingParams] = []
        self.num_cancelled = 0

    def tokens(self, prompt: str) -> list[int]:
        return list(self.tokenizer(prompt)["input_ids"])

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        return self.tokens("".join(message["content"] for message in messages))

    async def run(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> RequestOutput:
        self.params.append(params)
        outcome = self.outcomes.get(tuple(prompt_token_ids))
        if isinstance(outcome, EngineDeadError):
            raise outcome
        if outcome == "wait":
            try:
                await asyncio.Event().wait()
            finally:
                self.num_cancelled += 1
        return RequestOutput(
            request_id="r",
            prompt=None,
            prompt_token_ids=tuple(prompt_token_ids),
            outputs=[self._completion(index, prompt_token_ids) for index in range(params.n)],
            finished=True,
            error=outcome if isinstance(outcome, RayspecError) else None,
        )

    def _completion(self, index: int, token_ids: Sequence[int]) -> CompletionOutput:
        text = f"{index}:" + self.tokenizer.decode(list(token_ids))
        return CompletionOutput(index=index, text=text, token_ids=tuple(token_ids), finish_reason="stop")


def ask(line: BatchLine, engine: Any = None, clock: Callable[[], float] = lambda: 99.9) -> BatchResult:
    return asyncio.run(asyncio.wait_for(answer(line, engine or ScriptedEngine(), SERVED, clock=clock), timeout=10))


def test_a_chat_is_answered_and_told_as_openai_does() -> None:
    told = json.loads(ask(request("Ü", CHAT_URL, model=SERVED[1])).json_line())
    assert set(told) == {"id", "custom_id", "response", "error"}
    assert set(told["response"]) == {"status_code", "request_id", "body"}
    assert (told["custom_id"], told["response"]["status_code"], told["error"]) == ("Ü", 200, None)
    parsed = official_chat.ChatCompletion.model_validate(told["response"]["body"], strict=True)
    assert parsed.choices[0].message.content == "0:x"
    assert parsed.model == SERVED[0]
    assert told["response"]["request_id"] == parsed.id.replace("chatcmpl-", "req_")


@pytest.mark.parametrize(
    ("line", "status", "code"),
    [
        (request(model="other"), 404, "model_not_found"),
        (request(top_p=5), 400, "invalid_value"),
        (request(stream=True), 400, "unsupported_value"),
        (request(messages=[]), 400, "unknown_parameter"),
        (request(prompt=["x", "long " * CONTEXT]), 400, "context_length_exceeded"),
        (request(max_tokens=CONTEXT), 400, "context_length_exceeded"),
    ],
)
def test_a_bad_body_is_an_error_of_its_line(line: BatchLine, status: int, code: str) -> None:
    engine = ScriptedEngine()
    result = ask(line, engine)
    assert result.response is not None
    assert (result.response.status_code, error_of(result).code, result.error) == (status, code, None)
    assert engine.params == []


@pytest.mark.parametrize(("error", "status"), [(EmptyPromptError("nothing"), 400), (OutOfMemoryError("too much"), 500)])
def test_a_prompt_that_fails_fails_the_line_and_ends_the_others(error: RayspecError, status: int) -> None:
    engine = ScriptedEngine({(5,): "wait", (6,): error, (7,): "wait"})
    result = ask(request(prompt=[[5], [6], [7], [8]]), engine)
    assert result.response is not None
    assert (result.response.status_code, error_of(result).message) == (status, str(error))
    assert engine.num_cancelled == 2


@pytest.mark.parametrize("error", [EngineDeadError("gone"), StageLostError("gone")])
def test_a_line_has_no_answer_when_the_engine_is_gone(error: RayspecError) -> None:
    engine = ScriptedEngine({(5,): "wait", (6,): error})
    with pytest.raises(type(error)):
        ask(request(prompt=[[5], [6]]), engine)
    assert engine.num_cancelled == 1


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConfigError("/models/path has no template"), "no chat template; use /v1/completions"),
        (InvalidMessagesError("roles must alternate"), "roles must alternate"),
    ],
)
def test_a_conversation_that_cannot_be_a_prompt_is_an_error_of_its_line(error: Exception, message: str) -> None:
    class Untemplated(ScriptedEngine):
        def chat_tokens(self, messages: Any, *, add_generation_prompt: bool = True) -> list[int]:
            raise error

    told = error_of(ask(request(url=CHAT_URL), Untemplated()))
    assert told.code == "invalid_messages"
    assert message in told.message


OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "max_model_len": CONTEXT,
    "max_num_seqs": 8,
    "speculation": {"strategy": "static", "skip": [13, 14, 18], "max_draft_tokens": 4},
}
DOCUMENTS = demo.sample_documents(6, num_sentences=6, seed=11)
MALFORMED = (
    b'{"custom_id": "cut-off", "method": "POST", "url": "/v1/comple\n',
    b'["not", "an", "object"]\n',
    json.dumps({name: value for name, value in GOOD.items() if name != "custom_id"}).encode() + b"\n",
    line_of("chat-0", CHAT_URL),
    json.dumps(GOOD | {"custom_id": "wrong-url", "url": "/v1/embeddings"}).encode() + b"\n",
)


def batch_file() -> list[bytes]:
    """50 lines, every tenth malformed in its own way."""
    greedy = {"temperature": 0, "max_tokens": 6}
    lines = []
    for number in range(15):
        chat = [{"role": "user", "content": DOCUMENTS[number % 6].text}]
        lines.append(line_of(f"chat-{number}", CHAT_URL, messages=chat, logprobs=True, top_logprobs=3, **greedy))
        lines.append(line_of(f"text-{number}", prompt=f"Fee {number} was paid", logprobs=2, **greedy))
        seeded = {"n": 2, "seed": number, "temperature": 0.8, "max_tokens": 4}
        lines.append(line_of(f"many-{number}", prompt=["The report", "In May"], **seeded))
    for number, line in enumerate(MALFORMED):
        lines.insert(10 * number + 9, line)
    return lines


@pytest.fixture(scope="module")
def engine_and_reference() -> Iterator[tuple[AsyncEngine, list[RequestOutput]]]:
    llm = LLM("demo", **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3)
    prompts: list[Any] = [
        {"prompt_token_ids": llm.chat_tokens([{"role": "user", "content": document.text}])} for document in DOCUMENTS
    ]
    reference = llm.generate([*prompts, *(f"Fee {number} was paid" for number in range(15))], params)
    engine = AsyncEngine(llm)
    yield engine, reference
    engine.stop()


def run_file(engine: AsyncEngine) -> dict[str, BatchResult]:
    async def run() -> list[BatchResult]:
        found = read_batch(batch_file(), source="in.jsonl")
        answers = [answer(one, engine, SERVED) for one in found if isinstance(one, BatchLine)]
        return await asyncio.gather(*answers)

    malformed = [one for one in read(*batch_file()) if isinstance(one, BatchResult)]
    return {result.id: result for result in [*malformed, *asyncio.run(run())]}


def test_a_file_of_50_lines_of_which_5_are_malformed(
    engine_and_reference: tuple[AsyncEngine, list[RequestOutput]],
) -> None:
    engine, reference = engine_and_reference
    results = run_file(engine)
    assert len(results) == 50
    rows = [json.loads(result.json_line()) for result in results.values()]
    failed = [row for row, result in zip(rows, results.values(), strict=True) if result.failed]
    errors = sorted((official.BatchError.model_validate(row["error"]).line, row["error"]["code"]) for row in failed)
    assert errors == [
        (10, "invalid_json"),
        (20, "invalid_value"),
        (30, "missing_required_parameter"),
        (40, "duplicate_custom_id"),
        (50, "invalid_value"),
    ]
    answers = {row["custom_id"]: row["response"]["body"] for row in rows if row["error"] is None}
    assert len(answers) == 45
    for number in range(15):
        chat = official_chat.ChatCompletion.model_validate(answers[f"chat-{number}"], strict=True)
        _check_chat(chat, reference[number % 6])
        _check_text(official.Completion.model_validate(answers[f"text-{number}"], strict=True), reference[6 + number])
        many = official.Completion.model_validate(answers[f"many-{number}"], strict=True)
        assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert _without_time(run_file(engine)) == _without_time(results)


def _without_time(results: Mapping[str, BatchResult]) -> dict[str, Any]:
    rows = {name: json.loads(result.json_line()) for name, result in results.items()}
    for row in rows.values():
        for choice in ((row["response"] or {}).get("body") or {"choices": []})["choices"]:
            choice.pop("logprobs")  # equal up to rounding, which depends on the batch
        if row["response"] is not None:
            del row["response"]["body"]["created"]
    return rows


def _check_chat(parsed: official_chat.ChatCompletion, expected: RequestOutput) -> None:
    (choice,), (completion,) = parsed.choices, expected.outputs
    assert (choice.message.content, choice.finish_reason) == (completion.text, completion.finish_reason)
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert completion.logprobs is not None
    rows = zip(choice.logprobs.content, completion.token_ids, completion.logprobs, strict=True)
    for told, token_id, row in rows:
        assert told.token == demo_tokenizer().decode([token_id])
        assert told.logprob == pytest.approx(row[token_id].logprob, abs=1e-4)
        likely = sorted((one.logprob for one in row.values()), reverse=True)[:3]
        assert [one.logprob for one in told.top_logprobs] == pytest.approx(likely, abs=1e-4)
    assert parsed.usage is not None
    assert parsed.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert parsed.usage.completion_tokens == len(completion.token_ids)


def _check_text(parsed: official.Completion, expected: RequestOutput) -> None:
    (choice,), (completion,) = parsed.choices, expected.outputs
    assert (choice.text, choice.finish_reason) == (completion.text, completion.finish_reason)
    assert choice.logprobs is not None
    assert completion.logprobs is not None
    chosen = [row[token_id].logprob for token_id, row in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert choice.logprobs.token_logprobs == pytest.approx(chosen, abs=1e-4)
    assert choice.logprobs.text_offset is not None
    assert choice.logprobs.tokens is not None
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert choice.text[offset:].startswith(token) or token == demo_tokenizer().eos_token
