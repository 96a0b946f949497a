"""The commands that tell beforehand: `rayspec placement`, `rayspec plan` and `rayspec doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayspec import demo
from rayspec.command.exit_codes import EXIT_FAILED
from rayspec.command.terminal import clean_exit, output_console

app = typer.Typer()


@app.command()
def placement(
    *,
    model: Annotated[str, typer.Option(help="folder, config.json, hub id, or 'demo'; no weights are needed")],
    gpus: Annotated[
        str,
        typer.Option(help="in order, as 8xH100-80G, 2x8xH100 (two nodes), 4xH200,4xA100-80G or 2xNEW-96G@4000 (GB/s)"),
    ],
    stages: Annotated[
        int | None, typer.Option(help="pipeline stages; without stages, tensor and layers: as rayspec plan recommends")
    ] = None,
    tensor: Annotated[int | None, typer.Option(help="GPUs that share each stage")] = None,
    context: Annotated[int, typer.Option(help="tokens of a sequence, for the KV cache")] = 16384,
    concurrency: Annotated[
        int, typer.Option(help="sequences at once, for the KV cache; over all copies that rayspec plan recommends")
    ] = 32,
    quantization: Annotated[str | None, typer.Option(help="of the layers' linears: fp8, int8, int4")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16")] = "auto",
    layers: Annotated[str | None, typer.Option(help="layers of each stage, as 20,30,30")] = None,
    json: Annotated[Path | None, typer.Option(help="file to write the numbers to")] = None,
) -> None:
    """Say which layers go on which GPUs, what fits, and how fast a decode step could be. Needs no GPU.

    Exit code 1 if it does not fit.
    """
    # They bring torch, which others wait for.
    from rayspec.model.sizes import load_config  # noqa: PLC0415
    from rayspec.ops.placement_report import (  # noqa: PLC0415
        PlacementOptions,
        placements_table,
        save_placements,
    )
    from rayspec.ops.plan.choice import place_best  # noqa: PLC0415

    with clean_exit():
        options = PlacementOptions(
            gpus=gpus,
            stages=stages,
            tensor=tensor,
            context=context,
            concurrency=concurrency,
            quantization=quantization,
            dtype=dtype,
            layers=layers,
        )
        found = place_best(load_config(str(demo.model_path()) if model == "demo" else model), options)
        output_console().print(placements_table(found), highlight=False)
        if json is not None:
            save_placements(found, json)
    raise typer.Exit(0 if all(placement.fits for placement in found) else EXIT_FAILED)


@app.command()
def plan(
    *,
    model: Annotated[str, typer.Option(help="folder, config.json, hub id, or 'demo'; no weights are needed")],
    gpus: Annotated[
        str,
        typer.Option(help="in order, as 8xH100-80G, 2x8xH100 (two nodes), 4xH200,4xA100-80G or 2xNEW-96G@4000 (GB/s)"),
    ],
    context: Annotated[int, typer.Option(help="tokens of a sequence in the end")] = 16384,
    output_tokens: Annotated[int, typer.Option(help="of these, the answer's")] = 256,
    concurrency: Annotated[int, typer.Option(help="sequences at once, over all replicas")] = 32,
    goal: Annotated[str, typer.Option(help="throughput, latency (of a request alone), cost")] = "throughput",
    quantization: Annotated[str | None, typer.Option(help="of the layers' linears: fp8, int8, int4")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16")] = "auto",
    profile: Annotated[
        Path | None, typer.Option(help="measured on one such GPU, as `rayspec profile` has saved it")
    ] = None,
    acceptance: Annotated[
        float | None, typer.Option(help="of draft tokens; without it, the range that others have published")
    ] = None,
    skip: Annotated[float, typer.Option(help="share of the layers that drafts leave out")] = 0.5,
    price: Annotated[float | None, typer.Option(help="dollars per GPU hour")] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(help="prompt tokens run between two decode rounds")] = 1024,
    hop_us: Annotated[float, typer.Option(help="microseconds from a stage to the next one")] = 200.0,
    all_reduce_us: Annotated[float, typer.Option(help="microseconds between tensor-parallel ranks, a sublayer")] = 10.0,
    gpus_per_node: Annotated[
        int | None, typer.Option(help="the most tensor-parallel ranks; without it, as --gpus names nodes, else 8")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="file to write the numbers to")] = None,
) -> None:
    """Recommend stages x tensor x replicas: simulate what fits, with drafts and without. Needs no GPU.

    Exit code 1 if nothing fits.
    """
    # They bring torch, which others wait for.
    from rayspec.model.sizes import load_config  # noqa: PLC0415
    from rayspec.ops.plan.options import PlanOptions  # noqa: PLC0415
    from rayspec.ops.plan.report import make_plan, plan_table, save_plan  # noqa: PLC0415

    with clean_exit():
        options = PlanOptions(
            gpus=gpus,
            context=context,
            output_tokens=output_tokens,
            concurrency=concurrency,
            goal=goal,
            quantization=quantization,
            dtype=dtype,
            profile=profile,
            acceptance=acceptance,
            skip=skip,
            price=price,
            max_num_batched_tokens=max_num_batched_tokens,
            hop_us=hop_us,
            all_reduce_us=all_reduce_us,
            gpus_per_node=gpus_per_node,
        )
        report = make_plan(load_config(str(demo.model_path()) if model == "demo" else model), options)
        # Not cropped: flags to paste may be longer than a line.
        output_console().print(plan_table(report), highlight=False, markup=False, crop=False)
        if json is not None:
            save_plan(report, json)
    raise typer.Exit(0 if report.fits else EXIT_FAILED)


@app.command()
def doctor(
    *,
    model: Annotated[str | None, typer.Option(help="folder, hub id, or 'demo': are its files whole?")] = None,
    address: Annotated[
        str | None, typer.Option(help="of a Ray cluster: auto, host:port or ray://host:10001; else RAY_ADDRESS")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="this machine only: for a container's start")] = False,
    json: Annotated[Path | None, typer.Option(help="file to write the findings to")] = None,
) -> None:
    """Check this machine, and every node of a cluster: versions, GPUs, network, disks, model files; say what to do.

    Exit code 1 if there is a problem.
    """
    from rayspec.ops.doctor.examine import examine  # noqa: PLC0415 - others need not wait for it
    from rayspec.ops.doctor.findings import findings_table, has_problems, save_findings  # noqa: PLC0415

    with clean_exit():
        findings = examine(model=model, address=address, quick=quick)
        output_console().print(findings_table(findings))
        if json is not None:
            save_findings(findings, json)
    raise typer.Exit(EXIT_FAILED if has_problems(findings) else 0)
