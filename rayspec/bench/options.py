"""Options of a comparison, and how they are read from the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from rayspec.bench.workloads import WorkloadOptions
from rayspec.command.options import Asked
from rayspec.config import EngineConfig
from rayspec.types import ConfigError

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The strategies to compare, and the workloads. engine: options that all strategies share. plans: files of saved
    plans, by strategy. widen: factor by which the model is widened."""

    engine: EngineConfig
    workloads: WorkloadOptions
    strategies: tuple[str, ...]
    max_tokens: int
    batch: int
    repeats: int
    widen: int
    plans: Mapping[str, str] = field(default_factory=dict)
    hf: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the options as JSON values, as the results contain them."""
        return asdict(self) | {"engine": self.engine.model_dump(mode="json")}


def bench_options(
    asked: Asked,
    workloads: WorkloadOptions,
    *,
    strategies: str,
    max_tokens: int,
    batch: int,
    repeats: int,
    widen: int,
    plans: Sequence[str] | None = None,
    hf: bool = False,
) -> BenchOptions:
    """Parse the options. strategies: comma-separated names. plans: "STRATEGY=FILE" each. Raises ConfigError."""
    is_static = asked.flags["skip"] or asked.flags["static_choice"]
    asked.flags["strategy"] = "static" if is_static else None  # each contender gets its own strategy later
    names = tuple(filter(None, map(str.strip, strategies.split(","))))
    if not names:
        raise ConfigError(f"option 'strategies' is {strategies!r}: name at least one, as ar,knapspec")
    return BenchOptions(
        engine=asked.settings().engine,
        workloads=workloads,
        strategies=names,
        max_tokens=max_tokens,
        batch=batch,
        repeats=repeats,
        widen=widen,
        plans=dict(map(_strategy_and_file, plans or ())),
        hf=hf,
    )


def _strategy_and_file(text: str) -> tuple[str, str]:
    strategy, _, file = text.partition("=")
    if not strategy or not file:
        raise ConfigError(f"option 'plans' is {text!r}: write it as STRATEGY=FILE, such as self-sd=plans.json")
    return strategy, file


def numbers(option: str, text: str, number: Callable[[str], _Number]) -> tuple[_Number, ...]:
    """Parse comma-separated numbers and drop duplicates; ranges are not checked. Raises ConfigError."""
    try:
        return tuple(dict.fromkeys(number(part) for part in text.split(",")))
    except ValueError as error:
        raise ConfigError(f"option {option!r} is {text!r}: give numbers with commas between them") from error
