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
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, distributed, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from transformers import PretrainedConfig, PreTrainedModel

from rayspec.model.architecture import Decomposition, rounding_tolerance
from rayspec.model.attention import pack
from rayspec.model.kv_cache import KVCache, LayerShape
from rayspec.model.rows import RowSpan, one_run
from rayspec.model.sublayers import Sublayer, run
from rayspec.types import ConfigError, UnsupportedModelError

logger = logging.getLogger(__name__)

_OPTION = "tensor"
_NUM_CHECK_TOKENS = 10
# Scale of the test states. Blocks normalise them, so a block's output is large in comparison: they hide no error.
_CHECK_SCALE = 1e-2
# Largest share of a block's weights that may stay whole on every rank: norms, biases, routers.
_MOST_WHOLE = 0.1
_SPLIT_FAILURES = (
    AssertionError, AttributeError, IndexError, KeyError, OSError, RuntimeError, TypeError, UnsupportedModelError,
    ValueError,
)  # fmt: skip
_LOOPBACK = {"127.0.0.1", "::1", "localhost"}
_COLUMN_STYLES = {"colwise", "colwise_gather_output", "colwise_rep"}
_ROW_STYLES = {"rowwise", "rowwise_split_input", "rowwise_rep"}
_WHOLE_STYLES = {"replicate", "replicated_with_grad_allreduce"}


def free_address(host: str = "127.0.0.1") -> str:
    """Return an address on this machine where ranks can meet; the operating system chooses the port.

    The leader calls this, and the other ranks get the address. Nothing reserves the port until `join`: if another
    process takes it in between, `join` fails, and a new address is needed.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, 0))
        port = listener.getsockname()[1]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """This process as one of the `size` ranks of a stage. Rank 0 is the leader.

    address: where the ranks meet, from the leader's `free_address`. device: "cpu", "cuda" or "cuda:N".
    The ranks become the process's default group of torch.distributed: a process belongs to one stage.
    """

    rank: int
    size: int
    address: str
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"option {_OPTION!r} is {self.size}: use 1 (no tensor parallelism) or more")
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank is {self.rank}, but there are {self.size} ranks: use 0 to {self.size - 1}")

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def join(self, timeout_s: float) -> None:
        """Meet the other ranks. `timeout_s` also limits every later exchange between them.

        Raises torch.distributed.DistError if not all of them come in time.
        """
        os.environ.update(self._environment())
        if urlsplit(self.address).hostname in _LOOPBACK:  # gloo would listen on the host name's interface
            names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
            os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])
        device = torch.device(self.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=self._meeting_place(timedelta(seconds=timeout_s)),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout_s),
        )

    def leave(self) -> None:
        """Undo `join`. Models that were split cannot run any more."""
        if distributed.is_initialized():
            distributed.destroy_process_group()
        for name in self._environment():
            os.environ.pop(name, None)

    def largest(self, value: float) -> float:
        """Return the largest of the ranks' values, the same on all of them. NaN counts as infinity."""
        values = torch.tensor([math.inf if math.isnan(value) else value], dtype=torch.float32, device=self.device)
        distributed.all_reduce(values, distributed.ReduceOp.MAX)
        return float(values)

    def all_agree(self, condition: bool) -> bool:
        """Return whether the condition holds on every rank; the same on all of them."""
        return self.largest(float(not condition)) == 0

    def _meeting_place(self, timeout: timedelta) -> TCPStore:
        """Return the store where the ranks meet. The leader's listens at its address only; given an address, torch
        would listen on every interface, without authentication."""
        where = urlsplit(self.address)
        assert where.hostname is not None, "checked by _environment"
        assert where.port is not None, "checked by _environment"
        listener = None
        if self.is_leader:
            family = socket.AF_INET6 if ":" in where.hostname else socket.AF_INET
            try:
                listener = socket.create_server((where.hostname, where.port), family=family).detach()
            except OSError as error:
                raise distributed.DistNetworkError(f"rank 0 cannot listen at {self.address}: {error}") from error
        return TCPStore(
            where.hostname, where.port, self.size, self.is_leader, timeout=timeout, master_listen_fd=listener
        )

    def _environment(self) -> dict[str, str]:
        """Return the variables that launchers set and DeepSpeed reads; a Ray actor has no launcher."""
        where = urlsplit(self.address)
        if where.scheme != "tcp" or where.hostname is None or where.port is None:
            raise ConfigError(f"address is {self.address!r}: use tcp://host:port, as free_address() returns it")
        device = torch.device(self.device)
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str((device.index or 0) if device.type == "cuda" else self.rank),
            "LOCAL_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": where.hostname,
            "MASTER_PORT": str(where.port),
            "DS_ACCELERATOR": device.type,
        }


