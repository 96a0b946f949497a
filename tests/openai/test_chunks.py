"""Chunks of pieces: roles, indices, offsets, and what is not worth a chunk."""

from __future__ import annotations

from typing import Any

from rayspec.decode.output import TokenTexts
from rayspec.openai.requests import ChatRequest, CompletionRequest
from rayspec.openai.responses import Chunks, Stamp, plain_body
from rayspec.types import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from tests.demo_model import demo_tokenizer

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
TEXT: dict[str, Any] = {"model": "m", "prompt": "x", "stream": True}
STAMP = Stamp(id="id-1", created=5, model="m")
TEXTS = TokenTexts(demo_tokenizer())
HAN = demo_tokenizer()("世", add_special_tokens=False)["input_ids"]


def piece(*outputs: CompletionOutput) -> RequestOutput:
    return RequestOutput(request_id="r", prompt=None, prompt_token_ids=(1, 2), outputs=list(outputs), finished=False)


def new(text: str, *token_ids: int, index: int = 0, logprobs: bool = False, **values: Any) -> CompletionOutput:
    rows = [{token_id: Logprob(logprob=-0.5, rank=1)} for token_id in token_ids] if logprobs else None
    return CompletionOutput(index=index, text=text, token_ids=token_ids, logprobs=rows, **values)


def choices_of(chunks: Chunks, *pieces: tuple[int, RequestOutput]) -> list[dict[str, Any]]:
    made = [plain_body(chunk) for prompt_index, one in pieces for chunk in chunks.of(prompt_index, one)]
    assert all(len(chunk["choices"]) == 1 for chunk in made)
    return [chunk["choices"][0] for chunk in made]


def test_each_choice_of_a_chat_begins_with_its_role() -> None:
    chunks = Chunks(ChatRequest.parse(CHAT | {"n": 2}), TEXTS, STAMP)
    first = piece(new("a", 5), new("", 6, index=1))
    second = piece(new("b", 7, finish_reason="length"), new("c", 8, index=1, finish_reason="stop", stop_reason="c"))
    told = [
        (one["index"], one["delta"], one["finish_reason"], one["stop_reason"])
        for one in choices_of(chunks, (0, first), (0, second))
    ]
    begin = {"role": "assistant", "content": ""}
    assert told == [
        (0, begin, None, None),
        (0, {"content": "a"}, None, None),
        (1, begin, None, None),
        (0, {"content": "b"}, "length", None),
        (1, {"content": "c"}, "stop", "c"),
    ]


def test_indices_count_on_over_prompts() -> None:
    chunks = Chunks(CompletionRequest.parse(TEXT | {"n": 3}), TEXTS, STAMP)
    pieces = [(2, piece(new("a", 5, index=1))), (0, piece(new("b", 5, index=2))), (1, piece(new("c", 5)))]
    assert [one["index"] for one in choices_of(chunks, *pieces)] == [7, 2, 3]
    alone = Chunks(CompletionRequest.parse(TEXT), TEXTS, STAMP)
    assert [one["index"] for one in choices_of(alone, *((index, piece(new("a", 5))) for index in range(3)))] == [
        0,
        1,
        2,
    ]


def test_what_is_held_back_gives_no_chunk_unless_it_has_log_probabilities() -> None:
    held = [(0, piece(new("", HAN[0]))), (0, piece(new("", HAN[1]))), (0, piece(new("世", *HAN[2:])))]
    chunks = Chunks(CompletionRequest.parse(TEXT), TEXTS, STAMP)
    assert [one["text"] for one in choices_of(chunks, *held)] == ["世"]
    held = [(0, piece(new("", one, logprobs=True))) for one in HAN]
    chunks = Chunks(CompletionRequest.parse(TEXT | {"logprobs": 0}), TEXTS, STAMP)
    assert [len(one["logprobs"]["tokens"]) for one in choices_of(chunks, *held)] == [1] * len(HAN)


def test_an_end_without_text_is_told() -> None:
    for body, kind in ((CHAT, ChatRequest), (TEXT, CompletionRequest)):
        chunks = Chunks(kind.parse(body), TEXTS, STAMP)
        assert choices_of(chunks, (0, piece(new("", finish_reason="stop"))))[-1]["finish_reason"] == "stop"


def test_offsets_go_on_over_chunks_and_over_halves_of_characters() -> None:
    chunks = Chunks(CompletionRequest.parse(TEXT | {"logprobs": 0}), TEXTS, STAMP)
    (a,) = demo_tokenizer()("a")["input_ids"]
    tokens = [a, *HAN, a]
    pieces = [(prompt, piece(new("?", one, logprobs=True))) for one in tokens for prompt in (0, 1)]
    told = choices_of(chunks, *pieces)
    for index in (0, 1):
        offsets = [one["logprobs"]["text_offset"] for one in told if one["index"] == index]
        assert offsets == [[0], *[[1]] * len(HAN), [2]]


def test_the_end_has_what_was_asked_for() -> None:
    usage = {
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    for base, kind in ((CHAT, ChatRequest), (TEXT, CompletionRequest)):
        plain = kind.parse(base)
        with_usage = kind.parse(base | {"stream_options": {"include_usage": True}})
        with_metrics = kind.parse(base | {"return_spec_decode_metrics": True})
        ends = []
        for request, told in ((plain, "absent"), (with_usage, None), (with_metrics, "absent")):
            chunks = Chunks(request, TEXTS, STAMP)
            (*_, chunk) = chunks.of(0, piece(new("a", 5, 6)))
            assert plain_body(chunk).get("usage", "absent") == told
            ends.append([plain_body(end) for end in chunks.end()])
        assert ends[0] == []
        ((end,), (other,)) = ends[1:]
        assert (end["choices"], end["usage"], "metrics" in end) == ([], usage, False)
        assert (other["choices"], "usage" in other, other["metrics"]["num_spec_steps"]) == ([], False, 0)


def test_usage_counts_all_pieces_and_the_latest_metrics() -> None:
    chunks = Chunks(CompletionRequest.parse(TEXT | {"return_spec_decode_metrics": True}), TEXTS, STAMP)
    for prompt_index, lengths, num_rounds in ((0, (1,), 2), (1, (1,), 3), (0, (1, 4), 5)):
        output = piece(*(new("a", *[5] * length, index=index) for index, length in enumerate(lengths)))
        output.metrics = RequestMetrics(num_rounds=num_rounds, num_plain_rounds=1, num_draft_tokens=2 * num_rounds)
        list(chunks.of(prompt_index, output))
    (end,) = chunks.end()
    assert (chunks.usage.prompt_tokens, chunks.usage.completion_tokens) == (4, 7)
    metrics = plain_body(end)["metrics"]
    assert (metrics["num_spec_steps"], metrics["num_draft_tokens"]) == (6, 16)


def test_special_tokens_take_their_place_where_they_are_not_skipped() -> None:
    tokenizer = demo_tokenizer()
    (a,) = tokenizer("a")["input_ids"]
    output = piece(new("?", a, tokenizer.eos_token_id, a, logprobs=True))
    for skip, place in ((None, 0), (True, 0), (False, len(tokenizer.eos_token))):
        chunks = Chunks(CompletionRequest.parse(TEXT | {"logprobs": 0, "skip_special_tokens": skip}), TEXTS, STAMP)
        (choice,) = choices_of(chunks, (0, output))
        assert choice["logprobs"]["text_offset"] == [0, 1, 1 + place]
