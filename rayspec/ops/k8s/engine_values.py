"""Engine options of a rendered job or service: the same numbers that determine the size of its pods."""

from __future__ import annotations

from typing import Any

from rayspec.ops.k8s.options import RenderOptions
from rayspec.ops.k8s.sizing import ClusterPlan


def engine_values(options: RenderOptions, plan: ClusterPlan) -> dict[str, Any]:
    """Return the options of EngineConfig, without model and parallel."""
    values: dict[str, Any] = {
        "device": "cpu" if options.cpus is not None else "cuda",
        "max_model_len": plan.placement.options.num_tokens,
        "max_num_seqs": plan.concurrency,
    }
    if options.dtype != "auto":
        values["dtype"] = options.dtype
    if options.cpus is not None:
        values["num_threads"] = options.cpus
    return values


def parallel_values(options: RenderOptions, plan: ClusterPlan) -> dict[str, Any] | None:
    """Return the options of ParallelOptions; None where the engine makes a single copy of the model, in one process.
    For a service, Serve makes the replicas, not the engine."""
    replicas = plan.num_copies if options.kind == "job" else 1
    if plan.num_shards == 1 and replicas == 1:
        return None
    values: dict[str, Any] = {"stages": plan.num_stages, "start_timeout_s": plan.start_timeout_s}
    if plan.num_ranks > 1:
        values["tensor"] = plan.num_ranks
    if replicas > 1:
        values["replicas"] = replicas
    if options.cpus is not None:
        values["cpus_per_shard"] = float(options.cpus)
    return values


def llm_config(options: RenderOptions, plan: ClusterPlan) -> dict[str, Any]:
    """Return the options of the model for `rayspec.serve:build_openai_app`."""
    engine, parallel = engine_values(options, plan), parallel_values(options, plan)
    deployment: dict[str, Any] = {"num_replicas": plan.num_copies}
    if options.max_replicas is not None:
        scaling = {"min_replicas": plan.num_copies, "max_replicas": options.max_replicas}
        deployment = {"autoscaling_config": scaling | {"target_ongoing_requests": plan.concurrency}}
    if options.cpus is not None and parallel is None:
        deployment["ray_actor_options"] = {"num_cpus": options.cpus}
    return {
        "model_loading_config": {
            "model_id": options.served_model_name or options.model,
            "model_source": options.model,
        },
        "engine_kwargs": engine | ({"parallel": parallel} if parallel is not None else {}),
        "deployment_config": deployment,
    }


def job_flags(options: RenderOptions, plan: ClusterPlan) -> list[str]:
    """Return the flags of jobs/summarize.py and the other jobs."""
    values = {"model": options.model} | engine_values(options, plan) | (parallel_values(options, plan) or {})
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", f"{value}")]