def split_tensor_parallel(model: PreTrainedModel, parts: Decomposition, group: RankGroup) -> Decomposition:
    """Keep this rank's share of every attention and MLP block of the span, in place, and free the rest.

    The model may be on another device, at best still in the files that it was loaded from. Each layer moves to the
    group's device and is split before the next: in addition to its share, a rank needs memory for a layer or two.

    All ranks of the joined `group` call this with the same span. From then on they run the same sublayers on the same
    rows, because each block is a collective operation. Hidden states are bit-identical on all ranks.

    Returns `parts` with the shapes of this rank's keys and values: 1 / size of the heads. Raises ConfigError if heads
    or columns do not divide, UnsupportedModelError if no method of splitting computes the same as the whole layers; the
    layers then stay whole.
    """
    device = torch.device(group.device)
    if group.size == 1:
        model.to(device)  # type: ignore[arg-type]
        return parts
    _require_divisible(model.config, parts, group)
    layers = _layers(model, parts)
    _move_all_but({layer.module for layer in layers}, model, device)
    shapes = {layer: replace(shape, num_heads=shape.num_heads // group.size) for layer, shape in parts.shapes.items()}
    with torch.no_grad():
        samples = _one_of_each_kind(layers)
        for layer in samples:
            layer.module.to(device)
        trial = _SplitTrial(parts, shapes, group, samples)
        method = _first_that_works(trial, _methods(model.config, parts, group), model.config.model_type)
        for layer in layers:
            layer.module.to(device)
            method.split([layer.module])
            _divide_heads(layer, shapes, group)
    model.to(device)  # type: ignore[arg-type]  # parameters outside the modules moved so far
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory of the whole layers is free for keys and values
    return replace(parts, shapes=shapes)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A decoder layer and its two sublayers."""

    module: nn.Module
    sublayers: tuple[Sublayer, ...]

    def copy(self) -> _Layer:
        """Return a layer with copied blocks; the norms around the blocks are shared."""
        twin = deepcopy(self.module)
        blocks = dict(zip(self.module.modules(), twin.modules(), strict=True))
        return _Layer(twin, tuple(replace(sublayer, block=blocks[sublayer.block]) for sublayer in self.sublayers))


@dataclass(frozen=True, slots=True)
class _Method:
    """A way of splitting decoder layers in place."""

    name: str
    split: Callable[[Sequence[nn.Module]], None]


class _SplitTrial:
    """Splits copies of a few layers and compares their outputs with those of the whole layers."""

    def __init__(
        self, parts: Decomposition, shapes: dict[int, LayerShape], group: RankGroup, layers: Sequence[_Layer]
    ) -> None:
        self._parts = parts
        self._shapes = shapes
        self._group = group
        self._layers = layers
        self._expected = self._outputs(layers, parts.shapes)

    def objection(self, method: _Method) -> str | None:
        """Return why the method fails, or None if it works; all ranks come to the same conclusion. Raises nothing."""
        copies = [layer.copy() for layer in self._layers]
        found: str | None = None
        try:
            method.split([layer.module for layer in copies])
            for layer in copies:
                _divide_heads(layer, self._shapes, self._group)
            found = self._left_whole(copies)
        except _SPLIT_FAILURES as error:
            found = f"splitting fails with {type(error).__name__}: {error}"
        if not self._group.all_agree(found is None):
            return found or "another rank cannot split"
        difference, found = math.inf, "it computes something else"
        try:
            difference = self._largest_difference(self._outputs(copies, self._shapes))
        except _SPLIT_FAILURES as error:
            found = f"the split layer fails with {type(error).__name__}: {error}"
        worst = self._group.largest(difference)
        return (
            None
            if worst <= rounding_tolerance(self._expected[0].dtype)
            else f"{found} (largest difference {worst:.1e})"
        )

    @torch.inference_mode()
    def _outputs(self, layers: Sequence[_Layer], shapes: dict[int, LayerShape]) -> list[Tensor]:
        """Run each sublayer on the same random hidden states and return the outputs."""
        weight = next(layers[0].sublayers[0].block.parameters())
        cache = KVCache(shapes, _NUM_CHECK_TOKENS, dtype=weight.dtype, device=weight.device)
        generator = torch.Generator().manual_seed(0)
        size = self._parts.config.hidden_size
        hidden = torch.randn(1, _NUM_CHECK_TOKENS, size, generator=generator).to(weight.device, weight.dtype)
        rows = pack(cache, [RowSpan(one_run(0, _NUM_CHECK_TOKENS), 0, _NUM_CHECK_TOKENS)], device=weight.device)
        self._parts.rotate(hidden, rows)
        return [run((sublayer,), hidden * _CHECK_SCALE, rows) for layer in layers for sublayer in layer.sublayers]

    def _largest_difference(self, actual: Sequence[Tensor]) -> float:
        """Return the largest difference from the whole sublayers, as a share of a sublayer's largest output."""
        pairs = zip(self._expected, actual, strict=True)
        return max(float((a.float() - b.float()).abs().max() / a.float().abs().max()) for a, b in pairs)

    def _left_whole(self, copies: Sequence[_Layer]) -> str | None:
        for before, after in zip(self._layers, copies, strict=True):
            for whole, split in zip(before.sublayers, after.sublayers, strict=True):
                left, share = _num_weights(split.block) / _num_weights(whole.block), 1 / self._group.size
                if (left - share) / (1 - share) > _MOST_WHOLE:
                    return f"it leaves each rank {left:.0%} of the weights of {type(whole.block).__name__}"
        return None


def _first_that_works(trial: _SplitTrial, methods: Sequence[_Method], model_type: str) -> _Method:
    objections = []
    for method in methods:
        objection = trial.objection(method)
        if objection is None:
            logger.info("%s is split by %s", model_type, method.name)
            return method
        objections.append(f"{method.name}: {objection}")
        logger.info("%s is not split by %s", model_type, objections[-1])
    raise UnsupportedModelError(
        f"{model_type} cannot be split between ranks ({'; '.join(objections)}): set option {_OPTION!r} to 1"
    )


def _methods(config: PretrainedConfig, parts: Decomposition, group: RankGroup) -> list[_Method]:
    """Return the methods in the order in which they are tried."""
    methods = [_Method("transformers' plan", lambda layers: _split_by_plan(layers, config, parts, group))]
    if group.all_agree(_has_deepspeed()):
        dtype = next(parts.sublayers[0].block.parameters()).dtype
        methods.insert(0, _Method("DeepSpeed", lambda layers: _split_by_deepspeed(layers, config, dtype, group)))
    return methods


# What is cut


def _layers(model: PreTrainedModel, parts: Decomposition) -> list[_Layer]:
    owners = {child: module for module in model.modules() for child in module.children()}
    pairs = zip(parts.sublayers[::2], parts.sublayers[1::2], strict=True)
    return [_Layer(owners[attention.block], (attention, mlp)) for attention, mlp in pairs]


def _move_all_but(kept: Collection[nn.Module], module: nn.Module, device: torch.device) -> None:
    """Move `module` to the device, except the modules in `kept`."""
    if module in kept:
        return
    if not any(child in kept for child in module.modules()):
        module.to(device)
        return
    for child in module.children():
        _move_all_but(kept, child, device)


def _one_of_each_kind(layers: Sequence[_Layer]) -> list[_Layer]:
    kinds: dict[tuple[Any, ...], _Layer] = {}
    for layer in layers:
        shapes = [(name, parameter.shape) for name, parameter in layer.module.named_parameters()]
        kinds.setdefault((type(layer.module), *shapes), layer)
    return list(kinds.values())


def _num_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _require_divisible(config: PretrainedConfig, parts: Decomposition, group: RankGroup) -> None:
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(
            f"{config.model_type}: quantized weights cannot be split between ranks: set option {_OPTION!r} to 1"
        )
    counts = {
        "key-value heads": {shape.num_heads for shape in parts.shapes.values()},
        "attention heads": {config.num_attention_heads},
        "MLP columns": {getattr(config, "intermediate_size", None) or 0},
        "MLP columns of an expert": {getattr(config, "moe_intermediate_size", None) or 0},
    }
    for what, numbers in counts.items():
        for number in numbers:
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
    config.num_attention_heads //= group.size
    config.num_key_value_heads = shape.num_heads
    block.config = config
    for name, count in (
        ("num_heads", config.num_attention_heads),
        ("num_attention_heads", config.num_attention_heads),
        ("num_key_value_heads", shape.num_heads),
        ("num_kv_heads", shape.num_heads),
    ):
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


@dataclass(frozen=True, slots=True)
class _ParallelUnit:
    """Keeps DeepSpeed from making a group of its own, which would outlive the ranks."""

    group: Any

    def get_model_parallel_group(self) -> Any:
        return self.group


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
    sizes = {"tp_size": group.size, "tp_grain_size": 1, "tp_group": ranks, "mpu": _ParallelUnit(ranks)}
    with redirect_stdout(io.StringIO()):  # DeepSpeed prints what it recognised
        deepspeed.init_inference(
            _SpanModel(config, layers),
            config={"dtype": dtype, "tensor_parallel": sizes},
            replace_with_kernel_inject=False,
        )


# transformers' plan


def _split_by_plan(
    layers: Sequence[nn.Module], config: PretrainedConfig, parts: Decomposition, group: RankGroup
) -> None:
    """Apply the plan's entries to plain tensors.

    Entries that gather an output, because the block cuts or normalises it, are handled differently: fused projections
    are cut part by part, and norms over all heads gather their own input. So heads are divided too.
    """
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
        target.register_forward_hook(_sum_over_ranks)
    elif isinstance(target, nn.Linear) and style in _COLUMN_STYLES:
        _cut_columns(target, _fused_widths(name, target.out_features, shape), group)
    elif isinstance(target, nn.Linear) and style in _ROW_STYLES:
        _cut_rows(target, group)
    elif isinstance(target, nn.Parameter) and style in _ROW_STYLES | {"packed_colwise"}:
        packed = style == "packed_colwise"
        dim = -2 if packed else -1
        width = target.shape[dim]
        share = _share(target, dim, (width // 2,) * 2 if packed else (width,), group)
        owner, _, own_name = name.rpartition(".")
        setattr(layer.get_submodule(owner), own_name, share)
    else:
        raise UnsupportedModelError(f"the plan's style {style!r} for {name} is not known")


def _fused_widths(name: str, width: int, shape: LayerShape) -> tuple[int, ...]:
    """Return the widths of the projections that are fused into one, in their order."""
    if "qkv" in name:
        keys, values = shape.num_heads * shape.key_dim, shape.num_heads * shape.value_dim
        return width - keys - values, keys, values
    return (width // 2,) * 2 if "gate_up" in name else (width,)


def _cut_columns(linear: nn.Linear, widths: Sequence[int], group: RankGroup) -> None:
    linear.weight = _share(linear.weight, 0, widths, group)
    if linear.bias is not None:
        linear.bias = _share(linear.bias, 0, widths, group)
    linear.out_features = linear.weight.shape[0]


def _cut_rows(linear: nn.Linear, group: RankGroup) -> None:
    linear.weight = _share(linear.weight, 1, (linear.in_features,), group)
    linear.in_features = linear.weight.shape[1]
    if not group.is_leader:
        linear.bias = None  # type: ignore[assignment]  # added once
    linear.register_forward_hook(_sum_over_ranks)


def _share(weight: Tensor, dim: int, widths: Sequence[int], group: RankGroup) -> nn.Parameter:
    """Return this rank's share of each of the parts (of these widths along `dim`), in memory of its own."""
    pieces = [part.chunk(group.size, dim)[group.rank] for part in torch.split(weight, list(widths), dim)]
    return nn.Parameter(torch.cat(pieces, dim), requires_grad=False)


def _sum_over_ranks(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    distributed.all_reduce(output)
    return output
