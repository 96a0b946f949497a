from typing import Any

import pytest
import torch
from transformers import AutoConfig, Gemma3Config, LlamaConfig
from transformers.utils.import_utils import is_kernels_available

from rayspec.choices import QUANTISED_WEIGHTS
from rayspec.config import EngineConfig
from rayspec.decode.generate_state import GenerateState, cache_bytes
from rayspec.model.fused import FusedLayer, fuse
from rayspec.model.kv_cache import bytes_per_slot
from rayspec.model.layer_bytes import cached_bytes
from rayspec.model.matrices import QuantisedMatrix
from rayspec.model.sizes import model_sizes, quantisation_of, quantised_bytes
from rayspec.model.weights import become_plain, format_of_weights, quantiser_settings, read_config
from rayspec.types import ConfigError
from tests import every_type
from tests.families import FAMILIES, HARD_FAMILIES, WHOLE_FAMILIES, WINDOW, checkpoint, modules_of, reference
from tests.ops.plan.models import LLAMA_70B, llama

BF16 = torch.bfloat16
ONE_LAYER = LlamaConfig(**{**LLAMA_70B.to_dict(), "num_hidden_layers": 1})


def test_70b_has_its_published_size() -> None:
    sizes = model_sizes(LLAMA_70B, dtype=BF16)
    assert sizes.num_parameters == pytest.approx(70.55e9, rel=1e-4)
    assert sizes.embedding_bytes == sizes.head_bytes == 128256 * 8192 * 2
    attention, mlp = sizes.layers[0].sublayer_bytes
    assert attention == 2 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 8192)
    assert mlp == 2 * (3 * 8192 * 28672 + 8192)
    assert sum(layer.kv_bytes_per_token for layer in sizes.layers) == 320 * 1024
    assert _total(sizes) == 2 * sizes.num_parameters


@pytest.mark.parametrize("family", [*FAMILIES, *HARD_FAMILIES])
def test_sublayers_weigh_what_the_loaded_ones_do(family: str) -> None:
    sizes = model_sizes(read_config(checkpoint(family)), dtype=torch.float32)
    parts = modules_of(checkpoint(family))
    assert sizes.splits
    weights = [
        sum(p.nbytes for m in (s.block, s.pre_norm, s.post_norm) if m is not None for p in m.parameters())
        for s in parts.sublayers
    ]
    assert [each for layer in sizes.layers for each in layer.sublayer_bytes] == weights
    assert sizes.embedding_bytes == parts.embedding.weight.nbytes
    assert sizes.last_stage_bytes(2) == parts.lm_head.weight.nbytes + parts.final_norm.weight.nbytes
    shapes = [bytes_per_slot([shape], torch.float32) for shape in parts.shapes.values()]
    assert [layer.kv_bytes_per_token for layer in sizes.layers] == shapes
    assert [layer.window for layer in sizes.layers] == [parts.windows.get(number) for number in range(4)]
    assert sizes.window == FAMILIES.get(family, {}).get("sliding_window")


@pytest.mark.parametrize("family", [*FAMILIES, *WHOLE_FAMILIES])
def test_nothing_is_left_out_or_counted_twice(family: str) -> None:
    sizes = model_sizes(read_config(checkpoint(family)), dtype=torch.float32)
    assert sizes.num_parameters == sum(p.numel() for p in reference(checkpoint(family)).parameters())
    assert _total(sizes) == 4 * sizes.num_parameters
    assert sizes.splits == (family in FAMILIES)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_needs_its_matrix_on_a_stage_of_its_own(tied: bool) -> None:
    config = llama(64, 4, 8, 96)
    config.tie_word_embeddings = tied
    sizes = model_sizes(config, dtype=BF16)
    matrix, norm = 128256 * 64 * 2, 64 * 2
    assert sizes.tied == tied
    assert sizes.last_stage_bytes(1) == norm + (0 if tied else matrix)
    assert sizes.last_stage_bytes(2) == norm + matrix


