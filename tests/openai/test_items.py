"""The Responses API on the bundled model: what a body asks for, its items, and the events that build them."""

import json
import time
from typing import Any

import openai.types.responses as official
import pydantic
import pytest

from rayspec.llm import AsyncEngine
from rayspec.openai.items import ResponsesBody, ResponsesRequest
from rayspec.openai.protocol import InvalidRequestError
from tests.openai.scripted import streamed_events, whole_answer
from tests.openai.test_tools import WEATHER

TOOL = {"type": "function", "strict": True, **WEATHER}
NAMED = {"type": "function", "name": "weather"}
ASKED: dict[str, Any] = {"model": "m", "input": "Is it cold in Rome?", "temperature": 0, "max_output_tokens": 120}
YEAR = {"type": "integer", "minimum": 2000, "maximum": 2030}
SCHEMA = {"type": "object", "properties": {"year": YEAR}, "required": ["year"], "additionalProperties": False}
FORM = {"type": "json_schema", "name": "a", "strict": True, "schema": SCHEMA}
CALL = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Oslo", "days": 2}'}
EVENT: Any = pydantic.TypeAdapter(official.ResponseStreamEvent)


def answer(engine: AsyncEngine, **changes: Any) -> dict[str, Any]:
    return whole_answer(ResponsesRequest.parse(ASKED | changes), engine)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_output_tokens": 5, "top_logprobs": 2, "instructions": "Be brief.", "metadata": {"a": "b"}},
        {"text": {"format": FORM}},
        {"tools": [TOOL], "tool_choice": NAMED, "top_logprobs": 1},
    ],
    ids=["text", "schema", "call"],
)
def test_events_build_the_answer(engine: AsyncEngine, changes: dict[str, Any]) -> None:
    whole = answer(engine, **changes)
    streamed = streamed_events(ResponsesRequest.parse(ASKED | {"stream": True} | changes), engine)
    official.Response.model_validate(whole, strict=True)
    assert [one["sequence_number"] for one in streamed] == list(range(len(streamed)))
    for one in streamed:
        EVENT.validate_python(one)
    types = [one["type"].removeprefix("response.") for one in streamed]
    kind = "function_call_arguments" if "tools" in changes else "output_text"
    part = [] if "tools" in changes else ["content_part.added"]
    assert types[:4] == ["created", "in_progress", "output_item.added", *(part or [f"{kind}.delta"])]
    done = ["content_part.done"] if part else []
    is_cut = whole["status"] == "incomplete"
    assert types[-3 - len(done) :] == [
        f"{kind}.done", *done, "output_item.done", "incomplete" if is_cut else "completed"
    ]  # fmt: skip
    deltas = "".join(one["delta"] for one in streamed if one["type"] == f"response.{kind}.delta")
    (item,) = whole["output"]
    assert deltas == (item["arguments"] if "tools" in changes else item["content"][0]["text"])
    last = streamed[-1]["response"]
    same = [key for key in whole if key not in ("usage", "output")]
    assert [last[key] for key in same] == [whole[key] for key in same]
    assert last["output"] == [one["item"] for one in streamed if one["type"] == "response.output_item.done"]
    assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert whole["usage"]["total_tokens"] == whole["usage"]["input_tokens"] + whole["usage"]["output_tokens"]
    if "tools" in changes:
        assert (item["name"], json.loads(item["arguments"])["city"] in ("Oslo", "Rome")) == ("weather", True)
    elif "text" in changes:
        assert 2000 <= json.loads(item["content"][0]["text"])["year"] <= 2030
    else:
        assert (is_cut, whole["incomplete_details"]) == (True, {"reason": "max_output_tokens"})
        assert (whole["usage"]["output_tokens"], whole["metadata"]) == (5, {"a": "b"})
        logprobs = item["content"][0]["logprobs"]
        assert [len(one["top_logprobs"]) for one in logprobs] == [2] * 5


def test_items_become_the_messages_of_a_chat() -> None:
    reasoning = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]}
    said = {"role": "assistant", "type": "message", "id": "msg", "status": "completed"}
    said |= {"content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}]}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Cold?"}]},
        reasoning,
        said,
        CALL,
        CALL | {"call_id": "d", "id": None},
        {"type": "function_call_output", "call_id": "c", "output": "3 degrees"},
        {"type": "function_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "4 degrees"}]},
        CALL,
    ]
    request = ResponsesRequest.parse(ASKED | {"input": items, "instructions": "Be brief.", "seed": 3})
    first, *rest = [message.for_template for message in request.messages]
    assert first == {"role": "system", "content": "Be brief."}
    assert [one["role"] for one in rest] == ["user", "assistant", "tool", "tool", "assistant"]
    assert rest[0]["content"] == "Cold?"
    assert (rest[1]["content"], rest[1]["reasoning_content"]) == ("Let me see.", "R")
    assert [call["id"] for call in rest[1]["tool_calls"]] == ["c", "d"]
    assert [one["content"] for one in rest[2:4]] == ["3 degrees", "4 degrees"]
    assert "reasoning_content" not in rest[4]
    assert (request.seed, request.max_completion_tokens) == (3, 120)


