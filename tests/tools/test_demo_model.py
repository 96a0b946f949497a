"""The bundled model: its tokenizer, its training, and how exactly it writes."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from rayspec.demo import DOMAINS, model_path, sample_tasks
from tools.demo_model.evaluate import score
from tools.demo_model.tokenizer import load_tokenizer
from tools.demo_model.train import chunked_attention, save_atomically, train


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer()


@given(text=st.text())
def test_any_text_survives_a_round_trip(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_chat_template_renders_later_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    turns = [("system", "Be brief."), ("user", "Text."), ("assistant", "Sum."), ("user", "And?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|document|>Text.<|summary|>Sum.<|eos|><|user|>And?<|assistant|>"


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_chat_template_renders_tasks_as_taught(tokenizer: PreTrainedTokenizerBase, domain: str) -> None:
    (task,) = sample_tasks(domain, 1)
    turns = filter(None, (task.document, task.question))
    messages = [{"role": "user", "content": content} for content in turns]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == task.prompt


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    return loaded


def test_the_checkpoint_names_no_path_and_is_complete() -> None:
    files = {path.name: path for path in Path(model_path()).iterdir()}
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "MODEL_CARD.md"}
    assert expected <= files.keys()
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        values = json.loads(files[name].read_text())
        assert not [value for value in values.values() if isinstance(value, str) and value.startswith("/")]
    assert json.loads(files["config.json"].read_text())["dtype"] == "bfloat16"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("domain", "size", "num_tasks", "least_share"),
    [
        ("summary", 15, 2, 0.9),
        ("summary", 50, 3, 0.9),
        ("question", 30, 12, 0.5),
        ("ledger", 12, 4, 0.9),
    ],
)
def test_most_lines_are_exact(
    model: PreTrainedModel, domain: str, size: int, num_tasks: int, least_share: float
) -> None:
    tasks = sample_tasks(domain, num_tasks, size=size, seed=77)
    result = score(model, load_tokenizer(), tasks, batch_size=num_tasks)
    assert result.exact_lines >= least_share * result.lines


@pytest.fixture(scope="module", autouse=True)
def eager_on_one_thread() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def untrained() -> LlamaForCausalLM:
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


@pytest.mark.exhaustive
def test_training_saves_a_checkpoint_that_loads(untrained: LlamaForCausalLM, tmp_path: Path) -> None:
    before = untrained.lm_head.weight.detach().clone()
    train(
        untrained,
        load_tokenizer(),
        cpu_seconds=0.3,
        peak_lr=1e-3,
        max_drop=0.25,
        resumed=False,
        seed=0,
        save=lambda averaged: save_atomically(averaged, tmp_path / "checkpoint"),
        save_every_s=0.0,
    )
    assert not torch.equal(before, untrained.lm_head.weight)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint")
    assert loaded.dtype == torch.bfloat16
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
