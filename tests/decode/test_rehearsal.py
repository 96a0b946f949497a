"""The memory of the largest passes is measured before the KV cache is sized. Passes run on a CPU, and what torch says
of a GPU's memory is made up."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from rayspec.config import EngineConfig
from rayspec.decode import loading, rehearsal
from rayspec.decode.loading import affordable_slots, bytes_of_passes
from rayspec.decode.processing import _cut_to_top_p
from rayspec.decode.rehearsal import peak_bytes, rehearse
from rayspec.decode.runner import PackedBatch, Runner
from rayspec.model.architecture import decompose
from rayspec.model.fused import fuse
from rayspec.model.kv_cache import KVCache, bytes_per_slot, whole_pages
from rayspec.model.static_rows import BatchMetadata, Staging, StepBuffers
from rayspec.model.weights import load_model
from rayspec.types import CheckpointError
from tests.families import checkpoint, operator_parts_of, parts_of

PARTS = partial(operator_parts_of, checkpoint("llama"))


class Tight(Runner):
    """Runs out of memory in passes of many rows."""

    most, ran = 10**9, list[int]()

    def run(self, batch: PackedBatch, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        if batch.num_rows > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.ran.append(batch.num_rows)
        return super().run(batch, hidden, **options)


def _rehearsed(peak: Callable[..., int], most: int = 10**9, **changes: Any) -> tuple[int, list[Tight]]:
    parts, made = PARTS(), list[Tight]()

    def make(cache: KVCache) -> Tight:
        buffers = StepBuffers(
            cache, max_rows=512, max_sequences=16, max_places=256, hidden_size=64, dtype=torch.float32,
            device=parts.device,
        )  # fmt: skip
        made.append(Tight(parts, cache, device=parts.device, row_counts=None, buffers=buffers))
        made[-1].most, made[-1].ran = most, []
        return made[-1]

    sizes = {"num_prompt_rows": 300, "num_sequences": 6, "rows_each": 17, "max_model_len": 128} | changes
    return rehearse(parts, make, peak=peak, **sizes), made


def _of_all(device: torch.device, work: Callable[[], object]) -> int:
    work()
    return 10**7


def test_the_largest_chunk_and_the_largest_verify_run_once() -> None:
    parts = PARTS()
    taken, (runner,) = _rehearsed(_of_all)
    assert runner.ran == [300, 6 * 17]
    assert runner.buffers is not None
    assert taken == 10**7 - bytes_per_slot(list(parts.shapes.values()), parts.dtype) * (128 + 1)


def test_passes_that_do_not_fit_are_halved(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _, made = _rehearsed(_of_all, most=160)
    assert [runner.ran for runner in made] == [[], [150, 3 * 17]]
    (message,) = caplog.messages
    assert message.startswith("a pass of 300 rows does not fit into the memory")
    with pytest.raises(CheckpointError, match=r"a pass of 75 rows does not fit .* on cpu \(CUDA out of memory"):
        _rehearsed(_of_all, most=8)
    with pytest.raises(CheckpointError, match=r"a pass of 300 rows .*: lower max_num_batched_tokens or max_num_seqs"):
        _rehearsed(_of_all, most=160, may_divide=False)


@pytest.mark.parametrize("stage", range(3))
def test_every_stage_of_a_pipeline_runs_its_largest_passes(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first stage has the embedding, and only the last the head, whose sampling takes most memory."""
    ran, sampled = list[tuple[int, bool]](), list[bool]()

    def run(self: Runner, batch: PackedBatch, *arguments: Any) -> torch.Tensor:
        ran.append((batch.num_rows, isinstance(batch.buckets[0][1], BatchMetadata)))
        return of_runner(self, batch, *arguments)

    def choose(logits: torch.Tensor, rows: Any) -> torch.Tensor:
        sampled.extend(_cut_to_top_p in row.sampler.changes for row in rows)
        return of_sampling(logits, rows)

    of_runner, of_sampling = Runner.run, rehearsal.target_tokens
    monkeypatch.setattr(Runner, "run", run)
    monkeypatch.setattr(rehearsal, "target_tokens", choose)
    monkeypatch.setattr(loading, "has_kernels", lambda config, parts: True)
    monkeypatch.setattr(loading, "_verdict_file", lambda config, parts: None)
    monkeypatch.setattr(loading, "rehearse", partial(rehearse, peak=_of_all))
    layers = (range(1), range(1, 2), range(2, 4))[stage]
    config = EngineConfig(
        model=checkpoint("gemma2"), device="cpu", dtype="float32", max_num_seqs=6, max_num_batched_tokens=300,
        parallel={"stages": 3},
    )  # fmt: skip
    parts = fuse(decompose(load_model(config, layers=layers), layers=layers), use_operators=True)
    num_slots = bytes_per_slot(list(parts.shapes.values()), parts.dtype)
    assert bytes_of_passes(config, parts) == 10**7 - num_slots * (whole_pages(300) + 1)
    assert ran == [(300, True), (6 * 17, True)]
    assert sampled == [True] * 6 * (stage == 2)
    assert bytes_of_passes(config.replace(kv_cache_tokens=64), parts) == 0
    assert len(ran) == 2, "with the size of the cache given, nothing runs"


def test_a_kernel_that_fails_leaves_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> None:
        raise RuntimeError("CUDA error: invalid argument")

    monkeypatch.setattr(Staging, "upload", fails)
    _, (runner,) = _rehearsed(_of_all)
    assert runner.ran == [300, 6 * 17]
    assert runner.buffers is None


def test_a_peak_is_measured_without_what_torch_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that has 5 bytes of weights and 3 of cached blocks, and passes that take 7 bytes at their peak."""
    calls = list[str]()
    state = {"reserved": 8, "peak": 30}

    def empty_cache() -> None:
        calls.append("empty_cache")
        state["reserved"] = 5

    def reset(device: torch.device) -> None:
        calls.append("reset")
        state["peak"] = state["reserved"]

    def work() -> None:
        calls.append("work")
        state["peak"] = state["reserved"] + 7

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: state["reserved"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: state["peak"])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    assert peak_bytes(torch.device("cuda"), work) == 7
    assert calls == ["empty_cache", "reset", "work", "wait"]
    assert peak_bytes(torch.device("cpu"), lambda: pytest.fail("a CPU has no rehearsal")) == 0


def test_no_head_of_the_cache_is_beyond_the_kernels_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 16 numbers, and memory for more than 2**31 numbers of each."""
    parts, gpu = parts_of(checkpoint("llama")), torch.device("cuda")
    monkeypatch.setattr("rayspec.decode.loading.free_bytes", lambda device: 2**50)
    dim = next(iter(parts.shapes.values())).key_dim
    slots = affordable_slots(EngineConfig(model="test"), parts, gpu)
    assert 2**31 - 64 * dim < (whole_pages(slots) + 1) * dim < 2**31
