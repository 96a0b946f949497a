"""Command-line flags made from a group of options, so that names, help and defaults live there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rayspec.config import Options

GivenFlags = dict[str, Any]
_Command = Callable[..., None]


def with_flags(options: type[Options], *, from_file: bool = False) -> Callable[[_Command], _Command]:
    """Give a typer command a flag for each option that has a description and is not a parameter of the command itself.

    The command has a parameter `asked`, which receives the given flags by name. Their values are validated when
    `options` is created. from_file: a file may give the options too, so that no flag is required.
    """

    def decorate(command: _Command) -> _Command:
        hints = get_type_hints(command, include_extras=True)
        own = inspect.signature(command).parameters
        parameters: list[inspect.Parameter] = []
        for name, parameter in own.items():
            if name == "asked":
                parameters += _flags(options, without=own.keys(), from_file=from_file)
            else:
                parameters.append(parameter.replace(annotation=hints[name]))
        generated = [parameter.name for parameter in parameters if parameter.name not in own]

        @wraps(command)
        def wrapper(**values: Any) -> None:
            flags = {name: values.pop(name) for name in generated}
            command(asked={name: value for name, value in flags.items() if value is not None}, **values)

        del wrapper.__dict__["__wrapped__"]
        wrapper.__annotations__ = {}
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return wrapper

    return decorate


def _flags(options: type[Options], *, without: Any, from_file: bool) -> Iterator[inspect.Parameter]:
    for name, info in options.model_fields.items():
        if info.description is not None and name not in without:
            required = info.is_required() and not from_file
            yield inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if required else None,
                annotation=Annotated[_flag_type(info.annotation), typer.Option(help=_help(info))],
            )


def _flag_type(annotation: Any) -> Any:
    """Return the type of a flag. A tuple becomes one text, a mapping becomes a repeatable LABEL=VALUE."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return _flag_type(next(one for one in arguments if one is not type(None)))
    if origin in (Literal, tuple):
        return str | None
    return (list[str] | None) if origin is dict else annotation | None


def _help(info: FieldInfo) -> str:
    literals = [one for one in (info.annotation, *get_args(info.annotation)) if get_origin(one) is Literal]
    choices = ", ".join(get_args(literals[0])) if literals else ""
    repeatable = "LABEL=VALUE, repeatable" if get_origin(info.annotation) is dict else ""
    default = info.default if info.default not in (None, False, (), PydanticUndefined) else None
    shown = f"[default: {default}]" if default is not None and info.default_factory is None else ""
    return f"{'; '.join(part for part in (info.description, choices, repeatable) if part)} {shown}".strip()
