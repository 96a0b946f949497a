from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from rayspec.demo import model_path, sample_tasks
from rayspec.demo.widen import widen
from tests.families import build, ragged_prompts
from tools.demo_model.evaluate import complete
from tools.demo_model.tokenizer import load_tokenizer


@pytest.mark.parametrize(
    ("name", "changes", "k"), [("llama", {}, 2), ("mistral", {"head_dim": 24}, 3), ("qwen3", {}, 2)]
)
def test_widened_models_give_the_same_logits(name: str, changes: dict[str, Any], k: int) -> None:
    model = build(name, **changes)
    wide = widen(model, k)
    ids = torch.tensor(ragged_prompts([24, 24]))
    with torch.inference_mode():
        torch.testing.assert_close(wide(ids).logits, model(ids).logits, atol=1e-3, rtol=0)
    assert wide.config.hidden_size == model.config.hidden_size * k
    assert wide.config.num_key_value_heads == model.config.num_key_value_heads * k
    assert wide.config.tie_word_embeddings == model.config.tie_word_embeddings


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
