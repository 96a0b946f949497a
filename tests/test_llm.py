from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rayspec import LLM, SamplingParams, demo
from rayspec.types import (
    CheckpointError,
    ConfigError,
    EmptyPromptError,
    InvalidTokenError,
    PromptTooLongError,
    Request,
)
from tests.demo_model import EOS, demo_tokenizer
from tests.families import build, cases, checkpoint, greedy

GREEDY = SamplingParams(temperature=0, max_tokens=40)
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 1024, "kv_cache_tokens": 2048}
STATIC = {"strategy": "static", "skip": [13, 14, 18], "max_draft_tokens": 4}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", speculation=STATIC, max_num_seqs=3, **OPTIONS) as one:
        yield one


def _messages(count: int) -> list[list[dict[str, str]]]:
    documents = demo.sample_documents(count, num_sentences=6, seed=21)
    return [[{"role": "user", "content": document.text}] for document in documents]


def test_chat_answers_as_generate_of_transformers_does(llm: LLM) -> None:
    conversations = _messages(4)
    outputs = llm.chat(conversations, GREEDY)
    prompts = [llm.chat_tokens(one) for one in conversations]
    expected = greedy(demo.model_path(), prompts, 40, eos=(EOS,))
    assert [output.outputs[0].token_ids for output in outputs] == expected
    for output, prompt, tokens in zip(outputs, prompts, expected, strict=True):
        assert output.finished
        assert output.error is None
        assert list(output.prompt_token_ids) == prompt
        assert output.outputs[0].text == demo_tokenizer().decode(tokens, skip_special_tokens=True)
        assert output.metrics.num_rounds > 0
        assert output.metrics.num_draft_tokens >= output.metrics.num_accepted_tokens > 0
    assert llm.chat(conversations[0], GREEDY)[0].outputs[0].token_ids == expected[0]


def test_prompts_are_texts_or_tokens(llm: LLM) -> None:
    text = "The fee was paid in May. The report says"
    tokens = demo_tokenizer()(text)["input_ids"]
    one, two, three = llm.generate([text, {"prompt": text}, {"prompt_token_ids": tokens}], GREEDY)
    assert one.outputs[0].token_ids == two.outputs[0].token_ids == three.outputs[0].token_ids
    assert (one.prompt, three.prompt) == (text, None)
    assert llm.generate(text, GREEDY)[0].outputs[0].text == one.outputs[0].text
    assert llm.generate({"prompt_token_ids": tokens}, GREEDY)[0].outputs[0].text == one.outputs[0].text


def test_outputs_come_in_the_order_of_the_prompts_and_bad_ones_do_not_disturb(llm: LLM) -> None:
    prompts: list[Any] = [
        {"prompt_token_ids": [50, 60, 70]},
        {"prompt_token_ids": []},
        "",
        {"prompt_token_ids": [5] * 1024},
        {"prompt_token_ids": [5, 10**6]},
        *({"prompt_token_ids": [40 + index, 9]} for index in range(9)),
    ]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    kinds = [type(output.error) for output in outputs[1:5]]
    assert kinds == [EmptyPromptError, EmptyPromptError, PromptTooLongError, InvalidTokenError]
    assert all(output.finished for output in outputs)
    for prompt, output in zip(prompts, outputs, strict=True):
        if output.error is None:
            assert list(output.prompt_token_ids) == prompt["prompt_token_ids"]
            assert len(output.outputs[0].token_ids) == 5
        else:
            assert output.outputs == []
    assert len({output.request_id for output in outputs}) == len(prompts)


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 4, 2)]
    outputs = llm.generate(["one", "two", "three"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 4, 2]
    with pytest.raises(ConfigError, match="2 sampling params for 3 prompts"):
        llm.generate(["one", "two", "three"], params[:2])


def test_nothing_in_nothing_out(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_a_stream_takes_no_more_than_it_can_use(llm: LLM) -> None:
    taken = 0

    def requests() -> Iterator[Request]:
        nonlocal taken
        for index in range(30):
            taken += 1
            yield Request(request_id=f"s{index}", params=GREEDY.replace(max_tokens=3), prompt_token_ids=[30 + index])

    outputs = llm.stream(requests())
    names = [next(outputs).request_id]
    assert taken <= 2 * 3 + 1
    names += [output.request_id for output in outputs]
    assert sorted(names) == sorted(f"s{index}" for index in range(30))


def test_a_stream_that_is_left_can_be_shut_down(llm: LLM) -> None:
    stream = llm.stream(
        Request(request_id=f"t{index}", params=GREEDY, prompt_token_ids=[30 + index]) for index in range(9)
    )
    next(stream)
    assert llm.engine.has_unfinished
    llm.shutdown()
    assert not llm.engine.has_unfinished
    assert llm.generate("again", GREEDY.replace(max_tokens=2))[0].error is None


def test_the_options_in_force_are_shown(llm: LLM) -> None:
    assert llm.config.max_model_len == 1024
    assert llm.config.device == "cpu"
    assert llm.stats.num_generated_tokens > 0
    assert llm.stats.gate_reason


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "auto"])
def test_other_data_types_run(dtype: str) -> None:
    with LLM("demo", **(OPTIONS | {"dtype": dtype}), speculation=STATIC) as one:
        output = one.chat(_messages(1)[0], GREEDY.replace(max_tokens=8))[0]
    assert output.error is None
    assert len(output.outputs[0].token_ids) == 8


