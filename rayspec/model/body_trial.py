"""Comparisons of a sublayer's bodies with its modules, on the rows of the load check."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from rayspec.choices import Keys
from rayspec.model.architecture import rounding_tolerance
from rayspec.model.attention import AttentionKind, Heads, Rows
from rayspec.model.load_check import CheckRows, likeness
from rayspec.model.offload import Fetch
from rayspec.model.sublayers import Body, Sublayer


@dataclass(frozen=True, slots=True)
class Trial:
    """One sublayer, and the rows on which its bodies are compared with its modules. kinds: by attention call of the
    block, its parameters."""

    layer: int
    rows: CheckRows
    expected: Tensor
    kinds: Sequence[AttentionKind]

    @classmethod
    def of(cls, sublayer: Sublayer, rows: CheckRows) -> Trial:
        noting = [NotingRows(each) for each in rows.passes]
        expected = rows.outputs(sublayer.layer, sublayer, passes=noting)
        return cls(sublayer.layer, rows, rows.branch(expected), noting[0].kinds)

    def branch(self, body: Body) -> Tensor:
        """Return the term that a body adds to the residual: float32 [1, N, hidden_size]."""
        return self.rows.branch(self.rows.outputs(self.layer, body))

    def require(self, body: Body) -> None:
        """Raise ValueError if the body computes something else than the modules."""
        difference = float((self.expected - self.branch(body)).abs().max() / self.expected.abs().max())
        if not difference <= rounding_tolerance(self.rows.hidden[0].dtype):
            raise ValueError(f"the fused computation differs by {difference:.1e} of the largest output")

    def require_near(self, copied: Body, largest_error: float) -> None:
        """Raise ValueError if the error of a quantised copy is larger, as a share of the norm of the output."""
        error = float((self.branch(copied) - self.expected).norm() / self.expected.norm())
        if not error <= largest_error:
            raise ValueError(f"its error is {error:.3f} of the output")


@dataclass(slots=True)
class NotingRows:
    """Rows that record the `AttentionKind` of each call of a module."""

    rows: Rows
    kinds: list[AttentionKind] = field(default_factory=list)

    @property
    def in_place(self) -> bool:
        return False

    @property
    def positions(self) -> Tensor:
        return self.rows.positions

    @property
    def rope(self) -> dict[str, Any]:
        return self.rows.rope

    def seeing(self, keys: Keys) -> NotingRows:
        return self

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind, *, first_head: int = 0
    ) -> Tensor:
        self.kinds.append(kind)
        return self.rows.attend(layer, query, key, value, kind, first_head=first_head)

    def attend_projected(self, heads: Heads, projected: Tensor) -> Tensor:
        return self.rows.attend_projected(heads, projected)


def twin_of(sublayer: Sublayer) -> Sublayer:
    """Return the sublayer with copies of its modules, whose tensors are their own and are never fetched."""
    return replace(
        sublayer,
        block=_twin(sublayer.block),
        pre_norm=None if sublayer.pre_norm is None else _twin(sublayer.pre_norm),
        post_norm=None if sublayer.post_norm is None else _twin(sublayer.post_norm),
    )


def in_float32(twin: Sublayer) -> Sublayer:
    """Convert the tensors of a sublayer from `twin_of`, and return it."""
    for module in (twin.block, twin.pre_norm, twin.post_norm):
        if module is not None:
            module.float()
    return twin


def kind_of(sublayer: Sublayer) -> tuple[Any, ...]:
    """Return what attention sublayers have in common that differ in their weights only."""
    norms = (likeness(norm) for norm in (sublayer.pre_norm, sublayer.post_norm) if norm is not None)
    return (sublayer.layer_type, likeness(sublayer.block), *norms)


def _twin(module: nn.Module) -> nn.Module:
    twin = copy.copy(module)
    twin._buffers = {name: None if buffer is None else buffer.clone() for name, buffer in module._buffers.items()}
    twin._forward_pre_hooks = OrderedDict(
        (key, hook) for key, hook in module._forward_pre_hooks.items() if not isinstance(hook, Fetch)
    )
    twin._parameters = {
        name: None if weight is None else nn.Parameter(weight.data.clone(), requires_grad=False)
        for name, weight in module._parameters.items()
    }
    twin._modules = {name: None if child is None else _twin(child) for name, child in module._modules.items()}
    return twin
