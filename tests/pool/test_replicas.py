"""Replicas on a real Ray: two engines of the bundled model, each an actor of its own."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import ray

from rayspec import LLM, SamplingParams
from rayspec.decode.engine_loop import EngineDeadError
from rayspec.pool.replicas import Replicas, ResumedStream
from rayspec.pool.worker import RemoteEngine
from rayspec.types import CheckpointError, CompletionOutput, ConfigError, EmptyPromptError, Request, RequestOutput
from tests.demo_model import demo_prompts
from tests.engines import GREEDY, Pieces, tokens_of
from tests.pool.test_supervisor import is_whole
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

OPTIONS: dict[str, Any] = {
    "model": "demo", "dtype": "float32", "device": "cpu", "num_threads": 1, "max_model_len": 1024, "max_num_seqs": 4,
    "kv_cache_tokens": 2048,
}  # fmt: skip
TWO = {"replicas": 2, "cpus_per_shard": 0.5}
LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(ray_cluster: None) -> Iterator[LLM]:
    with LLM(**OPTIONS, parallel=TWO) as llm:
        wait_until_whole(llm)
        yield llm


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, Sequence[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in demo_prompts(6, 6)]


@pytest.fixture(scope="module")
def expected(prompts: list[dict[str, Sequence[int]]]) -> list[list[int]]:
    """Of one engine in this process, which decodes plainly."""
    with LLM(**OPTIONS, speculation={"strategy": "ar"}) as llm:
        return tokens_of(llm.generate(prompts, LONG))


def replicas_of(llm: LLM) -> Replicas:
    assert isinstance(llm.client, Replicas)
    return llm.client


def wait_until_whole(llm: LLM) -> None:
    wait_until(lambda: is_whole(replicas_of(llm)._pool.supervisor))


def engine_processes() -> list[int]:
    """Of all replicas that live."""
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    actors = [ray.get_actor(name) for name in names if name.startswith("rayspec-engine-")]
    return [ray.get(actor.place.remote()).process_id for actor in actors]


def kill_one_when_both_work(llm: LLM) -> threading.Thread:
    def kill() -> None:
        while llm.client.load.num_running < 2:
            time.sleep(0.01)
        os.kill(engine_processes()[0], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def test_replicas_answer_as_one_engine_and_share_requests(
    llm: LLM, prompts: list[Any], expected: list[list[int]]
) -> None:
    before = llm.stats.num_generated_tokens
    assert tokens_of(llm.generate(prompts, LONG)) == expected
    assert llm.stats.num_generated_tokens - before == 6 * 100
    assert (llm.client.num_wanted, llm.config.parallel.replicas if llm.config.parallel else 0) == (16, 2)
    assert len(engine_processes()) == 2


@pytest.mark.exhaustive
def test_a_killed_one_is_replaced_and_its_requests_rerun(
    llm: LLM, prompts: list[Any], expected: list[list[int]]
) -> None:
    thread = kill_one_when_both_work(llm)
    assert tokens_of(llm.generate(prompts, LONG)) == expected
    thread.join()
    wait_until_whole(llm)
    assert len(engine_processes()) == 2
    assert llm.stats.num_lost_replicas == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stream_that_begins_anew_repeats_nothing(llm: LLM, prompts: list[Any], temperature: float) -> None:
    """With no seed given, too: the text goes on as it began."""
    params = LONG.replace(temperature=temperature, n=2)
    pieces = Pieces()
    requests = [Request(request_id=str(n), params=params, stream=True, **prompt) for n, prompt in enumerate(prompts)]
    thread = kill_one_when_both_work(llm)
    pieces.take(list(llm.stream(requests)))
    thread.join()
    for number in range(len(prompts)):
        for index in range(2):
            tokens = pieces.tokens(str(number), index)
            assert len(tokens) == 100
            assert pieces.text(str(number), index) == llm.tokenizer.decode(tokens, skip_special_tokens=True)
    wait_until_whole(llm)


def test_a_bad_prompt_is_its_own_fault_and_an_aborted_request_ends(llm: LLM, prompts: list[Any]) -> None:
    bad, good = llm.generate([{"prompt_token_ids": []}, prompts[0]], GREEDY)
    assert isinstance(bad.error, EmptyPromptError)
    assert good.error is None
    stream = llm.stream([Request(request_id="a", params=LONG.replace(max_tokens=900), stream=True, **prompts[0])])
    assert isinstance(next(stream), RequestOutput)
    stream.close()
    wait_until(lambda: not llm.client.load.num_running)


def test_a_ping_reaches_every_replica_that_is_up(llm: LLM) -> None:
    replicas_of(llm).ping().result(60)
    frozen = engine_processes()[0]
    os.kill(frozen, signal.SIGSTOP)
    try:
        asked: Future[None] = replicas_of(llm).ping()
        with pytest.raises(TimeoutError):
            asked.result(0.5)
    finally:
        os.kill(frozen, signal.SIGCONT)
    asked.result(60)


@pytest.mark.exhaustive
def test_errors_of_loading_are_the_users_and_after_shutdown_nothing_is_left() -> None:
    before = Counter(engine_processes())
    with pytest.raises(CheckpointError, match="no/such-model"):
        LLM(**OPTIONS | {"model": "no/such-model"}, parallel=TWO)
    llm = LLM(**OPTIONS, parallel=TWO)
    llm.shutdown()
    with pytest.raises(ConfigError, match="has been shut down"):
        llm.generate("a")
    with pytest.raises(EngineDeadError, match="it was stopped"):
        llm.client.submit_all([Request(request_id="a", prompt="a", params=SamplingParams())])
    wait_until(lambda: Counter(engine_processes()) == before)


def test_a_replica_copies_what_another_has_finished_for_the_same_owner(llm: LLM) -> None:
    params = SamplingParams(max_tokens=48, temperature=3.0, seed=5, ignore_eos=True)
    pool = replicas_of(llm)._pool
    first, second = pool.supervisor._engines

    def texts_of(engine: RemoteEngine, owner: str) -> tuple[Sequence[int], int]:
        request = Request(request_id="0", prompt="The meeting of the council", params=params, owner=owner)
        output = pool.ask(engine.handle(request)).result()
        return output.outputs[0].token_ids, output.metrics.accepted_by_source.get("corpus", 0)

    expected, copied = texts_of(first, "a")
    assert copied == 0
    assert texts_of(second, "b") == (expected, 0)
    found, copied = texts_of(second, "a")
    assert found == expected
    assert copied >= 16


@pytest.mark.exhaustive
@pytest.mark.parametrize("parallel", ["{'replicas': 2, 'cpus_per_shard': 0.5}", "{'stages': 2, 'cpus_per_shard': 0.5}"])
def test_a_script_that_forgets_to_shut_down_ends_in_peace(ray_environment: None, parallel: str) -> None:
    code = (
        "import rayspec\n"
        "llm = rayspec.LLM('demo', dtype='float32', device='cpu', num_threads=1, max_model_len=512,\n"
        f"                  speculation={{'strategy': 'ar'}}, parallel={parallel})\n"
        "print(len(llm.generate(['Report'], rayspec.SamplingParams(max_tokens=5))))\n"
    )
    process = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=200)
    assert (process.returncode, process.stdout.strip()) == (0, "1"), process.stderr
    assert "Traceback" not in process.stderr
    assert "Started a local Ray" not in process.stderr


def test_a_part_that_was_given_is_not_given_again_however_the_stream_is_cut() -> None:
    def piece(text: str, finished: bool = False) -> RequestOutput:
        one = CompletionOutput(
            index=0, text=text, token_ids=list(text.encode()), finish_reason="stop" if finished else None
        )
        return RequestOutput(request_id="r", prompt=None, prompt_token_ids=(), outputs=[one], finished=finished)

    given: list[str] = []
    stream = ResumedStream(lambda output: given.append(output.outputs[0].text))
    for parts in (["abc", "de"], ["a", "bc", "def"], ["abcdefg"]):
        take = stream.begin()
        for text in parts:
            take(piece(text))
    assert given == ["abc", "de", "f", "g"]
    assert stream.last_part(piece("hi", finished=True)).outputs[0].text == "hi"
    stream.begin()
    assert stream.last_part(piece("abcdefghi", finished=True)).outputs[0].finish_reason == "stop"
