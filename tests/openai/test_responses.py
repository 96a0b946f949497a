"""Responses that the official client can read."""

from __future__ import annotations

from functools import cache
from typing import Any

import openai.types as official
import openai.types.chat as official_chat
import pytest
from openai.types.completion_usage import PromptTokensDetails

from rayspec.decode.output import TokenTexts
from rayspec.openai.errors import InvalidRequestError
from rayspec.openai.requests import ChatRequest, CompletionRequest, check_served
from rayspec.openai.responses import ModelCard, ModelList, SpecDecodeMetrics, Stamp, Usage, plain_body, response
from rayspec.types import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from tests.demo_model import demo_tokenizer

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "x"}
STAMP = Stamp(id="id-1", created=1_700_000_000, model="m")


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
    body = plain_body(response(request, [_output(first, second)], demo_texts(), STAMP))
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
        prompt_tokens=3,
        completion_tokens=num_tokens,
        total_tokens=3 + num_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=0),
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
        plain_body(response(request, outputs, demo_texts(), STAMP)), strict=True
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
    chat = response(ChatRequest.parse(CHAT), [_output(_completion("a"))], demo_texts(), STAMP)
    assert chat.choices[0].logprobs is None
    text = response(CompletionRequest.parse(TEXT), [_output(_completion("a"))], demo_texts(), STAMP)
    assert text.choices[0].logprobs is None
    plain = ChatRequest.parse(CHAT | {"logprobs": True})
    rows = response(plain, [_output(_completion("a", logprobs=True))], demo_texts(), STAMP).choices[0].logprobs
    assert rows is not None
    assert rows.content[0].top_logprobs == []


def test_what_drafting_did_is_told_when_asked_for_only() -> None:
    output = _output(_completion("a"))
    output.metrics = RequestMetrics(num_rounds=7, num_plain_rounds=3, num_draft_tokens=10, num_accepted_tokens=6)
    told = {
        "mean_acceptance_length": 2.5,
        "draft_acceptance_rate": 0.6,
        "num_draft_tokens": 10,
        "num_accepted_draft_tokens": 6,
        "num_spec_steps": 4,
    }
    asks = {"return_spec_decode_metrics": True}
    for wanted, extra in ((told, asks), (None, {}), (None, {"return_spec_decode_metrics": False})):
        chat = response(ChatRequest.parse(CHAT | extra), [output], demo_texts(), STAMP)
        assert plain_body(chat).get("metrics") == wanted
        text = response(CompletionRequest.parse(TEXT | extra), [output], demo_texts(), STAMP)
        assert plain_body(text).get("metrics") == wanted
    assert "metrics" not in plain_body(text)


def test_a_prompt_counts_once_and_every_completion_counts() -> None:
    outputs = [_output(_completion("ab"), _completion("abcd", index=1)), _output(_completion("a"), num_prompt_tokens=5)]
    usage = Usage.of(outputs)
    num_tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (8, num_tokens, 8 + num_tokens)


def test_means_of_nothing_are_none() -> None:
    metrics = SpecDecodeMetrics.of([RequestMetrics(num_rounds=4, num_plain_rounds=4)])
    assert (metrics.mean_acceptance_length, metrics.draft_acceptance_rate, metrics.num_spec_steps) == (None, None, 0)


def test_models_are_read_by_the_official_client() -> None:
    body = plain_body(ModelList(data=[ModelCard(id="m", created=5, max_model_len=9)]))
    (model,) = body["data"]
    assert official.Model.model_validate(model, strict=True).model_extra == {"max_model_len": 9}
    assert body["object"] == "list"


def test_a_model_that_is_not_served_is_named() -> None:
    check_served("b", ("a", "b"))
    with pytest.raises(InvalidRequestError, match="'c' does not exist; served here: 'a', 'b'") as caught:
        check_served("c", ("a", "b"))
    assert (caught.value.status, caught.value.param, caught.value.code) == (404, "model", "model_not_found")
