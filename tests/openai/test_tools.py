"""Requests with tools on the bundled model: what is called, in each format, as a whole and as a stream."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai.types.chat as official
import pytest

from rayspec import LLM
from rayspec.errors import RequestError
from rayspec.forms.grammar import Grammars
from rayspec.llm import AsyncEngine
from rayspec.openai.parsers import FORMATS, ToolFormat
from rayspec.openai.parsers import HERMES as HERMES_FORM
from rayspec.openai.protocol import ApiError, InvalidRequestError
from rayspec.openai.requests import ChatRequest
from rayspec.openai.tools import ToolUse
from tests.demo_model import demo_tokenizer, shallow_demo
from tests.openai.conftest import OPTIONS
from tests.openai.scripted import ScriptedEngine, joined, streamed_events, whole_answer
from tests.tool_templates import HERMES, tokenizer_with

WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "the weather of a city",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Oslo", "Rome"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["C", None], "format": "letter"},
        },
        "required": ["city", "days"],
    },
}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "now"}}]
NAMED = {"type": "function", "function": {"name": "weather"}}
TAGS = "qwen3_coder"
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "Is it cold in Rome?"}],
    "temperature": 0,
    "max_tokens": 120,
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo", "days": 2}'}}


def answer(engine: Any, **changes: Any) -> dict[str, Any]:
    return whole_answer(ChatRequest.parse(CHAT | changes), engine)


def chunks(engine: Any, **changes: Any) -> list[dict[str, Any]]:
    return streamed_events(ChatRequest.parse(CHAT | {"stream": True} | changes), engine)


def check_weather(call: dict[str, Any]) -> None:
    assert call["function"]["name"] == "weather"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["city"] in ("Oslo", "Rome")
    assert 1 <= arguments["days"] <= 9
    assert set(arguments) <= {"city", "days", "unit"}


@pytest.mark.parametrize("choice", [NAMED, "required"])
@pytest.mark.parametrize("parser", [None, "mistral", "qwen3_coder", "llama3_json", "openai"])
def test_a_forced_call_has_the_schema_and_the_form(engine: AsyncEngine, parser: Any, choice: Any) -> None:
    engine = copy.copy(engine)
    config = engine.llm.config.replace(tool_call_parser=parser)
    engine.llm = SimpleNamespace(config=config, chat_tokens=engine.llm.chat_tokens)  # type: ignore[assignment]
    body = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "n": 2}
    whole, streamed = answer(engine, **body), chunks(engine, **body)
    official.ChatCompletion.model_validate(whole, strict=True)
    for choice_of in whole["choices"]:
        (call,) = choice_of["message"]["tool_calls"]
        assert choice_of["message"]["content"] is None
        assert choice_of["finish_reason"] == "tool_calls"
        if call["function"]["name"] == "weather":
            check_weather(call)
        else:
            assert (choice, call["function"]) == ("required", {"name": "now", "arguments": "{}"})
        deltas = [one["choices"][0] for one in streamed if one["choices"][0]["index"] == choice_of["index"]]
        pieces = [piece for one in deltas for piece in one["delta"].get("tool_calls", ())]
        assert deltas[-1]["finish_reason"] == "tool_calls"
        assert [piece.get("id") for piece in pieces] == [call["id"]] + [None] * (len(pieces) - 1)
        assert {piece["index"] for piece in pieces} == {0}
        assert pieces[0]["type"] == "function"
        assert pieces[0]["function"]["name"] == call["function"]["name"]
        assert "".join(piece["function"]["arguments"] for piece in pieces) == call["function"]["arguments"]
        assert not any(one["delta"].get("content") for one in deltas)
    for chunk in streamed:
        official.ChatCompletionChunk.model_validate(chunk, strict=True)


def test_a_call_and_its_result_are_in_the_history(engine: AsyncEngine) -> None:
    messages = [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3 degrees"},
    ]
    body = {"messages": messages, "tools": TOOLS, "max_tokens": 8, "return_token_ids": True}
    whole = answer(engine, **body)
    text = engine.tokenizer.decode(whole["prompt_token_ids"])
    assert text.index('"description": "the weather of a city"') < text.index('{"city": "Oslo", "days": 2}')
    assert text.index('{"city": "Oslo", "days": 2}') < text.index("3 degrees")
    assert "null" in text, "of the schema"
    assert whole["choices"][0]["message"].get("tool_calls") is None
    assert whole["usage"]["completion_tokens"] == 8
    without = answer(engine, **body, tool_choice="none")
    assert "the weather of a city" not in engine.tokenizer.decode(without["prompt_token_ids"])


def test_an_output_that_ends_in_a_call_says_so(engine: AsyncEngine) -> None:
    found = []
    for max_tokens in (25, 45):
        whole = answer(engine, tools=TOOLS, tool_choice=NAMED, max_tokens=max_tokens)["choices"][0]
        assert whole["finish_reason"] == "length"
        found += [call["function"]["name"] for call in whole["message"].get("tool_calls", ())]
    assert found == ["weather"], "its name comes after 25 tokens"


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.opens or form.begin)
def test_forced_calls_are_calls_wherever_the_output_ends(form: ToolFormat) -> None:
    """The begin of a call without a name is no content, as a grammar allows calls only."""
    tools = ChatRequest.parse(CHAT | {"tools": TOOLS}).tools
    assert tools is not None
    use = ToolUse(tools=tools, called=tools, form=form, is_forced=True, is_parallel=True, is_known=True, added={})
    arguments = "<parameter=city>\nRome\n</parameter>\n" if form.has_tags else '{"city": "Rome"}'
    calls = [
        form.opens + arguments.join((form.head.replace("NAME", name), form.tail)) + form.closes
        for name in ("weather", "now")
    ]
    between = "<|call|><|start|>assistant" if form.has_channels else form.between
    text = form.many_opens + between.join(calls) + form.many_closes
    for end in range(len(text) + 1):
        _, content, found = joined(use.parser(), [text[:end]])
        assert (content, [name for name, _ in found]) == ("", ["weather", "now"][: len(found)]), text[:end]
    assert len(found) == 2


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.opens or form.begin)
def test_strict_functions_are_called_with_their_schema_only(engine: AsyncEngine, form: ToolFormat) -> None:
    strict = ChatRequest.parse(CHAT | {"tools": [{"type": "function", "function": WEATHER | {"strict": True}}]}).tools
    assert strict is not None
    use = ToolUse(tools=strict, called=strict, form=form, is_forced=False, is_parallel=True, is_known=True, added={})
    parts = form.head.replace("NAME", "weather"), form.tail + form.closes + form.many_closes
    for days, is_taken in (("3", True), ("30", False)):
        arguments = f'{{"city": "Rome", "days": {days}}}'
        if form.has_tags:
            arguments = f"<parameter=city>\nRome\n</parameter>\n<parameter=days>\n{days}\n</parameter>\n"
        is_whole = form.may_be_bare or form.has_channels
        text = f"{'' if is_whole else 'So: '}{form.many_opens}{form.opens}{arguments.join(parts)}"
        (found,) = [piece for piece in use.parser().feed(text, finished=True) if getattr(piece, "name", None)]
        assert (found.index, found.name) == (0, "weather")
        compiled = Grammars(lambda: engine.tokenizer, vocab_size=2048, eos_token_ids=(1,)).compiled(
            use.sampling["structured_outputs"]
        )
        tokens = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert (compiled.result().initial.deep_copy().validate_tokens(tokens) == len(tokens)) == is_taken
        text = f"{'<|channel|>final<|message|>' if form.has_channels else ''}So, there is <no> call [in it]."
        others = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert compiled.result().initial.deep_copy().validate_tokens(others) == len(others)


@pytest.mark.parametrize("begin", ["<think>Hm, 1 < 2.</think>", "Hm.</think>", "</think>", ""])
def test_a_model_thinks_before_a_strict_call(begin: str) -> None:
    """In tokens of its own, as Qwen3 does, also without a parser of reasoning. The prompt may have begun it."""
    tokenizer = copy.deepcopy(demo_tokenizer())
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
    tools = ChatRequest.parse(CHAT | {"tools": [{"type": "function", "function": WEATHER | {"strict": True}}]}).tools
    assert tools is not None
    use = ToolUse(
        tools=tools, called=tools, form=HERMES_FORM, is_forced=False, is_parallel=True, is_known=True, added=added
    )
    grammars = Grammars(lambda: tokenizer, vocab_size=len(tokenizer), eos_token_ids=(1,))
    initial = grammars.compiled(use.sampling["structured_outputs"]).result().initial
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": %d}}\n</tool_call>'
    for rest, is_taken in ((call % 3, True), (f"So: {call % 3}\n{call % 9}", True), ("No.", True), (call % 30, False)):
        tokens = tokenizer(begin + rest, add_special_tokens=False)["input_ids"]
        assert (initial.deep_copy().validate_tokens(tokens) == len(tokens)) == is_taken, rest


class Echo(ScriptedEngine):
    """Answers with the prompt."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__()
        self.llm.config, self.tokenizer = engine.llm.config, engine.tokenizer


