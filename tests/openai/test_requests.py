"""What request bodies mean, and what is refused and how."""

import json
import math
import time
from typing import Any

import openai.types as official
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayspec import StructuredOutputsParams
from rayspec.config import SamplingParams
from rayspec.openai.batch import BatchRequest
from rayspec.openai.items import ResponsesBody
from rayspec.openai.protocol import ApiError, InvalidRequestError, StrictBody
from rayspec.openai.requests import ChatRequest, CompletionRequest
from rayspec.openai.tokenizing import DetokenizeRequest, TokenizeRequest
from rayspec.types import PromptTooLongError

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "x"}
CALL = {"id": "c1", "type": "function", "function": {"name": "mul", "arguments": "{}"}}

EVERYTHING: dict[str, Any] = {
    "n": 2, "temperature": 0.5, "top_p": 0.9, "stop": ["a", "b"], "seed": 7, "presence_penalty": 0.25,
    "frequency_penalty": -0.25, "logit_bias": {"5": -100, "6": 1.5}, "top_k": 20, "min_p": 0.05,
    "repetition_penalty": 1.1, "min_tokens": 3, "ignore_eos": True, "stop_token_ids": [9], "skip_special_tokens": False,
    "include_stop_str_in_output": True, "bad_words": ["no", "never"], "allowed_token_ids": [1, 2, 3],
    "truncate_prompt_tokens": 5, "spaces_between_special_tokens": True, "prompt_logprobs": 3,
    "structured_outputs": {"choice": ["a", "b"]}, "use_drafts": False,
}  # fmt: skip


JSON_FORM: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "n", "strict": True, "schema": {"const": None}},
}


def params_of(body: dict[str, Any], *, prompt: int = 10, context: int = 100) -> SamplingParams:
    kind = ChatRequest if "messages" in body else CompletionRequest
    request = kind.parse(body)
    return request.sampling_params(request.num_output_tokens(prompt, context))


def test_every_parameter_reaches_the_sampling_params() -> None:
    values = EVERYTHING | {"logit_bias": {5: -100, 6: 1.5}, "stop": ("a", "b")}
    expected = SamplingParams(**values, max_tokens=30, logprobs=4)
    assert params_of(CHAT | EVERYTHING | {"max_tokens": 30, "logprobs": True, "top_logprobs": 4}) == expected
    assert params_of(CHAT | EVERYTHING | {"max_completion_tokens": 30, "logprobs": True, "top_logprobs": 4}) == expected
    assert params_of(TEXT | EVERYTHING | {"max_tokens": 30, "logprobs": 4}) == expected
    reached = {*EVERYTHING, "max_tokens", "logprobs"}
    assert reached == set(SamplingParams.model_fields) - {"detokenize"}


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({"response_format": JSON_FORM}, {"json": {"const": None}}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"structured_outputs": {"json": {"enum": [None], "const": None}}}, {"json": {"enum": [None], "const": None}}),
        ({"structured_outputs": {"grammar": "start: /a/"}}, {"grammar": "start: /a/"}),
        ({"guided_json": {"b": 1, "a": 2}}, {"json": '{"b": 1, "a": 2}'}),
        (
            {"guided_json": "{}", "guided_whitespace_pattern": " ", "guided_decoding_backend": "auto"},
            {"json": "{}", "whitespace_pattern": " "},
        ),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_grammar": "root ::= [a]"}, {"grammar": "root ::= [a]"}),
    ],
)
def test_forms_of_the_output_have_the_names_of_openai_and_vllm(body: dict[str, Any], form: dict[str, Any]) -> None:
    """Null has a meaning in schemas, and so has the order of properties."""
    for base in (CHAT, TEXT):
        assert params_of(base | body).structured_outputs == StructuredOutputsParams(**form)


