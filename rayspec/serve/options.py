"""The options of an endpoint, with the key names of `ray.serve.llm`'s YAML, and ours. No ray, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from rayspec.config import EngineConfig, Options
from rayspec.types import ConfigError

_HEALTH_MARGIN_S = 5.0  # what a health check takes besides the engine's answer


class AutoscalingOptions(Options):
    """How Serve changes the number of replicas; None leaves Serve's default."""

    min_replicas: int | None = Field(None, ge=0)
    initial_replicas: int | None = Field(None, ge=0)
    max_replicas: int | None = Field(None, ge=1)
    target_ongoing_requests: float | None = Field(None, gt=0)
    metrics_interval_s: float | None = Field(None, gt=0)
    look_back_period_s: float | None = Field(None, gt=0)
    upscaling_factor: float | None = Field(None, gt=0)
    downscaling_factor: float | None = Field(None, gt=0)
    upscale_delay_s: float | None = Field(None, ge=0)
    downscale_delay_s: float | None = Field(None, ge=0)
    downscale_to_zero_delay_s: float | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        least, most = self.min_replicas if self.min_replicas is not None else 1, self.max_replicas or 1
        if least > most:
            raise ValueError(f"min_replicas ({least}) exceeds max_replicas ({most}): raise max_replicas")
        return self


class RayActorOptions(Options):
    """What Ray reserves for a replica. None: an engine in the replica's own process takes a CPU, and a GPU where the
    cluster has any; shards of `parallel` have resources of their own."""

    num_cpus: float | None = Field(None, ge=0)
    num_gpus: float | None = Field(None, ge=0)
    memory: float | None = Field(None, gt=0, description="bytes")
    resources: dict[str, float] | None = None
    label_selector: dict[str, str] | None = None
    accelerator_type: str | None = None
    runtime_env: dict[str, Any] | None = None


class DeploymentOptions(Options):
    """A Serve deployment: the names are Serve's, which itself passes over names that it does not know.

    max_ongoing_requests: of one replica; None: twice the sequences that its engine decodes at once, so that the engine
    always has the next ones at hand. max_queued_requests: requests that wait until a replica has room; None: the
    sequences that all replicas decode at once. More requests get 429. health_check_timeout_s: None: engine_timeout_s
    and a margin. graceful_shutdown_timeout_s: for requests under way when a replica is to end.
    """

    num_replicas: int = Field(1, ge=1)
    autoscaling_config: AutoscalingOptions | None = None
    max_ongoing_requests: int | None = Field(None, ge=1)
    max_queued_requests: int | None = Field(None, ge=-1, description="-1: no limit")
    graceful_shutdown_timeout_s: float = Field(60.0, ge=0)
    graceful_shutdown_wait_loop_s: float = Field(0.2, gt=0)
    health_check_period_s: float = Field(1.0, gt=0)
    health_check_timeout_s: float | None = Field(None, gt=0)
    max_constructor_retry_count: int = Field(3, ge=1)
    max_replicas_per_node: int | None = Field(None, ge=1, le=100)
    rolling_update_percentage: float | None = Field(None, gt=0, le=1)
    ray_actor_options: RayActorOptions = RayActorOptions()

    @model_validator(mode="after")
    def _one_way_to_scale(self) -> Self:
        if self.autoscaling_config is not None and "num_replicas" in self.model_fields_set:
            raise ValueError("options 'num_replicas' and 'autoscaling_config' exclude each other: remove one")
        return self


class ModelLoadingConfig(Options):
    """model_id: what requests call the model. model_source: local folder, hub id or "demo"; None: the model_id."""

    model_id: str = Field(min_length=1)
    model_source: str | None = None
    tokenizer_source: str | None = None


class ExperimentalOptions(Options):
    """stream_batching_interval_ms: pieces of a streamed answer that come so soon after another travel together; the
    first and the last do not wait. 0: pieces travel as they come."""

    stream_batching_interval_ms: float = Field(100.0, ge=0, le=10_000)


class LLMConfig(Options):
    """One model. engine_kwargs: options of `EngineConfig`, `parallel` and `speculation` among them."""

    model_loading_config: ModelLoadingConfig
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    deployment_config: DeploymentOptions = DeploymentOptions()
    runtime_env: dict[str, Any] | None = None
    accelerator_type: str | None = None
    log_engine_metrics: bool = True
    experimental_configs: ExperimentalOptions = ExperimentalOptions()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for key, instead in (("model", "model_source"), ("tokenizer", "tokenizer_source")):
            if key in self.engine_kwargs:
                raise ValueError(
                    f"option 'engine_kwargs.{key}' is {self.engine_kwargs[key]!r}: "
                    f"name it as model_loading_config.{instead}"
                )
        engine = self.engine  # what is wrong with it is to be known now
        if self.accelerator_type is not None and engine.parallel is not None:
            raise ValueError(
                f"option 'accelerator_type' is {self.accelerator_type!r}: shards do not look at it; remove it, or "
                "'engine_kwargs.parallel'"
            )
        return self

    @property
    def model_id(self) -> str:
        return self.model_loading_config.model_id

    @property
    def engine(self) -> EngineConfig:
        """Raises ConfigError."""
        loading = self.model_loading_config
        source = {"model": loading.model_source or loading.model_id, "tokenizer": loading.tokenizer_source}
        try:
            return EngineConfig(**source | self.engine_kwargs)
        except ConfigError as error:
            raise ConfigError(f"in 'engine_kwargs': {error}") from None

    @property
    def num_places(self) -> int:
        """Sequences that one replica decodes at once. All cohorts of an engine share its `max_num_seqs`."""
        engine = self.engine
        return engine.max_num_seqs * (engine.parallel.replicas if engine.parallel is not None else 1)

    @property
    def max_ongoing_requests(self) -> int:
        """Of one replica."""
        return self.deployment_config.max_ongoing_requests or 2 * self.num_places

    @property
    def num_replicas(self) -> int:
        """The most there can be."""
        scaling = self.deployment_config.autoscaling_config
        return (scaling.max_replicas or 1) if scaling is not None else self.deployment_config.num_replicas

    @property
    def max_admitted(self) -> int | None:
        """Requests of the model that the endpoint holds: all replicas' and the waiting ones; None: no limit. By default
        three times what is decoded at once, so a request waits for about two others."""
        queued = self.deployment_config.max_queued_requests
        if queued is None:
            queued = self.num_places * self.num_replicas
        return None if queued < 0 else self.max_ongoing_requests * self.num_replicas + queued

    @property
    def scales_to_zero(self) -> bool:
        scaling = self.deployment_config.autoscaling_config
        return scaling is not None and scaling.min_replicas == 0


