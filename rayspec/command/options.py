"""Makes flags of option groups, and a help of the most used options, or of all of them in groups."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.core import TyperCommand, TyperGroup

from rayspec.command.settings import OF_ONE_ROW, make_settings
from rayspec.command.terminal import check_output
from rayspec.config import EngineConfig, Options, ParallelOptions, SamplingParams, Settings, SpeculationOptions
from rayspec.machine import ray_address
from rayspec.vllm_names import ENGINE

_SHOWS_ALL = "rayspec.help_all"
_OPTIONS = "Options"
_FIRST = "model"
# Panels with many options, of which the short help shows only these.
_MANY = frozenset({"Engine", "Speculation", "Shards", "Sampling", "Job"})
_MOST_USED = frozenset({
    _FIRST, "config", "device", "dtype", "limit", "long", "max_model_len", "max_num_seqs", "max_tokens", "overwrite",
    "replicas", "stages", "strategy", "temperature", "tensor",
})  # fmt: skip


def _checked(path: Path | None) -> Path | None:
    check_output(path, "json")
    return path


Json = Annotated[Path | None, typer.Option("--json", callback=_checked, help="file to write the numbers to")]

_Command = Callable[..., None]
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
        is_elsewhere = ray_address() is not None  # machines of the cluster load the model; they may have other folders
        check_name(settings.engine.model, is_elsewhere=is_elsewhere)
        if settings.engine.tokenizer is not None:
            check_name(settings.engine.tokenizer, option="tokenizer", is_elsewhere=is_elsewhere)
        return settings

    @property
    def given(self) -> dict[str, Any]:
        """The command's own options that have a value."""
        return {name: value for name, value in self.own.items() if value is not None}

    def own_options(self, options: type[OwnOptions], **more: Any) -> OwnOptions:
        """Validate the command's own options, and `more` that no flag gives. Raises ConfigError."""
        return options(**self.given, **more)


def with_settings(
    *, sampling: SamplingParams | None = None, own: tuple[type[Options], str] | None = None, takes_vllm: bool = False
) -> Callable[[_Command], _Command]:
    """Give a typer command the flags of the engine; its parameter `asked` is an Asked with their values. The class of
    the command should be LongCommand.

    sampling: defaults of the sampling flags; None gives no such flags. own: a group of options that the command has in
    addition to the engine's, and the title of its flags. takes_vllm: also vLLM's flags, which help does not list.
    """
    generated = [
        *_group_flags(EngineConfig, "Engine"),
        *_group_flags(SpeculationOptions, "Speculation"),
        *_group_flags(ParallelOptions, "Shards"),
        *([] if sampling is None else _group_flags(SamplingParams, "Sampling", sampling, leave_out=OF_ONE_ROW)),
    ]

    def decorate(command: _Command) -> _Command:
        owned = list(_group_flags(*own, leave_out=inspect.signature(command).parameters)) if own is not None else []

        def asked(values: dict[str, Any]) -> Asked:
            flags, mine = ({flag.name: values[flag.name] for flag in some} for some in (generated, owned))
            file, overrides = values["config"], values["set_"] or ()
            return Asked(file=file, overrides=overrides, flags=flags, sampling=sampling, own=mine)

        if takes_vllm:
            known = {*inspect.signature(command).parameters, *(flag.name for flag in generated)}
            generated.extend(_vllm_flags(known))
        return _with(command, [*owned, *_FILE_FLAGS, *generated, _HELP_FLAG], asked)

    return decorate


def with_options(options: type[Options]) -> Callable[[_Command], _Command]:
    """Give a typer command a flag for each option that is no parameter of the command itself; its parameter `asked` is
    an Asked with their values in `own`."""

    def decorate(command: _Command) -> _Command:
        flags = list(_group_flags(options, leave_out=inspect.signature(command).parameters))
        return _with(command, flags, lambda values: Asked(own=values))

    return decorate


def _with(command: _Command, flags: Sequence[inspect.Parameter], asked: Callable[[dict[str, Any]], Asked]) -> _Command:
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


def show_all(context: typer.Context, is_asked: bool) -> None:
    if is_asked:
        context.meta[_SHOWS_ALL] = True
        print(context.get_help())  # noqa: T201 - a command's output
        raise typer.Exit


