"""The command `rayspec k8s`. RenderOptions defines the names, help and defaults of its flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayspec.command.options import Asked, with_options
from rayspec.command.terminal import EXIT_FAILED, clean_exit, error_console
from rayspec.ops.k8s.options import RenderOptions, read_render_options

app = typer.Typer(
    help="Manifests for Kubernetes with KubeRay, computed from where a model's layers go.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_RENDER_HELP = """Print manifests for a model: pods, GPUs and memory as `rayspec placement` finds them.

    rayspec k8s render --model demo --cpus 2 --kind service > manifest.yaml

    rayspec k8s render --model meta-llama/Llama-3.1-70B-Instruct --gpus 8xH100-80G --output s3://B/out s3://B/documents

    rayspec k8s render --config k8s/overlays/gpu-8/job/options.yaml --output s3://B/out s3://B/documents

Needs neither GPUs nor a cluster, and of the model only its config.json. Exit code 2: an option cannot be, or the model
does not fit.
"""


@app.command(help=_RENDER_HELP)
@with_options(RenderOptions)
def render(
    *,
    config: Annotated[Path | None, typer.Option(help="YAML file with any of these options; flags win over it")] = None,
    asked: Asked,
    inputs: Annotated[
        list[str] | None, typer.Argument(metavar="INPUT...", help=RenderOptions.model_fields["inputs"].description)
    ] = None,
) -> None:
    from rayspec.ops.k8s.render import render  # noqa: PLC0415 - brings torch, which others wait for

    with clean_exit():
        print(render(read_render_options(config, asked.given | ({"inputs": tuple(inputs)} if inputs else {}))), end="")  # noqa: T201 - a command's output


@app.command()
def overlays(
    folder: Annotated[Path, typer.Argument(help="with an options.yaml in each overlay")] = Path("k8s/overlays"),
    check: Annotated[bool, typer.Option(help="write nothing; exit code 1 if a manifest is not up to date")] = False,
) -> None:
    """Render the manifest.yaml next to each options.yaml below a folder."""
    from rayspec.ops.k8s.render import stale_overlays  # noqa: PLC0415 - brings torch, which others wait for

    with clean_exit():
        stale = stale_overlays(folder)
        for path, text in stale.items():
            error_console().print(f"{path} {'is not up to date' if check else 'written'}", highlight=False)
            if not check:
                path.write_text(text, encoding="utf-8")
    raise typer.Exit(EXIT_FAILED if check and stale else 0)
