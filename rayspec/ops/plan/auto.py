"""`LLM(model, parallel="auto")`: the layout that `rayspec plan` recommends for the available GPUs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from transformers import PretrainedConfig

from rayspec.config import EngineConfig, ParallelOptions
from rayspec.decode.loading import allowed_copies, resolve_max_model_len, wanted_copies
from rayspec.machine import ray_address
from rayspec.model.sizes import quantised_bytes
from rayspec.model.weights import in_one_line, load_config
from rayspec.ops.plan.forecast import rank_layouts
from rayspec.ops.plan.gpus import Gpu, ask_torch, gpu_called, gpus_spec
from rayspec.ops.plan.options import PlanOptions
from rayspec.ops.plan.placement import usual_context
from rayspec.ray_session import ray_session
from rayspec.types import ConfigError

logger = logging.getLogger(__name__)

_ANSWER_S = 180.0  # a process of torch starts on each node


def with_layout(config: EngineConfig) -> EngineConfig:
    """Return the config with `parallel` set for the GPUs of the Ray cluster or, without a cluster, of this machine;
    unchanged without GPUs, and for a device that is not CUDA. Raises ConfigError."""
    nodes = found_gpus() if config.device in ("auto", "cuda") else ()
    if not nodes:
        return config
    found = laid_out(config, load_config(config), nodes)
    is_elsewhere = found.parallel is None and not torch.cuda.is_available()  # on a node that this process is not on
    return found.replace(parallel=ParallelOptions()) if is_elsewhere else found


def laid_out(config: EngineConfig, model: PretrainedConfig, nodes: Sequence[Sequence[Gpu]]) -> EngineConfig:
    """Return the config with the best layout. nodes: the GPUs of each node with GPUs. Without `max_num_seqs`, that is
    the default concurrency of `rayspec plan`, halved until the model fits. Raises ConfigError where it does not."""
    if config.offload is not None:
        raise ConfigError(
            "option 'parallel' is 'auto', which plans for weights that are all on the GPUs: with 'offload', name a "
            "layout, such as {'stages': 2}, or leave out 'parallel'"
        )
    if config.quantization_config is not None:
        model = copy.copy(model)
        model.quantization_config = dict(config.quantization_config)
    # Of copies for drafts, each process has at least an even share.
    num_gpus, wanted = sum(map(len, nodes)), wanted_copies(config, on_cpu=False)
    shares = {weights: sum(quantised_bytes(model, weights)) // num_gpus for weights in wanted}
    usual = PlanOptions.model_fields
    context = usual_context(model) if config.max_model_len is None else resolve_max_model_len(config, model)
    usual_seqs: int = usual["concurrency"].default
    fewer = [usual_seqs >> power for power in range(usual_seqs.bit_length())]
    options = PlanOptions(  # of the equivalent `rayspec plan`
        gpus=gpus_spec([gpu for node in nodes for gpu in node]),
        gpus_per_node=1 if config.lora_modules else min(map(len, nodes)),  # ranks take no adapters
        context=context,
        output_tokens=min(usual["output_tokens"].default, context - 1),
        draft_weights=tuple(allowed_copies(shares, config.speculation.extra_weight_bytes)),
        dtype=config.dtype,
        max_num_batched_tokens=config.max_num_batched_tokens or usual["max_num_batched_tokens"].default,
    )
    for concurrency in [config.max_num_seqs] if config.max_num_seqs else fewer:
        best = rank_layouts(model, options.replace(concurrency=concurrency)).best
        if best.fits:
            logger.info("on %s: %s", options.gpus, best.title)
            return config.replace(
                parallel=ParallelOptions(**best.parallel) if best.parallel else None,
                max_model_len=options.num_tokens,
                max_num_seqs=config.max_num_seqs or best.concurrency,
                max_num_batched_tokens=options.max_num_batched_tokens,
            )
    raise ConfigError(
        f"option 'parallel' is 'auto': {best.missing_bytes / 2**30:.1f} GiB are missing on {options.gpus}, even with "
        f"{best.title}; use more GPUs, a shorter max_model_len, fewer max_num_seqs or quantized weights"
    )


def found_gpus() -> tuple[tuple[Gpu, ...], ...]:
    """Return the GPUs of each node with GPUs. There is a cluster if RAY_ADDRESS names one or this process is connected.
    Raises ConfigError for an unknown GPU, and for nodes that do not answer."""
    seen: Sequence[Sequence[tuple[str, int]]]
    if ray_address() is None and not ray.is_initialized():
        here = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        seen = [[(gpu.name, gpu.total_memory) for gpu in here]]
    else:
        with ray_session():
            nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
            counts = {node["NodeID"]: int(node["Resources"].get("GPU", 0)) for node in nodes if node["Alive"]}
            look, there = ray.remote(_gpus_of_node), NodeAffinitySchedulingStrategy
            asked = {
                look.options(num_cpus=0, scheduling_strategy=there(node, soft=False)).remote(): count
                for node, count in counts.items()
                if count
            }
            try:
                answers = ray.get(list(asked), timeout=_ANSWER_S)
            except RayError as error:
                reason = in_one_line(getattr(error, "cause", None) or error)
                raise ConfigError(
                    f"option 'parallel' is 'auto', but not all nodes with GPUs have said which these are ({reason}): "
                    "try again, name the layout, or run rayspec doctor --address auto"
                ) from error
            seen = [answer[:count] for answer, count in zip(answers, asked.values(), strict=True)]
    return tuple(tuple(gpu_called(name, num_bytes) for name, num_bytes in node) for node in seen if node)


def _gpus_of_node() -> Sequence[tuple[str, int]]:
    """Return all GPUs, also those in use: Ray hides GPUs from tasks that reserve none."""
    seen = ask_torch(hidden_too=True)
    return list(zip(seen["names"], seen["num_bytes"], strict=True))
