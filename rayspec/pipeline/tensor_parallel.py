"""Tensor parallelism inside a stage: every rank runs all sublayers of the span with its share of the weights.

Heads and MLP columns are divided between the ranks; each block ends with a sum over them. Embedding, norms and head
stay whole. DeepSpeed's AutoTP does the splitting where its result is right and complete, and transformers' own plan
(`config.base_model_tp_plan`) where it is not. A test on the loaded weights decides which.
"""

from __future__ import annotations

import importlib
import io
import logging
import math
import os
import re
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import redirect_stdout
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from transformers import PretrainedConfig, PreTrainedModel

from rayspec.model.architecture import largest_difference, rounding_tolerance
from rayspec.model.kv_cache import LayerShape
from rayspec.model.load_check import CheckRows, CheckSequence, lack_of_memory
from rayspec.model.matrices import SummedLinear
from rayspec.model.sizes import rank_counts
from rayspec.model.sublayers import Decomposition, Sublayer, run
from rayspec.pipeline.collective import store_at
from rayspec.types import ConfigError, UnsupportedModelError

logger = logging.getLogger(__name__)

_OPTION = "tensor"
_NUM_CHECK_TOKENS = 10
# Largest share of a block's weights that may stay whole on every rank: norms, biases, routers.
_MOST_WHOLE = 0.1
_SPLIT_FAILURES = (
    AssertionError, AttributeError, IndexError, KeyError, OSError, RuntimeError, TypeError, UnsupportedModelError,
    ValueError,
)  # fmt: skip
_COLUMN_STYLES = {"colwise", "colwise_gather_output", "colwise_rep"}
_ROW_STYLES = {"rowwise", "rowwise_split_input", "rowwise_rep"}
_WHOLE_STYLES = {"replicate", "replicated_with_grad_allreduce"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """This process as one of the `size` ranks of a stage. Rank 0 is the leader. address: of the `Rendezvous` where the
    ranks meet. device: "cpu", "cuda" or "cuda:N". The ranks become the process's default group of torch.distributed: a
    process belongs to one stage."""

    rank: int
    size: int
    address: str
    device: str = "cpu"

    def join(self, timeout_s: float) -> None:
        """Meet the other ranks. `timeout_s` also limits every later exchange between them. Raises
        torch.distributed.DistError if not all of them come in time."""
        device = torch.device(self.device)
        host, _, port = self.address.rpartition(":")
        os.environ.update(  # the variables that launchers set and DeepSpeed reads; a Ray actor has no launcher
            RANK=str(self.rank),
            WORLD_SIZE=str(self.size),
            LOCAL_RANK=str((device.index or 0) if device.type == "cuda" else self.rank),
            LOCAL_SIZE=str(self.size),
            LOCAL_WORLD_SIZE=str(self.size),
            MASTER_ADDR=host.strip("[]"),
            MASTER_PORT=port,
            DS_ACCELERATOR=device.type,
            NCCL_GRAPH_REGISTER="0",  # registered buffers of graphs have not been tried
        )
        if host in {"127.0.0.1", "[::1]"}:  # gloo would listen on the host name's interface
            names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
            os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store_at(self.address, timeout_s),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout_s),
        )

    def largest(self, value: float) -> float:
        """Return the largest of the ranks' values, the same on all of them. NaN counts as infinity."""
        values = torch.tensor([math.inf if math.isnan(value) else value], dtype=torch.float32, device=self.device)
        distributed.all_reduce(values, distributed.ReduceOp.MAX)
        return float(values)

    def all_agree(self, condition: bool) -> bool:
        """Return whether the condition holds on every rank; the same on all of them."""
        return self.largest(float(not condition)) == 0


