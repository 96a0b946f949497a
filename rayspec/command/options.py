"""Makes command-line flags from the option groups in rayspec.config, the only place of names, help and defaults."""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rayspec.command.settings import Settings, make_settings
from rayspec.config import EngineConfig, Options, ParallelOptions, SamplingParams, SpeculationOptions

_ENGINE_PANEL, _SPECULATION_PANEL, _PARALLEL_PANEL, _SAMPLING_PANEL = "Engine", "Speculation", "Shards", "Sampling"
_PANELS = ((EngineConfig, _ENGINE_PANEL), (SpeculationOptions, _SPECULATION_PANEL), (ParallelOptions, _PARALLEL_PANEL))
_RAY_ADDRESS = "RAY_ADDRESS"
_NOT_FLAGS = {"n"}  # a row has one output

OwnOptions = TypeVar("OwnOptions", bound=Options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The values on a command line for the engine and the sampling, and in `own` for the command's own options."""

    file: Path | None = None
    overrides: Sequence[str] = ()
    flags: dict[str, Any] = field(default_factory=dict)
    sampling: SamplingParams | None = None
    own: Mapping[str, Any] = field(default_factory=dict)

    def settings(self) -> Settings:
        """Merge and validate the options. The names of model and tokenizer are checked too. Raises ConfigError."""
        from rayspec.model.sources import check_name  # noqa: PLC0415 - brings the hub's client, which help does not need

        settings = make_settings(file=self.file, overrides=self.overrides, flags=self.flags, sampling=self.sampling)
        is_elsewhere = _RAY_ADDRESS in os.environ  # machines of the cluster load the model; they may have other folders
        check_name(settings.engine.model, is_elsewhere=is_elsewhere)
        if settings.engine.tokenizer is not None:
            check_name(settings.engine.tokenizer, option="tokenizer", is_elsewhere=is_elsewhere)
        return settings

    def own_options(self, options: type[OwnOptions]) -> OwnOptions:
        """Validate the command's own options. Raises ConfigError."""
        return options(**{name: value for name, value in self.own.items() if value is not None})


def with_settings(
    *, sampling: SamplingParams | None = None, own: tuple[type[Options], str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a typer command the flags of the engine; the command's parameter `asked` receives their values.

    sampling: defaults of the sampling flags; None gives no such flags. own: a group of options that the command has in
    addition to the engine's, and the title of its flags.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        parameters = [
            parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(command).parameters.items()
            if name != "asked"
        ]
        generated = list(_flags(sampling))
        names = {parameter.name for parameter in generated}
        owned = list(_group_flags(*own)) if own is not None else []
        own_names = {parameter.name for parameter in owned}

        @wraps(command)
        def wrapper(**values: Any) -> None:
            flags = {name: values.pop(name) for name in names}
            file, overrides = values.pop("config"), values.pop("set_") or ()
            mine = {name: values.pop(name) for name in own_names}
            command(asked=Asked(file=file, overrides=overrides, flags=flags, sampling=sampling, own=mine), **values)

        del wrapper.__dict__["__wrapped__"]
        wrapper.__annotations__ = {}
        wrapper.__signature__ = inspect.Signature([*parameters, *owned, *_FILE_FLAGS, *generated])  # type: ignore[attr-defined]
        return wrapper

    return decorate


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


_FILE_FLAGS = (
    _parameter(
        "config",
        Annotated[
            Path | None,
            typer.Option(help="YAML file with any of these options; flags win over it", rich_help_panel=_ENGINE_PANEL),
        ],
    ),
    _parameter(
        "set_",
        Annotated[
            list[str] | None,
            typer.Option(
                "--set",
                metavar="NAME=VALUE",
                help="any option by its dotted name, as speculation.swift.skip_ratio=0.3; repeatable",
                rich_help_panel=_ENGINE_PANEL,
            ),
        ],
    ),
)


def _flags(sampling: SamplingParams | None) -> Iterator[inspect.Parameter]:
    for options, panel in _PANELS:
        yield from _group_flags(options, panel)
    if sampling is not None:
        for name, info in SamplingParams.model_fields.items():
            if name not in _NOT_FLAGS:
                yield from _flag(name, info, getattr(sampling, name), _SAMPLING_PANEL)


def _group_flags(options: type[Options], panel: str) -> Iterator[inspect.Parameter]:
    for name, info in options.model_fields.items():
        yield from _flag(name, info, info.default, panel)


def _flag(name: str, info: FieldInfo, default: Any, panel: str) -> Iterator[inspect.Parameter]:
    kind = _flag_type(info.annotation)
    if kind is not None:
        yield _parameter(name, Annotated[kind, typer.Option(help=_help(info, default), rich_help_panel=panel)])


def _flag_type(annotation: Any) -> Any:
    """Return the type of a flag; None for an option that a single flag cannot set. Values are validated later."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        kinds = [argument for argument in arguments if argument is not type(None)]
        return _flag_type(kinds[0]) if len(kinds) == 1 else None
    if origin is Literal:
        return str | None
    if origin is tuple:
        element = str if get_origin(arguments[0]) is Literal else arguments[0]
        return list[element] | None  # type: ignore[valid-type]
    return annotation | None if annotation in (bool, int, float, str) else None


def _help(info: FieldInfo, default: Any) -> str:
    values = get_args(info.annotation)[0] if get_origin(info.annotation) is tuple else info.annotation
    choices = ", ".join(get_args(values)) if get_origin(values) is Literal else ""
    text = "; ".join(part for part in (info.description or "", choices) if part)
    return f"{text} {_shown(default)}".strip()


def _shown(default: Any) -> str:
    if default in (None, (), PydanticUndefined):
        return ""
    return f"[default: {', '.join(map(str, default)) if isinstance(default, tuple) else default}]"
