"""The endpoint as a Serve application: one deployment for each model, and one for HTTP."""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Collection, Mapping
from typing import Any

import pydantic
import ray
from ray import serve
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.config import AutoscalingConfig

from rayspec.pipeline.placement import sized, wants_gpu
from rayspec.serve import watch
from rayspec.serve.access import ANY, ApiKeys
from rayspec.serve.batch_runner import BatchRunner
from rayspec.serve.ingress import Ingress
from rayspec.serve.options import DeploymentOptions, LLMConfig, ServeOptions, serve_options
from rayspec.types import ConfigError

_INGRESS_QUEUE = 256  # further requests get the 429 of Serve's proxy, which is not in OpenAI's format
_ALL = 10**9
# Ours in place of Serve's, which take longer to notice a lost replica and try for ever to start one.
_DEFAULTS = {"graceful_shutdown_wait_loop_s": 0.2, "health_check_period_s": 1.0, "max_constructor_retry_count": 3}
# Not the user's. Serve would refuse user_config only after the model has loaded.
_FIXED = {"_func_or_class", "backpressure_config", "name", "request_router_config", "user_config"}
# By name: the class brings torch, and only the replicas of the models need torch.
_MODEL_SERVER: Any = "rayspec.serve.model_server.ModelServer"


class PatientRouter(PowerOfTwoChoicesRequestRouter):
    """Serve's default choice of a replica, with longer deadlines: a step of the engine can block the interpreter for
    longer than Serve's 0.1 s. Serve copies the class by value, so it keeps no state of this module."""

    queue_len_response_deadline_s = 2.0
    max_queue_len_response_deadline_s = 10.0

    def initialize_state(self, **_: Any) -> None:
        watch.add_router(self)


_ROUTING = {
    "request_router_class": f"{__name__}.{PatientRouter.__name__}",
    "request_routing_stats_period_s": 1e9,  # never: Serve would send each ModelStatus to all its routers
}


def build_openai_app(args: Mapping[str, Any]) -> serve.Application:
    """Return an application that serves all models of `args["llm_configs"]`. args: options of ServeOptions; the
    environment variable RAYSPEC_API_KEYS holds more keys, separated by commas. Starts Ray where it does not run.
    Raises ConfigError."""
    if not ray.is_initialized():
        ray.init()
    options = with_sizes(serve_options(args, environment=os.environ))
    models = bind_models(options)
    own = options.ingress_deployment_config
    deployment = _deployment(
        own,
        "ingress_deployment_config",
        actor={"num_cpus": 0.5},
        name="Ingress",
        max_ongoing_requests=options.max_ongoing_requests,
        max_queued_requests=_INGRESS_QUEUE if own.max_queued_requests is None else own.max_queued_requests,
    )
    app: serve.Application = deployment(serve.ingress()(Ingress)).bind(
        options.replace(api_keys=()),
        models,
        bind_runner(options, models),
        keys=ApiKeys.of(options.api_keys),
        hosts=frozenset({ANY} if options.allowed_hosts is None else options.allowed_hosts),
        num_ingresses=own.num_replicas or 1,
    )
    return app


def with_sizes(options: ServeOptions) -> ServeOptions:
    """Return the options with the sizes of all engines, for admission in other processes. Ray must be running."""
    configs = []
    for config in options.llm_configs:
        engine = sized(config.engine)
        sizes = {"max_num_seqs": engine.num_seqs, "max_num_batched_tokens": engine.num_batched_tokens}
        configs.append(config.replace(engine_kwargs=config.engine_kwargs | sizes))
    return options.replace(llm_configs=tuple(configs))


def bind_runner(options: ServeOptions, models: Mapping[str, Any]) -> serve.Application | None:
    """Return the application that runs batches; None where batches are off. models: applications or handles by id."""
    if options.batches is None:
        return None
    make = serve.deployment(
        name="Batches",
        num_replicas=1,
        graceful_shutdown_timeout_s=2.0,  # the next runner answers the lines that are left
        ray_actor_options={"num_cpus": 0},
    )
    return make(BatchRunner).bind(options.replace(api_keys=()), dict(models))


def bind_models(options: ServeOptions) -> dict[str, serve.Application]:
    """Return a separate application for each model, by model id. Raises ConfigError."""
    bound: dict[str, serve.Application] = {}
    # Deployments are named after models, without characters that files or Ray refuse.
    names = [f"Model:{re.sub(r'[^A-Za-z0-9_.-]+', '--', one.model_id)}" for one in options.llm_configs]
    for number, (config, name) in enumerate(zip(options.llm_configs, names, strict=True)):
        make = model_deployment(
            config,
            replica_timeout_s=options.replica_timeout_s,
            name=name if names.count(name) == 1 else f"{name}-{number}",
            num_gpus=1 if wants_gpu(config.engine) else 0,
        )
        bound[config.model_id] = make(_MODEL_SERVER).bind(config, engine_timeout_s=options.engine_timeout_s)
    return bound


def model_deployment(config: LLMConfig, *, replica_timeout_s: float, name: str, num_gpus: int) -> Any:
    """Return Serve's decorator for a deployment of the model. Raises ConfigError."""
    own = config.deployment_config
    given = {"accelerator_type": config.accelerator_type, "runtime_env": config.runtime_env}
    return _deployment(
        own,
        "deployment_config",
        actor={"num_cpus": 1, "num_gpus": num_gpus} | {key: one for key, one in given.items() if one is not None},
        name=name,
        max_ongoing_requests=_ALL,  # calls that wait in Serve take no turns
        max_queued_requests=-1 if own.max_queued_requests is None else own.max_queued_requests,  # the ingress has one
        health_check_timeout_s=own.health_check_timeout_s or replica_timeout_s,
        request_router_config=_ROUTING,
    )


def _deployment(own: DeploymentOptions, option: str, *, actor: Mapping[str, Any], **ours: Any) -> Any:
    """Return Serve's decorator. own: the user's `option`. Raises ConfigError for options that Serve refuses."""
    given = own.model_dump(exclude_none=True)
    _check_names(given, inspect.signature(serve.deployment).parameters.keys() - _FIXED, option)
    scaling = given.get("autoscaling_config")
    _check_names(scaling or {}, AutoscalingConfig.model_fields, f"{option}.autoscaling_config")
    chosen = _DEFAULTS | given | ours | {"ray_actor_options": {**actor, **own.ray_actor_options}}
    try:
        make = serve.deployment(backpressure_config={"status_code": 429}, **chosen)
        make(Ingress)  # only now Serve checks ray_actor_options
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"option {'.'.join([option, *map(str, first['loc'])])!r}: {first['msg']}") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"option {option!r}: {error}") from None
    return make


def _check_names(given: Collection[str], valid: Collection[str], option: str) -> None:
    for name in given:
        if name not in valid:
            near = difflib.get_close_matches(name, valid, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(sorted(valid))}"
            raise ConfigError(f"unknown option {name!r} in {option!r}; {hint}")
