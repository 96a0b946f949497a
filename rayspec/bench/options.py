"""Options of `rayspec bench` and `rayspec tune`: each field is a flag, too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator
from typing_extensions import Self

from rayspec.command.options import Asked
from rayspec.config import Commas, EngineConfig, Options, Pairs, TuningOptions
from rayspec.types import ConfigError


class WorkloadOptions(Options):
    """The prompts of a benchmark."""

    input: tuple[str, ...] = Field(
        ("demo",),
        description="a file of documents, a Spec-Bench question file, or demo:DOMAIN of summary, question, ledger, "
        "schedule, all; repeatable",
    )
    context: Annotated[tuple[Annotated[int, Field(ge=2, le=2**24)], ...], Commas] = Field(
        (1024,), description="prompt tokens, several with commas; documents are cut, questions left out"
    )
    num_prompts: int = Field(4, ge=1, le=100_000, description="of each workload, at most")
    workload_seed: int = Field(0, ge=0, description="of the bundled prompts")


class BenchOptions(WorkloadOptions):
    """The strategies to compare, and the workloads. engine: options that all share. plans: files by strategy."""

    engine: EngineConfig
    strategies: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Commas] = Field(
        ("ar", "knapspec"), description="what to compare, with commas, or 'all'; 'ar' always runs"
    )
    max_tokens: int = Field(128, ge=2, description="output tokens of a prompt")
    batch: int = Field(1, ge=1, description="sequences decoded at once")
    repeats: int = Field(3, ge=1, description="rounds in which everything is measured once")
    widen: int = Field(1, ge=1, le=64, description="make the model this many times as wide, with the same text")
    plans: Annotated[dict[str, str], Pairs] = Field(
        default_factory=dict, description="STRATEGY=FILE: saved plans for one strategy, as self-sd=a.json; repeatable"
    )
    hf: bool = Field(True, description="compare with transformers generate")


def bench_options(asked: Asked, **values: Any) -> BenchOptions:
    """Return the options of a comparison. values: those of BenchOptions. Raises ConfigError."""
    if (given := asked.flags.get("strategy")) is not None:
        raise ConfigError(f"option 'strategy' is {given!r}: name it in 'strategies', with others to compare")
    _refuse_other_batch(asked, values.get("batch"))
    is_static = asked.flags["skip"] or asked.flags["static_choice"]
    asked.flags["strategy"] = "static" if is_static else None  # each contender gets its own strategy later
    return BenchOptions(engine=asked.settings().engine, **values)


def _refuse_other_batch(asked: Asked, batch: int | None) -> None:
    """Refuse a flag that would have no effect."""
    if (given := asked.flags.get("max_num_seqs")) not in (None, batch or 1):
        raise ConfigError(f"option 'max_num_seqs' is {given}: name the sequences decoded at once in 'batch'")


def tune_options(asked: Asked, output: Path) -> TuneOptions:
    """Return the options of tuning. Raises ConfigError."""
    if (given := asked.flags.get("strategy")) is not None:
        raise ConfigError(f"option 'strategy' is {given!r}: plans are tuned without a strategy, leave it out")
    _refuse_other_batch(asked, asked.given.get("batch"))
    return asked.own_options(TuneOptions, engine=asked.settings().engine, output=output)


class TuneOptions(TuningOptions):
    """The model to tune for, and the calibration prompts.

    input: "[DOMAIN=]INPUT". Without DOMAIN, the input's own name is the domain; of a file of questions, these are the
    categories. A single domain that was not named gives a plan for any text.
    """

    engine: EngineConfig
    output: Path
    input: tuple[str, ...] = Field(
        (),
        description="[DOMAIN=]INPUT, calibration prompts: a file of documents or questions, demo:DOMAIN, demo:all; "
        "repeatable",
    )
    context: int = Field(1024, ge=2, le=2**24, description="prompt tokens; documents are cut to it")
    num_prompts: int = Field(8, ge=1, le=100_000, description="of each domain, at most")
    batch: int = Field(1, ge=1, description="sequences decoded at once")
    widen: int = Field(1, ge=1, le=64, description="make the model this many times as wide, as in bench")
    overwrite: bool = Field(False, description="replace an output that exists")

    @model_validator(mode="after")
    def _has_prompts_and_a_place(self) -> Self:
        if not self.input:
            raise ValueError("option 'input' is missing: name calibration prompts, as FILE or DOMAIN=FILE")
        place = f"option 'output' is {str(self.output)!r}"
        if self.output.suffix != ".json":
            raise ValueError(f"{place}: its name must end in .json")
        if self.output.is_dir():
            raise ValueError(f"{place}, a folder: name a file")
        if self.output.exists() and not self.overwrite:
            raise ValueError(f"{place}, which exists: choose another name or pass --overwrite")
        return self
