import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rayspec.choices import Weights, choices_of
from rayspec.model import fused as fused_layers
from rayspec.model import matrices
from rayspec.model.architecture import decompose
from rayspec.model.fused import FusedLayer, fuse, in_one_order, matrices_of
from rayspec.model.matrices import FewRows, Matrix
from rayspec.model.offload import offload
from rayspec.model.sublayers import Decomposition
from tests.families import FAMILIES, HARD_FAMILIES, build, checkpoint, logits_of, modules_of, ragged_prompts, reference

KINDS: list[Weights] = ["int8", "int4"]
# Sublayers that the check refuses: interleaved rotation (GLM), norms over all heads (OLMo 2), no rotation in some
# layers (SmolLM 3), experts, attention of its own.
MODULES_LEFT = {
    "glm4": {"attention"}, "olmo2": {"attention"}, "phi3": {"attention"}, "smollm3": {"attention"}, "mixtral": {"mlp"},
    "qwen3_moe": {"mlp"}, "diffllama": {"attention"}, "ministral3": {"attention"}, "deepseek_v3": {"attention", "mlp"},
}  # fmt: skip


TOKENS = [5, 9, 2, 77, 30, 30, 6, 41, 8, 100, 3, 12]


@pytest.mark.parametrize("family", [*FAMILIES, *HARD_FAMILIES])
def test_modules_and_bodies_compute_what_transformers_does(family: str) -> None:
    (tokens,) = ragged_prompts([70])
    choices = choices_of([index % 3 != 1 for index in range(8)])
    expected = [logits_of(modules_of(checkpoint(family)), tokens, each) for each in (None, choices)]
    with torch.inference_mode():
        theirs = reference(checkpoint(family))(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(expected[0], theirs, atol=2e-4, rtol=1e-4)
    for use_operators in (False, True):
        fused = fuse(modules_of(checkpoint(family)), use_operators=use_operators)
        left = {sublayer.kind for sublayer in fused.sublayers if sublayer.body is None}
        assert left == MODULES_LEFT.get(family, set())
        actual = [logits_of(fused, tokens, each) for each in (None, choices)]
        torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_packed_and_the_embedding_stays(tied: bool) -> None:
    parts = decompose(build("llama", tie_word_embeddings=tied))
    expected = logits_of(parts, TOKENS)
    fused = fuse(parts)
    assert isinstance(fused.lm_head, Matrix)
    torch.testing.assert_close(logits_of(fused, TOKENS), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("use_operators", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@torch.inference_mode()
def test_drafts_have_a_head_whose_likeliest_tokens_are_the_heads(
    tied: bool, dtype: torch.dtype, use_operators: bool
) -> None:
    """Of few rows it takes the logits of the likeliest tokens from the head's own weights, with its bias."""
    model = build("llama", tie_word_embeddings=tied).to(dtype)
    model.lm_head.bias = torch.nn.Parameter(torch.randn(len(model.lm_head.weight), dtype=dtype))
    parts = decompose(model)
    assert fuse(decompose(build("llama"))).draft_head is None
    hidden = torch.randn(1, 4, parts.config.hidden_size, dtype=dtype)
    expected = parts.head(hidden)
    most = float(expected.abs().max())
    fused = fuse(parts, quantised=["int4"], use_operators=use_operators)
    torch.testing.assert_close(fused.head(hidden), expected, atol=0.01 * most, rtol=0.01)
    drafted = fused.head(hidden, drafting=True)
    assert drafted.dtype == dtype
    assert torch.equal(drafted.argmax(-1), expected.argmax(-1))
    torch.testing.assert_close(drafted.amax(-1), expected.amax(-1), atol=0.01 * most, rtol=0.01)
    assert 0.01 * most < float((drafted - expected).abs().max()) < 0.3 * most


def _raise(product: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("out of resource: shared memory")


@pytest.mark.parametrize("fault", [torch.zeros_like, _raise])
def test_a_head_of_drafts_that_computes_something_else_is_left_out(
    fault: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel that fails in the shape of the head only: the copies of sublayers stay."""
    parts, product = decompose(build("llama")), matrices.product
    num_tokens = len(parts.lm_head.weight) if parts.lm_head is not None else 0

    def faulty(output: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, *rest: Any) -> None:
        product(output, rows, weight, *rest)
        if weight.dtype == torch.int32 and len(weight) >= num_tokens:
            output.copy_(fault(output))

    monkeypatch.setattr(matrices, "product", faulty)
    with caplog.at_level(logging.WARNING):
        fused = fuse(parts, quantised=["int4"], use_operators=True)
    assert fused.draft_head is None or not isinstance(fused.draft_head, FewRows)
    assert all("int4" in sublayer.quantised for sublayer in fused.sublayers)
    (message,) = caplog.messages
    assert message.startswith("the LM head has no int4 copy for drafts: ")


@pytest.mark.parametrize("fault", [torch.zeros_like, _raise])
def test_a_head_whose_product_fails_is_multiplied_by_torch(
    fault: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel that fails in the shape of the head only: the sublayers keep theirs, and their passes have a fixed
    number of rows in deterministic mode."""
    parts, product = decompose(build("llama").bfloat16()), matrices.product
    assert parts.lm_head is not None
    num_tokens = len(parts.lm_head.weight)

    def faulty(output: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, *rest: Any) -> None:
        product(output, rows, weight, *rest)
        if len(weight) == num_tokens:
            output.copy_(fault(output))

    assert in_one_order(fuse(decompose(build("llama").bfloat16()), use_operators=True)) is not None
    monkeypatch.setattr(matrices, "product", faulty)
    with caplog.at_level(logging.WARNING):
        fused = fuse(parts, use_operators=True)
    assert isinstance(fused.lm_head, nn.Linear)
    assert isinstance(fused.sublayers[0].body, FusedLayer)
    assert in_one_order(fused) is None
    (message,) = caplog.messages
    assert message.startswith("the LM head is multiplied by torch, which is slower: ")


@pytest.mark.parametrize("has_instructions", [False, True])
@torch.inference_mode()
def test_many_rows_of_a_float32_draft_use_a_head_in_bfloat16(
    has_instructions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_instructions and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no instructions for bfloat16")
    is_blocked = matrices.has_blocked_layout
    monkeypatch.setattr(
        matrices, "has_blocked_layout", lambda weight: is_blocked(weight) if has_instructions else False
    )
    parts = decompose(build("llama"))
    hidden = torch.randn(1, 5, parts.config.hidden_size)
    expected = parts.head(hidden)
    fused = fuse(parts, quantised=["int4"])
    torch.testing.assert_close(fused.head(hidden), expected, atol=2e-4, rtol=1e-4)
    drafted = fused.head(hidden, drafting=True)
    assert drafted.dtype == torch.float32
    assert 0 < float((drafted - expected).abs().max()) < 0.02 * float(expected.abs().max())


def test_a_block_that_computes_something_else_runs_by_its_modules() -> None:
    """With a hook it has one more operation; with another forward it looks like an MLP of the common layout."""
    parts, calls = modules_of(checkpoint("llama")), []
    parts.sublayers[0].block.register_forward_hook(lambda *_: calls.append(1))
    louder, forward = parts.sublayers[3].block, parts.sublayers[3].block.forward
    louder.forward = lambda hidden: forward(hidden) * 1.01  # type: ignore[method-assign]
    expected = logits_of(parts, TOKENS)
    fused = fuse(parts)
    assert [sublayer.index for sublayer in fused.sublayers if sublayer.body is None] == [0, 3]
    calls.clear()
    torch.testing.assert_close(logits_of(fused, TOKENS), expected, atol=2e-4, rtol=1e-4)
    assert calls == [1]


def all_in(parts: Decomposition, weights: Weights) -> Decomposition:
    """The model whose full weights are the copies, where it has them."""
    sublayers = (replace(each, body=each.quantised.get(weights, each.body)) for each in parts.sublayers)
    return replace(parts, sublayers=tuple(sublayers))


@torch.inference_mode()
def dequantise_linears(parts: Decomposition, copies: Decomposition, weights: Weights) -> None:
    """Give the modules the weights of the copies."""
    for sublayer, copied in zip(parts.sublayers, copies.sublayers, strict=True):
        body = copied.quantised[weights]
        assert isinstance(body, FusedLayer)
        first, last = matrices_of(sublayer.block, sublayer.kind)
        assert isinstance(last, nn.Linear)
        for linears, matrix in zip((first, [last]), (body.first, body.last), strict=True):
            weight = matrix(torch.eye(linears[0].in_features)).T
            for linear, rows in zip(linears, weight.split([each.out_features for each in linears]), strict=True):
                linear.weight.copy_(rows)


@pytest.mark.parametrize("kind", ["attention", "mlp"])
@torch.inference_mode()
def test_int4_copies_are_near_where_the_inputs_of_tokens_are_large(kind: str) -> None:
    """Hidden states of all tokens are large in the same columns. A span without the embedding does not know them."""

    def model() -> Decomposition:
        parts = modules_of(checkpoint("llama"))
        assert isinstance(parts.embedding, nn.Embedding)
        places = torch.randperm(parts.config.hidden_size, generator=seed())
        parts.embedding.weight *= torch.logspace(0, 2, len(places))[places]
        return parts

    def seed() -> torch.Generator:
        return torch.Generator().manual_seed(0)

    def error(fused: Decomposition) -> float:
        number = ["attention", "mlp"].index(kind)
        choices = ["int4" if index == number else "full" for index in range(len(fused.sublayers))]
        found, exact = logits_of(fused, tokens, choices), logits_of(model(), tokens)
        return float((found - exact).norm() / exact.norm())

    tokens = torch.randint(100, (40,), generator=seed()).tolist()
    without = replace(fuse(replace(model(), embedding=None), quantised=["int4"]), embedding=model().embedding)
    assert error(fuse(model(), quantised=["int4"])) < 0.95 * error(without)


@pytest.mark.parametrize("use_operators", [False, True])
@pytest.mark.parametrize(("weights", "tolerance"), [("int8", 0.06), ("int4", 0.025)])
def test_copies_compute_what_their_modules_do(weights: Weights, tolerance: float, use_operators: bool) -> None:
    """int8 also rounds what the matrices are multiplied by, and int4 does so to bfloat16 on a CPU."""
    modules = modules_of(checkpoint("llama"))
    fused = fuse(modules_of(checkpoint("llama")), use_operators=use_operators, quantised=[weights])
    dequantise_linears(modules, fused, weights)
    expected, found = logits_of(modules, TOKENS), logits_of(all_in(fused, weights), TOKENS)
    assert (found - expected).norm() < tolerance * expected.norm()
    full = logits_of(modules_of(checkpoint("llama")), TOKENS)
    torch.testing.assert_close(logits_of(fused, TOKENS), full, atol=2e-4, rtol=1e-4)


def test_few_rows_are_multiplied_by_the_own_bits_of_a_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    modules, copies, parts = (modules_of(checkpoint("llama")) for _ in range(3))
    dequantise_linears(modules, fuse(copies, quantised=["int4"]), "int4")
    dequantise_linears(parts, fuse(modules_of(checkpoint("llama")), quantised=["int4"]), "int4")
    fused = fuse(parts, quantised=["int4"], own_bits=True)
    assert not caplog.messages
    few, many = TOKENS[:4], TOKENS
    assert torch.equal(logits_of(fused, few), logits_of(all_in(fused, "int4"), few))
    torch.testing.assert_close(logits_of(fused, many), logits_of(modules, many), atol=2e-4, rtol=1e-4)
    fuse(modules_of(checkpoint("llama")), quantised=["int4"], own_bits=True)
    assert "option 'own_bits' has no effect" in caplog.text


def test_a_matrix_that_cannot_have_a_copy_stays() -> None:
    """No group of columns fits 72."""
    mlp = fuse(decompose(build("llama", intermediate_size=72)), quantised=["int8", "int4"]).sublayers[1]
    assert isinstance(mlp.body, FusedLayer)
    kept = {weights: copy.last is mlp.body.last for weights, copy in mlp.quantised.items()}  # type: ignore[attr-defined]
    assert kept == {"int8": False, "int4": True}


def test_a_copy_that_is_far_off_is_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(fused_layers._LARGEST_ERROR, "int4", 0.01)
    fused = fuse(modules_of(checkpoint("llama")), quantised=["int8", "int4"])
    assert all(sublayer.body is not None and list(sublayer.quantised) == ["int8"] for sublayer in fused.sublayers)
    assert "8 of 8 sublayers have no int4 copy for drafts: 4 LlamaAttention (its error is" in caplog.text


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_copies_of_offloaded_sublayers_fetch_nothing(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = fuse(modules_of(checkpoint(family)), quantised=["int8", "int4"])
    expected = [logits_of(all_in(resident, weights), TOKENS) for weights in KINDS]
    parts = modules_of(checkpoint(family))
    expected_full = logits_of(parts, TOKENS)
    offloaded = offload(parts, [1, 2, 5], to="disk", folder=tmp_path)
    fused = fuse(parts, apart_from=[1, 2, 5], quantised=["int8", "int4"])
    torch.testing.assert_close(logits_of(fused, TOKENS), expected_full, atol=2e-4, rtol=1e-4)
    monkeypatch.setattr(type(offloaded), "fetch", lambda *_: pytest.fail("a copy fetched weights"))
    found = [logits_of(all_in(fused, weights), TOKENS) for weights in KINDS]
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
