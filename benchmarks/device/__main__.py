"""`python -m benchmarks.device`, from the root of a checkout. It needs no Ray."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.device.decoding import time_choices, time_rounds, time_shape, time_wide
from benchmarks.device.run import CHECKS, Check, measure_device
from benchmarks.roofline import SHAPES, ModelShape
from benchmarks.shared import DeviceOptions, Json, Widen, numbers
from rayspec.bench.commands import ComparedType, Device, Quick
from rayspec.command.terminal import EXIT_FAILED, clean_exit, output_console, say
from rayspec.types import ConfigError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
NumThreads = Annotated[int | None, typer.Option(min=1, help="torch CPU threads")]


@app.command()
def checks(
    *,
    device: Device = "auto",
    dtype: ComparedType = "bfloat16",
    num_threads: NumThreads = None,
    quick: Quick = False,
    json: Json = None,
) -> None:
    """Measure what a step launches and reads on this device, the bandwidth of matrices, and steps against the roofline.

    Exit code 1 if launches or reads of the host are not as they should be. Run nothing else at the same time.
    """
    _measure(DeviceOptions(device=device, dtype=dtype, num_threads=num_threads, is_quick=quick), CHECKS, json)


@app.command()
def shape(
    *,
    name: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "Llama-3.1-8B",
    batch: Annotated[str, typer.Option(help="numbers of sequences, with commas")] = "1,64",
    context: Annotated[str, typer.Option(help="tokens before the timed ones, with commas")] = "1024",
    steps: Annotated[int, typer.Option(min=4, help="timed steps of a run")] = 40,
    generate: Annotated[bool, typer.Option(help="compare with transformers generate")] = True,
    device: Device = "auto",
    dtype: ComparedType = "bfloat16",
    num_threads: NumThreads = None,
    json: Json = None,
) -> None:
    """Time plain decoding in the shape of a large model, with random weights, against generate and the bandwidth."""
    with clean_exit():
        cells = list(itertools.product(numbers("batch", batch, int), numbers("context", context, int)))
    timed = partial(time_shape, shape=_shape(name), cells=cells, num_steps=steps, generate=generate)
    _measure(DeviceOptions(device=device, dtype=dtype, num_threads=num_threads), {f"decoding, {name}": timed}, json)


@app.command()
def rounds(
    *,
    name: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "Llama-3.1-8B",
    context: Annotated[int, typer.Option(min=64, help="tokens of the sequence")] = 1024,
    num_rounds: Annotated[int, typer.Option(min=4, help="timed rounds of a plan")] = 40,
    device: Device = "auto",
    dtype: ComparedType = "bfloat16",
    num_threads: NumThreads = None,
    json: Json = None,
) -> None:
    """Time drafted rounds in the shape of a large model against the latency model, and a change of the plan."""
    timed = partial(time_rounds, shape=_shape(name), context=context, num_rounds=num_rounds)
    _measure(DeviceOptions(device=device, dtype=dtype, num_threads=num_threads), {f"rounds, {name}": timed}, json)


@app.command()
def choices(
    *,
    name: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "Llama-3.1-70B",
    layers: Annotated[int, typer.Option(min=1, help="layers that the device holds")] = 8,
    context: Annotated[int, typer.Option(min=64, help="tokens of the sequence")] = 16384,
    device: Device = "auto",
    dtype: ComparedType = "bfloat16",
    num_threads: NumThreads = None,
    json: Json = None,
) -> None:
    """Measure what sublayers of a large model cost by each choice, and predict the speed-up of drafts by them."""
    timed = partial(time_choices, shape=_shape(name), num_layers=layers, context=context)
    options = DeviceOptions(device=device, dtype=dtype, num_threads=num_threads)
    _measure(options, {f"choices, {name}": timed}, json)


@app.command()
def wide(
    *,
    widen: Widen = 32,
    strategies: Annotated[
        str, typer.Option(help="with commas; 'ar' always runs, 'int4' drafts by quantised copies of all sublayers")
    ] = "static,int4,knapspec,auto",
    context: Annotated[int, typer.Option(min=64, help="prompt tokens")] = 1800,
    num_prompts: Annotated[int, typer.Option(min=1, help="prompts of each domain")] = 4,
    max_tokens: Annotated[int, typer.Option(min=8, help="output tokens of a prompt, at most")] = 192,
    offload: Annotated[float, typer.Option(min=0.0, max=0.99, help="share of the sublayers' bytes in CPU memory")] = 0,
    device: Device = "auto",
    dtype: ComparedType = "bfloat16",
    num_threads: NumThreads = None,
    json: Json = None,
) -> None:
    """Compare strategies on the bundled model, made so many times as wide: 32 gives 3.2 billion parameters."""
    names = [name.strip() for name in strategies.split(",")]
    timed = partial(
        time_wide, widen=widen, strategies=names, context=context, num_prompts=num_prompts, max_tokens=max_tokens,
        offload=offload,
    )  # fmt: skip
    _measure(DeviceOptions(device=device, dtype=dtype, num_threads=num_threads), {"strategies": timed}, json)


def _shape(name: str) -> ModelShape:
    with clean_exit():
        if name not in SHAPES:
            raise ConfigError(f"option 'name' is {name!r}: use one of {', '.join(SHAPES)}")
        return SHAPES[name]


def _measure(options: DeviceOptions, checks: Mapping[str, Check], json: Path | None) -> None:
    with clean_exit():
        page, is_good = measure_device(options, say, json, checks=checks)
        output_console().print(page, markup=False, highlight=False, soft_wrap=True)
    if not is_good:
        raise typer.Exit(EXIT_FAILED)


if __name__ == "__main__":
    app()
