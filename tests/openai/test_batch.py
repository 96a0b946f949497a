"""Batch files in and out: bad lines stay alone, ids stay the same, and the bundled model answers a whole file."""

import asyncio
import json
import pickle
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import MagicMock

import openai.types as official
import openai.types.chat as official_chat
import pytest

from rayspec.decode.engine_loop import EngineDeadError
from rayspec.decode.stages import StageLostError
from rayspec.openai.batch import BatchLine, BatchResult, answer, read_batch
from rayspec.types import OutOfMemoryError, RayspecError
from tests.openai.scripted import ScriptedEngine

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
    return json.loads(bytes(result.response.body))


def error_of(result: BatchResult) -> official.ErrorObject:
    assert result.failed
    return official.ErrorObject.model_validate(body_of(result)["error"])


GOOD = json.loads(line_of("good"))


@pytest.mark.parametrize(
    ("line", "custom_id", "code", "param"),
    [
        (b'{"custom_id": "a", ', None, "invalid_json", None),
        (b"[1, 2]", None, "invalid_value", None),
        ({"custom_id": 5}, None, "invalid_value", "custom_id"),
        ({"custom_id": "seen"}, "seen", "duplicate_custom_id", "custom_id"),
        ({"method": "GET"}, "good", "invalid_value", "method"),
        ({"bodi": {}}, "good", "unknown_parameter", "bodi"),
    ],
)
def test_a_bad_line_is_reported(
    line: bytes | dict[str, Any], custom_id: str | None, code: str, param: str | None
) -> None:
    content = line if isinstance(line, bytes) else json.dumps(GOOD | line).encode()
    before, bad, after = read(b"\xef\xbb\xbf" + line_of("seen"), b" \r\n", content + b"\n", line_of("other"))
    assert isinstance(before, BatchLine)
    assert isinstance(after, BatchLine)
    assert isinstance(bad, BatchResult)
    assert bad.failed
    told = json.loads(bad.json_line())
    assert (told["custom_id"], told["response"]) == (custom_id, None)
    error = official.BatchError.model_validate(told["error"], strict=True)
    assert (error.code, error.param, error.line) == (code, param, 3)
    assert error.message is not None
    assert error.message.startswith("line 3: ")


def _ids(lines: Sequence[bytes], source: str) -> list[str]:
    return [one.id for one in read(*lines, source=source)]


def test_ids_depend_on_the_file_and_the_custom_id_only() -> None:
    lines = [line_of("1"), line_of("2"), line_of("1"), b"oops", line_of("3")]
    ids = _ids(lines, "in")
    assert len(set(ids)) == 5
    assert all(one.startswith("batch_req_") for one in ids)
    assert _ids(lines, "in") == ids
    assert _ids([line_of("3", temperature=0.5)], "in") == ids[4:]
    assert not set(_ids(lines, "out")) & set(ids)


def test_few_bytes_are_kept_of_the_lines_before() -> None:
    """The ids of a file of 100 MB took 100 MB for each batch."""
    lines = (line_of(f"{number} {500 * chr(0x1F600)}") for number in range(1000))
    tracemalloc.start()
    assert sum(isinstance(line, BatchLine) for line in read_batch(lines, source="in")) == 1000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**19


def ask(line: BatchLine, engine: Any = None, clock: Callable[[], float] = lambda: 99.9) -> BatchResult:
    return asyncio.run(asyncio.wait_for(answer(line, engine or ScriptedEngine(), SERVED, clock=clock), timeout=10))


def test_a_chat_is_answered_and_told_as_openai_does() -> None:
    name = "Ü\x85\u2028"
    text = pickle.loads(pickle.dumps(ask(request(name, CHAT_URL, model=SERVED[1])))).json_line()
    assert len(text.splitlines()) == 1
    told = json.loads(text)
    assert set(told) == {"id", "custom_id", "response", "error"}
    assert set(told["response"]) == {"status_code", "request_id", "body"}
    assert (told["custom_id"], told["response"]["status_code"], told["error"]) == (name, 200, None)
    parsed = official_chat.ChatCompletion.model_validate(told["response"]["body"], strict=True)
    assert parsed.choices[0].message.content == "x"
    assert parsed.model == SERVED[0]
    assert told["response"]["request_id"] == parsed.id.replace("chatcmpl-", "req_")


@pytest.mark.parametrize(
    ("line", "status", "code"),
    [
        (request(model="other"), 404, "model_not_found"),
        (request(stream=True), 400, "unsupported_value"),
        (request(max_tokens=CONTEXT), 400, "context_length_exceeded"),
    ],
)
def test_a_bad_body_is_an_error_of_its_line(line: BatchLine, status: int, code: str) -> None:
    engine = ScriptedEngine()
    result = ask(line, engine)
    assert result.response is not None
    assert (result.response.status_code, error_of(result).code, result.error) == (status, code, None)
    assert engine.num_asked == 0


@pytest.mark.parametrize("error", [EngineDeadError("gone"), StageLostError("gone"), OutOfMemoryError("too much")])
def test_a_failing_prompt_ends_the_others_and_a_dead_engine_leaves_no_answer(error: RayspecError) -> None:
    engine = ScriptedEngine({5: "wait", 6: error})
    line = request(prompt=[[5], [6]])
    if isinstance(error, OutOfMemoryError):
        result = ask(line, engine)
        assert (error_of(result).code, error_of(result).message) == ("out_of_memory", "too much")
    else:
        with pytest.raises(type(error)):
            ask(line, engine)
    assert (engine.num_asked, engine.num_open) == (2, 0)


def test_a_fault_of_ours_is_one_lines_error() -> None:
    class Broken(ScriptedEngine):
        def chat_tokens(self, *_: Any) -> list[int]:
            raise KeyError("fault")

    told = json.loads(ask(request("a", CHAT_URL, model=SERVED[0]), Broken()).json_line())
    assert told["response"]["status_code"] == 500
    assert told["response"]["body"]["error"]["code"] == "internal_error"


def test_large_lines_are_read_one_at_a_time() -> None:
    """Over all batches: their values take far more memory than their text."""
    large = MagicMock()
    small, long = line_of("a"), line_of("b", prompt="a" * 2**20)
    for _ in read_batch([small, long, small], source="f", large=large):
        assert large.__enter__.call_count == large.__exit__.call_count
    assert large.__enter__.call_count == 1
