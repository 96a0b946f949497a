"""Sliding-window layers give pages back, and no row misses a key that it sees."""

import random

import pytest
import torch

from rayspec.config import EngineConfig
from rayspec.decode.loading import affordable_slots, cache_size
from rayspec.model import attention
from rayspec.model.kv_cache import PAGE_SIZE, bytes_per_slot
from rayspec.types import CheckpointError
from tests.engines import GREEDY, NUM_BEHIND, RandomPlans, complete, engine_with, tokens_of
from tests.exhaustive import few_of
from tests.families import WINDOW, cases, checkpoint, parts_of


@pytest.mark.parametrize("family", few_of(["gemma2", "gemma3_text", "mistral", "phi3", "mixtral"], ["gemma3_text"]))
@pytest.mark.parametrize("way", ["plain", "static", "deterministic"])
def test_long_texts_equal_generate_with_few_pages(family: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs of windows are read in place, though they are short."""
    monkeypatch.setattr(attention, "_LONG_RUN_BYTES", 1)
    parts = parts_of(checkpoint(family))
    known = cases(checkpoint(family), (600, 40, 333, 90), 120)
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
    outputs = complete(engine, known.prompts, GREEDY.replace(max_tokens=120, ignore_eos=True))
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
    assert [output.metrics.num_cached_tokens for output in outputs] == [0, 320, 320, 320]


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
    with pytest.raises(CheckpointError, match=r"may have 0\.0 GiB of .* raise kv_cache_share or gpu_mem"):
        affordable_slots(config.replace(gpu_memory_utilization=0.4), parts, gpu)
