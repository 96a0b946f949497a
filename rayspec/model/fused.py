"""Fused sublayers of few large operations, used if a check on the loaded weights shows that they equal the modules.

Two matrices run a sublayer of the layout of Llama, Mistral, Qwen and similar families. Others keep their modules, whose
linear layers get a faster layout if the device has one. For drafts, a sublayer may have more bodies of the same kind,
whose matrices are quantised copies.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rayspec.choices import Weights
from rayspec.model.architecture import check_rows, largest_difference, rounding_tolerance
from rayspec.model.attention import AttentionKind, Heads, Rows
from rayspec.model.cuda.operations import gated, has_operators
from rayspec.model.load_check import CheckRows, CheckSequence, RecordingRows, lack_of_memory, likeness
from rayspec.model.matrices import (
    FEW_ROWS,
    FEW_ROWS_ON_GPU,
    Bfloat16Matrix,
    FewRows,
    LinearMap,
    Norm,
    OperatorMatrix,
    Shortlist,
    SummedLinear,
    SummedMatrix,
    as_operator,
    can_copy,
    empty_linears,
    full_matrix,
    has_blocked_layout,
    has_matrix,
    int4_matrix,
    int8_matrix,
    is_plain,
    is_plain_or_share,
    num_bytes,
    random_rows,
)
from rayspec.model.offload import Fetch
from rayspec.model.sublayers import Body, Decomposition, Sublayer

logger = logging.getLogger(__name__)

_NUM_MLP_ROWS = 10
# Random tokens whose hidden states show how large the inputs of a matrix are.
_NUM_TOKENS = 16
_QUERY_KEY_VALUE = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_GATE_UP = (("gate_proj", "up_proj"), ("gate_up_proj",))
_FIRST = {"attention": _QUERY_KEY_VALUE, "mlp": _GATE_UP}
_LAST = {"attention": "o_proj", "mlp": "down_proj"}
# The operator's name of an activation, by the name of transformers' class.
_OPERATOR_ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}
# The largest error of a copy's output, as a share of the norm of the output: about twice that of random weights.
_LARGEST_ERROR: dict[Weights, float] = {"int8": 0.05, "int4": 0.35}
# What a body raises for a block of another layout, or a GPU kernel that does not compile. Each is reported.
_MISFITS = (Exception,)


class LowRank(NamedTuple):
    """A product of two matrices: down [rank, inputs], up [outputs, rank]."""

    down: Tensor
    up: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        return linear(linear(rows, self.down), self.up)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedLayer:
    """A sublayer as two matrices. between: what is computed from the rows of the first for the rows of the last,
    [N, first.num_rows] -> [N, columns of the last]: attention with a rotate-half rotary embedding, or an MLP's gate.
    adapters: what each adapter adds to the first and to the last matrix. Copies for drafts share it."""

    sublayer: Sublayer
    pre_norm: Norm
    first: LinearMap
    between: Callable[[Tensor, Rows], Tensor]
    last: nn.Module
    adapters: dict[int, tuple[LowRank | None, LowRank | None]] = field(default_factory=dict)

    def __call__(self, hidden: Tensor, rows: Rows) -> Tensor:
        """Return the residual with the sublayer's output added; hidden: [1, N, hidden_size] in and out."""
        entering = self.pre_norm(hidden)
        mixed = self.between(self._adapted(0, self.first(entering), entering, rows)[0], rows)[None]
        if not (self.sublayer.adds_plainly and isinstance(self.last, LinearMap)):
            branch = self._adapted(1, self.last(mixed), mixed, rows)
            return self.sublayer.add(hidden, branch, in_place=rows.in_place)
        left = self.last.add_to(hidden, mixed) if rows.in_place else self.last.plus(hidden, mixed)
        return self._adapted(1, left, mixed, rows)

    def _adapted(self, matrix: int, output: Tensor, entering: Tensor, rows: Rows) -> Tensor:
        """Add to the output of the first matrix, 0, or of the last, 1, what the adapters of the rows add, in place."""
        for number, some in rows.adapters:
            product = self.adapters.get(number, (None, None))[matrix]
            if product is not None:
                output[0, some] += product(entering[0, some])
        return output


