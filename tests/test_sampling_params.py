"""What each sampling parameter does to the texts of an LLM, whatever drafts for it."""

from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from rayspec import LLM, SamplingParams, demo
from rayspec.decode import requests
from rayspec.prompts import text_tokens
from rayspec.types import ConfigError, InvalidTokenError, Logprob, Request, RequestOutput
from tests.demo_model import demo_tokenizer, shallow_demo
from tests.exhaustive import few_of
from tests.families import reference

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 512, "kv_cache_tokens": 2048}
STRATEGIES: dict[str, Any] = {
    "static": {"strategy": "static", "skip": [3, 4], "max_draft_tokens": 4},
    "lookup": {"strategy": "lookup"},
    "auto": {"strategy": "auto"},
    "lookahead": {"strategy": "lookahead"},
    "ar": {"strategy": "ar"},
}
TEXT = " ".join(document.text for document in demo.sample_documents(1, num_sentences=6, seed=3))


@pytest.fixture(scope="module")
def llms() -> Iterator[dict[str, LLM]]:
    made = {name: LLM(shallow_demo(), speculation=one, max_num_seqs=3, **OPTIONS) for name, one in STRATEGIES.items()}
    yield made
    for one in made.values():
        one.shutdown()


@pytest.fixture(scope="module")
def llm(llms: dict[str, LLM]) -> LLM:
    return llms["static"]


def _one(llm: LLM, prompt: Any = TEXT, **params: Any) -> RequestOutput:
    (output,) = llm.generate(
        prompt, SamplingParams(**{"temperature": 0, "max_tokens": 40, "ignore_eos": True} | params)
    )
    assert output.error is None
    return output


