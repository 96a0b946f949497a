"""Sequences that begin alike share keys and values, layers with a sliding window give pages back, and no text depends
on either."""

import random
from concurrent.futures import Future
from itertools import product

import pytest
import torch

from rayspec.config import EngineConfig, SamplingParams
from rayspec.decode.loading import affordable_slots, cache_size
from rayspec.decode.stages import LocalStages, StagesReplacedError
from rayspec.decode.work import Result, Work
from rayspec.model import attention
from rayspec.model.kv_cache import PAGE_SIZE, bytes_per_slot
from rayspec.types import CheckpointError, Request, RequestOutput
from tests.demo_model import demo_parts, demo_prompts
from tests.engines import GREEDY, NUM_BEHIND, RandomPlans, complete, engine_with, require_idle, tokens_of
from tests.exhaustive import few_of
from tests.families import WINDOW, cases, checkpoint, parts_of

SEEDED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=24, seed=5)


def _prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Some begin like another, up to any token."""
    prompts = [[rng.randrange(3, 90) for _ in range(rng.randint(1, 90))]]
    while len(prompts) < count:
        known = rng.choice(prompts)
        head = known[: rng.randint(0, len(known))] if rng.random() < 0.8 else []
        prompts.append(head[:120] + [rng.randrange(3, 90) for _ in range(rng.randint(1, 40))])
    return prompts


def _fails_now_and_then(stages: LocalStages, rng: random.Random) -> LocalStages:
    """Now and then all keys and values are lost."""
    start = stages.start

    def started(work: Work) -> Future[Result]:
        if rng.random() < 0.08:
            stages.head.forget()
            for tensor in (*stages.runner.cache.keys.values(), *stages.runner.cache.values.values()):
                tensor.fill_(float("nan"))
            raise StagesReplacedError("a stage was replaced")
        return start(work)

    stages.start = started  # type: ignore[method-assign]
    return stages


@pytest.mark.parametrize(
    ("family", "seed"),
    few_of(list(product(["llama", "gemma2", "mistral", "qwen3_moe"], range(12))), [("mistral", 1)]),
)
def test_texts_do_not_depend_on_it(family: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With random plans and trees, while sequences are preempted, aborted and replayed, and pages pushed out. All runs
    are read in place, though they are short."""
    monkeypatch.setattr(attention, "_LONG_RUN_BYTES", 1)
    parts, rng = parts_of(checkpoint(family)), random.Random(seed)
    prompts = _prompts(rng, 18)
    params = [rng.choice([GREEDY, SEEDED, SEEDED.replace(n=3)]) for _ in prompts]
    reference = engine_with(parts, max_num_seqs=1, enable_prefix_caching=False)
    expected = [_tokens(output) for output in complete(reference, prompts, params)]
    engine = engine_with(
        parts,
        RandomPlans(seed, len(parts.sublayers)),
        wrap=lambda stages: _fails_now_and_then(stages, rng),
        kv_cache_tokens=512,
        max_num_seqs=6,
        max_num_batched_tokens=48,
        num_beside=20,
        has_windowed_store=seed % 2 == 1,
    )
    waiting = list(zip(prompts, params, range(len(prompts)), strict=True))
    found: dict[str, RequestOutput] = {}
    unwanted: set[str] = set()
    while waiting or engine.has_unfinished:
        if waiting and rng.random() < 0.5:
            prompt, one, number = waiting.pop(0)
            engine.add(Request(request_id=str(number), params=one, prompt_token_ids=prompt))
            if rng.random() < 0.1:
                unwanted.add(str(number))
        if unwanted and rng.random() < 0.2:
            engine.abort(unwanted.pop())
        found |= {output.request_id: output for output in engine.step()}
    require_idle(engine)
    assert len(found) > 12
    for name, output in found.items():
        assert _tokens(output) == expected[int(name)]
    assert engine.stats.num_cached_tokens > 100
    assert engine.stats.num_replays > 0


def test_to_the_bit_in_deterministic_mode() -> None:
    prompts = [[*prompt, token] for prompt in demo_prompts(3, 3, seed=4) for token in (5, 6, 7)]
    runs = []
    for is_on in (False, True):
        engine = engine_with(
            demo_parts("bfloat16"),
            RandomPlans(3, 32) if is_on else None,
            deterministic=True,
            enable_prefix_caching=is_on,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            kv_cache_tokens=2048,
        )
        outputs = complete(engine, prompts, SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True))
        runs.append([(tuple(one.outputs[0].token_ids), one.outputs[0].logprobs) for one in outputs])
        assert (engine.stats.num_cached_tokens > 0) == is_on
    assert runs[0] == runs[1]


def test_a_prompt_with_several_completions_is_computed_once() -> None:
    engine = engine_with(parts_of(checkpoint("llama")), max_num_seqs=4)
    prompt = list(range(3, 83)) * 2
    (output,) = complete(engine, [prompt], SEEDED.replace(n=4))
    assert len({tuple(one.token_ids) for one in output.outputs}) > 1
    assert engine.stats.num_prefilled_tokens == 160 + 3 * 16, "a sequence computes its last tokens itself"
    assert output.metrics.num_cached_tokens == 0
    assert engine.stats.cache_hit_rate == pytest.approx(3 * 144 / (4 * 160))