@torch.inference_mode()
def fuse(
    parts: Decomposition,
    *,
    apart_from: Collection[int] = (),
    use_operators: bool | None = None,
    quantised: Collection[Weights] = (),
    own_bits: bool = False,
) -> Decomposition:
    """Return the same model or span, with a body for each sublayer whose body equals the modules on random input. The
    modules' own weights are freed: afterwards `parts` and its model cannot run any more.

    apart_from: sublayers that keep their modules, because their weights are fetched. use_operators: build bodies from
    the operators `rayspec::*` or from torch's operations; by default the device decides. quantised: copies for drafts,
    of each layout with a body. Copies stay on the device and fetch nothing; one with too large an error is left out.
    own_bits: few rows are multiplied by the int4 copies of a 4-bit checkpoint; where there is none, a warning says so.
    """
    has_kernels = has_operators(parts.device) if use_operators is None else use_operators
    fuser = _Fuser(parts, has_kernels, quantised, own_bits=own_bits)
    sublayers = tuple(fuser.fused(each, is_fetched=each.index in apart_from) for each in parts.sublayers)
    fuser.report(len(sublayers))
    if own_bits and not fuser.has_own_bits:
        logger.warning("option 'own_bits' has no effect: no layer that runs by a body has weights of 4 bits")
    head, draft_head = fuser.heads(parts)
    final_norm = parts.final_norm
    if has_kernels and final_norm is not None:
        final_norm = as_operator(final_norm)
    return replace(parts, sublayers=sublayers, lm_head=head, draft_head=draft_head, final_norm=final_norm)


def in_one_order(parts: Decomposition) -> Decomposition | None:
    """Return the same model, by the same weights, in which a row has the same bits among up to `ONE_ORDER` rows of a
    pass in static buffers. Return None if some product is not the operator `rayspec::product` in full."""
    sublayers, head = [], parts.lm_head
    for sublayer in parts.sublayers:
        body = sublayer.body
        if not isinstance(body, FusedLayer):
            return None
        first, last = (_in_one_order(each) for each in (body.first, body.last))
        if first is None or last is None:
            return None
        sublayers.append(replace(sublayer, body=replace(body, first=first, last=last)))
    if head is not None and (head := _in_one_order(head)) is None:
        return None
    return replace(parts, sublayers=tuple(sublayers), lm_head=head)


def _in_one_order(matrix: nn.Module) -> OperatorMatrix | None:
    return matrix.in_one_order() if isinstance(matrix, OperatorMatrix) else None


def draft_head_bytes(parts: Decomposition, weights: Weights) -> int:
    """Return the bytes of the copies of the LM head that drafts have, if their copies of sublayers are `weights`."""
    head = parts.lm_head
    if not is_plain(head):
        return 0
    bfloat16_bytes = 2 * head.weight.numel()
    own_bytes = bfloat16_bytes if _may_halve(head) else 0
    if not can_copy(weights, head.in_features):
        return own_bytes
    of_shortlist = bfloat16_bytes if has_blocked_layout(head.weight) and not _is_tied(parts) else 0
    on_cpu = head.weight.device.type == "cpu"
    return own_bytes + num_bytes(weights, *head.weight.shape, on_cpu=on_cpu) + of_shortlist


def _may_halve(head: nn.Linear) -> bool:
    """Return whether float32 rows multiply faster by this head in bfloat16."""
    return head.weight.dtype == torch.float32 and has_blocked_layout(head.weight)


def _is_tied(parts: Decomposition) -> bool:
    """Return whether the LM head's weight is the embedding's."""
    return parts.embedding is not None and parts.lm_head is not None and parts.embedding.weight is parts.lm_head.weight


def matrices_of(block: nn.Module, kind: Literal["attention", "mlp"]) -> tuple[list[nn.Linear], nn.Module]:
    """Return the linear layers that read the block's input, and the layer that computes its output. Raises
    AttributeError for a block of a layout that has no body."""
    first, last = names_of(block, kind)
    return [getattr(block, name) for name in first], getattr(block, last)


def names_of(block: nn.Module, kind: Literal["attention", "mlp"]) -> tuple[Sequence[str], str]:
    """Return the names of the layers of `matrices_of`. Raises AttributeError as it does."""
    names = next((each for each in _FIRST[kind] if all(hasattr(block, name) for name in each)), None)
    if names is None:
        known = " or ".join(" + ".join(each) for each in _FIRST[kind])
        raise AttributeError(f"no {known}")
    return names, _LAST[kind]