def test_what_is_left_out_or_null_has_the_default() -> None:
    nothing = dict.fromkeys([*EVERYTHING, "max_tokens", "logprobs", "stream", "stream_options", "user"])
    nothing |= dict.fromkeys(["prompt_logprobs", "bad_words", "anything"])
    for extra in ({}, nothing):
        assert params_of(TEXT | extra) == SamplingParams()
        assert params_of(CHAT | extra) == SamplingParams(max_tokens=90)
    assert params_of(CHAT | {"logprobs": True}).logprobs == 0
    assert params_of(CHAT | {"logprobs": False}).logprobs is None
    assert params_of(TEXT | {"logprobs": 0}).logprobs == 0
    assert params_of(TEXT | {"stop": "end"}).stop == ("end",)
    assert params_of(TEXT | {"logit_bias": {"5": 1, "7": None}}).logit_bias == {5: 1}


def test_fields_that_change_no_text_are_taken() -> None:
    ignored = {"user": "u", "metadata": {"a": "b"}, "store": True, "safety_identifier": "s"}
    asks_for_nothing = {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"],
        "parallel_tool_calls": False, "prediction": None, "service_tier": "auto", "stream": False,
    }  # fmt: skip
    assert params_of(CHAT | ignored | asks_for_nothing) == params_of(CHAT)
    assert params_of(TEXT | ignored | {"best_of": 1, "suffix": "", "echo": False}) == params_of(TEXT)
    assert params_of(TEXT | {"n": 2, "best_of": 2}) == params_of(TEXT | {"n": 2})


def test_a_chat_without_a_limit_has_the_checkpoints() -> None:
    for default, expected in ((None, 90), (70, 70), (200, 90)):
        assert ChatRequest.parse(CHAT).num_output_tokens(10, 100, default) == expected
        assert ChatRequest.parse(CHAT | {"max_tokens": 80}).num_output_tokens(10, 100, default) == 80
    both = {"max_tokens": 80, "max_completion_tokens": 60}
    assert ChatRequest.parse(CHAT | both).num_output_tokens(10, 100) == 60
    assert CompletionRequest.parse(TEXT).num_output_tokens(10, 100, 70) == 16


def test_the_output_must_fit_the_context() -> None:
    assert params_of(CHAT | {"max_tokens": 90}).max_tokens == 90
    assert params_of(TEXT, prompt=95).max_tokens == 5
    for body in (CHAT, TEXT):
        with pytest.raises(
            PromptTooLongError, match=r"maximum context length is 100 tokens.*101 tokens \(10 in the pr"
        ):
            params_of(body | {"max_tokens": 91})
        with pytest.raises(PromptTooLongError, match="maximum context length"):
            params_of(body, prompt=100)


