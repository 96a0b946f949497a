"""The only forward: prefill, draft, verify, profile and plan search all call `run`, with their own rows and spans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torch import Tensor, nn

from rayspec.choices import FULL, SKIP, Choice, Weights, keys_of, weights_of
from rayspec.model.attention import AttentionCalls, Rows

# A callback that `run` calls with a sublayer's index and the hidden states after it. The "tap" of a token is its hidden
# states at all sublayer boundaries.
Tap = Callable[[int, Tensor], None]
Body: TypeAlias = Callable[[Tensor, Rows], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sublayer:
    """One attention or MLP block with its norms and residual. `index` counts sublayers, `layer` decoder layers.

    body: a faster computation that replaces the modules, if a check found it equal to them. quantised: bodies for
    drafts with quantised copies of the weights, by type of weights.
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
        """Run the sublayer and its residual; hidden: [1, N, hidden_size] in and out.

        Raises KeyError for weights of which the sublayer has no copy.
        """
        if weights != "full":
            if weights not in self.quantised:
                raise KeyError(f"sublayer {self.index} has no {weights} copy of its weights")
            return self.quantised[weights](hidden, rows)
        if self.body is not None:
            return self.body(hidden, rows)
        branch: Tensor = hidden if self.pre_norm is None else self.pre_norm(hidden)
        if self.kind == "attention":
            branch, _ = self.block(
                hidden_states=branch,
                position_embeddings=rows.rope[self.layer_type],
                position_ids=rows.positions[None],
                attention_mask=None,
                packed=AttentionCalls(rows),
            )
        else:
            branch = self.block(branch)
        return self.add(hidden, branch, in_place=rows.in_place)

    def can_run(self, choice: Choice) -> bool:
        """Return whether the sublayer can run this choice. A choice of few keys applies to attention only."""
        has_weights = weights_of(choice) == "full" or weights_of(choice) in self.quantised
        return choice != SKIP and has_weights and (self.kind == "attention" or keys_of(choice) == "all")

    @property
    def modules(self) -> list[nn.Module]:
        """The modules in the order in which they run."""
        return [module for module in (self.pre_norm, self.block, self.post_norm) if module is not None]

    @property
    def has_experts(self) -> bool:
        """Whether the block is a mixture of experts. Its launches and matrix shapes then depend on the routing."""
        return hasattr(self.block, "experts")

    @property
    def adds_plainly(self) -> bool:
        """Whether the block's output is added to the residual without a norm or a scale."""
        return self.post_norm is None and self.residual_scale == 1

    def add(self, hidden: Tensor, branch: Tensor, *, in_place: bool) -> Tensor:
        """Return the residual `hidden` plus the block's output `branch`: [1, N, hidden_size] both."""
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

    hidden: [1, N, hidden_size]; changed if `rows.in_place`. choices: one per sublayer of the whole model; None runs all
    in full. `tap(i, hidden)` is called with the hidden states after sublayer i, even if it is skipped. Returns the
    hidden states after the span.
    """
    for sublayer in span:
        choice = FULL if choices is None else choices[sublayer.index]
        if choice != SKIP:
            hidden = sublayer(hidden, rows.seeing(keys_of(choice)), weights_of(choice))
        if tap is not None:
            tap(sublayer.index, hidden)
    return hidden
