"""Responses, whole and in chunks, that the official client can read."""

from typing import Any

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
