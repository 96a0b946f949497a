"""The endpoint as a Serve application: one deployment for each model, and one for HTTP."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import pydantic
import ray
from ray import serve
from ray.serve.config import AutoscalingConfig

from rayspec.command.locations import Location
from rayspec.pipeline.placement import wants_gpu
from rayspec.serve.access import ANY, ApiKeys
from rayspec.serve.batch_runner import BatchRunner, BatchSettings
from rayspec.serve.ingress import Ingress, IngressSettings, ModelSettings
from rayspec.serve.options import DeploymentOptions, LLMConfig, ServeOptions, serve_options
from rayspec.serve.routing import PatientRouter
from rayspec.types import ConfigError

_INGRESS_CPUS = 0.5
_INGRESS_QUEUE = 256  # further requests get the 429 of Serve's proxy, which is not in OpenAI's format
_RUNNER_SHUTDOWN_S = 2.0  # the next runner answers the lines that are left
_NOT_SERVES_OWN = {
    "autoscaling_config",
    "health_check_timeout_s",
    "max_ongoing_requests",
    "max_queued_requests",
    "ray_actor_options",
}
# By name: the class brings torch, and only the replicas of the models need torch.
_MODEL_SERVER: Any = "rayspec.serve.model_server.ModelServer"
_ROUTING = {
    "request_router_class": f"{PatientRouter.__module__}.{PatientRouter.__name__}",
    "request_routing_stats_period_s": 1e9,  # never: Serve would send each ModelStatus to all its routers
}


def build_openai_app(args: Mapping[str, Any]) -> serve.Application:
    """Return an application that serves all models of `args["llm_configs"]`. Raises ConfigError.

    args: options of ServeOptions. A Serve config names it as `import_path: rayspec.serve:build_openai_app`. The
    environment variable RAYSPEC_API_KEYS holds more keys, separated by commas. Starts Ray where it does not run,
    because the reservations of an engine depend on the cluster.
    """
    if not ray.is_initialized():
        ray.init()
    return bind(serve_options(args, environment=os.environ))


def bind(options: ServeOptions) -> serve.Application:
    """Return the application of the whole endpoint. Raises ConfigError."""
    models = bind_models(options)
    hosts = frozenset(options.allowed_hosts) if options.allowed_hosts is not None else frozenset({ANY})
    num_ingresses = options.ingress_deployment_config.num_replicas or 1
    settings = ingress_settings(options, hosts, num_ingresses=num_ingresses)
    return _ingress_deployment(options).bind(settings, models, bind_runner(options, models))


def bind_runner(options: ServeOptions, models: Mapping[str, Any]) -> serve.Application | None:
    """Return the application that runs batches; None where batches are off. models: applications or handles by id."""
    settings = batch_settings(options)
    if settings is None:
        return None
    make = serve.deployment(
        name="Batches",
        num_replicas=1,
        graceful_shutdown_timeout_s=_RUNNER_SHUTDOWN_S,
        ray_actor_options={"num_cpus": 0},
    )
    return make(BatchRunner).bind(settings, dict(models))


def batch_settings(options: ServeOptions) -> BatchSettings | None:
    """Return the settings of the batch runner; None where batches are off. Raises ConfigError."""
    if options.batches is None:
        return None
    places = {config.model_id: config.num_places * config.num_replicas for config in options.llm_configs}
    folder = Location.parse(options.batches).absolute()
    return BatchSettings(folder=folder.name, max_lines=options.max_batch_lines, places=places)


def bind_models(options: ServeOptions) -> dict[str, serve.Application]:
    """Return a separate application for each model, by model id. Raises ConfigError."""
    names = _deployment_names(options)
    return {
        config.model_id: _model_deployment(config, options, name).bind(
            config, engine_timeout_s=options.engine_timeout_s
        )
        for config, name in zip(options.llm_configs, names, strict=True)
    }


def ingress_settings(options: ServeOptions, hosts: frozenset[str], *, num_ingresses: int = 1) -> IngressSettings:
    """Return the settings of each of `num_ingresses`, which share `max_admitted`. hosts: see `allowed_host`."""

    def own_share(places: int | None) -> int | None:
        return None if places is None else -(-places // num_ingresses)

    models = {
        config.model_id: ModelSettings(
            max_admitted=own_share(config.max_admitted), scales_to_zero=config.scales_to_zero
        )
        for config in options.llm_configs
    }
    return IngressSettings(
        keys=ApiKeys.of(options.api_keys),
        models=models,
        hosts=hosts,
        cors=options.cors,
        max_requests=options.max_ongoing_requests,
        max_request_bytes=options.max_request_bytes,
        body_timeout_s=options.body_timeout_s,
        request_timeout_s=options.request_timeout_s,
        replica_timeout_s=options.replica_timeout_s,
        batches=batch_settings(options),
        max_batch_file_bytes=options.max_batch_file_bytes,
    )


def _model_deployment(config: LLMConfig, options: ServeOptions, name: str) -> serve.Deployment:
    actor: dict[str, Any] = {"num_cpus": 1, "num_gpus": 1 if wants_gpu(config.engine) else 0}
    if config.accelerator_type is not None:
        actor["accelerator_type"] = config.accelerator_type
    if config.runtime_env is not None:
        actor["runtime_env"] = config.runtime_env
    queued = config.deployment_config.max_queued_requests
    make = serve.deployment(
        name=name,
        max_ongoing_requests=config.max_ongoing_requests,
        max_queued_requests=-1 if queued is None else queued,  # the ingress enforces the default limit, over HTTP
        health_check_timeout_s=options.health_check_timeout_s(config),
        backpressure_config={"status_code": 429},
        request_router_config=_ROUTING,
        **_serves_own(config.deployment_config, actor),
    )
    return make(_MODEL_SERVER)


def _ingress_deployment(options: ServeOptions) -> serve.Deployment:
    own = options.ingress_deployment_config
    chosen = _serves_own(own, {"num_cpus": _INGRESS_CPUS})
    if own.health_check_timeout_s is not None:
        chosen["health_check_timeout_s"] = own.health_check_timeout_s
    make = serve.deployment(
        name="Ingress",
        max_ongoing_requests=options.max_ongoing_requests,
        max_queued_requests=_INGRESS_QUEUE if own.max_queued_requests is None else own.max_queued_requests,
        backpressure_config={"status_code": 429},
        **chosen,
    )
    return make(serve.ingress()(Ingress))


def _serves_own(options: DeploymentOptions, actor: dict[str, Any]) -> dict[str, Any]:
    """Return the options that Serve takes unchanged. actor: defaults for missing `ray_actor_options`."""
    chosen = options.model_dump(exclude=_NOT_SERVES_OWN, exclude_none=True)
    chosen["ray_actor_options"] = actor | options.ray_actor_options.model_dump(exclude_none=True)
    if options.autoscaling_config is not None:
        chosen["autoscaling_config"] = _autoscaling(options)
    return chosen


def _autoscaling(options: DeploymentOptions) -> AutoscalingConfig:
    assert options.autoscaling_config is not None
    try:
        return AutoscalingConfig(**options.autoscaling_config.model_dump(exclude_none=True))
    except pydantic.ValidationError as error:
        raise ConfigError(f"option 'autoscaling_config': {error.errors()[0]['msg']}") from None


def _deployment_names(options: ServeOptions) -> list[str]:
    """Return a unique name for each model's deployment: its id, without characters that files or Ray refuse."""
    fit = [re.sub(r"[^A-Za-z0-9_.-]+", "--", config.model_id) for config in options.llm_configs]
    return [f"Model:{name}" if fit.count(name) == 1 else f"Model:{name}-{i}" for i, name in enumerate(fit)]