def _ids(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("temperature", few_of([0.0, 0.8], [0.8]))
def test_masks_give_the_same_text_whatever_drafts(llms: dict[str, LLM], temperature: float) -> None:
    params: dict[str, Any] = {"temperature": temperature, "seed": 5, "ignore_eos": True}
    free = _one(llms["ar"], **params)
    words = tuple(dict.fromkeys(free.outputs[0].text.split()))[:3]
    allowed = tuple(sorted(set(_ids(free)))) + tuple(range(40, 80))
    masks: list[dict[str, Any]] = [{"bad_words": words}, {"bad_words": words[:1], "logit_bias": {50: 2}}]
    masks.append({"allowed_token_ids": allowed})
    asked = [SamplingParams(**params, max_tokens=40, **one) for one in masks]
    texts = [[_ids(output) for output in llm.generate([TEXT] * len(asked), asked)] for llm in llms.values()]
    assert all(text == texts[0] for text in texts[1:])
    assert _ids(free) not in texts[0][:2]
    assert llms["static"].stats.num_accepted_tokens > 0
    assert llms["lookup"].stats.num_accepted_tokens > 0


def test_bad_words_never_come(llm: LLM) -> None:
    params = {"temperature": 1.0, "seed": 3}
    words = list(dict.fromkeys(_one(llm, **params).outputs[0].text.split()))[:4]
    assert len(words) == 4
    text = _one(llm, bad_words=words, **params).outputs[0].text
    assert not set(words) & set(text.split())


def test_bad_words_are_tokenized_once_for_all_prompts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine tokenizes them between two steps, for 50 ms where there are many."""
    asked = Mock(side_effect=text_tokens)
    monkeypatch.setattr(requests, "text_tokens", asked)
    llm.generate([{"prompt_token_ids": [60]}] * 20, SamplingParams(bad_words=["agency", "road"], max_tokens=1))
    assert asked.call_count <= 4


@pytest.mark.parametrize("word", ["\n", " "], ids=["newline", "space"])
def test_a_bad_word_may_be_white_space(llm: LLM, word: str) -> None:
    (token,) = llm.tokenizer.encode(word, add_special_tokens=False)
    assert token in _ids(_one(llm, logit_bias={token: 100}))
    assert token not in _ids(_one(llm, logit_bias={token: 100}, bad_words=[word]))


def test_only_allowed_tokens_come(llm: LLM) -> None:
    allowed = [60, 61, 62, 63, 300]
    assert set(_ids(_one(llm, allowed_token_ids=allowed))) <= set(allowed)
    output = llm.generate("a", SamplingParams(allowed_token_ids=[10**6]))[0]
    assert isinstance(output.error, InvalidTokenError)
    assert "allowed_token_ids" in str(output.error)


def test_token_ids_alone(llm: LLM) -> None:
    with_text, without = _one(llm, logprobs=1), _one(llm, logprobs=1, detokenize=False)
    assert _ids(with_text) == _ids(without)
    assert without.outputs[0].text == "" != with_text.outputs[0].text
    rows = without.outputs[0].logprobs
    assert rows is not None
    assert all(one.decoded_token is None for row in rows for one in row.values())


@pytest.mark.parametrize(("most", "num_left"), [(7, 7), (-1, 512 - 40), (100_000, None)])
def test_a_prompt_is_cut_at_its_beginning(llm: LLM, most: int, num_left: int | None) -> None:
    tokens = llm.tokenizer(" ".join([TEXT] * 6))["input_ids"][:600]
    if num_left is None:
        tokens = tokens[:50]
    output = _one(llm, {"prompt_token_ids": tokens}, truncate_prompt_tokens=most)
    assert list(output.prompt_token_ids) == tokens[-(num_left or 50) :]


def test_without_max_tokens_the_text_may_fill_the_context(llm: LLM) -> None:
    output = _one(llm, {"prompt_token_ids": [40] * 500}, max_tokens=None)
    assert len(_ids(output)) == 12
    short: dict[str, Any] = OPTIONS | {"kv_cache_tokens": 128}
    with LLM(shallow_demo(), speculation={"strategy": "ar"}, **short) as one:
        output = _one(one, {"prompt_token_ids": [40] * 100}, max_tokens=None)
        assert len(_ids(output)) == 28


def _expected(tokens: Sequence[int]) -> torch.Tensor:
    """The log-probabilities of the tokens after each token, by transformers."""
    with torch.inference_mode():
        logits = reference(shallow_demo())(torch.tensor([list(tokens)])).logits[0]
    return logits.float().log_softmax(-1)


def _require(rows: Sequence[dict[int, Logprob] | None] | None, tokens: Sequence[int], table: torch.Tensor) -> None:
    assert rows is not None
    assert len(rows) == len(tokens)
    assert rows[0] is None
    for at, (row, token) in enumerate(zip(rows[1:], tokens[1:], strict=True)):
        assert row is not None
        assert row[token].logprob == pytest.approx(float(table[at, token]), abs=1e-4)
        assert {one.rank for one in row.values()} >= {1, 2, 3}
        assert set(table[at].topk(3).indices.tolist()) <= set(row)
        assert all(one.decoded_token is not None for one in row.values())


@pytest.mark.parametrize("chunk", [16, 1024])
def test_log_probabilities_of_a_prompt_are_those_of_transformers(chunk: int) -> None:
    """In chunks, beside others that decode, and although the prompt is in the cache."""
    tokens = demo_tokenizer()(TEXT)["input_ids"][:100]
    table = _expected(tokens)
    asked = SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=3, n=2)
    with LLM(shallow_demo(), speculation={"strategy": "lookup"}, max_num_batched_tokens=chunk, **OPTIONS) as one:
        prompts: list[Any] = [{"prompt_token_ids": tokens}] * 3 + [{"prompt_token_ids": tokens[:1]}]
        plain = asked.replace(prompt_logprobs=None)
        first, second, other, short = one.generate(prompts, [plain, asked, plain, asked])
        for output in (second, *one.generate(prompts[:1], asked)):
            _require(output.prompt_logprobs, tokens, table)
            assert output.metrics.num_cached_tokens == 0 or output.outputs[1:]
        assert short.prompt_logprobs == [None]
        assert first.prompt_logprobs is other.prompt_logprobs is None
        assert [one.token_ids for one in first.outputs] == [one.token_ids for one in second.outputs]
        request = Request(request_id="s", params=asked, prompt_token_ids=tokens, stream=True)
        streamed = [output.prompt_logprobs for output in one.stream([request])]
        assert len([rows for rows in streamed if rows is not None]) == 1


def test_a_copy_equals_and_no_copy_changes() -> None:
    one = SamplingParams(temperature=0.5, stop=["a"])
    assert one.clone() == one
    with pytest.raises(ConfigError, match=r"SamplingParams cannot change: use its copy by replace\(max_tokens=5\)"):
        one.max_tokens = 5
