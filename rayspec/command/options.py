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

_Command = Callable[..., None]
GivenFlags = dict[str, Any]
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
) -> Callable[[_Command], _Command]:
    """Give a typer command the flags of the engine; its parameter `asked` is an Asked with their values.

    sampling: defaults of the sampling flags; None gives no such flags. own: a group of options that the command has in
    addition to the engine's, and the title of its flags.
    """

    owned = list(_group_flags(*own)) if own is not None else []
    generated = [flag for options, panel in _PANELS for flag in _group_flags(options, panel)]
    if sampling is not None:
        for name, info in SamplingParams.model_fields.items():
            if name not in _NOT_FLAGS:
                generated += _flag(name, info, default=getattr(sampling, name), panel=_SAMPLING_PANEL)

    def asked(values: dict[str, Any]) -> Asked:
        flags, mine = ({flag.name: values[flag.name] for flag in some} for some in (generated, owned))
        return Asked(file=values["config"], overrides=values["set_"] or (), flags=flags, sampling=sampling, own=mine)

    return lambda command: _with(command, [*owned, *_FILE_FLAGS, *generated], asked)


def with_flags(options: type[Options], *, from_file: bool = False) -> Callable[[_Command], _Command]:
    """Give a typer command a flag for each option that has a description and is not a parameter of the command itself.

    The command has a parameter `asked`, which receives the given flags by name. Their values are validated when
    `options` is created. from_file: a file may give the options too, so that no flag is required.
    """

    def decorate(command: _Command) -> _Command:
        own = inspect.signature(command).parameters
        flags = [
            flag
            for name, info in options.model_fields.items()
            if info.description is not None and name not in own
            for flag in _flag(
                name, info, default=info.default, is_text=True, is_required=info.is_required() and not from_file
            )
        ]
        return _with(command, flags, lambda values: {name: each for name, each in values.items() if each is not None})

    return decorate


def _with(command: _Command, flags: Sequence[inspect.Parameter], asked: Callable[[dict[str, Any]], Any]) -> _Command:
    """Return a command with flags in place of the parameter `asked`, which gets what `asked` makes of their values."""
    hints = get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
        if name != "asked"
    ]

    def run(**values: Any) -> None:
        given = {flag.name: values.pop(flag.name) for flag in flags}
        command(asked=asked(given), **values)

    wrapper = wraps(command)(run)
    del wrapper.__dict__["__wrapped__"]
    wrapper.__annotations__ = {}
    wrapper.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
    return wrapper


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
                help="any option by its dotted name, as speculation.exit_layer=8; repeatable",
                rich_help_panel=_ENGINE_PANEL,
            ),
        ],
    ),
)


def _group_flags(options: type[Options], panel: str) -> Iterator[inspect.Parameter]:
    for name, info in options.model_fields.items():
        yield from _flag(name, info, default=info.default, panel=panel)


def _flag(
    name: str,
    info: FieldInfo,
    *,
    default: Any,
    panel: str | None = None,
    is_text: bool = False,
    is_required: bool = False,
) -> Iterator[inspect.Parameter]:
    """Yield the flag of an option, if a flag can set it. is_text: the option's validator splits the text of a list, and
    a mapping is given by repeated LABEL=VALUE."""
    kind = _flag_type(info.annotation, is_text=is_text)
    if kind is not None:
        repeats = is_text and get_origin(info.annotation) is dict
        help_ = _help(info, default, "LABEL=VALUE, repeatable" if repeats else "")
        flag = _parameter(name, Annotated[kind, typer.Option(help=help_, rich_help_panel=panel)])
        yield flag.replace(default=inspect.Parameter.empty) if is_required else flag


def _flag_type(annotation: Any, *, is_text: bool = False) -> Any:
    """Return the type of a flag; None for an option that a single flag cannot set. Values are validated later."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        kinds = [_flag_type(argument, is_text=is_text) for argument in arguments if argument is not type(None)]
        return kinds[0] if is_text or len(set(kinds)) == 1 else None
    if origin is Literal or (is_text and origin is tuple):
        return str | None
    if origin is tuple:
        element = str if get_origin(arguments[0]) is Literal else arguments[0]
        return list[element] | None  # type: ignore[valid-type]
    if origin is dict:
        return list[str] | None if is_text else None
    return annotation | None if annotation in (bool, int, float, str, Path) else None


def _help(info: FieldInfo, default: Any, more: str) -> str:
    within = get_args(info.annotation)
    choices = next((get_args(one) for one in (info.annotation, *within) if get_origin(one) is Literal), ())
    text = "; ".join(part for part in (info.description or "", ", ".join(choices), more) if part)
    return f"{text} {_shown(default)}".strip()


def _shown(default: Any) -> str:
    if default is False or default in (None, (), PydanticUndefined):
        return ""
    return f"[default: {', '.join(map(str, default)) if isinstance(default, tuple) else default}]"
