"""Options of `rayspec placement` and `rayspec plan`. Imports neither ray nor torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import Self

from rayspec.choices import QUANTISED_WEIGHTS
from rayspec.config import Commas, DType, Options, SpeculationOptions
from rayspec.ops.plan.gpus import ANY_CPU, gpus_of_a_node

Goal = Literal["throughput", "latency", "cost"]
Quantization = Literal["fp8", "int8", "int4"]
DraftWeights = Literal["int8", "int4"]
DEFAULT_CONTEXT = 16384
QUANTIZATION_HELP = "quantization of the linear layers; unset: what they have when the checkpoint is loaded"
COPIES_HELP = "quantized copies of the weights for drafts, which take memory; none: drafts without"
USUAL_COPIES: Any = SpeculationOptions().draft_weights
CONTEXT_HELP = f"tokens of a sequence, prompt and output; unset: {DEFAULT_CONTEXT}, or the model's if that is less"
# Published self-speculative decoders that skip about half of the sublayers have .85 to .95; KnapSpec's best .94 to .97.
PUBLISHED_ACCEPTANCE = 0.90


def _no_copies(value: Any) -> Any:
    return () if value in ("none", ["none"], ("none",)) else value


DraftCopies = Annotated[tuple[DraftWeights, ...], Commas, BeforeValidator(_no_copies)]


def choices_with(copies: tuple[DraftWeights, ...]) -> tuple[str, ...] | None:
    """Return `speculation.choices` for drafts with these copies; None if they are the default."""
    usual = SpeculationOptions()
    others = [choice for choice in usual.choices if choice not in QUANTISED_WEIGHTS]
    return None if copies == usual.draft_weights else (*others, *copies)


class LoadOptions(Options):
    """GPUs, the form of the weights, and the load, which determines the size of the KV cache. context: tokens of a
    complete sequence. None until `rayspec.ops.plan.placement.for_model` has set it."""

    gpus: str = Field(
        description="GPUs, as 8xH100-80G, 2x8xH100 (two nodes), 4xH200,4xA100-80G or 2xNEW-96G@4000 (GB/s)"
    )
    context: int | None = Field(None, ge=1, description=CONTEXT_HELP)
    concurrency: int = Field(32, ge=1, description="sequences at once, over all copies that rayspec plan recommends")
    quantization: Quantization | None = Field(None, description=QUANTIZATION_HELP)
    draft_weights: DraftCopies = Field(USUAL_COPIES, description=COPIES_HELP)
    dtype: DType = Field("auto", description="data type of the weights")

    @property
    def load(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in LoadOptions.model_fields}

    @property
    def on_cpu(self) -> bool:
        return ANY_CPU in self.gpus

    @property
    def num_tokens(self) -> int:
        """`context`, once it is set."""
        assert self.context is not None, "for_model sets the context"
        return self.context


class PlacementOptions(LoadOptions):
    """A placement to compute. stages, tensor, layers: where all are None, `rayspec plan` chooses the layout."""

    stages: int | None = Field(None, ge=1, description="pipeline stages; unset: as rayspec plan recommends")
    tensor: int | None = Field(None, ge=1, description="GPUs that share each stage")
    layers: Annotated[tuple[int, ...] | None, Commas] = Field(None, description="layers of each stage, as 20,30,30")

    @model_validator(mode="after")
    def _ranks_can_split_weights(self) -> Self:
        if self.num_ranks > 1 and self.quantization is not None:
            raise ValueError(
                f"option 'tensor' is {self.tensor}, and ranks cannot split {self.quantization} weights: set it to 1"
            )
        return self

    @property
    def names_layout(self) -> bool:
        return (self.stages, self.tensor, self.layers) != (None, None, None)

    @property
    def num_ranks(self) -> int:
        """GPUs that share each stage."""
        return self.tensor or 1


class PlanOptions(LoadOptions):
    """A cluster, a load, and a goal. profile: of this model. gpus_per_node: None: the smallest node that `gpus` names,
    else 8."""

    output_tokens: int = Field(256, ge=1, description="output tokens, a part of the context")
    goal: Goal = Field("throughput", description="what to optimize; latency: of one request alone")
    profile: Path | None = Field(None, description="latency profile of one such GPU, saved by `rayspec profile`")
    acceptance: float = Field(PUBLISHED_ACCEPTANCE, ge=0, le=1, description="share of draft tokens that are accepted")
    skip: float = Field(0.5, gt=0, lt=1, description="share of the layers that drafts leave out")
    price: float | None = Field(None, gt=0, description="dollars per GPU hour")
    max_num_batched_tokens: int = Field(4096, ge=16, description="prompt tokens run between two decode rounds")
    hop_us: float = Field(200.0, ge=0, description="microseconds from a stage to the next one")
    all_reduce_us: float = Field(10.0, ge=0, description="microseconds of an all-reduce, per sublayer")
    gpus_per_node: int | None = Field(
        None, ge=1, description="most tensor-parallel ranks; unset: as gpus names them, else 8"
    )

    @model_validator(mode="after")
    def _answers_fit(self) -> Self:
        if self.context is not None and self.output_tokens >= self.context:
            raise ValueError(
                f"option 'output_tokens' is {self.output_tokens}, and the context {self.context} tokens, which hold "
                "prompt and answer: lower output_tokens"
            )
        return self

    @property
    def max_ranks(self) -> int:
        return self.gpus_per_node or gpus_of_a_node(self.gpus)