@pytest.mark.parametrize(("quantization", "per_weight"), [("fp8", 1.0), ("int8", 1.0), ("int4", 0.5625)])
def test_quantization_shrinks_the_linears_of_layers_only(quantization: str, per_weight: float) -> None:
    plain = model_sizes(ONE_LAYER, dtype=BF16)
    sizes = model_sizes(ONE_LAYER, dtype=BF16, quantization=quantization)
    attention, mlp = sizes.layers[0].sublayer_bytes
    assert attention == per_weight * (2 * 8192 * 8192 + 2 * 8192 * 1024) + 2 * 8192
    assert mlp == per_weight * 3 * 8192 * 28672 + 2 * 8192
    assert (sizes.embedding_bytes, sizes.head_bytes) == (plain.embedding_bytes, plain.head_bytes)
    assert sizes.layers[0].kv_bytes_per_token == plain.layers[0].kv_bytes_per_token


def test_a_tensor_rank_has_its_share_and_all_norms() -> None:
    whole = model_sizes(ONE_LAYER, dtype=BF16)
    rank = model_sizes(ONE_LAYER, dtype=BF16, tensor=4)
    attention, mlp = whole.layers[0].sublayer_bytes
    norm = 2 * 8192
    assert rank.layers[0].sublayer_bytes == ((attention - norm) // 4 + norm, (mlp - norm) // 4 + norm)
    assert rank.layers[0].kv_bytes_per_token == whole.layers[0].kv_bytes_per_token // 4
    assert (rank.num_parameters, rank.head_bytes) == (whole.num_parameters, whole.head_bytes)
    alone, half = (quantised_bytes(ONE_LAYER, "int8", tensor=tensor)[1] for tensor in (1, 2))
    assert half * 2 == pytest.approx(alone, rel=1e-3), "ranks share the copies"


def test_each_attention_call_has_a_head_on_every_rank() -> None:
    """DiffLlama calls attention twice in a layer, so it keeps twice the heads that its config names."""
    config = read_config(checkpoint("diffllama"))
    whole, rank = (model_sizes(config, dtype=BF16, tensor=tensor).layers[0] for tensor in (1, 2))
    assert (config.num_key_value_heads, rank.kv_bytes_per_token) == (2, whole.kv_bytes_per_token // 2)


def test_a_model_with_an_image_tower_has_the_layers_of_its_language_model() -> None:
    text = AutoConfig.from_pretrained(checkpoint("gemma3_text"))
    tower = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text.to_dict(), vision_config=tower | {"image_size": 28, "patch_size": 14})
    whole, alone = (model_sizes(each, dtype=BF16) for each in (config, text))
    assert not whole.splits, "it decodes plainly, and no stage can hold a part of it"
    assert [layer.weight_bytes for layer in whole.layers] == [layer.weight_bytes for layer in alone.layers]
    assert [layer.kv_bytes_per_token for layer in whole.layers] == [layer.kv_bytes_per_token for layer in alone.layers]
    assert whole.num_parameters > alone.num_parameters
    assert _total(whole) == 2 * whole.num_parameters


@pytest.mark.parametrize(("tensor", "what"), [(3, "64 attention heads"), (16, "8 key-value heads")])
def test_tensor_must_divide_the_heads(tensor: int, what: str) -> None:
    with pytest.raises(ConfigError, match=f"'tensor' is {tensor}: it must divide the model's {what}"):
        model_sizes(ONE_LAYER, dtype=BF16, tensor=tensor)


def test_a_window_limits_what_is_read_and_not_what_is_kept() -> None:
    sliding, full = model_sizes(read_config(checkpoint("gemma2")), dtype=BF16).layers[:2]
    assert sliding.kv_bytes_per_token == full.kv_bytes_per_token
    assert sliding.kv_bytes_read(1000) == WINDOW * sliding.kv_bytes_per_token
    assert full.kv_bytes_read(1000) == 1000 * full.kv_bytes_per_token
    assert sliding.kv_bytes_read(5) == 5 * sliding.kv_bytes_per_token


def _total(sizes: object) -> int:
    return sizes.embedding_bytes + sum(each.weight_bytes for each in sizes.layers) + sizes.last_stage_bytes(1)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "qwen3_moe"])
def test_copies_weigh_what_the_loaded_ones_do(family: str) -> None:
    fused = fuse(modules_of(checkpoint(family)), quantised=["int8", "int4"])
    for weights in QUANTISED_WEIGHTS:
        bodies = [sublayer.quantised[weights] for sublayer in fused.sublayers if weights in sublayer.quantised]
        matrices = [matrix for body in bodies if isinstance(body, FusedLayer) for matrix in (body.first, body.last)]
        copies = [matrix for matrix in matrices if isinstance(matrix, QuantisedMatrix)]
        num_bytes = sum(copy._weight.nbytes + copy._scales.nbytes for copy in copies)
        sizes = quantised_bytes(read_config(checkpoint(family)), weights, on_cpu=True)
        assert sum(sizes) == num_bytes
        assert [bool(size) for size in sizes] == [bool(sublayer.quantised) for sublayer in fused.sublayers]


