"""The protocol as data: what bodies mean, what is refused and how, and responses that the official client can read."""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import cache
from typing import Any

import openai.types as official
import openai.types.chat as official_chat
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rayspec.config import SamplingParams
from rayspec.decode.engine_loop import EngineDeadError
from rayspec.decode.stages import StageLostError
from rayspec.service.openai_types import (
    ApiError,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    InvalidRequestError,
    Stamp,
    TokenTexts,
    parse_json,
)
from rayspec.service.prompts import InvalidMessagesError
from rayspec.types import (
    CompletionOutput,
    ConfigError,
    EmptyPromptError,
    InvalidTokenError,
    Logprob,
    NonFiniteLogitsError,
    OutOfMemoryError,
    PromptTooLongError,
    RayspecError,
    RequestOutput,
)
from tests.demo_model import demo_tokenizer

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "x"}
STAMP = Stamp(id="id-1", created=1_700_000_000, model="m")

EVERYTHING: dict[str, Any] = {
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "stop": ["a", "b"],
    "seed": 7,
    "presence_penalty": 0.25,
    "frequency_penalty": -0.25,
    "logit_bias": {"5": -100, "6": 1.5},
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "min_tokens": 3,
    "ignore_eos": True,
    "stop_token_ids": [9],
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
}


def params_of(body: dict[str, Any], *, prompt: int = 10, context: int = 100) -> SamplingParams:
    kind = ChatRequest if "messages" in body else CompletionRequest
    return kind.parse(body).sampling_params(prompt, context)


def test_every_parameter_reaches_the_sampling_params() -> None:
    expected = SamplingParams(
        **EVERYTHING | {"logit_bias": {5: -100, 6: 1.5}, "stop": ("a", "b")}, max_tokens=30, logprobs=4
    )
    assert params_of(CHAT | EVERYTHING | {"max_tokens": 30, "logprobs": True, "top_logprobs": 4}) == expected
    assert params_of(CHAT | EVERYTHING | {"max_completion_tokens": 30, "logprobs": True, "top_logprobs": 4}) == expected
    assert params_of(TEXT | EVERYTHING | {"max_tokens": 30, "logprobs": 4}) == expected
    reached = {*EVERYTHING, "max_tokens", "logprobs"}
    assert reached == set(SamplingParams.model_fields)


def test_what_is_left_out_or_null_has_the_default() -> None:
    nothing = dict.fromkeys([*EVERYTHING, "max_tokens", "logprobs", "stream", "stream_options", "user"])
    for extra in ({}, nothing):
        assert params_of(TEXT | extra) == SamplingParams()
        assert params_of(CHAT | extra) == SamplingParams(max_tokens=90)
    assert params_of(CHAT | {"logprobs": True}).logprobs == 0
    assert params_of(CHAT | {"logprobs": False}).logprobs is None
    assert params_of(TEXT | {"logprobs": 0}).logprobs == 0
    assert params_of(TEXT | {"stop": "end"}).stop == ("end",)


