from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from rayspec.model.blocked import block_linears
from rayspec.model.matrices import has_blocked_layout
from tests.families import build

TOKENS = torch.arange(6)[None]

pytestmark = pytest.mark.skipif(not has_blocked_layout(torch.zeros(1)), reason="needs oneDNN on an x86 processor")


def test_layers_that_nothing_else_reads_change_their_layout() -> None:
    model: Any = build("cohere2")  # whose head is tied to its embedding
    mlp = model.model.layers[0].mlp
    gate = mlp.gate_proj

    def forward(rows: Tensor) -> Tensor:
        gates = (gate(rows) + linear(rows, gate.weight)) / 2
        found: Tensor = mlp.down_proj(mlp.act_fn(gates) * mlp.up_proj(rows))
        return found

    mlp.forward = forward

    def logits() -> Tensor:
        with torch.no_grad():
            found: Tensor = model(TOKENS).logits
        return found

    expected = logits()
    block_linears(model, logits)
    torch.testing.assert_close(logits(), expected, atol=1e-5, rtol=1e-5)
    freed = {name for name, weight in model.named_parameters() if not weight.numel()}
    assert len(gate.weight)
    assert {f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "down")} < freed
    assert not any("embed" in name or "norm" in name for name in freed)
    every = {f"{name}.weight" for name, each in model.named_modules() if name.endswith("_proj")}
    assert freed == every - {"model.layers.0.mlp.gate_proj.weight"}
    assert "forward" in vars(model.lm_head)


def test_a_layer_that_computes_something_else_keeps_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = build("cohere2")
    monkeypatch.setattr(
        "rayspec.model.matrices.Matrix.forward", lambda self, rows: linear(rows, self._weight.to_dense()) + 1
    )
    block_linears(model, lambda: model(TOKENS))
    assert all(weight.numel() for weight in model.parameters())
