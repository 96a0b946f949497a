from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rayspec.choices import Choices, choices_of
from rayspec.model.architecture import Decomposition, decompose
from rayspec.model.attention import pack
from rayspec.model.bodies import AttentionBody, GatedBody, fuse
from rayspec.model.kv_arena import KVArena
from rayspec.model.matrices import Matrix
from rayspec.model.rows import RowSpan, one_run
from rayspec.model.sublayers import run
from tests.families import MATRIX, build, checkpoint, modules_of

CPU = torch.device("cpu")
# Sublayers that the check refuses: interleaved rotation (GLM), norms over all heads (OLMo 2), no rotation in some
# layers (SmolLM 3), experts.
MODULES_LEFT = {
    "glm4": {"attention"}, "olmo2": {"attention"}, "smollm3": {"attention"}, "mixtral": {"mlp"}, "qwen3_moe": {"mlp"},
}  # fmt: skip


@torch.inference_mode()
def logits_of(parts: Decomposition, tokens: list[int], choices: Choices | None = None) -> Tensor:
    arena = KVArena(parts.shapes, len(tokens), dtype=parts.dtype, device=CPU)
    rows = pack(arena, [RowSpan(one_run(0, len(tokens)), 0, len(tokens))], device=CPU)
    hidden = parts.embed(torch.tensor(tokens))
    parts.rotate(hidden, rows)
    return parts.head(run(parts.sublayers, hidden, rows, choices=choices))


@pytest.mark.parametrize("use_operators", [False, True])
@pytest.mark.parametrize("family", MATRIX)
def test_bodies_compute_what_the_modules_do(family: str, use_operators: bool) -> None:
    tokens = [5, 9, 2, 77, 30, 30, 6, 41, 8, 100, 3, 12]
    choices = choices_of([index % 3 != 1 for index in range(len(modules_of(checkpoint(family)).sublayers))])
    expected = [logits_of(modules_of(checkpoint(family)), tokens, each) for each in (None, choices)]
    fused = fuse(modules_of(checkpoint(family)), use_operators=use_operators)
    actual = [logits_of(fused, tokens, each) for each in (None, choices)]
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", MATRIX)
def test_sublayers_of_the_common_layout_have_bodies(family: str) -> None:
    fused = fuse(modules_of(checkpoint(family)))
    left = {sublayer.kind for sublayer in fused.sublayers if sublayer.body is None}
    assert left == MODULES_LEFT.get(family, set())
    bodies = [type(sublayer.body) for sublayer in fused.sublayers if sublayer.body is not None]
    assert bodies
    assert set(bodies) <= {AttentionBody, GatedBody}


def test_weights_are_held_once() -> None:
    parts = modules_of(checkpoint("llama"))
    linears = [m for sublayer in parts.sublayers for m in sublayer.block.modules() if isinstance(m, nn.Linear)]
    assert all(linear.weight.nbytes for linear in linears)
    fuse(parts)
    assert not any(linear.weight.nbytes for linear in linears)


def test_a_tied_matrix_stays_and_another_head_is_packed() -> None:
    heads = {tied: fuse(decompose(build("llama", tie_word_embeddings=tied))).lm_head for tied in (False, True)}
    assert isinstance(heads[False], Matrix)
    assert isinstance(heads[True], nn.Linear)


def test_sublayers_apart_stay_as_they_are() -> None:
    fused = fuse(modules_of(checkpoint("llama")), apart_from=[1, 2])
    assert [sublayer.index for sublayer in fused.sublayers if sublayer.body is None] == [1, 2]
    assert all(parameter.nbytes for parameter in fused.sublayers[1].block.parameters())


class _Louder(nn.Module):
    """A block that looks like an MLP of the common layout and computes something else."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = (
            mlp.gate_proj,
            mlp.up_proj,
            mlp.down_proj,
            mlp.act_fn,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        louder: Tensor = self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden)) * 1.01
        return louder


def test_a_block_that_computes_something_else_runs_by_its_modules() -> None:
    def changed() -> Decomposition:
        parts = modules_of(checkpoint("llama"))
        louder = replace(parts.sublayers[3], block=_Louder(parts.sublayers[3].block))
        return replace(parts, sublayers=(*parts.sublayers[:3], louder, *parts.sublayers[4:]))

    tokens = [5, 9, 2, 77]
    expected = logits_of(changed(), tokens)
    fused = fuse(changed())
    assert [sublayer.index for sublayer in fused.sublayers if sublayer.body is None] == [3]
    torch.testing.assert_close(logits_of(fused, tokens), expected, atol=2e-4, rtol=1e-4)


def test_a_module_with_a_hook_runs_as_it_is() -> None:
    parts = modules_of(checkpoint("llama"))
    calls = []
    parts.sublayers[0].block.register_forward_hook(lambda *_: calls.append(1))
    fused = fuse(parts)
    assert fused.sublayers[0].body is None
    calls.clear()
    logits_of(fused, [5, 9])
    assert calls == [1]
