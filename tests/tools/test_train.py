from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from tools.demo_model.tokenizer import load_tokenizer
from tools.demo_model.train import (
    DepthDroppingForward,
    TaskBatches,
    chunked_attention,
    save_atomically,
    spread_embeddings,
    train,
)


@pytest.fixture(scope="module", autouse=True)
def eager_on_one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
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


def batches(seed: int = 0) -> TaskBatches:
    return TaskBatches(load_tokenizer(), seed)


@pytest.mark.parametrize("length", [256, 512, 1024])
def test_batches_teach_each_token_of_an_answer_once(length: int) -> None:
    batch = batches().tasks(length)
    assert batch.ids.shape == batch.positions.shape == (4096 // length, length)
    assert torch.equal(batch.targets, batch.ids.flatten()[batch.rows + 1])
    summary_id, assistant_id, eos_id = 3, 5, 1
    starts = ((batch.ids == summary_id) | (batch.ids == assistant_id)).nonzero()[:, 1]
    ends = (batch.ids == eos_id).nonzero()[:, 1]
    assert len(starts) == len(ends) == len(batch.ids)
    # The mark that ends a question is part of its prompt; the one that ends a document is as well.
    assert int(batch.answered.sum()) == int((ends - starts).sum())
    assert set(batch.weights[batch.answered].tolist()) == {1.0}
    assert bool((batch.positions.diff(dim=1) >= 1).all())


def test_short_batches_are_of_all_domains() -> None:
    batch = batches().tasks(256)
    assert {2, 3, 4, 5} <= set(batch.ids.flatten().tolist())  # document, summary, user, assistant
    assert not {4, 5} & set(batches().repetitions().ids.flatten().tolist())


def test_repetitions_can_be_copied() -> None:
    batch = batches().repetitions()
    for row in batch.ids:
        assert any(torch.equal(row[period:], row[:-period]) for period in (7, 12, 23, 41, 90))


def test_equal_seeds_give_equal_batches() -> None:
    first, second, other = batches(1).tasks(256), batches(1).tasks(256), batches(2).tasks(256)
    assert torch.equal(first.ids, second.ids)
    assert torch.equal(first.positions, second.positions)
    assert not torch.equal(first.ids, other.ids)


@pytest.mark.parametrize("length", [128, 384, 200])
def test_chunked_attention_is_causal_attention(length: int) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, length, 8), torch.randn(2, 2, length, 8), torch.randn(2, 2, length, 8)
    expected = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3, enable_gqa=True)
    actual, _ = chunked_attention(torch.nn.Identity(), query, key, value, None, scaling=0.3)
    torch.testing.assert_close(actual, expected.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_the_training_forward_without_drops_is_the_models(model: LlamaForCausalLM) -> None:
    ids = torch.randint(6, 2048, (2, 128))
    positions = torch.arange(128).expand(2, -1)
    expected = model.model(ids).last_hidden_state
    AttentionInterface.register("chunked_training", chunked_attention)
    model.set_attn_implementation("chunked_training")
    torch.testing.assert_close(DepthDroppingForward(model, 0)(ids, positions, 0.0), expected, atol=1e-5, rtol=1e-5)


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


def test_embeddings_that_are_alike_are_moved_apart(model: LlamaForCausalLM) -> None:
    weight = model.get_parameter("model.embed_tokens.weight")
    with torch.no_grad():
        weight[10:14] = weight[9] * 1.01
    others = weight.detach().clone()
    others[9:14] = 0
    assert spread_embeddings(model) == 5
    directions = functional.normalize(weight[9:14].detach(), dim=-1)
    assert float((directions @ directions.T).fill_diagonal_(0).max()) < 0.8
    kept = weight.detach().clone()
    kept[9:14] = 0
    assert torch.equal(kept, others)