def test_eos_of_the_generation_config_ends_a_text(tmp_path: Path) -> None:
    known = cases(checkpoint("qwen2"), (9, 30), 24)
    model = build("qwen2")
    eos = [known.expected[0][10], known.expected[1][6]]
    model.generation_config.eos_token_id = eos
    model.save_pretrained(tmp_path)
    with LLM(str(tmp_path), tokenizer=demo.tokenizer_path(), speculation={"strategy": "ar"}, **OPTIONS) as one:
        outputs = one.generate([{"prompt_token_ids": prompt} for prompt in known.prompts], GREEDY)
        ignored = one.generate({"prompt_token_ids": known.prompts[0]}, GREEDY.replace(ignore_eos=True, max_tokens=24))
    for output, whole in zip(outputs, known.expected, strict=True):
        tokens = output.outputs[0].token_ids
        assert tuple(tokens) == whole[: len(tokens)]
        assert tokens[-1] in eos
        assert output.outputs[0].finish_reason == "stop"
    assert ignored[0].outputs[0].token_ids == known.expected[0]


def test_the_longest_context_is_the_models_own() -> None:
    options = {**OPTIONS, "max_model_len": None, "speculation": {"strategy": "ar"}}
    assert LLM("demo", **options).config.max_model_len == 8192
    with pytest.raises(ConfigError, match=r"max_model_len.*8193.*8192"):
        LLM("demo", **(options | {"max_model_len": 8193}))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_model_length": 5}, ConfigError, "did you mean 'max_model_len'"),
        ({"speculation": {"strategy": "knapsack"}}, ConfigError, "knapspec"),
        ({"speculation": {"stratgy": "ar"}}, ConfigError, "strategy"),
        ({"speculation": {"strategy": "static", "skip": [32]}}, ConfigError, "sublayer 32.*0 to 31"),
        ({"speculation": {"strategy": "ar", "skip": [1]}}, ConfigError, "skip"),
        ({"dtype": "float8"}, ConfigError, "dtype"),
        ({"device": "cpuu"}, ConfigError, "device"),
        ({"tokenizer": "no-such-tokenizer"}, CheckpointError, "no-such-tokenizer"),
        ({"model": "no-such-model"}, CheckpointError, "no-such-model"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    values = {"model": "demo", **OPTIONS, **options}
    with pytest.raises(error, match=message):
        LLM(**values)


def test_unknown_prompt_keys_are_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="prompt_tokens"):
        llm.generate({"prompt_tokens": [1]}, GREEDY)


def test_the_number_of_threads_is_set() -> None:
    before = torch.get_num_threads()
    try:
        LLM("demo", num_threads=2, speculation={"strategy": "ar"}, **OPTIONS)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
