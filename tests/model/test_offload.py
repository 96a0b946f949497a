import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rayspec.choices import choices_of
from rayspec.config import EngineConfig
from rayspec.model.architecture import decompose
from rayspec.model.offload import _DiskStore, _HostStore, offload
from rayspec.model.sublayers import Decomposition
from rayspec.model.weights import load_model
from rayspec.types import CheckpointError, ConfigError, UnsupportedModelError
from tests.families import MATRIX, checkpoint, logits_of

CHOSEN = (1, 2, 5, 7)
TOKENS = range(5, 13)


def _parts(family: str = "llama", dtype: Any = "float32") -> Decomposition:
    """One that no other test shares: offloading changes it for good."""
    return decompose(load_model(EngineConfig(model=checkpoint(family), dtype=dtype, device="cpu")))


def _count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sublayers whose weights are read from the file from now on, in order, also ahead of time."""
    reads: list[int] = []
    read = _DiskStore._read

    def counting(self: _DiskStore, index: int) -> None:
        reads.append(index)
        read(self, index)

    monkeypatch.setattr(_DiskStore, "_read", counting)
    return reads


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", MATRIX)
def test_results_are_bit_equal(family: str, dtype: str, tmp_path: Path) -> None:
    parts = _parts(family, dtype)
    expected = [logits_of(parts, TOKENS[:num_rows]) for num_rows in (1, 8, 1)]
    offload(parts, CHOSEN, to="disk", folder=tmp_path)
    for num_rows, logits in zip((1, 8, 1), expected, strict=True):
        assert torch.equal(logits_of(parts, TOKENS[:num_rows]), logits)
    assert list(tmp_path.iterdir()) == [], "the file has no name"


@pytest.mark.parametrize("shift", [0, 20])
def test_weights_lie_in_their_cache_lines_as_before(shift: int, tmp_path: Path) -> None:
    """Where a row starts in its cache line decides in which order CPU kernels add it up."""
    parts = _parts()
    for parameter in parts.sublayers[5].block.parameters():
        memory = torch.empty(parameter.nbytes + 64 + shift, dtype=torch.uint8)
        start = -memory.data_ptr() % 64 + shift
        moved = memory[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        parameter.data = moved.copy_(parameter.data)
    offload(parts, [5], to="disk", folder=tmp_path)
    assert {parameter.data_ptr() % 64 for parameter in parts.sublayers[5].block.parameters()} == {shift}


def test_a_skipped_sublayer_fetches_nothing_and_the_next_is_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = _parts()
    choices = choices_of([index not in CHOSEN for index in range(8)])
    expected = logits_of(parts, TOKENS[:1], choices)
    weights = offload(parts, CHOSEN, to="disk", folder=tmp_path)
    reads = _count_reads(monkeypatch)
    assert torch.equal(logits_of(parts, TOKENS[:1], choices), expected)
    assert reads == []
    logits_of(parts, TOKENS[:3])
    assert reads == list(CHOSEN), "once a forward, in order"
    del reads[:]
    weights.fetch(1)
    weights.fetch(2)
    weights._store._reader.submit(int).result()  # type: ignore[attr-defined]
    assert reads == [1, 2, 5], "5 followed 2 the last time"
    assert torch.equal(logits_of(parts, TOKENS[:1], choices), expected), "a wrong guess does no harm"
    del reads[:]
    with weights.without_transfers():  # to measure without them
        logits_of(parts, TOKENS[:2])
    assert reads == []


def test_weights_that_others_use_stay(tmp_path: Path) -> None:
    parts = _parts()
    shared, other = parts.sublayers[2], parts.sublayers[6]
    assert shared.pre_norm is not None
    assert other.pre_norm is not None
    shared.block.o_proj.weight = other.block.o_proj.weight
    shared.pre_norm.weight = other.pre_norm.weight
    kept = (shared.block.o_proj.weight.data_ptr(), shared.pre_norm.weight.data_ptr())
    expected = logits_of(parts, TOKENS[:3])
    weights = offload(parts, [2], to="disk", folder=tmp_path)
    assert (shared.block.o_proj.weight.data_ptr(), shared.pre_norm.weight.data_ptr()) == kept
    assert weights.sublayers == (2,)
    assert torch.equal(logits_of(parts, TOKENS[:3]), expected)


def test_sublayers_of_a_span_keep_their_numbers(tmp_path: Path) -> None:
    parts = _parts()
    expected = logits_of(parts, TOKENS[:2])
    span = replace(parts, embedding=None, sublayers=parts.sublayers[4:])
    weights = offload(span, [5, 7], to="disk", folder=tmp_path)
    assert [seconds > 0 for seconds in weights.transfer_seconds()] == [False, True, False, True]
    assert torch.equal(logits_of(parts, TOKENS[:2]), expected)


def test_a_file_is_read_in_pieces_and_a_damaged_one_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = _parts()
    expected = logits_of(parts, TOKENS[:3])
    weights = offload(parts, CHOSEN, to="disk", folder=tmp_path)
    preadv = os.preadv
    monkeypatch.setattr("os.preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:4096]], offset))
    assert torch.equal(logits_of(parts, TOKENS[:3]), expected)
    with monkeypatch.context() as patch:
        patch.setattr("os.preadv", lambda fd, buffers, offset: 0)
        weights._store._ahead = None  # type: ignore[union-attr]
        with pytest.raises(CheckpointError, match="end too early"):
            logits_of(parts, TOKENS[:1])
    assert torch.equal(logits_of(parts, TOKENS[:3]), expected), "read again"
    os.ftruncate(weights._store._file.fileno(), 4096)  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match="end too early"):
        logits_of(parts, TOKENS[:1])


@pytest.mark.parametrize("num_bytes", [4096, 5 * 4096, 27 * 4096])
def test_pinned_memory_that_is_rounded_up_takes_no_more_than_the_weights(
    num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch rounds each block up to a power of two."""
    taken: list[int] = []

    def pinned(like: torch.Tensor, *, pin_memory: bool) -> torch.Tensor:
        taken.append(1 << (like.nbytes - 1).bit_length())
        return torch.zeros(like.shape, dtype=like.dtype)

    monkeypatch.setattr(torch, "empty_like", pinned)
    image, store = torch.arange(num_bytes).to(torch.uint8), _HostStore()
    store.put(3, image)
    assert sum(taken) == num_bytes
    fetched = torch.zeros(num_bytes, dtype=torch.uint8)
    store.get(3, fetched)
    assert torch.equal(fetched, image)


