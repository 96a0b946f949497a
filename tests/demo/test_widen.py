from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rayspec.demo import model_path, sample_tasks
from rayspec.demo.widen import widen
from tools.demo_model.evaluate import complete
from tools.demo_model.tokenizer import load_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "mistral-other-head-size": lambda: MistralForCausalLM(MistralConfig(**SHAPE, head_dim=16, sliding_window=8)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8)),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def random_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = BUILDERS[name]()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.train(False)
    return model


@pytest.mark.parametrize(("name", "k"), list(zip(BUILDERS, (2, 3, 2), strict=True)))
def test_widened_models_give_the_same_logits(name: str, k: int) -> None:
    model = random_model(name)
    wide = widen(model, k)
    ids = torch.randint(0, 64, (2, 24))
    with torch.inference_mode():
        torch.testing.assert_close(wide(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    assert wide.config.hidden_size == 32 * k
    assert wide.config.num_key_value_heads == 2 * k
    assert wide.config.tie_word_embeddings == model.config.tie_word_embeddings
    assert model.config.hidden_size == 32


def test_the_widened_bundled_model_writes_the_same_text() -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    wide = widen(model, 2)
    tokenizer, prompt = load_tokenizer(), sample_tasks("summary", 1, size=12)[0].prompt
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        torch.testing.assert_close(wide(**inputs).logits, model(**inputs).logits, atol=1e-4, rtol=0)
    texts = [complete(one, tokenizer, [prompt], max_new_tokens=12) for one in (wide, model)]
    assert texts[0] == texts[1]


def test_other_families_are_refused_by_name() -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=32))
    with pytest.raises(ValueError, match="model_type='gpt2'"):
        widen(gpt2, 2)
