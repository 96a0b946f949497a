"""What the scripts share: options of their command lines, times of work on a device, and the end of a comparison."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
import typer

from rayspec.command.terminal import EXIT_FAILED, output_console, save_json
from rayspec.config import DType
from rayspec.model.weights import resolve_device
from rayspec.types import ConfigError

Input = Annotated[str, typer.Option("--input", help="a file of documents, or 'demo' for the bundled ones")]
Context = Annotated[int, typer.Option(min=2, help="prompt tokens; documents are cut to it")]
Strategies = Annotated[str, typer.Option(help="what to compare, with commas; 'ar' always runs")]
Seed = Annotated[int, typer.Option("--workload-seed", help="of the bundled prompts and of streams")]
MaxTokens = Annotated[int, typer.Option(min=2, help="output tokens of a prompt")]
Batch = Annotated[int, typer.Option(min=1, help="sequences decoded at once")]
Repeats = Annotated[int, typer.Option(min=1, help="rounds in which everything is measured once")]
Widen = Annotated[int, typer.Option(min=1, help="make the model so many times as wide, with the same text")]
Json = Annotated[Path | None, typer.Option(help="file to write the numbers to")]

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 2**10, "M": 2**20}
_DEFAULT_CACHE_BYTES = 64 * 2**20
_Number = TypeVar("_Number", int, float)


def fastest_seconds(
    works: Sequence[Callable[[], object]], device: torch.device, *, num_repeats: int, budget_s: float = math.inf
) -> list[float]:
    """Return the least seconds of each work: a disturbance only makes a run slower. A round runs each work once, so
    that a slow second of the machine affects all of them. The first round warms up, and at least one more follows.
    Each time includes the GPU work that is still under way when the function returns.

    budget_s: no further round begins after this time.
    """
    started = time.perf_counter()
    turns: list[list[float]] = []
    while len(turns) < 2 or (len(turns) <= num_repeats and time.perf_counter() - started < budget_s):
        turns.append([seconds(work, device) for work in works])
    return [min(each) for each in zip(*turns[1:], strict=True)]


def seconds(work: Callable[[], object], device: torch.device) -> float:
    _synchronise(device)
    started = time.perf_counter()
    work()
    _synchronise(device)
    return time.perf_counter() - started


def cache_bytes(device: torch.device) -> int:
    """Return the bytes of the last-level cache."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [path.read_text(encoding="ascii").strip() for path in _CACHES.glob("index*/size")]
    return max(
        (int(size[:-1]) * _UNITS[size[-1]] for size in sizes if size[-1:] in _UNITS), default=_DEFAULT_CACHE_BYTES
    )


def numbers(option: str, text: str, number: Callable[[str], _Number]) -> tuple[_Number, ...]:
    """Parse comma-separated numbers and drop duplicates; ranges are not checked. Raises ConfigError."""
    try:
        return tuple(dict.fromkeys(number(part) for part in text.split(",")))
    except ValueError as error:
        raise ConfigError(f"option {option!r} is {text!r}: give numbers with commas between them") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """device: auto, cpu, cuda, cuda:1, ... dtype: compared in addition to float32. is_quick: fewer models."""

    device: str = "auto"
    dtype: DType = "bfloat16"
    num_threads: int | None = None
    is_quick: bool = False

    @property
    def torch_device(self) -> torch.device:
        """The device. Raises ConfigError if the device does not exist."""
        return resolve_device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, "bfloat16" if self.dtype == "auto" else self.dtype)
        return dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a check. found: one or two sentences. numbers: JSON values for programs."""

    status: Literal["passed", "failed", "not here"]
    found: str
    numbers: Any = None


def not_here(why: str) -> Outcome:
    return Outcome(status="not here", found=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The first column names the row."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Outcome):
    """An outcome with tables for people. counted: explains the numbers."""

    tables: Sequence[Table] = ()
    counted: str = ""


def judged(*, is_good: bool, found: str, numbers: Any, tables: Sequence[Table], counted: str = "") -> Measured:
    """Return a passed or failed outcome."""
    status: Literal["passed", "failed"] = "passed" if is_good else "failed"
    return Measured(status=status, found=found, numbers=numbers, tables=tables, counted=counted)


def measured(found: str, *, numbers: Any, tables: Sequence[Table], counted: str = "") -> Measured:
    """Return a passed outcome: a measurement without a bound cannot fail."""
    return judged(is_good=True, found=found, numbers=numbers, tables=tables, counted=counted)


def conclude(result: dict[str, Any], text: str, file: Path | None) -> None:
    """Print `text` and write `result` to `file`. Raises typer.Exit with the code of failure if outputs differ."""
    output_console().print(text, markup=False, highlight=False, soft_wrap=True)
    if file is not None:
        save_json(result, file)
    if any(row["identical"] < row["total"] for row in result["results"]):
        raise typer.Exit(EXIT_FAILED)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
