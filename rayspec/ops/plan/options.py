"""What is asked of `rayspec plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from rayspec.config import DType, Options
from rayspec.model.sizes import Quantization
from rayspec.ops.gpus import gpus_of_a_node

Goal = Literal["throughput", "latency", "cost"]

# Of published self-speculative decoders that leave out about half of the sublayers, KnapSpec's at its best .94 to .97.
PUBLISHED_ACCEPTANCE = (0.85, 0.90, 0.95)


class PlanOptions(Options):
    """A cluster, a load, and what counts.

    context: tokens of a sequence in the end, of which `output_tokens` are the answer. acceptance: of draft tokens;
    None: what others have published, as a range. skip: share of the layers that drafts leave out. price: dollars per
    GPU hour. profile: a file that `rayspec profile` has saved, of this model on one such GPU. gpus_per_node: the most
    tensor-parallel ranks; None: as `gpus` names nodes, else 8.
    """

    gpus: str
    context: int = Field(16384, ge=2)
    output_tokens: int = Field(256, ge=1)
    concurrency: int = Field(32, ge=1)
    quantization: Quantization | None = None
    dtype: DType = "auto"
    goal: Goal = "throughput"
    price: float | None = Field(None, gt=0)
    acceptance: float | None = Field(None, ge=0, le=1)
    skip: float = Field(0.5, gt=0, lt=1)
    max_draft_tokens: int = Field(16, ge=1, le=127)
    profile: Path | None = None
    max_num_batched_tokens: int = Field(1024, ge=16)
    hop_us: float = Field(200.0, ge=0)
    all_reduce_us: float = Field(10.0, ge=0)
    gpus_per_node: int | None = Field(None, ge=1)
    seed: int = 0

    @model_validator(mode="after")
    def _answers_fit(self) -> Self:
        if self.output_tokens >= self.context:
            raise ValueError(
                f"option 'output_tokens' is {self.output_tokens}, and context {self.context}, which holds prompt and "
                "answer: raise that"
            )
        return self

    @property
    def max_ranks(self) -> int:
        """Of a stage."""
        return self.gpus_per_node or gpus_of_a_node(self.gpus)

    @property
    def acceptances(self) -> tuple[float, float, float]:
        """Low, middle, high."""
        return PUBLISHED_ACCEPTANCE if self.acceptance is None else (self.acceptance,) * 3
