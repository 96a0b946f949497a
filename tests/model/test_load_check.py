"""The load check finds what is wrong in rows other than the first of a prompt."""

import copy
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor
from transformers import AutoConfig

from rayspec.config import EngineConfig
from rayspec.decode.whole_model import WholeModelStages
from rayspec.local_engine import load_engine
from rayspec.model import attention, fused
from rayspec.model.architecture import decompose
from rayspec.model.attention import AttentionCalls, AttentionKind, Heads, PackedRows
from rayspec.model.fused import fuse
from rayspec.model.kv_cache import KVCache
from rayspec.model.load_check import boundaries, sequences
from rayspec.model.sublayers import Decomposition
from rayspec.types import CheckpointError, UnsupportedModelError
from tests.engines import GREEDY, complete, tokens_of
from tests.families import HARD_FAMILIES, build, checkpoint, greedy, ragged_prompts

LATE = 1000


def _calls_that_share_heads(patch: pytest.MonkeyPatch) -> None:
    """The second call of a layer overwrites what the first has cached, as it was for DiffLlama."""

    def attend(self: AttentionCalls, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Any:
        return self.rows.attend(layer, query, key, value, kind)

    patch.setattr(AttentionCalls, "attend", attend)


def _rope_that_is_late(patch: pytest.MonkeyPatch) -> None:
    """Every second late position is one too high."""
    rotate = Decomposition.rotate

    def shifted(self: Decomposition, hidden: Tensor, rows: Any) -> None:
        moved = replace(rows, positions=rows.positions + (rows.positions > LATE) * (rows.positions % 2))
        rotate(self, hidden, moved)
        rows.rope.update(moved.rope)

    patch.setattr(Decomposition, "rotate", shifted)


def _sequence_that_reads_another(patch: pytest.MonkeyPatch) -> None:
    """Rows of the second sequence read the first sequence's keys as their context."""
    attend = PackedRows.attend

    def wrong(self: PackedRows, *args: Any, **options: Any) -> Tensor:
        first, second, *others = self.spans
        return attend(replace(self, spans=[first, structs.replace(second, runs=first.runs), *others]), *args, **options)

    patch.setattr(PackedRows, "attend", wrong)


def _context_that_is_not_read(patch: pytest.MonkeyPatch) -> None:
    """Rows of a later pass see one another only."""
    patch.setattr(attention, "runs_between", lambda runs, first, end: [])


def _chunks_that_see_no_context(patch: pytest.MonkeyPatch) -> None:
    """Long chunks leave out the attention calls for their context."""
    merged = attention._Attention._merged
    patch.setattr(attention._Attention, "_merged", lambda self, pieces: merged(self, pieces[-1:]))


def _wider_window(patch: pytest.MonkeyPatch) -> None:
    """Rows with a sliding window see two keys too many."""
    lowest = attention._Attention._first_for_any
    mask = attention._Attention._mask

    def wide(self: Any) -> Any:
        window = self.kind.sliding_window
        return replace(self, kind=self.kind._replace(sliding_window=window + 2)) if window else self

    patch.setattr(attention._Attention, "_first_for_any", lambda self, *args: lowest(wide(self), *args))
    patch.setattr(attention._Attention, "_mask", lambda self, *args: mask(wide(self), *args))


@pytest.mark.parametrize(
    ("family", "plant"),
    [
        ("diffllama", _calls_that_share_heads),
        ("llama", _rope_that_is_late),
        ("llama", _sequence_that_reads_another),
        ("llama", _context_that_is_not_read),
        ("llama", _chunks_that_see_no_context),
        ("gemma2", _wider_window),
    ],
)
def test_what_only_later_rows_show_is_found(
    family: str, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    decompose(build(family))
    plant(monkeypatch)
    with pytest.raises(UnsupportedModelError, match="is not attention, then MLP"):
        decompose(build(family))


def test_a_model_that_fails_only_copies(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    path, prompts = checkpoint("diffllama"), ragged_prompts([40, 7])
    expected = greedy(path, prompts, 8)
    _calls_that_share_heads(monkeypatch)
    engine = load_engine(
        EngineConfig(model=path, dtype="float32", device="cpu", max_model_len=128), with_tokenizer=False
    )
    assert tokens_of(complete(engine, prompts, GREEDY.replace(max_tokens=8))) == expected
    assert isinstance(engine.stages, WholeModelStages)
    [message] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert message.startswith("drafts of this model are only copied or recycled tokens: diffllama: layer 0 is not ")


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("window", [12, 512])
def test_a_window_two_positions_off_in_one_layer_type_is_found(number: int, window: int) -> None:
    model = build("gemma2", sliding_window=window)
    layer = model.base_model.layers[number]
    layer.self_attn.sliding_window = (layer.self_attn.sliding_window or 0) + 2
    with pytest.raises(UnsupportedModelError, match=f"layer {number} "):
        decompose(model)


@pytest.mark.parametrize("window", [12, 512])
def test_a_mask_that_is_not_the_window_is_found(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the window is longer than the sequences of the check."""
    module = sys.modules[type(build("gemma2").base_model).__module__]
    masked = module.create_sliding_window_causal_mask

    def wider(config: Any, **options: Any) -> Any:
        other = copy.copy(config)
        other.sliding_window = window + 2
        return masked(config=other, **options)

    monkeypatch.setattr(module, "create_sliding_window_causal_mask", wider)
    with pytest.raises(UnsupportedModelError, match="layer 0 "):
        decompose(build("gemma2", sliding_window=window))


def test_states_that_change_between_layers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    norm, layer = model.base_model.norm, model.base_model.layers[2]
    layer.register_forward_pre_hook(lambda module, args: (norm(args[0]), *args[1:]))
    with pytest.raises(UnsupportedModelError, match="between its layers"):
        decompose(model)


def _body_off_at_late_positions(self: PackedRows, heads: Heads, projected: Tensor) -> Tensor:
    late = (self.positions > LATE)[None, :, None]
    rope = {name: tuple(torch.where(late, each.roll(1, 1), each) for each in pair) for name, pair in self.rope.items()}
    return self.attend(heads.layer, *heads.split(projected, rope), heads.kind)


def _body_that_caches_nothing(self: PackedRows, heads: Heads, projected: Tensor) -> Tensor:
    spare = torch.full_like(self.positions, self.cache.num_slots - 1)
    return replace(self, slots=spare).attend(heads.layer, *heads.split(projected, self.rope), heads.kind)


@pytest.mark.parametrize("fault", [_body_off_at_late_positions, _body_that_caches_nothing])
def test_modules_run_in_place_of_fused_bodies_that_are_wrong(
    fault: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parts = decompose(build("llama"))
    monkeypatch.setattr(PackedRows, "attend_projected", fault)
    fused = fuse(parts)
    assert [sublayer.body is None for sublayer in fused.sublayers] == [True, False] * 4
    [message] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert message.startswith(
        "4 of 8 sublayers run by transformers' modules, which is slower: "
        "4 LlamaAttention (the fused computation differs by "
    )


@pytest.mark.parametrize(("beta", "dtype"), [(0.5, torch.float32), (0.01, torch.bfloat16)])
def test_queries_that_are_not_scaled_are_found(
    beta: float, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """In bfloat16, too, where rounding is larger than the difference."""
    rope = HARD_FAMILIES["ministral3"]["rope_parameters"]
    for each, has_bodies in ((0.0, True), (beta, False)):
        model = build("ministral3", rope_parameters=rope | {"llama_4_scaling_beta": each}).to(dtype)
        fused = fuse(decompose(model))
        assert [sublayer.body is not None for sublayer in fused.sublayers[::2]] == [has_bodies] * 4
        assert ("4 Ministral3Attention (the fused" in caplog.text) != has_bodies


def test_memory_that_is_short_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """For a body, and for the check itself, which is no reason to decode plainly."""

    def no_memory(*_: Any, **__: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes\nMore")

    parts = decompose(build("llama"))
    monkeypatch.setattr(fused, "full_matrix", no_memory)
    assert all(sublayer.body is None for sublayer in fuse(parts).sublayers)
    of_layers, of_head = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "8 of 8 sublayers" in of_layers
    assert "the LM head keeps its layout" in of_head
    assert all("you tried to allocate 9 bytes" in message for message in (of_layers, of_head))
    monkeypatch.setattr(KVCache, "write", no_memory)
    with pytest.raises(CheckpointError, match="too little memory is left to check the loaded model"):
        decompose(build("llama"))


def test_lengths_of_the_config_are_boundaries_wherever_they_are() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 1e4}
    config = AutoConfig.for_model(
        "llama", max_position_embeddings=4096, sliding_window=100, attention_chunk_size=300, rope_parameters=rope
    )
    assert boundaries(config, None) == [100, 300, 1024, 4096]
    assert [each.first for each in sequences(boundaries(config, 2048), with_chunks=True)] == [0, 0, 95, 295, 1019, 2040]
