from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from tools.demo_model.tokenizer import load_tokenizer
from tools.demo_model.train import chunked_attention, save_atomically, train


@pytest.fixture(scope="module", autouse=True)
def eager_on_one_thread() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2048,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


@pytest.mark.parametrize("length", [384, 200])
def test_chunked_attention_is_causal_attention(length: int) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, length, 8), torch.randn(2, 2, length, 8), torch.randn(2, 2, length, 8)
    expected = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3, enable_gqa=True)
    actual, _ = chunked_attention(torch.nn.Identity(), query, key, value, None, scaling=0.3)
    torch.testing.assert_close(actual, expected.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_training_saves_a_checkpoint_that_loads(model: LlamaForCausalLM, tmp_path: Path) -> None:
    before = model.lm_head.weight.detach().clone()
    train(
        model,
        load_tokenizer(),
        cpu_seconds=0.3,
        peak_lr=1e-3,
        max_drop=0.25,
        resumed=False,
        seed=0,
        save=lambda averaged: save_atomically(averaged, tmp_path / "checkpoint"),
        save_every_s=0.0,
    )
    assert not torch.equal(before, model.lm_head.weight)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint")
    assert loaded.dtype == torch.bfloat16
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