def test_fields_that_change_no_text_are_taken() -> None:
    ignored = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "safety_identifier": "s"}
    asks_for_nothing = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "parallel_tool_calls": False,
        "prediction": {"type": "content", "content": "guess"},
        "stream": False,
    }
    assert params_of(CHAT | ignored | asks_for_nothing) == params_of(CHAT)
    assert params_of(TEXT | ignored | {"best_of": 1, "suffix": "", "echo": False}) == params_of(TEXT)


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
        (CHAT, {"prompt": "x"}, "prompt", "unknown_parameter", "unknown field"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools", "unsupported_parameter", "not supported"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter", "not supp"),
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter", "not supported"),
        (CHAT, {"temperature": 2.5}, "temperature", "invalid_value", "2.5"),
        (CHAT, {"temperature": "0.5"}, "temperature", "invalid_value", "number"),
        (CHAT, {"temperature": True}, "temperature", "invalid_value", "number"),
        (CHAT, {"temperature": math.inf}, "temperature", "invalid_value", "finite"),
        (CHAT, {"logit_bias": {"1": math.nan}}, "logit_bias.1", "invalid_value", "finite"),
        (CHAT, {"top_p": 0}, "top_p", "invalid_value", "greater than 0"),
        (CHAT, {"n": 0}, "n", "invalid_value", "greater than or equal to 1"),
        (CHAT, {"n": True}, "n", "invalid_value", "integer"),
        (CHAT, {"max_tokens": 0}, "max_tokens", "invalid_value", "greater"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value", "greater"),
        (CHAT, {"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens", "invalid_value", "give one"),
        (CHAT, {"min_tokens": 9, "max_tokens": 3}, "min_tokens", "invalid_value", "exceeds"),
        (CHAT, {"logprobs": 5}, "logprobs", "invalid_value", "boolean"),
        (CHAT, {"top_logprobs": 1}, "top_logprobs", "invalid_value", "logprobs: true"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value", "20"),
        (CHAT, {"logit_bias": {"a": 1}}, "logit_bias", "invalid_value", "integer"),
        (CHAT, {"logit_bias": {"1": 101}}, "logit_bias", "invalid_value", "100"),
        (CHAT, {"seed": 2**64}, "seed", "invalid_value", "64 bits"),
        (CHAT, {"stop": [""]}, "stop", "invalid_value", "empty"),
        (CHAT, {"stream_options": {}}, "stream_options", "invalid_value", "stream: true"),
        (CHAT, {"model": None}, "model", "missing_required_parameter", "required"),
        (CHAT, {"messages": []}, "messages", "invalid_value", "at least 1"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content", "missing_required_parameter", "required"),
        (CHAT, {"messages": [{"role": "u", "content": ""}]}, "messages.0.role", "invalid_value", "assistant"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content",
            "unsupported_parameter",
            "'image_url'",
        ),
        (
            CHAT,
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "messages.0.tool_calls",
            "unsupported_parameter",
            "not supported",
        ),
        (TEXT, {"messages": []}, "messages", "unknown_parameter", "unknown field"),
        (TEXT, {"echo": True}, "echo", "unsupported_parameter", "not supported"),
        (TEXT, {"best_of": 2}, "best_of", "unsupported_parameter", "not supported"),
        (TEXT, {"suffix": "x"}, "suffix", "unsupported_parameter", "not supported"),
        (TEXT, {"logprobs": 21}, "logprobs", "invalid_value", "20"),
        (TEXT, {"prompt": []}, "prompt", "invalid_value", "token ids"),
        (TEXT, {"prompt": [1, "a"]}, "prompt", "invalid_value", "token ids"),
        (TEXT, {"prompt": [True]}, "prompt", "invalid_value", "token ids"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    base: dict[str, Any], changes: dict[str, Any], param: str, code: str, message: str
) -> None:
    kind = ChatRequest if base is CHAT else CompletionRequest
    with pytest.raises(InvalidRequestError, match=message) as caught:
        kind.parse(base | changes).sampling_params(10, 100)
    assert (caught.value.param, caught.value.code, caught.value.status) == (param, code, 400)
    assert param.split(".", maxsplit=1)[0] in str(caught.value)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=300)
@given(
    base=st.sampled_from([CHAT, TEXT]),
    name=st.sampled_from(sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, *ChatRequest.refused})),
    value=_JSON,
)
def test_no_value_of_a_field_raises_anything_else(base: dict[str, Any], name: str, value: Any) -> None:
    kind = ChatRequest if base is CHAT else CompletionRequest
    try:
        params = kind.parse(base | {name: value}).sampling_params(10, 100)
    except (InvalidRequestError, PromptTooLongError) as error:
        official.ErrorObject.model_validate(ApiError.of(error).body["error"])
    else:
        assert params.max_tokens <= 90


@pytest.mark.parametrize(
    "content", [b'{"a": "\\ud83d"}', b"\xff", b'{"a": NaN}', b'{"a": 1', b"{} {}", b"[" * 100_000, b""]
)
def test_what_is_not_json_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        parse_json(content)


@settings(deadline=None)
@given(body=_JSON)
def test_no_body_raises_anything_else(body: Any) -> None:
    for kind in (ChatRequest, CompletionRequest):
        with pytest.raises(InvalidRequestError):
            kind.parse(body)


def _taken_as_text(prompt: str | Any) -> list[int]:
    assert isinstance(prompt, str)
    return [ord(character) for character in prompt]


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [("ab", [[97, 98]]), (["a", "b"], [[97], [98]]), ([5, 6], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]]), ([[]], [[]])],
)
def test_prompts_are_texts_or_tokens(prompt: Any, token_ids: list[list[int]]) -> None:
    assert CompletionRequest.parse({"model": "m", "prompt": prompt}).prompts(_taken_as_text) == token_ids