def test_the_time_of_many_calls_grows_with_their_number() -> None:
    body = ResponsesBody.parse(ASKED | {"input": [CALL] * 40_000})
    start_s = time.process_time()
    ((message, _),) = body.messages()
    assert len(message["tool_calls"]) == 40_000
    assert time.process_time() - start_s < 1.0


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the earlier input and output again"),
        ({"conversation": {"id": "x"}}, "conversation", "nothing is stored here"),
        ({"background": True}, "background", "not supported here"),
        ({"truncation": "auto"}, "truncation", "not supported here"),
        ({"max_tokens": 5}, "max_tokens", "did you mean 'max_output_tokens'"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"temperature": -1}, "temperature", "-1"),
        ({"include": ["file_search_call.results"]}, "include.0", "message.output_text.logprobs"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type", "send the item itself"),
        ({"input": [{"type": "reasoning", "summary": 5}]}, "input.0.summary", "list of parts"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type", "text only"),
        ({"input": [{"role": "king", "content": "x"}], "instructions": "x"}, "input.0.role", "give one of"),
        ({"asked": 1}, "asked", "not supported here"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input.0.arguments", "it must be text"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "the server runs no tools"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name", "pattern"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "no function 'x'"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            '"required" or {"type": "function", "name": ...}',
        ),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format", "schema"),
        ({"metadata": {"a": "b" * 2**20}}, "metadata", "at most 1048576 here"),  # each event repeats them
        ({"instructions": "b" * (2**20 + 1)}, "instructions", "at most 1048576 here"),
    ],
)
def test_a_bad_request_says_where(changes: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        request = ResponsesRequest.parse(ASKED | changes)
        request.sampling_params(5)
    assert caught.value.param == param


SAID = {"role": "assistant", "content": "x"}
PLAIN = "{% for one in messages %}{{ one.role }}: {{ one.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("items", "changes", "place"),
    [
        ([{"role": "user", "content": "x"}, CALL], {}, "input.1"),
        ([{"role": "user", "content": "x"}, CALL], {"instructions": "Be brief."}, "input.1"),
        ([SAID, CALL, CALL], {"instructions": "Be brief."}, "input.1"),
        ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]}, SAID], {}, "input.0"),
        ([SAID, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]}, CALL], {}, "input.2"),
        (
            [{"role": "user", "content": "x"}, CALL],
            {"tools": [TOOL], "tool_choice": NAMED},  # told in a system message, which the client did not send
            "input.1",
        ),
    ],
)
def test_an_item_that_the_template_does_not_know_is_named(
    engine: AsyncEngine,
    monkeypatch: pytest.MonkeyPatch,
    items: list[dict[str, Any]],
    changes: dict[str, Any],
    place: str,
) -> None:
    monkeypatch.setattr(engine.tokenizer, "chat_template", PLAIN)
    for read in (whole_answer, streamed_events):
        with pytest.raises(InvalidRequestError, match="the model's chat template has no such field") as caught:
            read(ResponsesRequest.parse(ASKED | {"input": items} | changes), engine)
        assert caught.value.param == place
        assert str(caught.value).startswith(f"{place}: ")


def test_reasoning_that_cannot_be_read_here_is_left_out() -> None:
    items = [{"role": "user", "content": "x"}, {"type": "reasoning", "summary": [], "encrypted_content": "abc"}]
    (message,) = ResponsesRequest.parse(ASKED | {"input": items}).messages
    assert message.for_template == {"role": "user", "content": "x"}


def test_a_schema_that_cannot_be_enforced_is_refused_with_its_place(engine: AsyncEngine) -> None:
    bad = FORM | {"schema": {"type": "object", "properties": {"a": {"type": "thing"}}}}
    for read in (whole_answer, streamed_events):
        with pytest.raises(InvalidRequestError, match=r"text\.format\.schema\.properties\.a: ") as caught:
            read(ResponsesRequest.parse(ASKED | {"text": {"format": bad}}), engine)
        assert caught.value.param == "text.format.schema"