def _checked_head(head: nn.Linear, matrix: OperatorMatrix) -> nn.Module:
    """Return the matrix, or the head itself if the operator fails in this shape or computes something else."""
    rows = random_rows(head)
    expected = head(rows)
    try:
        difference = largest_difference(matrix(rows), expected)
        if difference <= rounding_tolerance(rows.dtype):
            return matrix
        misfit = f"the result differs by {difference:.1e} of the largest logit"
    except _MISFITS as error:
        misfit = lack_of_memory(error) or str(error)
    logger.warning("the LM head is multiplied by torch, which is slower: %s", misfit)
    return head


def _require_near(found: Tensor, expected: Tensor, weights: Weights) -> None:
    """Raise ValueError if the output by a copy of the weights has too large an error."""
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    if not error <= _LARGEST_ERROR[weights]:
        raise ValueError(f"its error is {error:.3f} of the output")


@dataclass(frozen=True, slots=True)
class _Check:
    """One sublayer, and the rows on which its bodies are compared with its modules. kinds: by attention call of the
    block, its parameters."""

    layer: int
    rows: CheckRows
    expected: Tensor
    kinds: Sequence[AttentionKind]

    @classmethod
    def of(cls, sublayer: Sublayer, rows: CheckRows) -> _Check:
        recording = [RecordingRows(each.positions, each.rope, each) for each in rows.passes]
        expected = rows.outputs(sublayer.layer, sublayer, passes=recording)
        return cls(sublayer.layer, rows, rows.branch(expected), [kind for _, kind in recording[0].calls])

    def branch(self, body: Body) -> Tensor:
        """Return the term that a body adds to the residual: float32 [1, N, hidden_size]."""
        return self.rows.branch(self.rows.outputs(self.layer, body))

    def require(self, body: Body) -> None:
        """Raise ValueError if the body computes something else than the modules."""
        difference = largest_difference(self.branch(body), self.expected)
        if not difference <= rounding_tolerance(self.rows.hidden[0].dtype):
            raise ValueError(f"the fused computation differs by {difference:.1e} of the largest output")


class _Inputs:
    """Hidden states of random tokens, which the sublayers of a model compute in turn: how large the inputs of their
    matrices are. Random hidden states do not show it, but random tokens do nearly as well as text (docs/tried.md)."""

    def __init__(self, parts: Decomposition) -> None:
        self._rows = CheckRows(parts, [CheckSequence(0, (_NUM_TOKENS,))])
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(parts.config.get_text_config().vocab_size, (_NUM_TOKENS,), generator=generator)
        self._hidden = parts.embed(tokens.to(parts.device))

    def mean_squares(self, sublayer: Sublayer) -> Sequence[Tensor | None]:
        """Run the next sublayer. Return the mean squares of the columns of the inputs of its first and its last matrix,
        float32 [columns] each, or None for a block of another layout."""
        found: list[Tensor | None] = [None, None]

        def note(place: int, _: nn.Module, args: tuple[Tensor, ...]) -> None:
            squares = args[0].float().square().flatten(0, -2).mean(0)
            found[place] = squares if bool(squares.isfinite().all()) else None

        try:
            first, last = matrices_of(sublayer.block, sublayer.kind)
        except AttributeError:
            first, last = [], None
        watched = [*first[:1], *([last] if isinstance(last, nn.Module) else [])]
        handles = [each.register_forward_pre_hook(partial(note, place)) for place, each in enumerate(watched)]
        self._hidden = self._rows.outputs(sublayer.layer, sublayer, hidden=[self._hidden])
        for handle in handles:
            handle.remove()
        return found


