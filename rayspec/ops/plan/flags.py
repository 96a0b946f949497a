"""Flags to paste into other commands so that they use a planned layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rayspec.config import EngineConfig
from rayspec.ops.plan.gpus import DEFAULT_GPUS_PER_NODE, gpus_spec
from rayspec.ops.plan.layouts import Layout
from rayspec.ops.plan.options import PlanOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """Flags for a layout.

    engine: flags of jobs, `rayspec serve` and all other commands that make an engine. python: arguments of
    `rayspec.LLM` after the model. placement: flags of `rayspec placement`, which shows the first copy. render: flags of
    `rayspec k8s render`; None for copies on different kinds of GPUs, which Ray could not tell apart.
    """

    engine: str
    python: str
    placement: str
    render: str | None


def flags_of(layout: Layout, options: PlanOptions) -> Flags:
    engine, copy = _engine(layout, options), _copy(layout, options)
    parallel = _parallel(layout)
    nested = engine | ({"parallel": parallel} if parallel else {})
    copies = _replicas(layout)
    if options.max_ranks != DEFAULT_GPUS_PER_NODE:
        copies["gpus_per_node"] = options.max_ranks
    return Flags(
        engine=_joined(engine | parallel),
        python=", ".join(f"{name}={value!r}" for name, value in nested.items()),
        placement=_joined(copy | _draft_weights(options)),
        render=_joined(copy | copies) if len(layout.groups) == 1 else None,
    )


def _engine(layout: Layout, options: PlanOptions) -> dict[str, Any]:
    values: dict[str, Any] = {"max_model_len": options.num_tokens, "max_num_seqs": layout.groups[0].concurrency}
    if options.max_num_batched_tokens != EngineConfig.model_fields["max_num_batched_tokens"].default:
        values["max_num_batched_tokens"] = options.max_num_batched_tokens
    return values | _dtype(options)


def _parallel(layout: Layout) -> dict[str, int]:
    """Return the options of the parallel layout; empty where one process holds the only copy."""
    if layout.num_gpus == 1:
        return {}
    return {"stages": layout.stages, "tensor": layout.tensor} | _replicas(layout)


def _replicas(layout: Layout) -> dict[str, int]:
    return {"replicas": layout.replicas} if layout.replicas > 1 else {}


def _copy(layout: Layout, options: PlanOptions) -> dict[str, Any]:
    group = layout.groups[0]
    values: dict[str, Any] = {
        "gpus": gpus_spec(group.gpus),
        "stages": layout.stages,
        "tensor": layout.tensor,
        "context": options.num_tokens,
        "concurrency": group.concurrency,
    }
    if options.quantization is not None:
        values["quantization"] = options.quantization
    return values | _dtype(options)


def _draft_weights(options: PlanOptions) -> dict[str, str]:
    return {"draft_weights": ",".join(options.draft_weights)} if options.draft_weights else {}


def _dtype(options: PlanOptions) -> dict[str, str]:
    return {} if options.dtype == "auto" else {"dtype": options.dtype}


def _joined(values: dict[str, Any]) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in values.items())