def test_calls_are_found_in_free_text(engine: AsyncEngine) -> None:
    text = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n' * 2
    body = {"tools": TOOLS, "messages": [{"role": "user", "content": text}]}
    (choice,) = answer(Echo(engine), **body)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == ['{"city": "Rome"}'] * 2
    assert len({call["id"] for call in calls}) == 2
    assert choice["message"]["content"] == "Let me see.\nLet me see."
    (choice,) = answer(Echo(engine), **body, parallel_tool_calls=False)["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    (choice,) = answer(Echo(engine), **body, tool_choice="none")["choices"]
    assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("stop", False)


def test_an_answer_without_calls_has_its_schema(engine: AsyncEngine) -> None:
    schema = {"type": "object", "properties": {"cold": {"type": "boolean"}}, "required": ["cold"]}
    schema |= {"additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for choice in (None, "required"):
        (one,) = answer(engine, tools=TOOLS, response_format=form, tool_choice=choice)["choices"]
        calls = one["message"].get("tool_calls")
        assert calls or choice is None
        if not calls:
            assert list(json.loads(one["message"]["content"])) == ["cold"]
    for form_of, parser in ((HERMES_FORM, None), (FORMATS[-1], "openai")):
        request = ChatRequest.parse(CHAT | {"tools": TOOLS, "response_format": form})
        use = ToolUse.of(request, engine.tokenizer, parser)
        assert use is not None
        grammars = Grammars(lambda: engine.tokenizer, vocab_size=2048, eos_token_ids=(1,))
        initial = grammars.compiled(use.sampling["structured_outputs"]).result().initial
        begin = "<|channel|>final<|message|>" if use.form.has_channels else ""
        call = form_of.many_opens + form_of.opens + "{}".join((form_of.head.replace("NAME", "now"), form_of.tail))
        for text, is_taken in ((f'{begin}{{"cold": true}}', True), (f"{begin}No.", False), (call, True)):
            tokens = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
            assert (initial.deep_copy().validate_tokens(tokens) == len(tokens)) == is_taken, text


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function", "Field required"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools.0.custom", "unknown field"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "pattern"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"properties": []}}}]},
            "tools.0.function.parameters",
            "JSON schema of",
        ),
        ({"tools": TOOLS * 2}, "tools", "two functions are called 'now'"),
        ({"tools": [TOOLS[1]] * 129}, "tools", "at most 128"),
        ({"tools": [{"type": "function", "function": WEATHER | {"description": "a" * 2**17}}]}, "tools", "at most"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", '"required"'),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "no func"),
        ({"tool_choice": "required"}, "tool_choice", "only with tools"),
        ({"tools": TOOLS, "guided_regex": "a"}, "guided_regex", "tools are given, too"),
    ],
)
def test_a_bad_request_says_where(changes: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        ChatRequest.parse(CHAT | changes)
    assert caught.value.param == param


def test_definitions_that_each_argument_repeats_are_limited() -> None:
    """With an argument in a tag of its own. 4,500 arguments would take 300 MB and many seconds of the event loop."""
    schema = {"properties": {f"p{at}": {} for at in range(4500)}, "$defs": {"a": {"description": "a" * 60_000}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    tool_use = ToolUse.of(ChatRequest.parse(CHAT | {"tools": tools, "tool_choice": "required"}), demo_tokenizer(), TAGS)
    assert tool_use is not None
    with pytest.raises(InvalidRequestError, match="tools: the grammar of the calls has more than 262144 characters"):
        tool_use.sampling  # noqa: B018 - raises


def test_a_schema_that_cannot_be_enforced_is_refused(engine: AsyncEngine) -> None:
    bad = {"name": "bad", "parameters": {"properties": {"a": {"type": "thing"}}}}
    with pytest.raises(RequestError, match="tools: ") as caught:
        answer(engine, tools=[{"type": "function", "function": bad}], tool_choice="required")
    assert ApiError.of(caught.value).param == "tools"


@pytest.mark.parametrize("mark", ["[TOOL_CALLS]", "<tool_call>"])
def test_marks_that_are_tokens_of_their_own(tmp_path: Path, mark: str) -> None:
    """Mistral's is a special token. That of Qwen's models is none, and no text for a grammar either."""
    tokenizer = tokenizer_with(mark + HERMES.replace("<|user|>", "<|document|>"), tmp_path, special=mark)
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    (added,) = (one for one in content["added_tokens"] if one["content"] == mark)
    added["special"] = mark == "[TOOL_CALLS]"
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["extra_special_tokens"] = [mark] * added["special"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    engine = AsyncEngine(LLM(shallow_demo(), tokenizer=tokenizer, **OPTIONS))
    try:
        strict: Any = {"tools": [{"type": "function", "function": {"name": "now", "strict": True}}]}
        use = ToolUse.of(ChatRequest.parse(CHAT | strict), engine.tokenizer, None)
        assert use is not None
        form = use.form
        call_of_now = form.head.replace("NAME", "now") + "{}" + form.tail
        text = f"So:{form.many_opens}{form.opens}{call_of_now}{form.closes}{form.many_closes}"
        tokens = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert added["id"] in tokens
        assert use.sampling.get("skip_special_tokens", True) != added["special"]
        grammars = Grammars(lambda: engine.tokenizer, vocab_size=2048, eos_token_ids=(1,))
        initial = grammars.compiled(use.sampling["structured_outputs"]).result().initial
        assert initial.deep_copy().validate_tokens(tokens) == len(tokens)
        (choice,) = answer(engine, tools=TOOLS, tool_choice=NAMED, return_token_ids=True)["choices"]
        (call,) = choice["message"]["tool_calls"]
        check_weather(call)
        assert choice["token_ids"][0] == added["id"]
        assert len(call["id"]) == (9 if added["special"] else 29), "Mistral's templates take no other"
    finally:
        engine.llm.shutdown()
