from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from rayspec.choices import SKIP, choices_of
from rayspec.config import EngineConfig
from rayspec.decode import loading
from rayspec.decode.loading import resolve_max_model_len
from rayspec.decode.whole_model import WholeModelStages
from rayspec.local_engine import load_engine
from rayspec.model import architecture
from rayspec.model.architecture import NormLayout, decompose, max_positions
from rayspec.model.attention import IMPLEMENTATION, pack
from rayspec.model.kv_cache import KVCache
from rayspec.model.rows import RowSpan, one_run
from rayspec.model.sublayers import run
from rayspec.types import ConfigError, UnsupportedModelError
from tests import every_type
from tests.exhaustive import few_of
from tests.families import FAMILIES, WHOLE_FAMILIES, build, checkpoint, modules_of, parts_of


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_splits_into_attention_and_mlp(family: str) -> None:
    parts = modules_of(checkpoint(family))
    assert [sublayer.kind for sublayer in parts.sublayers] == ["attention", "mlp"] * 4
    assert [sublayer.index for sublayer in parts.sublayers] == list(range(8))
    assert [sublayer.layer for sublayer in parts.sublayers] == [index // 2 for index in range(8)]
    assert parts.config._attn_implementation == IMPLEMENTATION
    assert len(parts.curve_names) == 8


def test_rotary_embeddings_of_layer_types_count_where_a_file_has_other_parameters_too() -> None:
    rope: dict[str, Any] = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    rope |= {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}}
    model = build("gemma3_text", rope_parameters=rope | {"rope_type": "default", "rope_theta": None})
    assert model.config.rope_parameters.keys() > rope.keys()
    layer_types = [sublayer.layer_type for sublayer in decompose(model).sublayers]
    assert layer_types == [one for one in model.config.layer_types for _ in range(2)]


def test_sublayers_that_are_other_work_have_curves_of_their_own() -> None:
    names = modules_of(checkpoint("qwen3_moe")).curve_names
    assert len({names[1], names[3]}) == 2
    assert names[1] == names[5] == names[7]
    assert len({name for name in modules_of(checkpoint("gemma2")).curve_names if name.startswith("attention")}) == 2
    assert modules_of(checkpoint("llama")).curve_names == ["attention:LlamaAttention", "mlp:LlamaMLP"] * 4


@pytest.mark.parametrize("family", WHOLE_FAMILIES)
def test_a_family_that_does_not_split_is_refused_and_left_as_it_was(family: str) -> None:
    model = build(family)
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        before = model(tokens, use_cache=False).logits
    implementation = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError) as caught:
        decompose(model)
    assert family in str(caught.value)
    assert model.config._attn_implementation == implementation
    with torch.no_grad():
        assert torch.equal(model(tokens, use_cache=False).logits, before)


@pytest.mark.parametrize(
    "wrong",
    [
        NormLayout("post_attention_layernorm", None, "input_layernorm", None),
        NormLayout(None, "input_layernorm", None, "post_attention_layernorm"),
    ],
)
def test_a_split_that_is_wrong_is_found(wrong: NormLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "LAYOUTS", (wrong,))
    with pytest.raises(UnsupportedModelError, match="llama: layer 0 is not attention, then MLP"):
        decompose(build("llama"))


@pytest.mark.parametrize("family", few_of(["gpt_oss", "granite_swa"], ["gpt_oss"]))
def test_attention_with_sinks_never_runs_by_our_attention(
    family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also if its sinks are so small that no number shows them. So the model asks for no GPU kernels either."""
    model = every_type.build(family)
    for layer in model.base_model.layers:
        torch.nn.init.constant_(layer.self_attn.sinks, -1e4)
    with pytest.raises(UnsupportedModelError, match=f"{family}: attention has sinks"):
        decompose(model)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(loading, "has_kernels", lambda config, parts: pytest.fail("the kernels were asked for"))
    engine = load_engine(every_type.engine_config(str(tmp_path), "auto"), with_tokenizer=False)
    assert isinstance(engine.stages, WholeModelStages)


def test_one_odd_layer_in_the_middle_is_found() -> None:
    model = build("llama")
    layer = model.base_model.layers[2]
    layer.input_layernorm, layer.post_attention_layernorm = torch.nn.Identity(), torch.nn.Identity()
    layer.extra = torch.nn.Linear(64, 64)

    def forward(hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        mixed, _ = layer.self_attn(hidden_states=hidden_states, **options)
        return layer.extra(hidden_states + mixed)  # type: ignore[no-any-return]

    layer.forward = forward
    with pytest.raises(UnsupportedModelError, match="layer 2"):
        decompose(model)


def test_layers_with_state_that_cannot_be_cropped_are_refused() -> None:
    model = build("llama")
    model.config.layer_types = ["full_attention", "linear_attention"] * 2
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        decompose(model)


def test_a_context_beyond_the_rope_is_refused_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 256,
    }  # fmt: skip
    model = AutoConfig.for_model(
        "phi3",
        max_position_embeddings=2048,
        original_max_position_embeddings=256,
        hidden_size=64,
        num_attention_heads=4,
        rope_parameters=rope,
    )
    assert max_positions(AutoConfig.for_model("llama", max_position_embeddings=2048)) == 2048
    assert resolve_max_model_len(EngineConfig(model="any"), model) == 256
    assert "max_model_len is 256: beyond 256 tokens the model's rotary embedding (longrope) changes" in caplog.text
    with pytest.raises(ConfigError, match=r"'max_model_len' is 300, beyond 256 tokens .* \(longrope\) .*: lower it"):
        resolve_max_model_len(EngineConfig(model="any", max_model_len=300), model)


@torch.inference_mode()
def test_a_skipped_sublayer_passes_its_input_on_and_taps_see_every_boundary() -> None:
    parts = parts_of(checkpoint("llama"))
    cache = KVCache(parts.shapes, 8, dtype=torch.float32, device=parts.device)
    hidden = parts.embed(torch.tensor([5, 6, 7]))
    rows = pack(cache, [RowSpan(one_run(0, 1000), 0, 3)], device=parts.device)
    parts.rotate(hidden, rows)
    seen: dict[int, torch.Tensor] = {}
    choices = choices_of([True, False, True, True, False, False, True, True])
    output = run(parts.sublayers, hidden, rows, choices=choices, tap=seen.__setitem__)
    assert list(seen) == list(range(8))
    before = hidden
    for index, choice in enumerate(choices):
        assert torch.equal(seen[index], before) == (choice == SKIP)
        before = seen[index]
    assert torch.equal(output, seen[7])
    middle = run(parts.sublayers[2:6], seen[1], rows, choices=choices)
    assert torch.equal(middle, seen[5]), "choices count sublayers of the whole model"