def test_messages_become_what_chat_templates_take() -> None:
    seen: list[Any] = []
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "developer", "content": "rules"},
        {"role": "system", "content": "more"},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": "yes", "tool_calls": [], "refusal": None},
        {"role": "tool", "content": "42", "tool_call_id": "t"},
    ]
    ChatRequest.parse({"model": "m", "messages": messages}).prompts(lambda prompt: seen.append(prompt) or [1])
    assert seen == [
        [
            {"role": "system", "content": "rules"},
            {"role": "system", "content": "more"},
            {"role": "user", "content": "one\ntwo", "name": "ann"},
            {"role": "assistant", "content": "yes"},
            {"role": "tool", "content": "42", "tool_call_id": "t"},
        ]
    ]


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (PromptTooLongError("long"), 400, "invalid_request_error", "context_length_exceeded"),
        (EmptyPromptError("none"), 400, "invalid_request_error", "empty_prompt"),
        (InvalidTokenError("foreign"), 400, "invalid_request_error", "invalid_token"),
        (InvalidMessagesError("odd"), 400, "invalid_request_error", "invalid_messages"),
        (
            InvalidRequestError("who", code="model_not_found", status=404),
            404,
            "invalid_request_error",
            "model_not_found",
        ),
        (OutOfMemoryError("full"), 500, "server_error", "out_of_memory"),
        (NonFiniteLogitsError("nan"), 500, "server_error", "non_finite_logits"),
        (EngineDeadError("at /secret/place"), 503, "server_error", "engine_dead"),
        (StageLostError("at 10.0.0.1"), 503, "server_error", "stage_lost"),
        (ConfigError("in /secret/config"), 503, "server_error", "config"),
    ],
)
def test_errors_have_a_status_and_a_code(error: RayspecError, status: int, kind: str, code: str) -> None:
    told = ApiError.of(error)
    body = official.ErrorObject.model_validate(told.body["error"])
    assert (told.status, body.type, body.code) == (status, kind, code)
    assert not body.model_extra
    assert (str(error) in body.message) == (status < 503)


def _output(*completions: CompletionOutput, num_prompt_tokens: int = 3) -> RequestOutput:
    tokens = tuple(range(num_prompt_tokens))
    return RequestOutput(request_id="r", prompt=None, prompt_token_ids=tokens, outputs=list(completions), finished=True)


def _completion(text: str, *, index: int = 0, logprobs: bool = False, **values: Any) -> CompletionOutput:
    token_ids = demo_tokenizer()(text)["input_ids"]
    rows = [
        {
            token_id: Logprob(logprob=float("-inf"), rank=3),
            40: Logprob(logprob=-0.5, rank=1),
            41: Logprob(logprob=-1.5, rank=2),
        }
        for token_id in token_ids
    ]
    values = {"finish_reason": "stop"} | values
    return CompletionOutput(index=index, text=text, token_ids=token_ids, logprobs=rows if logprobs else None, **values)


@cache
def demo_texts() -> TokenTexts:
    return TokenTexts(demo_tokenizer())


def test_a_chat_completion_is_read_by_the_official_client() -> None:
    request = ChatRequest.parse(CHAT | {"logprobs": True, "top_logprobs": 2})
    first = _completion("Hi é", logprobs=True)
    second = _completion("Yo", index=1, logprobs=True, finish_reason="length")
    body = asdict(ChatCompletion.of(request, _output(first, second), demo_texts(), STAMP))
    parsed = official_chat.ChatCompletion.model_validate(body, strict=True)
    assert (parsed.id, parsed.created, parsed.model, parsed.object) == ("id-1", 1_700_000_000, "m", "chat.completion")
    assert [choice.message.content for choice in parsed.choices] == ["Hi é", "Yo"]
    assert [choice.finish_reason for choice in parsed.choices] == ["stop", "length"]
    assert [choice.index for choice in parsed.choices] == [0, 1]
    content = parsed.choices[0].logprobs.content  # type: ignore[union-attr]
    assert b"".join(bytes(token.bytes) for token in content) == "Hi é".encode()
    assert all(token.logprob == -9999.0 for token in content)
    assert [[one.logprob for one in token.top_logprobs] for token in content] == [[-0.5, -1.5]] * len(content)
    num_tokens = len(first.token_ids) + len(second.token_ids)
    assert parsed.usage == official.CompletionUsage(
        prompt_tokens=3, completion_tokens=num_tokens, total_tokens=3 + num_tokens
    )
    assert not parsed.model_extra
    assert set(parsed.choices[0].model_extra or ()) == {"stop_reason"}