class _Fuser:
    """Makes bodies and checks each on the rows of a load check. The first attention block of a kind is also checked
    with long chunks, in float32: in a narrower type, rounding could hide a fault. What an MLP computes does not depend
    on positions, so it has one pass of a few rows."""

    def __init__(
        self, parts: Decomposition, use_operators: bool, quantised: Collection[Weights], *, own_bits: bool
    ) -> None:
        self._use_operators = use_operators
        self._quantised = quantised
        self._own_bits = own_bits
        modules = itertools.chain.from_iterable(one.block.modules() for one in parts.sublayers)
        self._has_ranks = any(isinstance(one, SummedLinear) for one in modules)
        self.has_own_bits = False
        self._shapes = parts.shapes
        self._rows = {
            "attention": check_rows(parts, with_chunks=False),
            "mlp": CheckRows(parts, [CheckSequence(0, (_NUM_MLP_ROWS,))]),
        }
        self._exact = check_rows(parts, with_chunks=True, dtype=torch.float32)
        self._faults: dict[tuple[Any, ...], ValueError | None] = {}  # of each kind of attention, in float32
        self._failed: dict[str, dict[tuple[str, type[Exception]], tuple[str, list[int]]]] = {}
        self._inputs = _Inputs(parts) if "int4" in quantised and parts.embedding is not None else None

    def fused(self, sublayer: Sublayer, *, is_fetched: bool) -> Sublayer:
        """Return the sublayer with a body and copies. If its weights are fetched, it gets copies only, which stay on
        the device."""
        if is_fetched and not self._quantised:
            return sublayer
        mean_squares = (None, None) if self._inputs is None else self._inputs.mean_squares(sublayer)
        check = _Check.of(sublayer, self._rows[sublayer.kind])  # Fetches the weights: until another sublayer runs.
        try:
            body, linears = self._checked_body(_twin_of(sublayer) if is_fetched else sublayer, check)
        except _MISFITS as misfit:
            lack = "have no copies for drafts" if is_fetched else "run by transformers' modules, which is slower"
            self._note(lack, sublayer, misfit)
            if not is_fetched:
                self._block_linears(sublayer, check)
            return sublayer
        copies = self._copies(body, linears, check, mean_squares)
        empty_linears(linears)
        if is_fetched:
            return replace(sublayer, quantised=copies)
        return replace(sublayer, body=self._by_own_bits(body, copies), quantised=copies)

    def report(self, num_sublayers: int) -> None:
        """Log a warning for each thing that some sublayers lack, with the reasons."""
        for effect, causes in self._failed.items():
            numbers = {number for _, found in causes.values() for number in found}
            reasons = "; ".join(f"{len(found)} {block} ({why})" for (block, _), (why, found) in causes.items())
            logger.warning("%d of %d sublayers %s: %s", len(numbers), num_sublayers, effect, reasons)

    def _require_memory(self, misfit: Exception) -> None:
        """Raise a lack of memory if ranks compute together: the others, which may have enough, wait for this one."""
        if self._has_ranks and lack_of_memory(misfit) is not None:
            raise misfit

    def _note(self, effect: str, sublayer: Sublayer, misfit: Exception) -> None:
        """Note what a sublayer lacks. Of sublayers with the same block and the same kind of error, the first's error is
        reported."""
        self._require_memory(misfit)
        cause = (type(sublayer.block).__name__, type(misfit))
        why, found = lack_of_memory(misfit) or str(misfit), list[int]()
        self._failed.setdefault(effect, {}).setdefault(cause, (why, found))[1].append(sublayer.index)

    def _checked_body(self, sublayer: Sublayer, check: _Check) -> tuple[FusedLayer, Sequence[nn.Linear]]:
        """Do as `_body`. Raises ValueError, too, if the body computes something else than the modules."""
        body, linears = self._body(sublayer, check)
        check.require(body)
        if sublayer.kind == "attention":
            kind = (sublayer.layer_type, *map(likeness, sublayer.modules))
            if kind not in self._faults:
                self._faults[kind] = None
                twin = _twin_of(sublayer)
                for module in twin.modules:
                    module.float()
                exact = _Check.of(twin, self._exact)
                try:
                    exact.require(self._body(twin, exact)[0])
                except ValueError as error:
                    self._faults[kind] = error
            if (fault := self._faults[kind]) is not None:
                raise fault
        return body, linears

    def heads(self, parts: Decomposition) -> tuple[nn.Module | None, nn.Module | None]:
        """Return the LM head in the faster layout, if it has one, and the head of drafts, if they have copies. A tied
        head is copied, for the embedding."""
        head = parts.lm_head
        if not is_plain(head):
            return head, None
        halved = Bfloat16Matrix([head]) if self._quantised and _may_halve(head) else None
        shortlist = self._shortlist(head, is_tied=_is_tied(parts))
        packed: nn.Module = head
        try:
            matrix = self._matrix([head])
            if isinstance(matrix, OperatorMatrix):
                packed = _checked_head(head, matrix)
            elif self._may_block(head):
                packed = matrix if halved is None or not self.has_own_bits else FewRows(matrix, halved)
                if not _is_tied(parts):
                    empty_linears([head])
        except RuntimeError as error:
            if (lack := lack_of_memory(error)) is None:
                raise
            logger.warning("the LM head keeps its layout, which is slower: %s", lack)
            return head, halved
        if shortlist is None:
            return packed, halved
        return packed, FewRows(halved or matrix, shortlist, most=FEW_ROWS_ON_GPU if self._use_operators else FEW_ROWS)

    def _shortlist(self, head: nn.Linear, *, is_tied: bool) -> Shortlist | None:
        """Return a head of drafts with the smallest copies, or None if they have none of the head. Its logits of random
        rows are compared with the head's."""
        if not self._quantised:
            return None
        weights: Weights = "int4" if "int4" in self._quantised else "int8"
        try:
            copy = self._copy(weights, [head])
            stays = is_tied or not self._may_block(head)
            made = Shortlist(head, copy, head.weight.data if stays else head.weight.data.bfloat16())
            rows = random_rows(head)
            _require_near(made(rows), head(rows), weights)
        except _MISFITS as misfit:
            logger.warning("the LM head has no %s copy for drafts: %s", weights, lack_of_memory(misfit) or misfit)
            return None
        return made

    def _copies(
        self,
        body: FusedLayer,
        linears: Sequence[nn.Linear],
        check: _Check,
        mean_squares: Sequence[Tensor | None],
    ) -> dict[Weights, Body]:
        """Return bodies with quantised copies of the linear layers `linears`. A matrix that cannot have a copy stays,
        and so does a last layer that is not plain. mean_squares: of the inputs of the first and the last matrix."""
        matrices = [("first", linears, mean_squares[0])]
        if isinstance(body.last, LinearMap):
            matrices = [("first", linears[:-1], mean_squares[0]), ("last", linears[-1:], mean_squares[1])]
        copies: dict[Weights, Body] = {}
        for weights in self._quantised:
            able = [one for one in matrices if can_copy(weights, one[1][0].weight.shape[1])]
            try:  # if none can, the first says why
                copied: dict[str, Any] = {
                    name: self._copy(weights, own, squares) for name, own, squares in able or matrices
                }
                made = replace(body, **copied)
                _require_near(check.branch(made), check.expected, weights)
            except _MISFITS as misfit:
                self._note(f"have no {weights} copy for drafts", body.sublayer, misfit)
            else:
                copies[weights] = made
        return copies

    def _copy(self, weights: Weights, linears: Sequence[nn.Linear], mean_squares: Tensor | None = None) -> LinearMap:
        if weights == "int8":
            return _summed(int8_matrix(linears, use_operators=self._use_operators), linears)
        return _summed(int4_matrix(linears, use_operators=self._use_operators, mean_squares=mean_squares), linears)

    def _by_own_bits(self, body: FusedLayer, copies: Mapping[Weights, Body]) -> FusedLayer:
        """Return the body with the matrices of its int4 copy for few rows, where the checkpoint has 4 bits."""
        copy = copies.get("int4")
        if not self._own_bits or not isinstance(copy, FusedLayer):
            return body
        for name in ("first", "last"):
            full, own = getattr(body, name), getattr(copy, name)
            if isinstance(full, LinearMap) and isinstance(own, LinearMap) and own.has_own_bits:
                either: dict[str, Any] = {name: FewRows(full, own)}
                body, self.has_own_bits = replace(body, **either), True
        return body

    def _body(self, sublayer: Sublayer, check: _Check) -> tuple[FusedLayer, Sequence[nn.Linear]]:
        """Return a body and the linear layers whose weights it holds. Raises one of `_MISFITS` for another layout."""
        block: Any = sublayer.block
        linears, last = matrices_of(block, sublayer.kind)
        # Hooks, a quantizer or a fetch act on matrices that are not plain. A rank's share is allowed.
        if block._forward_hooks or block._forward_pre_hooks or not all(map(is_plain_or_share, linears)):
            raise TypeError(f"{type(block).__name__} is more than its matrices")
        first = self._matrix(linears)
        body = FusedLayer(
            sublayer=sublayer,
            pre_norm=self._norm(sublayer.pre_norm),
            first=first,
            between=self._gate(block) if sublayer.kind == "mlp" else self._attention(sublayer, first, check.kinds),
            last=self._matrix([last]) if has_matrix(last) else last,
        )
        return body, [*linears, *filter(has_matrix, [last])]

    def _attention(
        self, sublayer: Sublayer, projections: LinearMap, kinds: Sequence[AttentionKind]
    ) -> Callable[[Tensor, Rows], Tensor]:
        block: Any = sublayer.block
        if len(kinds) != 1:
            raise TypeError(f"{len(kinds)} attention calls, not one")
        num_kv_heads = self._shapes[sublayer.layer].num_heads
        has_norms = getattr(block, "q_norm", None) is not None
        heads = Heads(
            layer=sublayer.layer,
            layer_type=sublayer.layer_type,
            num_heads=projections.num_rows // block.head_dim - 2 * num_kv_heads,
            num_kv_heads=num_kv_heads,
            head_dim=block.head_dim,
            norms=(self._norm(block.q_norm), self._norm(block.k_norm)) if has_norms else None,
            kind=kinds[0],
        )
        return lambda projected, rows: rows.attend_projected(heads, projected).flatten(1)

    def _gate(self, block: Any) -> Callable[[Tensor, Rows], Tensor]:
        """Return what computes act(gate) * up. The first half of the columns is the gate, the second half is up."""
        activation = block.act_fn if hasattr(block, "act_fn") else block.activation_fn
        name = _OPERATOR_ACTIVATIONS.get(type(activation).__name__)
        if self._use_operators and name is not None:
            return lambda gate_up, _: gated(gate_up, name)

        def weighed(gate_up: Tensor, _: Rows) -> Tensor:
            gate, up = gate_up.chunk(2, -1)
            product: Tensor = activation(gate) * up
            return product

        return weighed

    def _block_linears(self, sublayer: Sublayer, check: _Check) -> None:
        """Give the block's linear layers the device's faster layout, if the block's result stays equal."""
        found = [
            (owner, name, child)
            for owner in sublayer.block.modules()
            for name, child in owner.named_children()
            if is_plain(child) and self._may_block(child)
        ]
        try:
            for owner, name, linear in found:
                setattr(owner, name, self._matrix([linear]))
            check.require(sublayer)
        except _MISFITS as misfit:
            self._require_memory(misfit)
            logger.debug("sublayer %d keeps its linear layers: %s", sublayer.index, misfit)
            for owner, name, linear in found:
                setattr(owner, name, linear)
        else:
            empty_linears([linear for _, _, linear in found])

    def _matrix(self, linears: Sequence[nn.Linear]) -> LinearMap:
        return _summed(full_matrix(linears, use_operators=self._use_operators), linears)

    def _may_block(self, linear: nn.Linear) -> bool:
        return not self._use_operators and has_blocked_layout(linear.weight)

    def _norm(self, norm: nn.Module | None) -> Norm:
        if norm is None:
            return lambda hidden: hidden
        return as_operator(norm) if self._use_operators else norm


