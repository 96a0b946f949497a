"""`rayspec placement`, `rayspec plan`, `rayspec models`, `rayspec doctor`, `rayspec k8s`; tables of
`rayspec profile`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from rayspec import demo
from rayspec.command.options import Asked, Json, with_options
from rayspec.command.terminal import EXIT_FAILED, output_console, save_json, say
from rayspec.machine import ray_address
from rayspec.ops.doctor import machine
from rayspec.ops.doctor.machine import Finding, findings_table, skipped
from rayspec.ops.k8s.options import RenderOptions, read_render_options
from rayspec.ops.plan.options import PlacementOptions, PlanOptions
from rayspec.ops.supported import supported, supported_table
from rayspec.planning.latency import LatencyModel
from rayspec.types import ConfigError

app = typer.Typer()
k8s = typer.Typer(
    help="Manifests for Kubernetes with KubeRay, computed from where a model's layers go.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(k8s, name="k8s")

# Rows and contexts of the table of `rayspec profile`.
_ROWS = (1, 2, 4, 8, 16, 32)
_CONTEXTS = (128, 1024, 4096, 16384, 65536)

Model = Annotated[str, typer.Option(help="folder, config.json, hub id, or 'demo'; no weights are needed")]


@app.command()
@with_options(PlacementOptions)
def placement(*, model: Model, asked: Asked, json_: Json = None) -> None:
    """Say which layers go on which GPUs, what fits, and how fast a decode step could be. Needs no GPU.

    Exit code 1 if it does not fit.
    """
    # These imports load torch, which other commands need not wait for.
    from rayspec.model.weights import read_config  # noqa: PLC0415
    from rayspec.ops.plan.forecast import place_best  # noqa: PLC0415
    from rayspec.ops.plan.placement import placements_json, placements_table  # noqa: PLC0415

    options = asked.own_options(PlacementOptions)
    found = place_best(read_config(demo.local_path(model)), options)
    output_console().print(placements_table(found), highlight=False)
    save_json(placements_json(found), json_)
    raise typer.Exit(0 if all(placement.fits for placement in found) else EXIT_FAILED)


@app.command()
@with_options(PlanOptions)
def plan(*, model: Model, asked: Asked, json_: Json = None) -> None:
    """Recommend stages x tensor x replicas: simulate what fits, with drafts and without. Needs no GPU.

    Exit code 1 if nothing fits.
    """
    # These imports load torch, which other commands need not wait for.
    from rayspec.model.weights import read_config  # noqa: PLC0415
    from rayspec.ops.plan.forecast import rank_layouts  # noqa: PLC0415
    from rayspec.ops.plan.report import plan_json, plan_table  # noqa: PLC0415

    options = asked.own_options(PlanOptions)
    report = rank_layouts(read_config(demo.local_path(model)), options)
    # Not cropped: flags to paste may be longer than a line.
    output_console().print(plan_table(report), highlight=False, crop=False)
    save_json(plan_json(report), json_)
    raise typer.Exit(0 if report.fits else EXIT_FAILED)


@app.command()
def models(
    *,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="type, folder, hub id, or 'demo'")] = None,
    json_: Json = None,
) -> None:
    """Say which model types draft, only copy tokens, or decode plainly, and why.

    A model whose weights are here is loaded as for generation. Exit code 1 if it is refused.
    """
    rows = supported(model)
    output_console().print(supported_table(rows, model), highlight=False)
    save_json({"models": [asdict(row) for row in rows]}, json_)


@app.command()
def doctor(
    *,
    model: Annotated[str | None, typer.Option(help="check its files, too: a folder, hub id, or 'demo'")] = None,
    address: Annotated[
        str | None, typer.Option(help="Ray cluster: auto, host:port or ray://host:10001; else RAY_ADDRESS")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="check this machine only, as a container starts")] = False,
    json_: Json = None,
) -> None:
    """Check this machine, and every node of a cluster: versions, GPUs, network, disks, model files; say what to do.

    Exit code 1 if there is a problem.
    """
    findings = examine(model=model, address=address, quick=quick)
    output_console().print(findings_table(findings))
    is_ok = all(finding.status != "problem" for finding in findings)
    save_json({"ok": is_ok, "findings": [asdict(finding) for finding in findings]}, json_)
    raise typer.Exit(0 if is_ok else EXIT_FAILED)


def examine(*, model: str | None = None, address: str | None = None, quick: bool = False) -> list[Finding]:
    """Run all checks of `rayspec doctor` that apply. model: a folder, a hub id, or "demo".

    address: address of a cluster, in the form of ray.init; None: RAY_ADDRESS. quick: check only this machine, measure
    nothing, and take less than three seconds if it has no GPU. Raises ConfigError for both.
    """
    if quick and address is not None:
        raise ConfigError(f"option 'address' is {address!r}, and 'quick' checks this machine only: remove one of them")
    findings, _ = machine.check_machine()
    place = None
    if model is not None:
        finding, place = machine.check_model(model)
        findings.append(finding)
    if quick:
        return findings
    if place is not None:
        findings += machine.check_weights(place)
    findings.append(machine.check_dtype())
    where = address or ray_address()
    if where is None:
        return [*findings, skipped("cluster", "no cluster given: use --address auto, host:port or ray://host:10001")]
    from rayspec.ops.doctor.cluster import cluster_findings  # noqa: PLC0415 - brings ray

    return [*findings, *cluster_findings(where, model)]


def latency_table(latency: LatencyModel, *, max_context: int) -> Table:
    """Return a table of the milliseconds of one sequence's forward pass: attention, MLP, head and total."""
    one, two = (latency.verify_s(rows=2, context=0, batch=batch) for batch in (1, 2))
    title = f"milliseconds of a forward of one sequence; each further sequence takes {1000 * (two - one):.3f} ms more"
    splits = len(latency.sublayers) > 1  # an undivided model counts as one
    table = Table(title=title, title_justify="left")
    for heading in ("rows", "context", "attention", "MLP", "head", "forward", "attention share"):
        table.add_column(heading, justify="right")
    for context in [context for context in _CONTEXTS if context <= max_context] or [max_context]:
        for rows in _ROWS:
            seconds = latency.sublayers_s(rows=rows, context=context, batch=1)
            attention_s, mlp_s = float(seconds[::2].sum()), float(seconds[1::2].sum())
            forward_s = latency.verify_s(rows=rows, context=context, batch=1)
            parts = [f"{1000 * part:.2f}" for part in (attention_s, mlp_s, latency.head_s(rows))]
            table.add_row(
                str(rows),
                str(context),
                *(parts if splits else ["-"] * len(parts)),
                f"{1000 * forward_s:.2f}",
                f"{100 * attention_s / (attention_s + mlp_s):.0f} %" if splits else "-",
                end_section=rows == _ROWS[-1],
            )
    return table