def test_a_text_completion_is_read_by_the_official_client() -> None:
    request = CompletionRequest.parse(TEXT | {"logprobs": 2})
    outputs = [
        _output(_completion("ab é c", logprobs=True), _completion("d", index=1, logprobs=True)),
        _output(_completion("e", logprobs=True, finish_reason="length", stop_reason=None), num_prompt_tokens=4),
    ]
    parsed = official.Completion.model_validate(
        asdict(Completion.of(request, outputs, demo_texts(), STAMP)), strict=True
    )
    assert [(choice.index, choice.text, choice.finish_reason) for choice in parsed.choices] == [
        (0, "ab é c", "stop"),
        (1, "d", "stop"),
        (2, "e", "length"),
    ]
    logprobs = parsed.choices[0].logprobs
    assert logprobs is not None
    num_tokens = len(outputs[0].outputs[0].token_ids)
    assert [len(getattr(logprobs, name)) for name in type(logprobs).model_fields] == [num_tokens] * 4
    for token, chosen, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert chosen == top[token] == -9999.0
        assert len(top) == 3
    assert parsed.usage is not None
    assert parsed.usage.prompt_tokens == 7


def test_logprobs_are_there_when_asked_for_only() -> None:
    chat = ChatCompletion.of(ChatRequest.parse(CHAT), _output(_completion("a")), demo_texts(), STAMP)
    assert chat.choices[0].logprobs is None
    text = Completion.of(CompletionRequest.parse(TEXT), [_output(_completion("a"))], demo_texts(), STAMP)
    assert text.choices[0].logprobs is None
    plain = ChatRequest.parse(CHAT | {"logprobs": True})
    rows = ChatCompletion.of(plain, _output(_completion("a", logprobs=True)), demo_texts(), STAMP).choices[0].logprobs
    assert rows is not None
    assert rows.content[0].top_logprobs == []


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_tokens_join_to_the_text_and_offsets_point_into_it(text: str) -> None:
    tokenizer, texts = demo_tokenizer(), demo_texts()
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = [bytes(texts.utf8(token_id) or ()) for token_id in token_ids]
    assert b"".join(pieces) == text.encode()
    offsets = list(texts.offsets(token_ids, skip_special=True))
    assert offsets == [len(b"".join(pieces[:end]).decode(errors="ignore")) for end in range(len(pieces))]


def test_special_tokens_take_no_place_where_the_text_has_none() -> None:
    eos = demo_tokenizer().eos_token_id
    token_ids = [*demo_tokenizer()("ab")["input_ids"], eos, eos]
    assert demo_texts().text(eos) == demo_tokenizer().eos_token
    assert list(demo_texts().offsets(token_ids, skip_special=True))[-1] == 2
    assert list(demo_texts().offsets(token_ids, skip_special=False))[-1] == 2 + len(demo_tokenizer().eos_token)


def test_pieces_of_sentencepiece_keep_their_space_and_their_bytes() -> None:
    vocabulary = {"<unk>": 0, "▁a": 1, "a": 2, "▁": 3, "<0xE4>": 4, "<0xB8>": 5, "<0x96>": 6}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>"))
    assert [texts.text(token_id) for token_id in (1, 2, 4)] == [" a", "a", "bytes:\\xe4"]
    assert [texts.utf8(token_id) for token_id in (1, 4, 5)] == [[32, 97], [0xE4], [0xB8]]
    assert list(texts.offsets([2, 4, 5, 6, 1], skip_special=True)) == [0, 1, 1, 1, 2]