def split_tensor_parallel(model: PreTrainedModel, parts: Decomposition, group: RankGroup) -> Decomposition:
    """Keep this rank's share of every attention and MLP block of the span, in place, and free the rest. Return `parts`
    with the shapes of this rank's keys and values.

    One layer after the other moves to the group's device and is split there, so a rank needs memory for its share and a
    layer or two. All ranks call this, and from then on run the same sublayers on the same rows; hidden states are
    bit-identical. Raises ConfigError if heads or columns do not divide, and UnsupportedModelError if no method of
    splitting computes the same as the whole layers, which then stay whole.
    """
    device = torch.device(group.device)
    if group.size == 1:
        model.to(device)  # type: ignore[arg-type]
        return parts
    _require_divisible(model.config, parts, group)
    owners = {child: module for module in model.modules() for child in module.children()}
    pairs = zip(parts.sublayers[::2], parts.sublayers[1::2], strict=True)
    layers = [_Layer(owners[attention.block], (attention, mlp)) for attention, mlp in pairs]
    _move_all_but({layer.module for layer in layers}, model, device)
    shapes = {layer: replace(shape, num_heads=shape.num_heads // group.size) for layer, shape in parts.shapes.items()}
    methods = {"transformers' plan": partial(_split_by_plan, config=model.config, parts=parts, group=group)}
    if group.all_agree(_has_deepspeed()):
        by_deepspeed = partial(_split_by_deepspeed, config=model.config, dtype=parts.dtype, group=group)
        methods = {"DeepSpeed": by_deepspeed, **methods}
    with torch.no_grad():
        kinds: dict[Any, _Layer] = {}
        for layer in layers:
            weights = [(name, parameter.shape) for name, parameter in layer.module.named_parameters()]
            kinds.setdefault((type(layer.module), *weights), layer)
        samples = list(kinds.values())
        for layer in samples:
            layer.module.to(device)
        expected, objections = _outputs(samples, parts), list[str]()
        for name, split in methods.items():
            objection = _objection(split, samples, expected, replace(parts, shapes=shapes), group)
            if objection is None:
                break
            objections.append(f"{name}: {objection}")
            logger.info("%s is not split by %s", model.config.model_type, objections[-1])
        else:
            raise UnsupportedModelError(
                f"{model.config.model_type} cannot be split between ranks ({'; '.join(objections)}): "
                f"set option {_OPTION!r} to 1"
            )
        logger.info("%s is split by %s", model.config.model_type, name)
        for layer in layers:
            layer.module.to(device)
            split([layer.module])
            _divide_heads(layer, shapes, group)
    model.to(device)  # type: ignore[arg-type]  # parameters outside the modules moved so far
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory of the whole layers is free for keys and values
    return replace(parts, shapes=shapes)


@dataclass(frozen=True, slots=True)
class _Layer:
    module: nn.Module
    sublayers: tuple[Sublayer, ...]

    def copy(self) -> _Layer:
        """Return a layer with copied blocks; the norms around the blocks are shared."""
        twin = deepcopy(self.module)
        blocks = dict(zip(self.module.modules(), twin.modules(), strict=True))
        return _Layer(twin, tuple(replace(sublayer, block=blocks[sublayer.block]) for sublayer in self.sublayers))


def _objection(
    split: Callable[[Sequence[nn.Module]], None],
    samples: Sequence[_Layer],
    expected: Sequence[Tensor],
    parts: Decomposition,
    group: RankGroup,
) -> str | None:
    """Split copies of a few layers and compare their outputs with those of the whole layers. Return why this way of
    splitting fails, or None if it works; all ranks come to the same conclusion. parts: with this rank's shapes."""
    copies = [layer.copy() for layer in samples]
    found: str | None = None
    try:
        split([layer.module for layer in copies])
        for before, after in zip(samples, copies, strict=True):
            _divide_heads(after, parts.shapes, group)
            for whole, own in zip(before.sublayers, after.sublayers, strict=True):
                left, share = _num_weights(own.block) / _num_weights(whole.block), 1 / group.size
                if found is None and (left - share) / (1 - share) > _MOST_WHOLE:
                    found = f"it leaves each rank {left:.0%} of the weights of {type(whole.block).__name__}"
    except _SPLIT_FAILURES as error:
        if lack_of_memory(error) is not None:  # perhaps on this rank only: the others would wait in a sum
            raise
        found = f"splitting fails with {type(error).__name__}: {error}"
    if not group.all_agree(found is None):
        return found or "another rank cannot split"
    difference, found = math.inf, "it computes something else"
    try:
        pairs = zip(expected, _outputs(copies, parts), strict=True)
        difference = max(largest_difference(own, whole) for whole, own in pairs)
    except _SPLIT_FAILURES as error:
        if lack_of_memory(error) is not None:  # perhaps on this rank only: the others would wait in a sum
            raise
        found = f"the split layer fails with {type(error).__name__}: {error}"
    worst = group.largest(difference)
    return None if worst <= rounding_tolerance(parts.dtype) else f"{found} (largest difference {worst:.1e})"


@torch.inference_mode()
def _outputs(layers: Sequence[_Layer], parts: Decomposition) -> list[Tensor]:
    """Run each sublayer on the same random hidden states and return the outputs."""
    check = CheckRows(parts, [CheckSequence(0, (_NUM_CHECK_TOKENS,))])
    (hidden,), (rows,) = check.hidden, check.passes
    return [run((sublayer,), hidden, rows) for layer in layers for sublayer in layer.sublayers]


def _move_all_but(kept: Collection[nn.Module], module: nn.Module, device: torch.device) -> None:
    """Move `module` to the device, except the modules in `kept`."""
    if module in kept:
        return
    if not any(child in kept for child in module.modules()):
        module.to(device)
        return
    for child in module.children():
        _move_all_but(kept, child, device)


def _num_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _require_divisible(config: PretrainedConfig, parts: Decomposition, group: RankGroup) -> None:
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(
            f"{config.model_type}: quantized weights cannot be split between ranks: set option {_OPTION!r} to 1"
        )
    own = {("key-value heads", shape.num_heads) for shape in parts.shapes.values()}
    for what, number in (*own, *rank_counts(config).items()):
        if number % group.size:
            raise ConfigError(
                f"option {_OPTION!r} is {group.size}, which does not divide the {number} {what} of "
                f"{config.model_type}: use a divisor of {number}"
            )


def _divide_heads(layer: _Layer, shapes: dict[int, LayerShape], group: RankGroup) -> None:
    """Set the attention block's numbers of heads to those of this rank, and let norms over all heads gather them."""
    block: Any = layer.sublayers[0].block
    shape = shapes[block.layer_idx]
    config = copy(block.config)
    heads, kv_heads = config.num_attention_heads // group.size, shape.num_heads
    config.num_attention_heads, config.num_key_value_heads = heads, kv_heads
    block.config = config
    own = {"num_heads": heads, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_kv_heads": kv_heads}
    for name, count in own.items():
        if hasattr(block, name):
            setattr(block, name, count)
    for name, norm in list(block.named_children()):
        weight = getattr(norm, "weight", None)
        if weight is not None and weight.ndim == 1 and weight.numel() > shape.key_dim:
            setattr(block, name, GatheredNorm(norm, group))


class GatheredNorm(nn.Module):
    """A norm over all heads (OLMo2's query and key norms): gathers all ranks' heads, returns those of this rank."""

    def __init__(self, norm: nn.Module, group: RankGroup) -> None:
        super().__init__()
        self.norm = norm
        self._rank = group.rank
        self._size = group.size

    def forward(self, share: Tensor) -> Tensor:
        """Normalise this rank's share: [1, N, width / size] in and out."""
        shares = [torch.empty_like(share) for _ in range(self._size)]
        distributed.all_gather(shares, share)
        mine: Tensor = self.norm(torch.cat(shares, -1)).chunk(self._size, -1)[self._rank]
        return mine


# DeepSpeed


class _SpanModel(nn.Module):
    """Only the layers, so that DeepSpeed leaves embedding and head alone. It requires "Model" in the class name."""

    def __init__(self, config: PretrainedConfig, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(layers)


def _has_deepspeed() -> bool:
    try:
        importlib.import_module("deepspeed")
    except (ImportError, OSError, RuntimeError) as error:
        logger.info("DeepSpeed is not used (%s): models are split by transformers' plan", error)
        return False
    return True


def _split_by_deepspeed(
    layers: Sequence[nn.Module], config: PretrainedConfig, dtype: torch.dtype, group: RankGroup
) -> None:
    deepspeed: Any = importlib.import_module("deepspeed")  # optional, and slow to import
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed's all-reduce would be compiled at this moment, ignores the group and needs all ranks on one machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=distributed.get_backend(), auto_mpi_discovery=False, verbose=False)
    ranks = distributed.group.WORLD
    # With a unit, DeepSpeed makes no group of its own, which would outlive the ranks.
    unit = SimpleNamespace(get_model_parallel_group=lambda: ranks)
    sizes = {"tp_size": group.size, "tp_grain_size": 1, "tp_group": ranks, "mpu": unit}
    with redirect_stdout(io.StringIO()):  # DeepSpeed prints what it recognised
        deepspeed.init_inference(
            _SpanModel(config, layers),
            config={"dtype": dtype, "tensor_parallel": sizes},
            replace_with_kernel_inject=False,
        )
    for layer in layers:  # which drafts may then run by quantised copies
        for name, module in [*layer.named_modules()]:
            if type(module).__name__ == "LinearAllreduce":
                _set(layer, name, _summed_share(module, group))


# transformers' plan


def _split_by_plan(
    layers: Sequence[nn.Module], config: PretrainedConfig, parts: Decomposition, group: RankGroup
) -> None:
    """Apply the plan's entries to plain tensors. In place of gathering outputs, fused projections are cut part by part,
    and norms over all heads gather their own input. So heads are divided too."""
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    for layer in layers:
        attention: Any = layer.self_attn
        shape = parts.shapes[attention.layer_idx]
        for name, target in [*layer.named_modules(), *layer.named_parameters()]:
            style = plan.get("layers.*." + re.sub(r"\.\d+(?=\.|$)", ".*", name))
            if style is not None:
                _apply_style(layer, name, target, style, shape, group)


def _apply_style(
    layer: nn.Module, name: str, target: nn.Module | nn.Parameter, style: str, shape: LayerShape, group: RankGroup
) -> None:
    if style in _WHOLE_STYLES:
        return
    if style == "moe_tp_experts" and isinstance(target, nn.Module):
        target.register_forward_hook(lambda _module, _inputs, output: _total(output))
    elif isinstance(target, nn.Linear) and style in _COLUMN_STYLES:
        widths: tuple[int, ...] = (target.out_features,)  # of the projections that are fused into one, in their order
        if "qkv" in name:
            keys, values = shape.num_heads * shape.key_dim, shape.num_heads * shape.value_dim
            widths = target.out_features - keys - values, keys, values
        elif "gate_up" in name:
            widths = (target.out_features // 2,) * 2
        target.weight = _share(target.weight, 0, widths, group)
        if target.bias is not None:
            target.bias = _share(target.bias, 0, widths, group)
        target.out_features = target.weight.shape[0]
    elif isinstance(target, nn.Linear) and style in _ROW_STYLES:
        target.weight = _share(target.weight, 1, (target.in_features,), group)
        target.in_features = target.weight.shape[1]
        _set(layer, name, _summed_share(target, group))
    elif isinstance(target, nn.Parameter) and style in _ROW_STYLES | {"packed_colwise"}:
        packed = style == "packed_colwise"
        dim = -2 if packed else -1
        width = target.shape[dim]
        share = _share(target, dim, (width // 2,) * 2 if packed else (width,), group)
        _set(layer, name, share)
    else:
        raise UnsupportedModelError(f"the plan's style {style!r} for {name} is not known")


def _share(weight: Tensor, dim: int, widths: Sequence[int], group: RankGroup) -> nn.Parameter:
    """Return this rank's share of each of the parts (of these widths along `dim`), in memory of its own."""
    pieces = [part.chunk(group.size, dim)[group.rank] for part in torch.split(weight, list(widths), dim)]
    return nn.Parameter(torch.cat(pieces, dim), requires_grad=False)


def _set(layer: nn.Module, name: str, value: nn.Module | nn.Parameter) -> None:
    owner, _, own_name = name.rpartition(".")
    setattr(layer.get_submodule(owner), own_name, value)


def _summed_share(share: Any, group: RankGroup) -> SummedLinear:
    """Return a layer with this rank's columns as one whose products are summed. The bias is added once. Parameters are
    new: DeepSpeed's refer to its layer, which keeps their memory."""
    weight = nn.Parameter(share.weight.data, requires_grad=False)
    bias = None if share.bias is None or group.rank > 0 else nn.Parameter(share.bias.data, requires_grad=False)
    return SummedLinear(weight, bias, _total)


def _total(products: Tensor) -> Tensor:
    """Sum over the ranks, in place."""
    distributed.all_reduce(products)
    return products