def test_what_was_generated_is_found_by_the_next_turn_of_a_chat() -> None:
    engine = engine_with(parts_of(checkpoint("llama")))
    prompt = list(range(3, 60))
    (first,) = complete(engine, [prompt], GREEDY.replace(ignore_eos=True))
    turn = [*prompt, *first.outputs[0].token_ids, 7, 8]
    (second,) = complete(engine, [turn])
    assert second.metrics.num_cached_tokens == (len(turn) - 3) // 16 * 16
    (alone,) = complete(engine_with(parts_of(checkpoint("llama")), enable_prefix_caching=False), [turn])
    assert _tokens(second) == _tokens(alone)


def _tokens(output: RequestOutput) -> list[tuple[int, ...]]:
    assert output.error is None
    return [tuple(one.token_ids) for one in output.outputs]


@pytest.mark.parametrize(
    ("family", "way"),
    few_of(
        list(product(["gemma2", "gemma3_text", "mistral", "phi3", "mixtral"], ["plain", "static", "deterministic"])),
        [("gemma3_text", "static")],
    ),
)
def test_long_texts_equal_generate_with_few_pages(family: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs of windows are read in place, though they are short."""
    monkeypatch.setattr(attention, "_LONG_RUN_BYTES", 1)
    parts = parts_of(checkpoint(family))
    known = cases(checkpoint(family), (600, 40, 333, 90), 60)
    engine = engine_with(
        parts,
        RandomPlans(3, len(parts.sublayers)),
        is_static=way == "static",
        deterministic=way == "deterministic",
        max_num_seqs=3,
        max_num_batched_tokens=64,
    )
    cache = engine.stages.runner.cache  # type: ignore[attr-defined]
    assert cache.num_windowed_slots == (2 * 3 * (2 + -(-(WINDOW + NUM_BEHIND + 6) // PAGE_SIZE)) + 4) * PAGE_SIZE < 600
    outputs = complete(engine, known.prompts, GREEDY.replace(max_tokens=60, ignore_eos=True))
    assert tokens_of(outputs) == known.expected


def test_a_shared_prefix_is_found_where_its_window_is() -> None:
    parts = parts_of(checkpoint("gemma2"))
    document = [random.Random(4).randrange(3, 190) for _ in range(320)]
    questions = [[*document, 5, number] for number in range(4)]
    expected = tokens_of(complete(engine_with(parts, enable_prefix_caching=False), questions))
    engine = engine_with(parts, max_num_seqs=2, max_num_batched_tokens=64)
    assert engine._scheduler.kv.windowed is not None
    outputs = complete(engine, questions)
    assert tokens_of(outputs) == expected
    assert [output.num_cached_tokens for output in outputs] == [0, 320, 320, 320], "vLLM's name"


def test_free_memory_holds_more_tokens_where_layers_have_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(checkpoint("gemma2"))  # two layers of four have windows, and a slot takes 256 bytes a layer
    config = EngineConfig(model="test", max_num_seqs=2, max_num_batched_tokens=64, speculation={"strategy": "ar"})
    monkeypatch.setattr("rayspec.decode.loading.free_bytes", lambda device: 4 * 2**20)
    windowed = cache_size(config, 10**6, WINDOW).num_windowed_slots
    assert affordable_slots(config, parts, parts.device) == (2**20 - windowed * 512) // 512
    monkeypatch.setattr("rayspec.decode.loading.free_bytes", lambda device: 4 * 2**16)
    assert affordable_slots(config, parts, parts.device) == 2**16 // 1024, "one store for all layers"
    half = config.replace(kv_cache_share=0.125)
    assert affordable_slots(half, parts, parts.device) == 2**15 // 1024
    assert affordable_slots(config, parts, parts.device, num_sharing=2) == 2**15 // 1024


def test_the_share_of_a_gpu_counts_what_is_there_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 MiB the model has 4. On a CPU the option has no effect."""
    parts = parts_of(checkpoint("llama"))
    num_bytes = bytes_per_slot(list(parts.shapes.values()), parts.dtype)
    monkeypatch.setattr("rayspec.decode.loading.free_bytes", lambda device: 4 * 2**20)
    monkeypatch.setattr("rayspec.decode.loading.total_bytes", lambda device: 8 * 2**20)
    config, gpu = EngineConfig(model="test", gpu_memory_utilization=0.75), torch.device("cuda")
    assert affordable_slots(config, parts, gpu) == 2 * 2**20 // num_bytes
    assert affordable_slots(config, parts, gpu, num_sharing=2) == 2**20 // num_bytes
    assert affordable_slots(config.replace(kv_cache_share=0.25), parts, gpu) == 2**20 // num_bytes
    assert affordable_slots(config, parts, torch.device("cpu")) == 2**20 // num_bytes
    assert affordable_slots(config, parts, gpu, pass_bytes=2**20) == 2**20 // num_bytes
    half = config.replace(kv_cache_share=0.5)
    assert affordable_slots(half, parts, gpu, pass_bytes=2**20) == 3 * 2**19 // num_bytes
    with pytest.raises(CheckpointError, match=r"may have 0\.0 GiB of .* raise kv_cache_share or gpu_mem"):
        affordable_slots(config.replace(gpu_memory_utilization=0.4), parts, gpu)
