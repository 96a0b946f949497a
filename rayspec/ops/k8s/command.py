"""`rayspec k8s`: flags from RenderOptions, so that names, help and defaults live there."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rayspec.command.exit_codes import EXIT_FAILED
from rayspec.command.terminal import clean_exit, error_console
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


def _render(**asked: Any) -> None:
    from rayspec.ops.k8s.render import render  # noqa: PLC0415 - brings torch, which others wait for

    with clean_exit():
        file = asked.pop("config")
        asked["inputs"] = tuple(asked["inputs"]) if asked["inputs"] else None
        print(render(read_render_options(file, asked)), end="")  # noqa: T201 - a command's output


def _parameters() -> Iterator[inspect.Parameter]:
    yield _parameter("config", Path | None, typer.Option(help="YAML file with any of these options; flags win over it"))
    for name, info in RenderOptions.model_fields.items():
        if name == "inputs":
            yield _parameter(name, list[str] | None, typer.Argument(metavar="INPUT...", help=info.description))
        else:
            yield _parameter(name, _flag_type(info.annotation), typer.Option(help=_help(info)))


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def _flag_type(annotation: Any) -> Any:
    """What the command line takes; values are checked by the options."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return _flag_type(next(one for one in arguments if one is not type(None)))
    if origin is Literal:
        return str | None
    return (list[str] | None) if origin is dict else annotation | None


def _help(info: FieldInfo) -> str:
    literals = [one for one in (info.annotation, *get_args(info.annotation)) if get_origin(one) is Literal]
    choices = ", ".join(get_args(literals[0])) if literals else ""
    repeatable = "LABEL=VALUE, repeatable" if get_origin(info.annotation) is dict else ""
    default = info.default if info.default not in (None, False, (), PydanticUndefined) else None
    shown = f"[default: {default}]" if default is not None and info.default_factory is None else ""
    return f"{'; '.join(part for part in (info.description, choices, repeatable) if part)} {shown}".strip()


_render.__signature__ = inspect.Signature(list(_parameters()))  # type: ignore[attr-defined]
app.command(name="render", help=_RENDER_HELP)(_render)


@app.command()
def overlays(
    folder: Annotated[Path, typer.Argument(help="with an options.yaml in each overlay")] = Path("k8s/overlays"),
    check: Annotated[bool, typer.Option(help="write nothing; exit code 1 if a manifest is not up to date")] = False,
) -> None:
    """Render the manifest.yaml beside each options.yaml below a folder."""
    from rayspec.ops.k8s.render import stale_overlays  # noqa: PLC0415 - brings torch, which others wait for

    with clean_exit():
        stale = stale_overlays(folder)
        for path, text in stale.items():
            error_console().print(f"{path} {'is not up to date' if check else 'written'}", highlight=False)
            if not check:
                path.write_text(text, encoding="utf-8")
    raise typer.Exit(EXIT_FAILED if check and stale else 0)