def test_sizes_of_layers_hold_the_copies_that_are_asked_for() -> None:
    int4, int8 = (sum(quantised_bytes(ONE_LAYER, weights)[:2]) for weights in ("int4", "int8"))
    both = model_sizes(ONE_LAYER, dtype=BF16, draft_weights=("int4", "int8"))
    assert {layer.copy_bytes for layer in both.layers} == {int4 + int8}
    quantized = model_sizes(ONE_LAYER, dtype=BF16, quantization="int8", draft_weights=("int4",))
    assert {layer.copy_bytes for layer in quantized.layers} == {0}, "there are no copies of what is quantized"


def quantised(method: str, **settings: Any) -> LlamaConfig:
    config = LlamaConfig(**ONE_LAYER.to_dict())
    config.quantization_config = {"quant_method": method, **settings}
    become_plain(config)
    return config


@pytest.mark.parametrize(
    ("config", "on_gpu", "on_cpu"),
    [
        (ONE_LAYER, None, None),
        (quantised("fp8"), "fp8", None),
        (quantised("fbgemm_fp8"), "fp8", "fp8"),
        (quantised("gptq", bits=4), None, None),
        (quantised("gptq", bits=3), "int4", "int4"),
        (quantised("awq", bits=4, version="gemm"), None, None),
        (quantised("awq", bits=4, version="gemv"), "int4", "int4"),
        (quantised("compressed-tensors"), None, None),
        (quantised("bitsandbytes", load_in_4bit=True), "int4", "int4"),
        (quantised("bitsandbytes", load_in_8bit=True), "int8", "int8"),
        (quantised("torchao", quant_type={"default": {"_type": "Int4WeightOnlyConfig"}}), "int4", "int4"),
        (quantised("quanto", weights="int8"), "int8", "int8"),
        (quantised("mxfp4"), "int4" if is_kernels_available() else None, None),
    ],
    ids=lambda one: str(getattr(one, "quantization_config", "plain")) if isinstance(one, LlamaConfig) else None,
)
def test_the_type_of_weights_is_that_after_the_load(
    config: LlamaConfig, on_gpu: str | None, on_cpu: str | None
) -> None:
    engine = EngineConfig(model="m")
    assert [quantisation_of(engine, config, on_cpu=each) for each in (False, True)] == [on_gpu, on_cpu]
    for each, found in ((False, on_gpu), (True, on_cpu)):
        if quantization := quantiser_settings(engine, config):
            assert format_of_weights(quantization, on_cpu=each)[1] == (found is None)


def test_modules_that_a_checkpoint_excepts_are_in_full() -> None:
    plain = model_sizes(ONE_LAYER, dtype=BF16)
    for names in (["model.layers.*.self_attn"], ["lm_head", "model.layers.0.self_attn"]):
        sizes = model_sizes(quantised("fp8", modules_to_not_convert=names), dtype=BF16, quantization="fp8")
        assert sizes.layers[0].sublayer_bytes == (plain.layers[0].sublayer_bytes[0], 3 * 8192 * 28672 + 2 * 8192)


@pytest.mark.parametrize("family", every_type.RECURRENT)
def test_what_a_sequence_keeps_is_known_without_weights(family: str) -> None:
    """Recurrent state, twice while a verify is under way, and keys and values: all that the engine allocates."""
    model, num_tokens = every_type.build(family), 8
    sizes = model_sizes(every_type.config_of(family), dtype=torch.float32)
    of_token = sum(layer.kv_bytes_per_token for layer in sizes.layers)
    of_sequence = sum(layer.state_bytes for layer in sizes.layers)
    assert of_sequence > 0
    assert cache_bytes(model) == (of_token, of_sequence)
    state = GenerateState(model, [5] * num_tokens, cuts="step")
    state.run(state.prompt)
    state.try_rows([6, 7])
    kept = cached_bytes(state.cache) + sum(cached_bytes(then) for _, then in state._copy[1:])
    assert kept == of_sequence + of_token * (num_tokens + num_tokens + 2)
