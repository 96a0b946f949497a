"""Reasoning is found in the texts of each style, wherever the text is cut, and has its place in answers."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import openai.types.chat as official
import pytest
from msgspec import UNSET

from rayspec import SamplingParams
from rayspec.decode.output import TokenTexts
from rayspec.openai.items import ResponsesRequest
from rayspec.openai.parsers import HERMES, CallParser, HarmonyParser, OutputParser, ThinkParser, reasoning_style
from rayspec.openai.requests import ChatRequest
from rayspec.openai.responses import Answer
from rayspec.types import CompletionOutput, RequestOutput
from tests.openai.scripted import Read, ScriptedEngine, joined, require_one_reading, streamed_events, whole_answer

Make = Callable[[], OutputParser]


def tags() -> OutputParser:
    return ThinkParser(None, is_inside=False)


def inside() -> OutputParser:
    return ThinkParser(None, is_inside=True)


def with_calls() -> OutputParser:
    return ThinkParser(lambda: CallParser(HERMES, {"now": {}}, is_parallel=True), is_inside=True)


def channels() -> OutputParser:
    return HarmonyParser(has_tools=True, is_parallel=True)


def without_tools() -> OutputParser:
    return HarmonyParser(has_tools=False, is_parallel=False)


CALL = '<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'
TO_NOW = 'to=functions.now <|constrain|>json<|message|>{"a": 1}'
AGAIN = f"<|start|>assistant<|channel|>commentary {TO_NOW}<|call|>"
THINKS = "<|channel|>analysis<|message|>Hm < 2.<|end|><|start|>assistant"
CASES: list[tuple[Make, str, Read]] = [
    (tags, " Just text, a <think> and </think>. ", ("", " Just text, a <think> and </think>. ", [])),
    (tags, "<think>\nHm < 2.\n</think>\n\nSo.\n", ("Hm < 2.", "So.\n", [])),
    (tags, "<think>\n\n</think>\n\nSo.", ("", "So.", [])),
    (tags, "<think>never <end> </thi", ("never <end> </thi", "", [])),
    (tags, "<thi", ("", "<thi", [])),
    (inside, "Hm.\n\nSo?</think>So. </think>", ("Hm.\n\nSo?", "So. </think>", [])),
    (inside, "cut", ("cut", "", [])),
    (
        with_calls,
        f"Hm, <tool_call>?\n</think>\n\nLet me see.\n{CALL}",
        ("Hm, <tool_call>?", "Let me see.", [("now", '{"a": 1}')]),
    ),
    (channels, f"{THINKS}<|channel|>final<|message|>So. < 3", ("Hm < 2.", "So. < 3", [])),
    (channels, f"{THINKS}<|channel|>commentary {TO_NOW}<|call|>", ("Hm < 2.", "", [("now", '{"a": 1}')])),
    (channels, ' to=functions.now<|channel|>commentary json<|message|>{"a": 1}', ("", "", [("now", '{"a": 1}')])),
    (channels, f"<|channel|>commentary<|message|>Wait<|end|>{AGAIN * 2}", ("", "Wait", [("now", '{"a": 1}')] * 2)),
    (channels, f"{THINKS}<|channel|>analysis to=python code<|message|>1<|end|>", ("Hm < 2.\n\n1", "", [])),
    (without_tools, f"<|channel|>commentary {TO_NOW}<|call|>", ('{"a": 1}', "", [])),
    (channels, '{"a": "<|"}', ("", '{"a": "<|"}', [])),
    (channels, "<|channel|>anal", ("", "", [])),
    (channels, f"<|channel|>{'x' * 300}", ("", f"<|channel|>{'x' * 300}", [])),
]


@pytest.mark.parametrize(("make", "text", "result"), CASES)
def test_reasoning_content_and_calls(make: Make, text: str, result: Read) -> None:
    for at in range(len(text) + 1):
        assert joined(make(), [text[:at], text[at:]]) == result, f"cut at {at}"
    assert joined(make(), list(text)) == result


@pytest.mark.parametrize("make", [tags, inside, with_calls, channels, without_tools])
def test_any_text_has_one_reading(make: Make) -> None:
    words = ["<think>", "</think>", "<|channel|>", "<|start|>assistant", "<|message|>", "<|end|>", "<|call|>", "final"]
    words += [" to=functions.now", "commentary", "analysis", CALL, TO_NOW, THINKS, "<", "|", " ", "\n", "word"]
    require_one_reading(make, words, 300)


def said(text: str, token_ids: Sequence[int] = (), prompt: Sequence[int] = (), *, is_last: bool) -> RequestOutput:
    one = CompletionOutput(index=0, text=text, token_ids=token_ids, finish_reason="stop" if is_last else None)
    return RequestOutput(request_id="r", prompt=None, prompt_token_ids=tuple(prompt), outputs=[one], finished=is_last)


def test_a_long_run_of_spaces_is_searched_once() -> None:
    texts = [" " * 600_000, *(" " for _ in range(1000)), "Hm.</think>So.", " ", "\n", "Yes."]
    for make in (inside, with_calls):
        request = ChatRequest.parse({"model": "m", "messages": messages("a"), "stream": True})
        answer = Answer(request, TokenTexts(ScriptedEngine.tokenizer), name="7", created=9, model="m", make_parser=make)
        outputs = [said(text, is_last=at == len(texts)) for at, text in enumerate(texts, start=1)]
        start_s = time.process_time()
        deltas: list[Any] = [chunk.choices[0].delta for output in outputs for chunk in answer.chunks(0, output)]
        assert time.process_time() - start_s < 0.5
        assert "".join(one.reasoning for one in deltas if one.reasoning is not UNSET) == "Hm."
        assert "".join(one.content for one in deltas if one.content is not UNSET) == "So. \nYes."


class Says(ScriptedEngine):
    """Answers with a text, of which each piece of a stream has a sign."""

    def __init__(self, text: str, parser: str | None) -> None:
        super().__init__()
        self.text, self.asked = text, list[SamplingParams]()
        self.llm.config.reasoning_parser = parser

    async def run(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> RequestOutput:
        self.asked.append(params)
        return self._said(prompt_token_ids, self.text, is_last=True)

    async def stream(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, interval_s: float
    ) -> AsyncGenerator[RequestOutput, None]:
        for at, sign in enumerate(self.text, start=1):
            yield self._said(prompt_token_ids, sign, is_last=at == len(self.text))

    def _said(self, prompt: Sequence[int], text: str, *, is_last: bool) -> RequestOutput:
        token_ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return said(text, token_ids, prompt, is_last=is_last)


def asked(kind: Any, engine: Says, **body: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the whole response and the chunks."""
    whole = whole_answer(kind.parse({"model": "m", **body}), engine)
    return whole, streamed_events(kind.parse({"model": "m", "stream": True, **body}), engine)


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("parser", ["deepseek_r1", "qwen3"])
def test_reasoning_is_apart_from_the_content_where_a_parser_is_named(parser: str) -> None:
    text = "Hm.\n</think>\n\nSo."
    whole, chunks = asked(ChatRequest, Says(text, parser), messages=messages("x<think>\n"))
    official.ChatCompletion.model_validate(whole, strict=True)
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("Hm.", "Hm.", "So.")
    assert 0 < whole["usage"]["completion_tokens_details"]["reasoning_tokens"] < whole["usage"]["completion_tokens"]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    for name in ("reasoning_content", "reasoning", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == message[name]
    only, _ = asked(ChatRequest, Says("Hm, hm.", parser), messages=messages("x<think>\n"))
    assert only["usage"]["completion_tokens_details"]["reasoning_tokens"] == only["usage"]["completion_tokens"]
    hidden, chunks = asked(ChatRequest, Says(text, parser), messages=messages("x<think>\n"), include_reasoning=False)
    assert "reasoning" not in hidden["choices"][0]["message"]
    assert not any("reasoning" in choice["delta"] for chunk in chunks for choice in chunk["choices"])
    back = [*messages("x"), message, *messages("y<think>")]
    again, _ = asked(ChatRequest, Says(text, parser), messages=back)
    assert again["choices"][0]["message"]["content"] == "So."


def test_reasoning_stays_in_the_text_without_a_parser() -> None:
    whole, _ = asked(ChatRequest, Says("Hm.</think>So.", None), messages=messages("x<think>"))
    assert whole["choices"][0]["message"]["content"] == "Hm.</think>So."


def test_channels_are_items_of_the_responses_api() -> None:
    engine = Says(f"{THINKS}<|channel|>final<|message|>So.", "openai_gptoss")
    whole, events = asked(ResponsesRequest, engine, input="x")
    assert [one.skip_special_tokens for one in engine.asked] == [False]
    thought, message = whole["output"]
    assert (thought["type"], thought["content"][0]) == ("reasoning", {"type": "reasoning_text", "text": "Hm < 2."})
    assert message["content"][0]["text"] == "So."
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    deltas = [one["delta"] for one in events if one["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == "Hm < 2."
    assert events[-1]["response"]["output"] == whole["output"]


def test_a_form_of_gpt_oss_is_that_of_its_answer() -> None:
    engine = Says(f"{THINKS}<|channel|>final<|message|>{{}}", "openai_gptoss")
    form = {"response_format": {"type": "json_object"}}
    whole = whole_answer(ChatRequest.parse({"model": "m", "messages": messages("x"), **form}), engine)
    assert whole["choices"][0]["message"]["content"] == "{}"
    going_on = {"add_generation_prompt": False, "continue_final_message": True}
    whole_answer(ChatRequest.parse({"model": "m", "messages": messages("x"), **form, **going_on}), engine)
    forms = [one.structured_outputs for one in engine.asked]
    assert [one and one.reasoning for one in forms] == ["channels", None]


def test_only_the_format_of_gpt_oss_is_found_without_a_name() -> None:
    assert reasoning_style("a<|channel|>analysis<|message|>", None) == "openai_gptoss"
    assert reasoning_style("<think>", None) is None
    assert reasoning_style("<|channel|>analysis<|message|>", "qwen3") == "qwen3"