class ServeOptions(Options):
    """An endpoint: its models and what it grants.

    llm_configs: one a model, each as a mapping or as the path of a YAML file that holds one. api_keys: any of them
    opens the endpoint; none at all leaves it open to everyone who can reach it. cors: origins whose web pages may use
    the endpoint, "*" for all. allowed_hosts: names by which clients may call the endpoint, besides loopback's own, "*"
    for all; None: all, but on loopback only loopback's own. max_request_bytes: of a body. header_timeout_s and
    body_timeout_s: for the headers and the body of a request to come. request_timeout_s: for a whole answer, streamed
    or not; None: as long as it takes. engine_timeout_s: after which an engine that gives no sign of life is replaced;
    longer than its longest step. replica_timeout_s: the same for a replica's process, which answers while the engine
    computes. batches: folder, path or URI that all nodes reach, for /v1/files and /v1/batches; None: there are none.
    max_batch_file_bytes, max_batch_lines: of a file for batches.
    """

    llm_configs: tuple[LLMConfig, ...] = Field(min_length=1)
    ingress_deployment_config: DeploymentOptions = DeploymentOptions()
    api_keys: tuple[str, ...] = Field((), repr=False)
    cors: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None
    max_request_bytes: int = Field(16 * 2**20, ge=1024)
    header_timeout_s: float = Field(10.0, gt=0)
    body_timeout_s: float = Field(60.0, gt=0)
    request_timeout_s: float | None = Field(None, gt=0)
    engine_timeout_s: float = Field(30.0, gt=0)
    replica_timeout_s: float = Field(6.0, ge=1)
    batches: str | None = None
    max_batch_file_bytes: int = Field(200 * 2**20, ge=1024)
    max_batch_lines: int = Field(50_000, ge=1)

    @field_validator("llm_configs", mode="before")
    @classmethod
    def _read_files(cls, configs: Any) -> Any:
        if not isinstance(configs, list | tuple):
            return configs
        return [read_options_file(Path(one)) if isinstance(one, str) else one for one in configs]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        name, count = Counter(config.model_id for config in self.llm_configs).most_common(1)[0]
        if count > 1:
            raise ValueError(f"option 'model_id' is {name!r} in {count} of llm_configs: give each model its own")
        # Keys are secret: a message must not show them.
        for number, key in enumerate(self.api_keys, start=1):
            if not (key.isascii() and key.isprintable() and key) or " " in key:
                raise ValueError(f"option 'api_keys': key {number} must be printable ASCII without spaces")
        for origin in self.cors:
            if not _is_origin(origin):
                raise ValueError(f"option 'cors' has {origin!r}: write an origin, as 'https://app.example', or '*'")
        for config in self.llm_configs:
            if self.health_check_timeout_s(config) <= self.engine_timeout_s:
                raise ValueError(
                    f"option 'health_check_timeout_s' is {config.deployment_config.health_check_timeout_s}: it must "
                    f"exceed engine_timeout_s ({self.engine_timeout_s}); raise it"
                )
        return self

    def health_check_timeout_s(self, config: LLMConfig) -> float:
        return config.deployment_config.health_check_timeout_s or self.engine_timeout_s + _HEALTH_MARGIN_S

    @property
    def deployments(self) -> tuple[DeploymentOptions, ...]:
        return (*(config.deployment_config for config in self.llm_configs), self.ingress_deployment_config)

    @property
    def max_ongoing_requests(self) -> int:
        """Of an ingress: what all models may hold, and some more requests that are refused."""
        asked = self.ingress_deployment_config.max_ongoing_requests
        held = [_UNLIMITED if one.max_admitted is None else one.max_admitted for one in self.llm_configs]
        return asked or sum(held) + _NUM_REFUSED_AT_ONCE


_NUM_REFUSED_AT_ONCE = 256
_UNLIMITED = 100_000


def _is_origin(text: str) -> bool:
    """A scheme, a host and perhaps a port, as browsers send it."""
    parts = urlsplit(text)
    return text == "*" or (bool(parts.netloc) and text == f"{parts.scheme}://{parts.netloc}")


def serve_options(args: Mapping[str, Any], *, environment: Mapping[str, str]) -> ServeOptions:
    """Of the `args` of an application. environment: its RAYSPEC_API_KEYS holds more keys, with commas. Raises
    ConfigError."""
    more = tuple(filter(None, (key.strip() for key in environment.get("RAYSPEC_API_KEYS", "").split(","))))
    options = ServeOptions(**args)
    return options.replace(api_keys=options.api_keys + more) if more else options


def read_options_file(path: Path) -> dict[str, Any]:
    """A YAML file of options. Raises ConfigError."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the file {str(path)!r} cannot be read: {error.strerror}; check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file {str(path)!r} is not valid YAML: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"the file {str(path)!r} must hold options, as 'name: value' lines")
    return content
