from __future__ import annotations

import gc
import io
import os
import pickle
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tqdm import tqdm
from transformers import GenerationConfig

from rayspec import LLM, SamplingParams, TextPrompt, TokensPrompt, demo
from rayspec.decode.engine_loop import EngineDeadError, EngineLoop
from rayspec.decode.output import NewOutput
from rayspec.decode.stages import StageLostError
from rayspec.types import (
    CheckpointError,
    ConfigError,
    EmptyPromptError,
    InvalidTokenError,
    PromptTooLongError,
    Request,
    RequestError,
    RequestOutput,
)
from tests.demo_model import EOS, demo_tokenizer, shallow_demo
from tests.families import build, greedy
from tests.waiting import wait_until

CALL = {"id": "c1", "type": "function", "function": {"name": "mul", "arguments": '{"a": 6}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
GREEDY = SamplingParams(temperature=0, max_tokens=40)
ENDLESS = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
SHORT = GREEDY.replace(max_tokens=6)
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 1024, "kv_cache_tokens": 2048}
STATIC = {"strategy": "static", "skip": [3, 4], "max_draft_tokens": 4}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(shallow_demo(), speculation=STATIC, max_num_seqs=3, **OPTIONS) as one:
        yield one


def _messages(count: int) -> list[list[dict[str, str]]]:
    documents = demo.sample_documents(count, num_sentences=6, seed=21)
    return [[{"role": "user", "content": document.text}] for document in documents]


def test_arguments_have_the_names_and_places_of_vllm(llm: LLM) -> None:
    conversation = _messages(1)[0]
    named = llm.generate(prompts="Report", sampling_params=SHORT, use_tqdm=False, lora_request=None)
    assert _tokens(named) == _tokens(llm.generate("Report", SHORT))
    (answer,) = llm.chat(conversation, SHORT, False)
    again = llm.chat(messages=conversation, sampling_params=SHORT, add_generation_prompt=True, tools=None)
    assert _tokens([answer]) == _tokens(again)
    (without,) = llm.chat(conversation, SHORT, add_generation_prompt=False)
    prompt = llm.tokenizer.apply_chat_template(conversation, add_generation_prompt=False, return_dict=True)["input_ids"]
    assert list(without.prompt_token_ids) == prompt != list(answer.prompt_token_ids)


def test_a_progress_bar_may_be_the_callers_own(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    bars: list[tqdm[Any]] = []

    def bar(**options: Any) -> tqdm[Any]:
        bars.append(tqdm(file=io.StringIO(), **options))
        return bars[0]

    llm.generate(["one", "", "three"], SHORT, use_tqdm=bar)
    assert [(bar.n, bar.total) for bar in bars] == [(3, 3)]
    llm.generate(["one"], SHORT)
    assert capsys.readouterr() == ("", "")  # no terminal


def test_a_checkpoint_is_run_with_its_generation_config(tmp_path: Path) -> None:
    model = build("llama")
    model.generation_config = GenerationConfig(
        pad_token_id=0, repetition_penalty=1.3, no_repeat_ngram_size=4, max_new_tokens=30, suppress_tokens=[17, 40]
    )
    model.save_pretrained(tmp_path)
    prompt = [5, 9, 7] * 5
    options: dict[str, Any] = OPTIONS | {"tokenizer": "demo", "speculation": STATIC | {"skip": [1, 4]}}
    mask = torch.ones(1, len(prompt), dtype=torch.int64)
    expected = model.generate(torch.tensor([prompt]), attention_mask=mask, do_sample=False)[0, len(prompt) :].tolist()
    with LLM(str(tmp_path), **options) as one:
        asked = {"prompt_token_ids": prompt}
        greedy_params = one.default_sampling_params.replace(temperature=0)
        assert list(one.generate(asked, greedy_params)[0].outputs[0].token_ids) == expected
        assert [len(output.outputs[0].token_ids) for output in one.generate(asked)] == [30]
        assert one.config.generation_config == "auto"
    with LLM(str(tmp_path), generation_config="none", **options) as one:
        assert one.default_sampling_params == SamplingParams()
        assert list(one.generate(asked, greedy_params)[0].outputs[0].token_ids) != expected


def test_chat_answers_as_generate_of_transformers_does(llm: LLM) -> None:
    conversations = _messages(4)
    outputs = llm.chat(conversations, GREEDY)
    prompts = [llm.chat_tokens(one) for one in conversations]
    expected = greedy(shallow_demo(), prompts, 40, eos=(EOS,))
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
    prompts: list[Any] = [text, TextPrompt(prompt=text), TokensPrompt(prompt_token_ids=tokens), tokens]
    one, two, three, four = llm.generate(prompts, GREEDY)
    assert _tokens([one, one, one]) == _tokens([two, three, four])
    assert _tokens(llm.generate(tokens, GREEDY)) == _tokens([one])
    assert _tokens(llm.generate({"prompt": text, "multi_modal_data": None}, GREEDY)) == _tokens([one])
    assert (one.prompt, three.prompt) == (text, None)
    assert llm.generate(text, GREEDY)[0].outputs[0].text == one.outputs[0].text
    assert llm.generate({"prompt_token_ids": tokens}, GREEDY)[0].outputs[0].text == one.outputs[0].text
    for array in (np.array(tokens), torch.tensor(tokens), list(np.array(tokens))):
        both: list[Any] = [text, array]
        assert _tokens(llm.generate(array, GREEDY) + llm.generate(both, GREEDY)) == _tokens([one, one, one])


def _requests(prompts: Iterable[list[int]], params: SamplingParams) -> Iterator[Request]:
    for index, prompt in enumerate(prompts):
        yield Request(request_id=str(index), params=params, prompt_token_ids=prompt)


def _wait_until_idle(llm: LLM) -> None:
    wait_until(lambda: not llm.engine.has_unfinished)


def _tokens(outputs: Iterable[RequestOutput]) -> list[list[Sequence[int]]]:
    return [[one.token_ids for one in output.outputs] for output in outputs]


def test_calls_from_many_threads_get_their_own_outputs(llm: LLM) -> None:
    """Of every kind, good and bad, as one after another."""
    documents = _messages(3)
    sampled = SamplingParams(temperature=1.0, n=2, max_tokens=6, seed=7, logprobs=1)

    def generate(number: int) -> Any:
        prompts: list[Any] = [{"prompt_token_ids": [40 + number + index]} for index in range(4)]
        return _tokens(llm.generate([*prompts, "", "\ud800", 5], [*[SHORT, sampled] * 2, *[SHORT] * 3]))

    def chat(number: int) -> Any:
        outputs = llm.chat([documents[number % 3], [{"role": "nobody", "content": "x"}]], sampled)
        return [one.logprobs for output in outputs for one in output.outputs]

    def stream(number: int) -> Any:
        outputs = llm.stream(_requests([[50 + number], [], [60 + number]], SHORT))
        return sorted((output.request_id, _tokens([output])) for output in outputs)

    def closed_stream(number: int) -> Any:
        short = Request(request_id="short", params=SHORT, prompt_token_ids=[50 + number])
        with closing(llm.stream([short, *_requests([[60 + number]], ENDLESS)])) as outputs:
            return _tokens([next(outputs)])

    works = [(work, number) for number in range(3) for work in (generate, chat, stream, closed_stream)]
    expected = [work(number) for work, number in works]
    with ThreadPoolExecutor(len(works)) as pool:
        assert list(pool.map(lambda one: one[0](one[1]), works)) == expected
    _wait_until_idle(llm)


def test_a_request_runs_while_the_source_makes_the_next(llm: LLM) -> None:
    def source() -> Iterator[Request]:
        before = llm.stats.num_generated_tokens
        yield from _requests([[50]], SHORT)
        wait_until(lambda: llm.stats.num_generated_tokens > before, 60)
        yield from _requests([[60]], SHORT)

    assert len(list(llm.stream(source()))) == 2


def test_an_interrupt_aborts_the_requests_of_its_call(llm: LLM) -> None:
    others: list[RequestOutput] = []
    other = threading.Thread(target=lambda: others.extend(llm.generate({"prompt_token_ids": [30]}, GREEDY)))

    def interrupt() -> None:
        while len(llm.engine._requests) < 5:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    other.start()
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([{"prompt_token_ids": [31]}] * 20, ENDLESS)
    interrupter.join()
    other.join()
    assert others[0].error is None
    _wait_until_idle(llm)


def test_an_exception_of_the_engine_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[NewOutput]:
        raise RuntimeError("the device is gone")

    with LLM(shallow_demo(), speculation=STATIC, **OPTIONS) as one:
        monkeypatch.setattr(one.engine, "advance", fail)
        with pytest.raises(RuntimeError, match=r"^the device is gone$"):
            one.generate(["a", "b"], ENDLESS)
        with pytest.raises(EngineDeadError, match="the device is gone"):
            one.generate("again", GREEDY)


def test_when_the_model_is_lost_every_request_says_so() -> None:
    with LLM(shallow_demo(), speculation=STATIC, **OPTIONS) as one:
        lost = StageLostError("stage-1 is gone")

        def add(_: Request) -> None:
            raise lost

        one.engine.add = add  # type: ignore[method-assign]
        for _ in range(2):
            assert [output.error for output in one.generate(["a", "b"], GREEDY)] == [lost, lost]


def test_pickling_names_the_remedy(llm: LLM) -> None:
    with pytest.raises(TypeError, match="make one in each process"):
        pickle.dumps(llm)


def test_a_shutdown_ends_calls_that_are_under_way_and_refuses_later_ones() -> None:
    one = LLM(shallow_demo(), speculation=STATIC, **OPTIONS)
    left = one.stream(_requests([[30]], ENDLESS))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(one.generate, [{"prompt_token_ids": [30]}] * 20, ENDLESS)
        while not one.engine.has_unfinished:
            time.sleep(0.01)
        one.shutdown()
        with pytest.raises(EngineDeadError, match="it was stopped"):
            call.result(60)
    assert not one.engine.has_unfinished
    with pytest.raises(EngineDeadError, match="it was stopped"):
        next(left)
    for use in (lambda: one.generate("again"), lambda: one.chat(_messages(1)[0]), lambda: one.stream([])):
        with pytest.raises(ConfigError, match="has been shut down: load the model again"):
            use()
    one.shutdown()


def test_a_model_that_nobody_refers_to_is_freed() -> None:
    one = LLM(shallow_demo(), speculation=STATIC, **OPTIONS)
    one.generate("text", GREEDY.replace(max_tokens=2))
    engine = weakref.ref(one.engine)
    del one
    gc.collect()
    assert engine() is None


def test_the_processes_of_a_model_end_with_it_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[str]()
    monkeypatch.setattr(EngineLoop, "shutdown", lambda loop: ended.append(loop.info.config.model))
    for closes in (False, True):
        one = LLM(shallow_demo(), speculation=STATIC, **OPTIONS)
        if closes:
            one.shutdown()
        del one
        gc.collect()
        assert len(ended) == 1 + closes


def test_settings_of_the_callers_tokenizer_do_not_change_prompts(llm: LLM) -> None:
    """transformers keeps the settings of a call until the next one, and threads share them."""
    text = "The fee was paid in May."
    llm.tokenizer.backend_tokenizer.enable_truncation(2)
    assert llm.engine.tokenizer is not None
    assert llm.engine.tokenizer.backend_tokenizer.truncation is None
    assert len(llm.generate(text, GREEDY.replace(max_tokens=1))[0].prompt_token_ids) > 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_model_length": 5}, ConfigError, "did you mean 'max_model_len'"),
        ({"speculation": {"strategy": "static", "skip": [32]}}, ConfigError, "sublayer 32.*0 to 31"),
        ({"device": "cpuu"}, ConfigError, "device"),
        ({"max_model_len": 8193}, ConfigError, "max_model_len.*8193.*8192"),
        ({"tokenizer": "no-such-tokenizer"}, CheckpointError, "no-such-tokenizer"),
        ({"model": "no-such-model"}, CheckpointError, "no-such-model"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    values = {"model": "demo", **OPTIONS, **options}
    with pytest.raises(error, match=message):
        LLM(**values)


BAD_PROMPTS: list[tuple[Any, type[Exception], str]] = [
    ("\ud800", RequestError, r"'\\ud800' at index 0.*surrogate"),
    ("", EmptyPromptError, ""),
    ([5, "a"], RequestError, r"the prompt is \[5, 'a'\]: give a text, or .*prompt_token_ids"),
    ({"prompt_tokens": [1]}, RequestError, "prompt_tokens.*give a text, or .*'prompt_token_ids'"),
    ({"prompt_token_ids": [5, 1.7]}, InvalidTokenError, "prompt token 1.7 is not an integer"),
    ({"prompt_token_ids": [5, 10**6]}, InvalidTokenError, ""),
    ({"prompt_token_ids": [5] * 1024}, PromptTooLongError, ""),
    ({"prompt_token_ids": torch.tensor([0.5, 2.0])}, InvalidTokenError, "is not an integer"),
    ({"prompt_token_ids": torch.tensor(5)}, RequestError, r"prompt_token_ids is tensor\(5\): give a list of token ids"),
]


def test_a_bad_prompt_is_an_output_with_an_error_at_its_place(llm: LLM) -> None:
    prompts: list[Any] = ["ok", *(prompt for prompt, _, _ in BAD_PROMPTS), {"prompt_token_ids": torch.tensor([5, 6])}]
    good, *bad, other = llm.generate(prompts, [SHORT.replace(max_tokens=None)] + [SHORT] * (len(prompts) - 1))
    assert (good.error, other.error, other.prompt_token_ids) == (None, None, (5, 6))
    assert len(good.outputs[0].token_ids) > 6 >= len(other.outputs[0].token_ids), "each prompt has its own parameters"
    for output, (_, error, message) in zip(bad, BAD_PROMPTS, strict=True):
        assert type(output.error) is error
        assert re.search(message, str(output.error))
        assert (output.finished, output.outputs) == (True, [])
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        ("hi", "the conversation is 'hi': give a list"),
        ([CALLS], "messages.0.tool_calls: the model's chat template has no such field"),
    ],
)
def test_a_bad_conversation_is_an_output_with_an_error(llm: LLM, conversation: Any, message: str) -> None:
    good, bad = llm.chat([_messages(1)[0], conversation], GREEDY.replace(max_tokens=2))
    assert good.error is None
    assert isinstance(bad.error, RequestError)
    assert message in str(bad.error)
    assert str(pickle.loads(pickle.dumps(bad)).error) == str(bad.error)
    assert bad.request_id != good.request_id


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(5), "prompts is 5: give a text"),
        (lambda llm: llm.generate(pd.DataFrame({"prompt": ["a"]})), "prompts is +prompt"),
        (lambda llm: llm.generate("a", {"max_tokens": 5}), r"params has {'max_tokens': 5}: give SamplingParams\("),
        (lambda llm: llm.generate("a", params=SHORT), "argument 'params' is called 'sampling_params', as in vLLM"),
        (lambda llm: llm.generate("a", lora_request=1), "lora_request is 1: give one LoRARequest, or one"),
        (
            lambda llm: llm.chat(_messages(1)[0], continue_final_message=True),
            "argument 'continue_final_message' is True: give add_generation_prompt=False",
        ),
        (lambda llm: llm.generate("a", lora_reqest=None), "unknown argument 'lora_reqest'"),
        (lambda llm: llm.generate(["a", "b", "c"], [GREEDY, SHORT]), "2 sampling params for 3 prompts"),
        (lambda llm: llm.chat("hi"), "messages is 'hi': give a list"),
        (lambda llm: list(llm.stream(["a"])), r"a request is 'a': give a Request, or use generate\(\)"),
        (
            lambda llm: list(llm.stream([Request(request_id="a", params=5, prompt="a")])),
            r"the params of a request are 5: give SamplingParams\(",
        ),
        (
            lambda llm: list(llm.stream([Request(request_id="a", params=SHORT, prompt="a", owner=["b"])])),
            r"the owner of a request is \['b'\]: give a text",
        ),
    ],
)
def test_a_call_with_a_wrong_type_says_what_to_give(llm: LLM, call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(llm)
    assert not llm.engine.has_unfinished