def stage_table(latency: LatencyModel) -> Table:
    """Return a table of the cost of each stage. Its title has the time of a hop, and the delay after a pause."""
    pause = f", a pause before it {1000 * latency.wake_s:.3f} ms more" if latency.wake_s else ""
    table = Table(title=f"stages; a hop takes {1000 * latency.hop_s:.3f} ms{pause}", title_justify="left")
    for heading in ("stage", "sublayers", "attention ms", "MLP ms", "8 rows ms", "weight transfer ms", "next hop ms"):
        table.add_column(heading, justify="right")
    one, eight = (latency.sublayers_s(rows=rows, context=1024, batch=1) for rows in (1, 8))
    for stage in dict.fromkeys(latency.stages):
        mine = [index for index, own in enumerate(latency.stages) if own == stage]
        kinds = [[index for index in mine if index % 2 == parity] for parity in (0, 1)]
        table.add_row(
            str(stage),
            f"{mine[0]}-{mine[-1]}",
            *(f"{1000 * float(one[kind].sum()):.2f}" for kind in kinds),
            f"{1000 * float(eight[mine].sum()):.2f}",
            f"{1000 * sum(latency.transfer_s[index] for index in mine):.2f}",
            f"{1000 * (latency.link_s[stage] if latency.link_s else latency.hop_s):.3f}",
        )
    return table


_RENDER_HELP = """Print manifests for a model: pods, GPUs and memory as `rayspec placement` finds them.

    rayspec k8s render --model demo --cpus 2 --kind service > manifest.yaml

    rayspec k8s render --model meta-llama/Llama-3.1-70B-Instruct --gpus 8xH100-80G --output s3://B/out s3://B/documents

    rayspec k8s render --config k8s/overlays/gpu-8/job/options.yaml --output s3://B/out s3://B/documents

Needs neither GPUs nor a cluster, and of the model only its config.json. Exit code 2: an option cannot be, or the model
does not fit.
"""


@k8s.command(help=_RENDER_HELP, short_help="Print the manifests of a model.")
@with_options(RenderOptions)
def render(
    *,
    config: Annotated[Path | None, typer.Option(help="YAML file with any of these options; flags override it")] = None,
    asked: Asked,
    inputs: Annotated[
        list[str] | None, typer.Argument(metavar="INPUT", help=RenderOptions.model_fields["inputs"].description)
    ] = None,
) -> None:
    from rayspec.ops.k8s.render import render  # noqa: PLC0415 - brings torch, which others wait for

    print(render(read_render_options(config, asked.given | ({"inputs": tuple(inputs)} if inputs else {}))), end="")  # noqa: T201 - a command's output


@k8s.command(short_help="Render all manifests below a folder.")
def overlays(
    folder: Annotated[Path, typer.Argument(help="with an options.yaml in each overlay")] = Path("k8s/overlays"),
    check: Annotated[bool, typer.Option(help="write nothing; exit code 1 if a manifest is not up to date")] = False,
) -> None:
    """Render the manifest.yaml next to each options.yaml below a folder."""
    from rayspec.ops.k8s.render import stale_overlays  # noqa: PLC0415 - brings torch, which others wait for

    stale = stale_overlays(folder)
    for path, text in stale.items():
        say(f"{path} {'is not up to date' if check else 'written'}")
        if not check:
            path.write_text(text, encoding="utf-8")
    raise typer.Exit(EXIT_FAILED if check and stale else 0)