def _summed(matrix: LinearMap, linears: Sequence[nn.Linear]) -> LinearMap:
    """Return the matrix of these layers, with the sum over the ranks if they have one."""
    last = linears[-1]
    return SummedMatrix(matrix, last.total) if isinstance(last, SummedLinear) else matrix


def _twin_of(sublayer: Sublayer) -> Sublayer:
    """Return the sublayer with copies of its modules, whose tensors are their own and are never fetched."""

    def twin_of(module: nn.Module) -> nn.Module:
        twin = copy.copy(module)
        twin._buffers = {name: None if buffer is None else buffer.clone() for name, buffer in module._buffers.items()}
        twin._forward_pre_hooks = OrderedDict(
            (key, hook) for key, hook in module._forward_pre_hooks.items() if not isinstance(hook, Fetch)
        )
        twin._parameters = {
            name: None if weight is None else nn.Parameter(weight.data.clone(), requires_grad=False)
            for name, weight in module._parameters.items()
        }
        twin._modules = {name: None if child is None else twin_of(child) for name, child in module._modules.items()}
        return twin

    return replace(
        sublayer,
        block=twin_of(sublayer.block),
        pre_norm=None if sublayer.pre_norm is None else twin_of(sublayer.pre_norm),
        post_norm=None if sublayer.post_norm is None else twin_of(sublayer.post_norm),
    )
