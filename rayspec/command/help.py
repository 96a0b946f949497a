"""The help of commands with many options: the most used ones, and all of them, in groups, where that is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

_SHOWS_ALL = "rayspec.help_all"
_OPTIONS = "Options"
_FIRST = "model"
# Panels with many options, of which the short help shows only these.
MANY: Final = frozenset({"Engine", "Speculation", "Shards", "Sampling", "Job"})
_MOST_USED: Final = frozenset({
    _FIRST, "config", "device", "dtype", "limit", "long", "max_model_len", "max_num_seqs", "max_tokens", "overwrite",
    "replicas", "stages", "strategy", "temperature", "tensor",
})  # fmt: skip


def show_all(context: typer.Context, is_asked: bool) -> None:
    """The callback of --help-all."""
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
                if panel in MANY and param.name not in _MOST_USED:
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
