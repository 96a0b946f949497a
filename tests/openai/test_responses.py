"""Responses, whole and in chunks, that the official client can read."""

from __future__ import annotations

from typing import Any

import openai.types as official
import openai.types.chat as official_chat
from openai.types.completion_usage import PromptTokensDetails

from rayspec.decode.output import TokenTexts
from rayspec.openai.requests import ChatRequest, CompletionRequest
from rayspec.openai.responses import Answer, plain_body
from rayspec.types import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from tests.demo_model import demo_tokenizer

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "x"}
HAN = demo_tokenizer()("世", add_special_tokens=False)["input_ids"]


def answer(body: dict[str, Any], **more: Any) -> Answer:
    kind: Any = ChatRequest if "messages" in body else CompletionRequest
    return Answer(kind.parse(body | more), TokenTexts(demo_tokenizer()), name="1", created=1_700_000_000, model="m")


def output(*completions: CompletionOutput, num_prompt_tokens: int = 3, **metrics: int) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=tuple(range(num_prompt_tokens)),
        outputs=list(completions),
        finished=True,
        metrics=RequestMetrics(**metrics),
    )


def completion(text: str, *, index: int = 0, logprobs: bool = False, **values: Any) -> CompletionOutput:
    token_ids = values.pop("token_ids", None) or demo_tokenizer()(text)["input_ids"]
    top = {40: Logprob(logprob=-0.5, rank=1), 41: Logprob(logprob=-1.5, rank=2)}
    rows = [{token_id: Logprob(logprob=float("-inf"), rank=3)} | top for token_id in token_ids]
    values = {"finish_reason": "stop"} | values
    return CompletionOutput(index=index, text=text, token_ids=token_ids, logprobs=rows if logprobs else None, **values)


def test_a_chat_completion_is_read_by_the_official_client() -> None:
    first = completion("Hi é", logprobs=True)
    second = completion("Yo", index=1, logprobs=True, finish_reason="length")
    body = plain_body(answer(CHAT, logprobs=True, top_logprobs=2).whole([output(first, second)]))
    parsed = official_chat.ChatCompletion.model_validate(body, strict=True)
    assert (parsed.id, parsed.created, parsed.model) == ("chatcmpl-1", 1_700_000_000, "m")
    assert parsed.object == "chat.completion"
    found = [(choice.index, choice.message.content, choice.finish_reason) for choice in parsed.choices]
    assert found == [(0, "Hi é", "stop"), (1, "Yo", "length")]
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hi é", "refusal": None}
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
    outputs = [
        output(completion("ab é c", logprobs=True), completion("d", index=1, logprobs=True)),
        output(completion("e", logprobs=True, finish_reason="length"), num_prompt_tokens=4),
    ]
    parsed = official.Completion.model_validate(plain_body(answer(TEXT, logprobs=2).whole(outputs)), strict=True)
    found = [(choice.index, choice.text, choice.finish_reason) for choice in parsed.choices]
    assert found == [(0, "ab é c", "stop"), (1, "d", "stop"), (2, "e", "length")]
    logprobs = parsed.choices[0].logprobs
    assert logprobs is not None
    num_tokens = len(outputs[0].outputs[0].token_ids)
    assert [len(getattr(logprobs, name)) for name in type(logprobs).model_fields] == [num_tokens] * 4
    for token, chosen, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert chosen == top[token] == -9999.0
        assert len(top) == 3
    assert parsed.usage is not None
    assert parsed.usage.prompt_tokens == 7


def choices_of(made: Answer, *pieces: tuple[int, CompletionOutput]) -> list[dict[str, Any]]:
    chunks = [plain_body(chunk) for prompt, one in pieces for chunk in made.chunks(prompt, output(one))]
    return [choice for chunk in chunks for choice in chunk["choices"]]


def test_what_is_held_back_gives_no_chunk_unless_it_has_log_probabilities() -> None:
    texts = ("", "", "世")
    held = [(0, completion(text, token_ids=[one], finish_reason=None)) for text, one in zip(texts, HAN, strict=True)]
    assert [one["text"] for one in choices_of(answer(TEXT), *held)] == ["世"]
    held = [(0, completion("", token_ids=[one], logprobs=True, finish_reason=None)) for one in HAN]
    assert [len(one["logprobs"]["tokens"]) for one in choices_of(answer(TEXT, logprobs=0), *held)] == [1] * len(HAN)
    end = completion("", token_ids=[HAN[0]], finish_reason="stop")
    assert choices_of(answer(CHAT), (0, end))[-1]["finish_reason"] == "stop"


def test_offsets_go_on_over_chunks_and_over_halves_of_characters() -> None:
    (a,) = demo_tokenizer()("a")["input_ids"]
    pieces = [
        (prompt, completion("?", token_ids=[one], logprobs=True, finish_reason=None))
        for one in [a, *HAN, a]
        for prompt in (0, 1)
    ]
    told = choices_of(answer(TEXT, logprobs=0), *pieces)
    for index in (0, 1):
        offsets = [one["logprobs"]["text_offset"] for one in told if one["index"] == index]
        assert offsets == [[0], *[[1]] * len(HAN), [2]]
    special = completion("?", token_ids=[a, demo_tokenizer().eos_token_id, a], logprobs=True)
    for skip, place in ((None, 0), (False, len(demo_tokenizer().eos_token))):
        (choice,) = choices_of(answer(TEXT, logprobs=0, skip_special_tokens=skip), (0, special))
        assert choice["logprobs"]["text_offset"] == [0, 1, 1 + place]
