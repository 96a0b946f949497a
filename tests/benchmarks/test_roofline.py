from __future__ import annotations

import pytest

from benchmarks.roofline import ACCELERATORS, SHAPES, ideal_latency

H200 = ACCELERATORS["H200"]


@pytest.mark.parametrize("name", ["Qwen3-4B"])
def test_a_shape_weighs_what_the_built_model_does(name: str) -> None:
    """But for norms, which `ModelShape` leaves out."""
    import torch  # noqa: PLC0415 - the other tests need neither
    from transformers import LlamaConfig, Qwen3Config  # noqa: PLC0415

    from rayspec.model.sizes import model_sizes  # noqa: PLC0415

    shape = SHAPES[name]
    config = (Qwen3Config if name.startswith("Qwen3") else LlamaConfig)(
        num_hidden_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.mlp_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.tied,
    )
    sizes = model_sizes(config, dtype=torch.bfloat16)
    attention_bytes, mlp_bytes = sizes.layers[0].sublayer_bytes
    assert 2 * shape.attention_parameters == pytest.approx(attention_bytes, rel=1e-3)
    assert 2 * shape.mlp_parameters == pytest.approx(mlp_bytes, rel=1e-3)
    assert 2 * shape.head_parameters == sizes.head_bytes
    assert shape.kv_bytes_per_token == sizes.layers[0].kv_bytes_per_token
    assert shape.num_parameters == pytest.approx(sizes.num_parameters, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "bytes_per_weight", "milliseconds"),
    [
        ("Llama-3.1-8B", 2, (3.2, 3.6, 6.7)),
        ("Llama-3.1-8B", 1, (1.7, 2.1, 5.3)),
        ("Llama-3.1-405B", 2, (168, 170, 182)),
    ],
)
def test_steps_of_plain_decoding(name: str, bytes_per_weight: float, milliseconds: tuple[float, ...]) -> None:
    """Worked out apart: weights and KV cache over 4.8 TB/s, at 1K, 16K and 128K tokens."""
    latency = ideal_latency(SHAPES[name], H200, bytes_per_weight=bytes_per_weight)
    steps = [1000 * latency.decode_step_s(context=context, batch=1) for context in (1024, 16384, 131072)]
    assert steps == pytest.approx(milliseconds, rel=0.02)
