"""Options of manifests: a model, GPUs and a few names. Imports neither ray nor torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from rayspec.command.settings import read_options_file
from rayspec.config import DType, Options, Pairs
from rayspec.demo import BUNDLED
from rayspec.ops.plan.gpus import gpus_of_a_node
from rayspec.ops.plan.options import (
    CONTEXT_HELP,
    COPIES_HELP,
    QUANTIZATION_HELP,
    USUAL_COPIES,
    DraftCopies,
    Quantization,
)
from rayspec.types import ConfigError

Kind = Literal["job", "service", "cluster"]

# KubeRay truncates names that it derives from these: ray-operator/controllers/ray/utils/constant.go, v1.7.0.
_MAX_NAME: dict[Kind, int] = {"job": 47, "service": 47, "cluster": 53}
_PORT = r"([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])"
_DNS_SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
# Two shells read an entrypoint, the submitter's and that of Ray's job runner: it has no special characters.
_PLAIN_WORD = r"[A-Za-z0-9@%+=:,./_~*\[\]-]+"
_WHERE: dict[str, tuple[Kind, ...]] = {
    "inputs": ("job",),
    "output": ("job",),
    "long": ("job",),
    "retries": ("job",),
    "served_model_name": ("service",),
    "max_replicas": ("service", "cluster"),
    "redis_address": ("service", "cluster"),
}


def _words(form: str, remedy: str) -> Callable[[Any], Any]:
    """Return what refuses values that are no word of this form, or no tuple of such words."""

    def checked(value: Any) -> Any:
        words = value if isinstance(value, tuple) else (value,)
        if not all(word is None or re.fullmatch(form, word) for word in words):
            raise ValueError(remedy)
        return value

    return checked


class RenderOptions(Options):
    """Defaults of context and concurrency are those of `rayspec placement`, whose plan the manifests follow. Where
    neither stages nor tensor is named, `rayspec plan` chooses both. It also chooses the number of copies where neither
    replicas nor max_replicas is named: gpus and concurrency are then those of all copies together."""

    kind: Kind = Field("job", description="a RayJob that summarizes, a RayService, or a RayCluster to work on")
    model: str = Field(description="model that the pods load: hub id, a folder in the pods, or 'demo'")
    sizes_from: str | None = Field(
        None, description="config.json that sizes are computed from; unset: that of the model"
    )
    gpus: str | None = Field(
        None,
        description="GPUs, as 8xH100-80G or 2x8xH100; of one copy, if a layout or a number of copies is named",
    )
    cpus: int | None = Field(None, ge=1, description="cores of a shard, in place of GPUs")
    gpus_per_node: int | None = Field(
        None, ge=1, description="GPUs that a pod may ask for; unset: as gpus names nodes, as 2x8xH100, else 8"
    )
    stages: int | None = Field(
        None, ge=1, description="pipeline stages; unset: as rayspec plan recommends, or with tensor the fewest"
    )
    tensor: int | None = Field(
        None, ge=1, description="GPUs that share each stage; unset: as rayspec plan recommends, or 1 with stages"
    )
    context: int | None = Field(None, ge=2, description=CONTEXT_HELP)
    concurrency: int = Field(32, ge=1, description="sequences at once, on these GPUs")
    quantization: Quantization | None = Field(None, description=QUANTIZATION_HELP)
    draft_weights: DraftCopies = Field(USUAL_COPIES, description=COPIES_HELP)
    dtype: DType = Field("auto", description="data type of the weights")
    replicas: int | None = Field(
        None, ge=1, description="copies of the model; unset: as rayspec plan recommends, or 1 with a named layout"
    )
    max_replicas: int | None = Field(None, ge=1, description="most copies for the autoscaler; unset: as many")
    name: str = Field("rayspec", description="name of the resource, and prefix of other names")
    namespace: str | None = Field(None, description="Kubernetes namespace; unset: that of kubectl")
    image: str | None = Field(None, description="container image; unset: rayspec:VERSION-cuda or -cpu")
    served_model_name: str | None = Field(None, description="model's name in requests; unset: its hub id or folder")
    inputs: tuple[str, ...] = Field((), description="documents of a job: s3://, gs://, abfs://, or paths in the pods")
    output: str | None = Field(None, description="folder of a job's rows and report: a URI, or a path in the pods")
    long: Literal["fail", "truncate", "map-reduce", "refine"] = Field(
        "fail", description="how a job treats documents longer than the context"
    )
    retries: int = Field(1, ge=0, description="how often a failed job starts again, on a new cluster")
    spot: bool = Field(False, description="workers on preemptible nodes, the head on others")
    node_selector: Annotated[dict[str, str], Pairs] = Field(
        default_factory=dict, description="node label of workers, LABEL=VALUE; repeatable; unset: the GPU's product"
    )
    gpu_resource: str = Field("nvidia.com/gpu", description="name of a GPU for the device plugin")
    models_claim: str | None = Field(None, description="existing volume claim for models; unset: a new one")
    storage_class: str | None = Field(None, description="storage class of a new claim; it must allow ReadWriteMany")
    hf_secret: str = Field("rayspec-hf-token", description="secret with the Hub's token under 'token', if there is one")
    bucket_secret: str = Field("rayspec-bucket", description="secret with the bucket's environment, if there is one")
    api_keys_secret: str = Field("rayspec-api-keys", description="secret with a service's keys under 'keys'")
    redis_address: str | None = Field(None, description="HOST:PORT of a Redis that keeps the head's state")
    redis_secret: str = Field("rayspec-redis", description="secret with its password under 'password'")
    operator_namespace: str = Field("default", description="where KubeRay's operator runs")
    monitoring_namespace: str = Field("monitoring", description="namespace whose pods may read metrics")

    _labels = field_validator("name", "namespace", "operator_namespace", "monitoring_namespace")(
        _words(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", "use up to 63 lower-case letters, digits and '-', first a letter")
    )
    _subdomains = field_validator(
        "models_claim", "storage_class", "hf_secret", "bucket_secret", "api_keys_secret", "redis_secret"
    )(_words(_DNS_SUBDOMAIN, "use lower-case letters, digits, '-' and '.', with a letter or digit at both ends"))
    _no_spaces = field_validator("image", "gpu_resource")(_words(r"\S+", "give a name without spaces"))
    _places = field_validator("redis_address")(_words(rf"[^:/\s]+:{_PORT}", "give it as HOST:PORT, as redis:6379"))
    _plain_words = field_validator("model", "output", "inputs")(
        _words(_PLAIN_WORD, "it goes through shells: rename what has spaces, quotes, '$', '&', ';' or the like")
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        most = _MAX_NAME[self.kind]
        if len(self.name) > most:
            raise ValueError(f"option 'name' is {self.name!r}: KubeRay takes {most} characters here, shorten it")
        for name, kinds in _WHERE.items():
            is_given = getattr(self, name) != type(self).model_fields[name].default
            if is_given and self.kind not in kinds:
                raise ValueError(f"option {name!r} is of a {' or a '.join(kinds)}, not of a {self.kind}: remove it")
        if self.kind == "job" and self.output is None:
            raise ValueError("option 'output' is missing: name a folder that outlives the job, as s3://BUCKET/FOLDER")
        if self.kind == "job" and not self.inputs and self.model not in BUNDLED:
            raise ValueError("option 'inputs' is missing: name documents, as s3://BUCKET/FOLDER")
        if (self.gpus is None) == (self.cpus is None):
            raise ValueError(f"options 'gpus' and 'cpus' are {self.gpus!r} and {self.cpus}: name one of them")
        if self.max_replicas is not None and self.max_replicas < (self.replicas or 1):
            raise ValueError(
                f"option 'max_replicas' is {self.max_replicas}: it must be replicas ({self.replicas}) or more"
            )
        return self

    @property
    def names_layout(self) -> bool:
        return self.stages is not None or self.tensor is not None

    @property
    def names_copies(self) -> bool:
        """Whether gpus and concurrency are those of one copy."""
        return self.names_layout or self.replicas is not None or self.max_replicas is not None

    @property
    def gpus_of_a_pod(self) -> int:
        assert self.gpus is not None
        return self.gpus_per_node or gpus_of_a_node(self.gpus)

    @property
    def autoscales(self) -> bool:
        """Whether Ray's autoscaler runs. A resource of kind `cluster` has workers only on demand."""
        return self.kind == "cluster" or self.max_replicas is not None

    @property
    def uses_hub(self) -> bool:
        return self.model not in BUNDLED


def read_render_options(file: Path | None, asked: Mapping[str, Any]) -> RenderOptions:
    """Return the options of a file and of flags. file: YAML; a relative `sizes_from` is relative to this file. asked:
    values that override the file's; Raises ConfigError."""
    values: dict[str, Any] = read_options_file(file, "option 'config': the file") if file is not None else {}
    sizes_from = values.get("sizes_from")
    if file is not None and isinstance(sizes_from, str) and (file.parent / sizes_from).exists():
        values["sizes_from"] = str(file.parent / sizes_from)
    values |= asked
    if "model" not in values:
        raise ConfigError("option 'model' is missing: name a hub id, a folder in the pods, or 'demo'")
    return RenderOptions(**values)
