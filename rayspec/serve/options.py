"""Options of an endpoint: the names of `ray.serve.llm`'s YAML, and additional ones. Imports neither ray nor torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, field_validator, model_validator
from typing_extensions import Self

from rayspec.command.locations import Location
from rayspec.command.options import Asked
from rayspec.command.settings import read_options_file
from rayspec.config import EngineConfig, Options, ParallelOptions, SamplingParams
from rayspec.types import ConfigError

TOKENIZED_AT_ONCE = 4  # bodies of /tokenize and /detokenize, in an ingress


class AutoscalingOptions(Options):
    """Serve's options, of which rayspec reads these. All numbers may be text, because templates often quote them."""

    model_config = ConfigDict(extra="allow")

    min_replicas: int | None = None
    max_replicas: int | None = None


class DeploymentOptions(Options):
    """The options of a Serve deployment, under Serve's names. All go to Serve, which knows more than the ones that
    rayspec reads itself. Unknown names raise ConfigError when the deployment is made.

    num_replicas: None: 1, or as autoscaling_config says. max_ongoing_requests: most requests of one replica, without
    those of batches; None: twice the sequences that its engine decodes at once, so that new sequences are always ready.
    max_queued_requests: most requests that wait for a replica; None: the sequences that all replicas decode at once;
    -1: no limit. Further requests get 429. health_check_timeout_s: None: replica_timeout_s.
    graceful_shutdown_timeout_s: time for requests under way before a replica ends. ray_actor_options: by default one
    CPU, and one GPU if the engine runs in the replica's process and the cluster has GPUs. Shards of `parallel` have
    their own reservations.
    """

    model_config = ConfigDict(extra="allow")

    num_replicas: int | None = Field(None, ge=1)
    autoscaling_config: AutoscalingOptions | None = None
    max_ongoing_requests: int | None = Field(None, ge=1)
    max_queued_requests: int | None = Field(None, ge=-1)
    graceful_shutdown_timeout_s: float = Field(60.0, ge=0)
    health_check_timeout_s: float | None = Field(None, gt=0)
    ray_actor_options: dict[str, Any] = Field(default_factory=dict)


class ModelLoadingConfig(Options):
    """The model to load. model_id: its name in requests. model_source: folder, hub id or "demo"; None: the model_id."""

    model_id: str = Field(min_length=1)
    model_source: str | None = None
    tokenizer_source: str | None = None


class ExperimentalOptions(Options):
    """Options under a name of Ray's. stream_batching_interval_ms: parts of a streamed answer within this interval are
    sent together; the first and the last are sent at once. 0: every part is sent at once."""

    stream_batching_interval_ms: float = Field(100.0, ge=0, le=10_000)