class LongCommand(TyperCommand):
    """A command whose help has the most used options only, and with --help-all a section for each group of options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        shows_all = ctx.meta.get(_SHOWS_ALL, False)
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], _OPTIONS: []}
        num_left_out = 0
        for param in sorted(self.get_params(ctx), key=lambda param: param.name != _FIRST):
            if (record := param.get_help_record(ctx)) is None:
                continue
            panel = getattr(param, "rich_help_panel", None) or _OPTIONS
            if param.param_type_name == "argument":
                panel = "Arguments"
            elif not shows_all:
                if panel in _MANY and param.name not in _MOST_USED:
                    num_left_out += 1
                    continue
                panel = _OPTIONS
            sections.setdefault(panel, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
        if num_left_out:
            formatter.write_paragraph()
            formatter.write_text(f"{num_left_out} more options: {ctx.command_path} --help-all")


def format_groups(group: TyperGroup, ctx: Any, formatter: Any, titles: Mapping[str, tuple[str, ...]]) -> None:
    """Write the commands of a group in sections: names by title. Each command has the first sentence of its help."""
    for title, names in titles.items():
        commands = [(name, group.get_command(ctx, name)) for name in names]
        rows = [(name, command.get_short_help_str(1000)) for name, command in commands if command is not None]
        with formatter.section(title):
            formatter.write_dl(rows)


def _parameter(name: str, kind: Any, *names: str, **about: Any) -> inspect.Parameter:
    annotation = Annotated[kind | None, typer.Option(*names, **about)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


_FILE_FLAGS = (
    _parameter("config", Path, help="YAML file with any of these options; flags override it", rich_help_panel="Engine"),
    _parameter(
        "set_",
        list[str],
        "--set",
        metavar="NAME=VALUE",
        help="any option by its dotted name, as speculation.exit_layer=8; repeatable",
        rich_help_panel="Engine",
    ),
)
_HELP_FLAG = _parameter("help_all", bool, "--help-all", is_eager=True, callback=show_all, help="list all options")


_SHORT = {"tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp", "data_parallel_size": "-dp"}


def _vllm_flags(leave_out: Collection[str]) -> Iterator[inspect.Parameter]:
    """Yield vLLM's flags. `EngineConfig` reads their values, as it reads them in a file."""
    for name, argument in ENGINE.items():
        if name not in leave_out:
            flag = f"--{name.replace('_', '-')}"
            names = (f"{flag}/--no-{name.replace('_', '-')}",) if argument.is_flag else (flag,)
            short = (_SHORT[name],) if name in _SHORT else ()
            yield _parameter(name, bool if argument.is_flag else str, *names, *short, hidden=True)


def _group_flags(
    options: type[Options], panel: str | None = None, usual: Options | None = None, leave_out: Collection[str] = ()
) -> Iterator[inspect.Parameter]:
    """Yield a flag for each option that a flag can set. usual: has the defaults; None: those of the group."""
    for name, info in options.model_fields.items():
        kind = _flag_type(info)
        if kind is not None and name not in leave_out:
            default = info.default if usual is None else getattr(usual, name)
            yield _parameter(name, kind, help=_help(info, default), rich_help_panel=panel)


def _flag_type(info: FieldInfo) -> Any:
    """Return the type of a flag, or None. Values are validated later. A mapping has one if it has a description."""
    if get_origin(info.annotation) is dict:
        return list[str] if info.description else None
    is_union = get_origin(info.annotation) in (Union, types.UnionType)
    kinds = set[Any]()
    for kind in get_args(info.annotation) if is_union else (info.annotation,):
        origin = get_origin(kind)
        if origin is tuple or origin is Literal:
            kinds.add(list[str] if origin is tuple else str)
        elif kind is not type(None):
            kinds.add(kind if kind in (bool, int, float, str, Path) else None)
    return kinds.pop() if len(kinds) == 1 else None


def _help(info: FieldInfo, default: Any) -> str:
    within = get_args(info.annotation)
    choices = next((get_args(one) for one in (info.annotation, *within) if get_origin(one) is Literal), ())
    one_of = "any of" if tuple in (get_origin(info.annotation), *map(get_origin, within)) else "one of"
    text, _, usual = (info.description or "").partition("; unset: ")
    text = "; ".join(part for part in (text, f"{one_of} {', '.join(choices)}" if choices else "") if part)
    if default is not False and default not in (None, (), PydanticUndefined):
        usual = ", ".join(map(str, default)) if isinstance(default, tuple) else str(default)
    return f"{text} [default: {usual}]".strip() if usual else text
