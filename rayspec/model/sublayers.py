"""THE forward. Prefill, draft, verify, profile and plan search are calls of `run` with other rows and other spans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torch import Tensor, nn

from rayspec.choices import FULL, SKIP, Choice, Weights, keys_of, weights_of
from rayspec.model.attention import Rows

Tap = Callable[[int, Tensor], None]
Body: TypeAlias = Callable[[Tensor, Rows], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sublayer:
    """One attention or MLP block with its norms and residual. `index` counts sublayers, `layer` decoder layers.

    body: what runs in place of the modules, where something faster was proven equal to them. quantised: what drafts may
    run in place of both, on copies of the weights.
    """

    index: int
    kind: Literal["attention", "mlp"]
    layer: int
    layer_type: str
    block: nn.Module
    pre_norm: nn.Module | None
    post_norm: nn.Module | None
    residual_scale: float
    body: Body | None = None
    quantised: Mapping[Weights, Body] = field(default_factory=dict)

    def __call__(self, hidden: Tensor, rows: Rows, weights: Weights = "full") -> Tensor:
        """hidden: [1, N, hidden_size] in and out. Raises KeyError for weights of which the sublayer has no copy."""
        if weights != "full":
            return self._copy(weights)(hidden, rows)
        if self.body is not None:
            return self.body(hidden, rows)
        branch: Tensor = hidden if self.pre_norm is None else self.pre_norm(hidden)
        if self.kind == "attention":
            branch, _ = self.block(
                hidden_states=branch,
                position_embeddings=rows.rope[self.layer_type],
                position_ids=rows.positions[None],
                attention_mask=None,
                packed=rows,
            )
        else:
            branch = self.block(branch)
        return self.add(hidden, branch, in_place=rows.in_place)

    def can_run(self, choice: Choice) -> bool:
        """Whether there is a way to run it so. Few keys mean nothing to an MLP."""
        has_weights = weights_of(choice) == "full" or weights_of(choice) in self.quantised
        return choice != SKIP and has_weights and (self.kind == "attention" or keys_of(choice) == "all")

    def _copy(self, weights: Weights) -> Body:
        if weights not in self.quantised:
            raise KeyError(f"sublayer {self.index} has no {weights} copy of its weights")
        return self.quantised[weights]

    @property
    def has_experts(self) -> bool:
        """Its launches, and the shapes of its products, depend on which rows choose which expert."""
        return hasattr(self.block, "experts")

    @property
    def adds_plainly(self) -> bool:
        """The block's output goes to the residual as it is."""
        return self.post_norm is None and self.residual_scale == 1

    def add(self, hidden: Tensor, branch: Tensor, *, in_place: bool) -> Tensor:
        """The residual with the block's output: [1, N, hidden_size] both."""
        if self.post_norm is not None:
            branch = self.post_norm(branch)
        branch = branch if self.residual_scale == 1 else branch * self.residual_scale
        return hidden.add_(branch) if in_place else hidden + branch


def run(
    span: Sequence[Sublayer],
    hidden: Tensor,
    rows: Rows,
    *,
    choices: Sequence[Choice] | None = None,
    tap: Tap | None = None,
) -> Tensor:
    """Run a contiguous span of sublayers over packed rows.

    hidden: [1, N, hidden_size]; changed where `rows.in_place`. choices: of each sublayer of the whole model; None
    runs all in full. `tap(i, hidden)` is called with the hidden states after sublayer i, run or not. Returns the hidden
    states after the span.
    """
    for sublayer in span:
        choice = FULL if choices is None else choices[sublayer.index]
        if choice != SKIP:
            hidden = sublayer(hidden, rows.seeing(keys_of(choice)), weights_of(choice))
        if tap is not None:
            tap(sublayer.index, hidden)
    return hidden
