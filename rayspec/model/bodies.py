"""Sublayers as few large operations, where a check on the loaded weights shows that they compute what the modules do.

The layout of Llama, Mistral, Qwen and their like has a fused body: one matrix for queries, keys and values, one for
gate and up, and a last matrix that adds to the residual. Norms are the family's own modules. A sublayer that the check
refuses goes on with transformers' modules, whose linear layers get a faster layout where the device has one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rayspec.model.architecture import Decomposition
from rayspec.model.attention import AttentionKind, Rows, pack
from rayspec.model.kv_arena import KVArena
from rayspec.model.matrices import Matrix, empty_linears, has_blocked_layout, is_plain
from rayspec.model.rows import RowSpan, one_run
from rayspec.model.sublayers import Body, Sublayer

logger = logging.getLogger(__name__)

_NUM_CHECK_TOKENS = 10
# Small against what a block adds, which does not shrink with its normalised input: the residual hides no mistake.
_CHECK_SCALE = 1e-2
_TOLERANCES = {torch.float32: 1e-4}
_OTHER_TOLERANCE = 5e-2
_QUERY_KEY_VALUE = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_GATE_UP = (("gate_proj", "up_proj"), ("gate_up_proj",))
# What a body raises where a block is not what it takes it for.
_MISFITS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBody:
    """Attention with rotary embedding of the rotate-half kind; queries and keys may have a norm a head."""

    sublayer: Sublayer
    head_dim: int
    num_heads: int
    num_kv_heads: int
    kind: AttentionKind
    projections: Matrix
    output: Matrix

    def __call__(self, hidden: Tensor, rows: Rows) -> Tensor:
        """hidden: [1, N, hidden_size] in and out."""
        heads = self.projections(_normed(self.sublayer, hidden))[0].unflatten(-1, (-1, self.head_dim))
        turned, value = torch.split(heads, [self.num_heads + self.num_kv_heads, self.num_kv_heads], 1)
        turned = _rotated(self._head_normed(turned), rows.rope[self.sublayer.layer_type])
        query, key = torch.split(turned, [self.num_heads, self.num_kv_heads], 1)
        mixed = rows.attend(
            self.sublayer.layer, query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), self.kind
        )
        return _added(self.sublayer, self.output, hidden, mixed.flatten(1)[None])

    def _head_normed(self, turned: Tensor) -> Tensor:
        """Queries and keys: [N, num_heads + num_kv_heads, head_dim]."""
        block: Any = self.sublayer.block
        if getattr(block, "q_norm", None) is None:
            return turned
        query, key = torch.split(turned, [self.num_heads, self.num_kv_heads], 1)
        return torch.cat([block.q_norm(query), block.k_norm(key)], 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedBody:
    """An MLP whose gate weighs what goes up: down(act(gate) * up)."""

    sublayer: Sublayer
    activation: nn.Module
    gate_up: Matrix
    down: Matrix

    def __call__(self, hidden: Tensor, rows: Rows) -> Tensor:
        """hidden: [1, N, hidden_size] in and out."""
        gate, up = self.gate_up(_normed(self.sublayer, hidden)).chunk(2, -1)
        return _added(self.sublayer, self.down, hidden, self.activation(gate) * up)


@torch.inference_mode()
def fuse(parts: Decomposition, *, apart_from: Collection[int] = ()) -> Decomposition:
    """The same model or span, with bodies where they prove equal to the modules on random input.

    The modules' own weights are freed: `parts` and the model that they come from cannot run any more. apart_from:
    sublayers that stay as they are, because their weights are fetched.
    """
    check = _Check(parts)
    sublayers = tuple(
        sublayer if sublayer.index in apart_from else _fused(sublayer, check) for sublayer in parts.sublayers
    )
    fused = Counter(sublayer.body is not None for sublayer in sublayers)
    logger.info("%d of %d sublayers have a fused body", fused[True], len(sublayers))
    return replace(parts, sublayers=sublayers, lm_head=_packed_head(parts))


class _Check:
    """Random hidden states that run through sublayers, each with an empty KV cache."""

    def __init__(self, parts: Decomposition) -> None:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(1, _NUM_CHECK_TOKENS, parts.config.hidden_size, generator=generator) * _CHECK_SCALE
        self.hidden = hidden.to(parts.device, parts.dtype)
        arena = KVArena(parts.shapes, _NUM_CHECK_TOKENS, dtype=parts.dtype, device=parts.device)
        span = RowSpan(one_run(0, _NUM_CHECK_TOKENS), 0, _NUM_CHECK_TOKENS)
        self.rows = _NotingRows(pack(arena, [span], device=parts.device))
        parts.rotate(self.hidden, self.rows.rows)

    def branch(self, body: Body) -> Tensor:
        """What it adds to the residual: float32 [1, N, hidden_size]."""
        return body(self.hidden, self.rows).float() - self.hidden.float()

    def accepts(self, expected: Tensor, body: Body) -> bool:
        actual = self.branch(body)
        tolerance = _TOLERANCES.get(self.hidden.dtype, _OTHER_TOLERANCE)
        return bool((expected - actual).abs().max() <= tolerance * expected.abs().max())


@dataclass(slots=True)
class _NotingRows:
    """Rows that note what kind of attention a module asks for."""

    rows: Rows
    kind: AttentionKind | None = None

    @property
    def positions(self) -> Tensor:
        return self.rows.positions

    @property
    def rope(self) -> dict[str, Any]:
        return self.rows.rope

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
        self.kind = kind
        return self.rows.attend(layer, query, key, value, kind)


def _fused(sublayer: Sublayer, check: _Check) -> Sublayer:
    expected = check.branch(sublayer)
    try:
        body, linears = _body(sublayer, check.rows.kind)
        if check.accepts(expected, body):
            empty_linears(linears)
            return replace(sublayer, body=body)
    except _MISFITS as misfit:
        logger.debug("sublayer %d runs by its modules: %s", sublayer.index, misfit)
    _block_linears(sublayer, check, expected)
    return sublayer


def _body(sublayer: Sublayer, kind: AttentionKind | None) -> tuple[Body, Sequence[nn.Linear]]:
    """A body, and the linear layers whose weights it holds. Raises one of `_MISFITS`."""
    block: Any = sublayer.block
    if sublayer.kind == "mlp":
        entry, last = _linears(block, _GATE_UP), [block.down_proj]
        activation = block.act_fn if hasattr(block, "act_fn") else block.activation_fn
        _require_plain(block, [*entry, *last])
        body: Body = GatedBody(sublayer=sublayer, activation=activation, gate_up=Matrix(entry), down=Matrix(last))
        return body, [*entry, *last]
    assert kind is not None, "the modules have attended"
    entry, last = _linears(block, _QUERY_KEY_VALUE), [block.o_proj]
    _require_plain(block, [*entry, *last])
    projections, output = Matrix(entry), Matrix(last)
    num_heads = output.num_columns // block.head_dim
    body = AttentionBody(
        sublayer=sublayer,
        head_dim=block.head_dim,
        num_heads=num_heads,
        num_kv_heads=(projections.num_rows // block.head_dim - num_heads) // 2,
        kind=kind,
        projections=projections,
        output=output,
    )
    return body, [*entry, *last]


def _linears(block: nn.Module, names: Sequence[Sequence[str]]) -> list[nn.Linear]:
    """The layers of the first names that the block has."""
    found = next((each for each in names if all(hasattr(block, name) for name in each)), None)
    if found is None:
        raise AttributeError(f"{type(block).__name__} has none of {names}")
    return [getattr(block, name) for name in found]


def _require_plain(block: nn.Module, linears: Sequence[nn.Linear]) -> None:
    """Nothing happens around the matrices: no rank, no quantizer and no fetch has a hand in them."""
    if block._forward_hooks or block._forward_pre_hooks or not all(map(is_plain, linears)):
        raise TypeError(f"{type(block).__name__} is more than its matrices")


def _block_linears(sublayer: Sublayer, check: _Check, expected: Tensor) -> None:
    """Give the block's linear layers the device's faster layout, where it still computes the same."""
    found = _plain_linears(sublayer.block)
    try:
        for owner, name, linear in found:
            setattr(owner, name, Matrix([linear]))
        if check.accepts(expected, sublayer):
            empty_linears([linear for _, _, linear in found])
            return
    except _MISFITS as misfit:
        logger.debug("sublayer %d keeps its linear layers: %s", sublayer.index, misfit)
    for owner, name, linear in found:
        setattr(owner, name, linear)


def _plain_linears(block: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Those with a faster layout: the module that holds each, its name there, and the layer."""
    return [
        (owner, name, child)
        for owner in block.modules()
        for name, child in owner.named_children()
        if is_plain(child) and has_blocked_layout(child.weight)
    ]


def _packed_head(parts: Decomposition) -> nn.Module | None:
    """A tied head stays as it is: the embedding needs its rows."""
    head: Any = parts.lm_head
    embedding: Any = parts.embedding
    if not is_plain(head) or not has_blocked_layout(head.weight):
        return parts.lm_head
    if embedding is not None and embedding.weight is head.weight:
        return parts.lm_head
    packed = Matrix([head])
    empty_linears([head])
    return packed


def _normed(sublayer: Sublayer, hidden: Tensor) -> Tensor:
    normed: Tensor = hidden if sublayer.pre_norm is None else sublayer.pre_norm(hidden)
    return normed


def _added(sublayer: Sublayer, matrix: Matrix, hidden: Tensor, rows: Tensor) -> Tensor:
    """The residual with the block's output, which is the matrix times `rows`."""
    return matrix.added_to(hidden, rows) if sublayer.adds_plainly else sublayer.add(hidden, matrix(rows))


def _rotated(heads: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """heads: [N, heads, head_dim]; rope: cosines and sines [1, N, head_dim]."""
    cosines, sines = (each[0][:, None] for each in rope)
    first, second = heads.chunk(2, -1)
    return heads * cosines + torch.cat((-second, first), -1) * sines