class LLMConfig(Options):
    """One model. engine_kwargs: options of `EngineConfig`, including `parallel` and `speculation`."""

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
        engine = self.engine  # raises ConfigError now, not when the model loads
        if engine.parallel is not None and engine.parallel.replicas > 1:
            count = engine.parallel.replicas
            raise ValueError(
                f"option 'engine_kwargs.parallel.replicas' is {count}: Serve starts the replicas of an endpoint; "
                f"remove the option, and set deployment_config.num_replicas to {count}"
            )
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
        """Options of the engine. Raises ConfigError."""
        loading = self.model_loading_config
        source = {"model": loading.model_source or loading.model_id, "tokenizer": loading.tokenizer_source}
        try:
            return EngineConfig(**source | self.engine_kwargs)
        except ConfigError as error:
            raise ConfigError(f"in 'engine_kwargs': {error}") from None

    @property
    def max_ongoing_requests(self) -> int:
        return self.deployment_config.max_ongoing_requests or 2 * self.engine.num_seqs

    @property
    def num_replicas(self) -> int:
        scaling = self.deployment_config.autoscaling_config
        return self.deployment_config.num_replicas or 1 if scaling is None else scaling.max_replicas or 1

    @property
    def num_cpus(self) -> float:
        """Ray CPUs that all replicas and their shards reserve."""
        own, parallel = self.deployment_config.ray_actor_options.get("num_cpus"), self.engine.parallel
        own = own if isinstance(own, int | float) else 1.0  # Serve refuses what is no number
        return self.num_replicas * (own + (parallel.num_cpus if parallel is not None else 0))

    def num_ongoing(self, num_running: int, num_ingresses: int = 1) -> int:
        """Return how many requests the replicas that run now take from each of some ingresses at once. Where none runs,
        as many as one would take: Serve starts a replica for requests that wait."""
        return -(-self.max_ongoing_requests * max(1, num_running) // num_ingresses)

    @property
    def max_admitted(self) -> int | None:
        """Most sequences of the model's requests, running and waiting; None: no limit. By default three times the
        sequences that are decoded at once, so that a request waits for about two others."""
        queued = self.deployment_config.max_queued_requests
        if queued is None:
            queued = self.engine.num_seqs * self.num_replicas
        return None if queued < 0 else self.max_ongoing_requests * self.num_replicas + queued

    @property
    def scales_to_zero(self) -> bool:
        scaling = self.deployment_config.autoscaling_config
        return scaling is not None and scaling.min_replicas == 0


class ServeOptions(Options):
    """An endpoint: its models, access rights and limits.

    llm_configs: one per model, as a mapping or as the path of a YAML file. api_keys: each key gives access; without
    keys, everyone who can reach the endpoint has access. cors: origins whose web pages may use the endpoint, "*" for
    all. allowed_hosts: names by which clients may call the endpoint, in addition to the loopback names, "*" for all;
    None: all, but only loopback names if the endpoint listens on loopback. max_request_bytes: largest body.
    header_timeout_s, body_timeout_s: limits for the arrival of a request's headers and body; the second also for a
    client that does not read its answer. request_timeout_s: limit for a whole answer, streamed or not, from the arrival
    of the request; None: no limit. engine_timeout_s: an engine is replaced if a pass has lasted for so long and for 20
    times its expected time. A busy machine, a first pass, a plan search and a measurement do not count, see
    `decode/stages.py`. replica_timeout_s: a replica is replaced if its process, which answers while the engine
    computes, is silent for so long; if its node says that the process is stopped, after 6 s. batches: path or URI of a
    folder that all nodes reach, for /v1/files and /v1/batches; None: batches are off. max_batch_file_bytes,
    max_batch_lines: limits of a file for batches.
    """

    llm_configs: tuple[LLMConfig, ...]
    ingress_deployment_config: DeploymentOptions = DeploymentOptions()
    api_keys: tuple[str, ...] = Field((), repr=False)
    cors: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None
    max_request_bytes: int = Field(16 * 2**20, ge=1024)
    header_timeout_s: float = Field(10.0, gt=0)
    body_timeout_s: float = Field(60.0, gt=0)
    request_timeout_s: float | None = Field(None, gt=0)
    engine_timeout_s: float = Field(60.0, gt=0)
    replica_timeout_s: float = Field(60.0, ge=1)
    batches: str | None = Field(None, min_length=1)
    max_batch_file_bytes: int = Field(200 * 2**20, ge=1024)
    max_batch_lines: int = Field(50_000, ge=1)

    @field_validator("llm_configs", mode="before")
    @classmethod
    def _read_files(cls, configs: Any) -> Any:
        if not isinstance(configs, list | tuple):
            return configs
        return [read_options_file(Path(one)) if isinstance(one, str) else one for one in configs]

    @field_validator("allowed_hosts")
    @classmethod
    def _lower_names(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if names is None else tuple(name.lower() for name in names)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.llm_configs:
            raise ValueError("option 'llm_configs' is empty: name a model")
        names = [name for config in self.llm_configs for name in (config.model_id, *config.engine.lora_modules)]
        name, count = Counter(names).most_common(1)[0]
        if count > 1:
            is_adapter = any(name in config.engine.lora_modules for config in self.llm_configs)
            raise ValueError(
                f"option {'lora_modules' if is_adapter else 'model_id'!r}: {name!r} names {count} models or adapters; "
                "give each a name of its own"
            )
        # Keys are secret: a message must not show them.
        for number, key in enumerate(self.api_keys, start=1):
            if not (key.isascii() and key.isprintable() and key) or " " in key:
                raise ValueError(f"option 'api_keys': key {number} must be printable ASCII without spaces")
        for origin in self.cors:
            parts = urlsplit(origin)  # a scheme, a host and perhaps a port, as browsers send an origin
            is_origin = parts.netloc and origin == f"{parts.scheme}://{parts.netloc}".lower() and "@" not in origin
            if origin != "*" and not (is_origin and not re.search(r"^http:.*:80$|^https:.*:443$", origin)):
                raise ValueError(
                    f"option 'cors' has {origin!r}: write an origin as browsers send it, in lower case and without a "
                    "usual port, as 'https://app.example', or '*'"
                )
        for name in self.allowed_hosts or ():
            if not (re.fullmatch(r"\*|[^\s:/\[\]*]*[^\s:/\[\]*.]", name) or _is_address(name)):
                raise ValueError(
                    f"option 'allowed_hosts' has {name!r}: write a name or an address, without scheme and port, as "
                    "'api.example', or '*'"
                )
        return self

    @property
    def model_of(self) -> dict[str, str]:
        """The model of each name that requests may use: its own, and those of its adapters."""
        return {
            name: config.model_id
            for config in self.llm_configs
            for name in (config.model_id, *config.engine.lora_modules)
        }

    @property
    def max_ongoing_requests(self) -> int:
        """Most requests of an ingress at once: those that all models admit, and some more that are refused."""
        asked = self.ingress_deployment_config.max_ongoing_requests
        held = [_UNLIMITED if one.max_admitted is None else one.max_admitted for one in self.llm_configs]
        return asked or sum(held) + _NUM_REFUSED_AT_ONCE


def _is_address(name: str) -> bool:
    with suppress(ValueError):
        return bool(ip_address(name))
    return False


_NUM_REFUSED_AT_ONCE = 256
_UNLIMITED = 100_000


def serve_options(args: Mapping[str, Any], *, environment: Mapping[str, str]) -> ServeOptions:
    """Return the options in the `args` of an application. environment: RAYSPEC_API_KEYS holds more keys, separated by
    commas. A local folder of batches becomes absolute. Raises ConfigError."""
    more = tuple(filter(None, (key.strip() for key in environment.get("RAYSPEC_API_KEYS", "").split(","))))
    options = ServeOptions(**args)
    folder = None if options.batches is None else Location.parse(options.batches).absolute().name
    return options.replace(api_keys=options.api_keys + more, batches=folder)


def asked_options(
    file: Path | None,
    asked: Asked,
    *,
    model_id: str | None,
    api_keys: Sequence[str],
    cors: Sequence[str] = (),
    allowed_hosts: Sequence[str] = (),
    batches: str | None = None,
    environment: Mapping[str, str],
) -> ServeOptions:
    """Return the options of an endpoint: those in `file`, or of the engine in `asked`. model_id: name of the model;
    None: as in the engine's options. The lists are added to the file's, `batches` replaces the file's. Raises
    ConfigError."""
    if model_id == "":
        raise ConfigError("option 'served_model_name' is '': give a name, or leave it out")
    if file is None:
        settings = asked.settings()
        if settings.sampling != SamplingParams():
            raise ConfigError("options of 'sampling' have no effect here, requests bring their own: remove them")
        engine, parallel = settings.engine, settings.engine.parallel
        deployment = {}
        if parallel is not None and parallel.replicas > 1:  # which Serve starts
            deployment, parallel = {"num_replicas": parallel.replicas}, parallel.replace(replicas=1)
            engine = engine.replace(parallel=None if parallel == ParallelOptions() else parallel)
        loading = {"model_id": model_id or engine.model, "model_source": engine.model}
        config = {
            "model_loading_config": loading | {"tokenizer_source": engine.tokenizer},
            "engine_kwargs": engine.model_dump(exclude_defaults=True, exclude={"model", "tokenizer"}),
            "deployment_config": deployment,
        }
        args: dict[str, Any] = {"llm_configs": [config]}
    else:
        given = [name for name, value in asked.flags.items() if value is not None]
        given += ["served_model_name"] * (model_id is not None) + ["set"] * bool(asked.overrides)
        given += ["config"] * (asked.file is not None)
        if given:
            raise ConfigError(f"option {given[0]!r} does not go with {str(file)!r}: write it there")
        args = read_options_file(file)
        if "applications" in args:
            raise ConfigError(
                f"{str(file)!r} is a file for Serve: run `serve run {file}`, or give a file with what is in its 'args'"
            )
    chosen: dict[str, Any] = {"batches": batches} if batches is not None else {}
    for name, values in {"api_keys": api_keys, "cors": cors, "allowed_hosts": allowed_hosts}.items():
        own = args.get(name) or []
        if values and isinstance(own, list | tuple):  # others are refused
            chosen[name] = [*own, *values]
    return serve_options(args | chosen, environment=environment)
