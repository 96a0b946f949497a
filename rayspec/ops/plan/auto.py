"""`LLM(model, parallel="auto")`: the layout that `rayspec plan` recommends for the available GPUs."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from transformers import PretrainedConfig

from rayspec.config import EngineConfig, ParallelOptions
from rayspec.decode.loading import resolve_max_model_len
from rayspec.model.sizes import quantisation_of
from rayspec.model.weights import load_config
from rayspec.ops.plan.choice import rank_layouts
from rayspec.ops.plan.found import found_gpus
from rayspec.ops.plan.gpus import Gpu, gpus_spec
from rayspec.ops.plan.layouts import Layout
from rayspec.ops.plan.options import PlanOptions
from rayspec.ops.plan.placement import usual_context
from rayspec.types import ConfigError

logger = logging.getLogger(__name__)


def with_layout(config: EngineConfig, *, keep_max_num_seqs: bool) -> EngineConfig:
    """Return the config with `parallel` set for the GPUs of the Ray cluster or, without a cluster, of this machine.

    keep_max_num_seqs: see `laid_out`. Without GPUs, and where the device is not CUDA, the config stays unchanged, and
    the model runs in this process. Raises ConfigError.
    """
    nodes = found_gpus() if config.device in ("auto", "cuda") else ()
    if not nodes:
        return config
    return laid_out(config, load_config(config), nodes, keep_max_num_seqs=keep_max_num_seqs)


def laid_out(
    config: EngineConfig, model: PretrainedConfig, nodes: Sequence[Sequence[Gpu]], *, keep_max_num_seqs: bool
) -> EngineConfig:
    """Return the config with the best layout. nodes: the GPUs of each node with GPUs. keep_max_num_seqs: whether the
    user has chosen `max_num_seqs`; if not, it follows from the default concurrency of `rayspec plan`, halved until the
    model fits. Raises ConfigError where the model does not fit."""
    most = config.max_num_seqs if keep_max_num_seqs else PlanOptions.model_fields["concurrency"].default
    fewest = most if keep_max_num_seqs else 1
    for concurrency in (most >> power for power in range((most // fewest).bit_length())):
        options = plan_options(config, model, nodes, concurrency)
        best = rank_layouts(model, options).best
        if best.fits:
            logger.info("on %s: %s", options.gpus, best.title)
            sequences = config.max_num_seqs if keep_max_num_seqs else best.groups[0].concurrency
            return config.replace(parallel=_parallel(best), max_model_len=options.num_tokens, max_num_seqs=sequences)
    raise ConfigError(
        f"option 'parallel' is 'auto': {best.missing_bytes / 2**30:.1f} GiB are missing on {options.gpus}, even with "
        f"{best.title}; use more GPUs, a shorter max_model_len, fewer max_num_seqs or quantized weights"
    )


def plan_options(
    config: EngineConfig, model: PretrainedConfig, nodes: Sequence[Sequence[Gpu]], concurrency: int
) -> PlanOptions:
    """Return the options of the equivalent `rayspec plan`."""
    usual = PlanOptions.model_fields
    context = usual_context(model) if config.max_model_len is None else resolve_max_model_len(config, model)
    return PlanOptions(
        gpus=gpus_spec([gpu for node in nodes for gpu in node]),
        gpus_per_node=min(map(len, nodes)),
        context=context,
        output_tokens=min(usual["output_tokens"].default, context - 1),
        concurrency=concurrency,
        quantization=quantisation_of(model, config.quantization_config),
        draft_weights=config.speculation.draft_weights,
        dtype=config.dtype,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )


def _parallel(layout: Layout) -> ParallelOptions | None:
    """Return the options of a layout; None where one process holds the only copy."""
    if layout.num_gpus == 1:
        return None
    return ParallelOptions(stages=layout.stages, tensor=layout.tensor, replicas=layout.replicas)
