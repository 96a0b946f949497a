"""A model as sublayers, and the only forward: prefill, draft, verify, profile and plan search all call `run`, with
their own rows and spans."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from rayspec.choices import SKIP, Choice, Weights, keys_of, weights_of
from rayspec.model.attention import AttentionCalls, Rows
from rayspec.model.kv_cache import LayerShape

# `run` calls it with a sublayer's index and the states after it. A token's "tap" is its states at all boundaries.
Tap = Callable[[int, Tensor], None]
Body: TypeAlias = Callable[[Tensor, Rows], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sublayer:
    """One attention or MLP block with its norms and residual. `index` counts sublayers, `layer` decoder layers. body: a
    faster computation that replaces the modules, if a check found it equal to them. quantised: bodies for drafts with
    quantised copies of the weights, by type of weights."""

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
        """Run the sublayer and its residual; hidden: [1, N, hidden_size] in and out. weights: full, or of a copy.
        Without the copy it runs in full: a shard that replaces another may lack it, as after the loss of its GPU."""
        if (body := self.quantised.get(weights, self.body)) is not None:
            return body(hidden, rows)
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
    """Run a contiguous span of sublayers over packed rows. hidden: [1, N, hidden_size]; changed if `rows.in_place`.
    choices: one per sublayer of the whole model; None runs all in full. `tap(i, hidden)` is called with the hidden
    states after sublayer i, even if it is skipped. Returns the hidden states after the span."""
    for sublayer in span:
        if choices is None:
            hidden = sublayer(hidden, rows)
        elif (choice := choices[sublayer.index]) != SKIP:
            hidden = sublayer(hidden, rows.seeing(keys_of(choice)), weights_of(choice))
        if tap is not None:
            tap(sublayer.index, hidden)
    return hidden


@dataclass(frozen=True, slots=True)
class Decomposition:
    """A causal LM, or a span of its layers, as embedding, sublayers and head. Hidden states are [1, N, hidden_size].

    embedding is None in a span without the first layer; final_norm and lm_head are None in a span without the last.
    draft_head: a cheaper copy of the head, if drafts have one.
    Sublayers and layers keep the numbers that they have in the whole model. shapes: shape of keys and values, by layer.
    """

    config: PretrainedConfig
    embedding: nn.Module | None
    embedding_scale: float
    rotary: nn.Module
    sublayers: tuple[Sublayer, ...]
    final_norm: nn.Module | None
    lm_head: nn.Module | None
    logit_scale: float
    logit_softcap: float | None
    shapes: dict[int, LayerShape]
    draft_head: nn.Module | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self._weight.dtype

    @property
    def device(self) -> torch.device:
        return self._weight.device

    @property
    def _weight(self) -> nn.Parameter:
        """A weight that no quantizer changes: of a norm, or of an end where the family's norms have no weights."""
        first = self.sublayers[0]
        modules = (self.final_norm, first.pre_norm, first.post_norm, self.embedding, self.lm_head, first.block)
        weights = (weight for module in modules if module is not None for weight in module.parameters())
        return next(weight for weight in weights if weight.is_floating_point())

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embed token_ids, [N] -> [1, N, hidden_size]. Needs a span with the first layer."""
        assert self.embedding is not None, "the embedding is with the first layer"
        hidden: Tensor = self.embedding(token_ids[None])
        return hidden if self.embedding_scale == 1 else hidden * self.embedding_scale

    def rotate(self, hidden: Tensor, rows: Rows) -> None:
        """Fill `rows.rope` with cosines and sines of the rows' positions, by layer type if the family has several."""
        for layer_type in dict.fromkeys(sublayer.layer_type for sublayer in self.sublayers):
            typed = (layer_type,) if layer_type else ()
            rows.rope[layer_type] = self.rotary(hidden, rows.positions[None], *typed)

    def head(self, hidden: Tensor, *, drafting: bool = False) -> Tensor:
        """Return the logits [N, vocab_size] of hidden states [1, N, hidden_size]. Needs a span with the last layer."""
        lm_head = self.draft_head if drafting and self.draft_head is not None else self.lm_head
        assert self.final_norm is not None, "the head is with the last layer"
        assert lm_head is not None, "the head is with the last layer"
        logits: Tensor = lm_head(self.final_norm(hidden))[0]
        if self.logit_scale != 1:
            logits = logits * self.logit_scale
        if self.logit_softcap is not None:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits

    @property
    def windows(self) -> dict[int, int]:
        """The sliding window, in tokens, of each layer that has one."""
        found = {one.layer: window_of(one.block, self.config) for one in self.sublayers if one.kind == "attention"}
        return {layer: window for layer, window in found.items() if window is not None}

    @property
    def curve_names(self) -> list[str]:
        """Name of each sublayer's latency curve. Sublayers of one name do the same work, in any span of the model."""
        windows = {layer: f":window{window}" for layer, window in self.windows.items()}
        return [
            f"{one.kind}:{type(one.block).__name__}{windows.get(one.layer, '') if one.kind == 'attention' else ''}"
            for one in self.sublayers
        ]


def window_of(attention: nn.Module | None, config: PretrainedConfig) -> int | None:
    """Return the sliding window of an attention block, in tokens; None if it hides nothing. In families whose layers
    are all alike, it is in the config. In others, full attention may hold the window of the other layers."""
    if not getattr(attention, "is_sliding", True):
        return None
    return hiding_window(getattr(attention, "sliding_window", getattr(config, "sliding_window", None)), config)


def hiding_window(window: int | None, config: PretrainedConfig) -> int | None:
    """Return the window; None if it is as long as any sequence."""
    return window if window and window < getattr(config, "max_position_embeddings", math.inf) else None