def test_without_room_for_the_weights_the_model_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = _parts()
    expected = logits_of(parts, TOKENS[:3])
    with pytest.raises(ConfigError, match=r"folder.*nowhere"):
        offload(parts, CHOSEN, to="disk", folder=tmp_path / "nowhere")

    def full(*_: object) -> int:
        raise OSError("No space left on device")

    for call in ("posix_fallocate", "pwrite"):
        monkeypatch.setattr(os, call, full)
        with pytest.raises(ConfigError, match="No space left"):
            offload(parts, CHOSEN, to="disk", folder=tmp_path)
        monkeypatch.undo()
    assert torch.equal(logits_of(parts, TOKENS[:3]), expected)
    offload(parts, CHOSEN, to="disk", folder=tmp_path)
    assert torch.equal(logits_of(parts, TOKENS[:3]), expected)


def test_options_that_cannot_work_are_errors(tmp_path: Path) -> None:
    parts = _parts()
    with pytest.raises(ConfigError, match=r"to.*'cpu'.*disk"):
        offload(parts, [1], to="cpu")
    block: Any = parts.sublayers[3].block
    block.up_proj.weight = type("Quantized", (nn.Parameter,), {})(block.up_proj.weight.data)
    with pytest.raises(UnsupportedModelError, match=r"sublayer 3.*quantiz"):
        offload(parts, [3], to="disk", folder=tmp_path)