@pytest.mark.parametrize(
    ("base", "changes", "param", "code", "message"),
    [
        (CHAT, {"temperatur": 1}, "temperatur", "unknown_parameter", "did you mean 'temperature'"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools.0.function", "missing_required_parameter", "required"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format.type", "invalid_value", "'json_schema'"),
        (CHAT, {"response_format": JSON_FORM | {"schema": {}}}, "response_format.schema", "invalid_value", "unknown"),
        (TEXT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_value", "schema"),
        (CHAT, {"guided_json": "{"}, "guided_json", "invalid_value", "no JSON"),
        (CHAT, {"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "invalid_value", "regex and choice"),
        (CHAT, {"response_format": JSON_FORM, "guided_regex": "a"}, "guided_regex", "invalid_value", "give one of"),
        (CHAT, {"structured_outputs": {"jsn": {}}}, "structured_outputs", "invalid_value", "unknown field 'jsn'"),
        (CHAT, {"temperature": -0.5}, "temperature", "invalid_value", "-0.5"),
        (CHAT, {"temperature": math.inf}, "temperature", "invalid_value", "finite"),
        (CHAT, {"logit_bias": {"1": math.nan}}, "logit_bias.1", "invalid_value", "finite"),
        (TEXT, {"service_tier": "flex"}, "service_tier", "unsupported_parameter", "not supported"),
        (CHAT, {"min_tokens": 9, "max_tokens": 3}, "min_tokens", "invalid_value", "must not exceed"),
        (CHAT, {"top_logprobs": 1}, "top_logprobs", "invalid_value", "logprobs: true"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value", "20"),
        (CHAT, {"stream_options": {}}, "stream_options", "invalid_value", "stream: true"),
        (CHAT, {"model": None}, "model", "missing_required_parameter", "required"),
        (CHAT, {"messages": [{"role": "u", "content": ""}]}, "messages.0.role", "invalid_value", "assistant"),
        *((TEXT, {"n": 2, "best_of": one}, "best_of", "invalid_value", "only as many as n") for one in (1, 3)),
        (TEXT, {"suffix": "x"}, "suffix", "unsupported_parameter", "not supported"),
        (CHAT, {"priority": 5}, "priority", "unsupported_parameter", "not supported"),
        (TEXT, {"use_beam_search": True}, "use_beam_search", "unsupported_parameter", "not supported"),
        (TEXT, {"echo": True, "logprobs": 1, "stream": True}, "echo", "invalid_value", "give stream: false"),
        (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value", "give stream: false"),
        (CHAT, {"continue_final_message": True}, "continue_final_message", "invalid_value", "add_generation_prompt"),
        (
            CHAT,
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
            "invalid_value",
            "include_usage: true",
        ),
        (TEXT, {"prompt": [1, "a"]}, "prompt", "invalid_value", "token ids"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    base: dict[str, Any], changes: dict[str, Any], param: str, code: str, message: str
) -> None:
    kind = ChatRequest if base is CHAT else CompletionRequest
    with pytest.raises(InvalidRequestError, match=message) as caught:
        request = kind.parse(base | changes)
        request.sampling_params(request.num_output_tokens(10, 100))
    assert (caught.value.param, caught.value.code, caught.value.status) == (param, code, 400)
    assert param.split(".", maxsplit=1)[0] in str(caught.value)


@pytest.mark.parametrize(
    ("base", "field", "allowed", "refused"),
    [
        (TEXT, "n", 128, 129),
        (TEXT, "prompt", ["x"] * 1024, ["x"] * 1025),
        (TEXT | {"n": 8}, "prompt", ["x"] * 128, ["x"] * 129),
        (TEXT, "stop", ["a"] * 16, ["a"] * 17),
        (TEXT, "stop_token_ids", [1] * 1024, [1] * 1025),
        (TEXT | {"n": 16}, "allowed_token_ids", [1] * 2**15, [1] * (2**15 + 1)),
        (TEXT, "bad_words", ["a" * 64] * 128, ["a" * 65] * 128),
        (TEXT, "logit_bias", {str(i): 1.0 for i in range(1024)}, {str(i): 1.0 for i in range(1025)}),
        (CHAT, "messages", CHAT["messages"] * 2048, CHAT["messages"] * 2049),
        (CHAT, "messages", [CHAT["messages"][0] | {"name": "a" * 256}], [CHAT["messages"][0] | {"name": "a" * 257}]),
    ],
)
def test_what_is_over_a_limit_is_refused_by_name(base: dict[str, Any], field: str, allowed: Any, refused: Any) -> None:
    kind = ChatRequest if "messages" in base else CompletionRequest
    kind.parse(base | {field: allowed})
    with pytest.raises(InvalidRequestError, match=r"\d") as caught:
        kind.parse(base | {field: refused})
    param = "n" if base.get("n") == 8 else field
    assert str(caught.value.param).startswith(param)
    assert (caught.value.code, caught.value.status) == ("invalid_value", 400)


HUGE = 15 * 2**20  # bytes


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","prompt":"x","metadata":[' + b"[]," * (HUGE // 3) + b"[]]}",
        b'{"model":"m","prompt":"x","' + b"a" * HUGE + b'":1}',
        b'{"model":"m","prompt":[' + b'"a",' * (HUGE // 4) + b"1]}",
        b'{"model":"m","prompt":[' + b"1," * 1_900_000 + b'"a"]}',
        b'{"model":"m","prompt":"x","stop":[' + b"1," * (HUGE // 2) + b"1]}",
        b'{"model":"m","prompt":"x","logit_bias":{' + b",".join(b'"%d":""' % i for i in range(90_000)) + b"}}",
        b'{"model":"m","messages":[' + b'{"role":"user","content":""},' * 480_000 + b"1]}",
        b'{"model":"m","prompt":"x","seed":' + b"9" * 10**6 + b"}",
        b'{"model":"m","prompt":"x","metadata":' + b"[" * (HUGE // 2) + b"]" * (HUGE // 2) + b"}",
        b'{"model":"m","prompt":"x","metadata":"' + b'\\"' * (HUGE // 2),
        b'{"model":"' + b"[{:" * (HUGE // 3) + b'","prompt":"x","n":0}',
    ],
)
def test_a_huge_body_costs_little_and_its_error_is_short(body: bytes) -> None:
    kind = ChatRequest if b'"messages"' in body[:30] else CompletionRequest
    start_s = time.process_time()
    with pytest.raises(InvalidRequestError) as caught:
        kind.read(body)
    assert time.process_time() - start_s < 3
    assert len(str(caught.value)) + len(caught.value.param or "") <= 2000


def test_characters_within_texts_are_no_parts_and_every_seed_of_64_bits_is_taken() -> None:
    text = r"\"\\[[[{{{:::,,," * 700_000
    assert CompletionRequest.read(json.dumps({"model": "m", "prompt": text}).encode()).prompts == [text]
    for seed in (-(2**63), 2**63 - 1):
        assert params_of(TEXT | {"seed": seed}).seed == seed
        with pytest.raises(InvalidRequestError, match="64 bits"):
            params_of(TEXT | {"seed": seed + (1 if seed > 0 else -1)})


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    base=st.sampled_from([CHAT, TEXT]),
    name=st.sampled_from(sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, *ChatRequest.refused})),
    value=_JSON,
)
def test_no_value_of_a_field_raises_anything_else(base: dict[str, Any], name: str, value: Any) -> None:
    kind = ChatRequest if base is CHAT else CompletionRequest
    try:
        request = kind.parse(base | {name: value})
        params = request.sampling_params(request.num_output_tokens(10, 100))
    except (InvalidRequestError, PromptTooLongError) as error:
        official.ErrorObject.model_validate(ApiError.of(error).body["error"])
    else:
        assert params.max_tokens <= 90


def test_messages_become_what_chat_templates_take() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "developer", "content": "rules"},
        {"role": "system", "content": "more"},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": "yes", "tool_calls": [], "refusal": None, "annotations": []},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "content": "42", "tool_call_id": "t"},
    ]
    assert ChatRequest.parse({"model": "m", "messages": messages}).prompts == [
        [
            {"role": "system", "content": "rules"},
            {"role": "system", "content": "more"},
            {"role": "user", "content": "one\ntwo", "name": "ann"},
            {"role": "assistant", "content": "yes"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
            {"role": "tool", "content": "42", "tool_call_id": "t"},
        ]
    ]


def test_a_long_schema_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(InvalidRequestError, match="guided_json: json has more than 262144 characters"):
        CompletionRequest.parse({"model": "m", "prompt": "x", "guided_json": "[" * 300_000})


@pytest.mark.parametrize(
    "kind", [BatchRequest, ChatRequest, CompletionRequest, DetokenizeRequest, ResponsesBody, TokenizeRequest]
)
def test_a_list_of_invalid_items_is_one_error(kind: type[StrictBody]) -> None:
    """Two million errors took 14 s of the interpreter's lock, and 2 GB."""
    for name in kind.model_fields:
        with pytest.raises(pydantic.ValidationError) as found:
            kind.model_validate({"model": 1, name: [1.5] * 5000})
        assert found.value.error_count() < 10, name


def test_a_chat_has_fewer_items_than_a_prompt_of_token_ids() -> None:
    """Two million in a message took more than a second of the one thread that parses."""
    items = "[" + "1," * 700_000 + "1]"
    with pytest.raises(InvalidRequestError, match="624288 items"):
        ChatRequest.read(f'{{"model": "m", "messages": [{{"role": "user", "content": "x", "y": {items}}}]}}'.encode())
    assert CompletionRequest.read(f'{{"model": "m", "prompt": {items}}}'.encode()).num_prompts == 1
