"""`python -m benchmarks.device`, from the root of a checkout. It needs no Ray."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.device.run import measure_device
from benchmarks.shared import DeviceOptions, Json
from rayspec.bench.commands import ComparedType, Device, Quick
from rayspec.command.terminal import EXIT_FAILED, clean_exit, output_console, say

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def device(
    *,
    device: Device = "auto",
    dtype: ComparedType = "bfloat16",
    num_threads: Annotated[int | None, typer.Option(min=1, help="torch CPU threads")] = None,
    quick: Quick = False,
    json: Json = None,
) -> None:
    """Measure what a step launches and reads on this device, the bandwidth of matrices, and steps against the roofline.

    Exit code 1 if launches or reads of the host are not as they should be. Run nothing else at the same time.
    """
    with clean_exit():
        options = DeviceOptions(device=device, dtype=dtype, num_threads=num_threads, is_quick=quick)
        page, is_good = measure_device(options, say, json)
        output_console().print(page, markup=False, highlight=False, soft_wrap=True)
    if not is_good:
        raise typer.Exit(EXIT_FAILED)


if __name__ == "__main__":
    app()
