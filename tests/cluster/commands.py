"""Commands of documents, held against the command lines that they are for, without running them."""

import itertools
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import typer.main
from ray.scripts.scripts import cli as ray_cli
from ray.serve.scripts import cli as serve_cli

import benchmarks.__main__
import benchmarks.device.__main__
from rayspec.cli import LAZY_HELP, lazy_command
from rayspec.cli import app as rayspec_app
from rayspec.command.settings import make_settings
from rayspec.config import EngineConfig, ParallelOptions, SpeculationOptions

RAY = ray_cli
RAYSPEC: Any = typer.main.get_command(rayspec_app)
RAYSPEC.commands |= {name: lazy_command(name) for name in LAZY_HELP}
JOBS: dict[str, Any] = {
    **{name.replace("-", "_"): command for name, command in RAYSPEC.commands["job"].commands.items()},
    "bench": RAYSPEC.commands["bench"],
    "measure": RAYSPEC.commands["profile"],
    "tune": RAYSPEC.commands["tune"],
}
BENCHMARKS: Any = typer.main.get_command(benchmarks.__main__.app)
BENCHMARKS_OF_DEVICES: Any = typer.main.get_command(benchmarks.device.__main__.app)
PROGRAMS = ("ray", "rayspec", "serve", "python")
_BLOCK = re.compile(r"^```([a-z]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_ASSIGNMENT = re.compile(r"[A-Z_]+=.*")
_SHELL = {">", "<", "|", "&&", ";"}


def shell_blocks(document: str) -> list[str]:
    """The code blocks that are of a shell."""
    return [block for language, block in _BLOCK.findall(document) if language in {"", "bash", "sh"}]


def blocks(document: str) -> list[list[str]]:
    """Commands of the code blocks that are of a shell, as words."""
    lines = [line for block in shell_blocks(document) for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def inline(document: str) -> list[str]:
    """What stands in backquotes in the text."""
    return _INLINE.findall(_BLOCK.sub("", document))


def inline_commands(document: str) -> list[list[str]]:
    return [shlex.split(text) for text in inline(document) if text.split()[0] in PROGRAMS and " " in text]


def options() -> set[str]:
    """All that rayspec, its jobs and Ray know."""
    return {
        name for group in (RAYSPEC, RAY, BENCHMARKS, BENCHMARKS_OF_DEVICES, *JOBS.values()) for name in _options(group)
    }


def _options(command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for inner in getattr(command, "commands", {}).values():
        yield from _options(inner)


def faults(words: Sequence[str]) -> list[str]:
    """What is wrong with a command, and with those that it hands on; nothing for programs that are not ours."""
    while words and _ASSIGNMENT.fullmatch(words[0]):
        words = words[1:]
    words = list(itertools.takewhile(lambda word: word not in _SHELL, words))
    program, *arguments = words or [""]
    if program not in PROGRAMS or arguments[:1] == ["-c"]:
        return []
    handed_on = [arguments[-1].split()] if arguments[:1] == ["exec"] and " " in arguments[-1] else []
    if "--" in arguments:
        handed_on.append(arguments[arguments.index("--") + 1 :])
    found = [fault for inner in handed_on for fault in faults(inner)]
    try:
        parse_program(program, arguments)
    except Exception as error:  # noqa: BLE001 - of click or of typer's own copy of it
        # A command may be named without all that it needs, and --help ends it.
        if type(error).__name__ not in {"MissingParameter", "Exit"}:
            found.append(f"{' '.join(words)}: {error}")
    return found


def parse_program(program: str, arguments: Sequence[str]) -> None:
    """Raises what click and typer raise."""
    if program != "python":
        parse({"ray": RAY, "rayspec": RAYSPEC, "serve": serve_cli}[program], arguments)
        return
    modules = {"benchmarks": BENCHMARKS, "benchmarks.device": BENCHMARKS_OF_DEVICES}
    if arguments[0] == "-m":
        if arguments[1] in modules:  # others have their own parsers
            parse(modules[arguments[1]], arguments[2:])
        return
    script = re.fullmatch(r"(?:(?:/opt/rayspec/)?jobs/)?(\w+)\.py", arguments[0])
    if script is None or script[1] not in JOBS:
        raise ValueError(f"there is no job {arguments[0]}")
    parse(JOBS[script[1]], arguments[1:])


def parse(command: Any, arguments: Sequence[str]) -> Any:
    """The context of the innermost command, which is not run."""
    name = ""
    while hasattr(command, "commands"):
        name, *arguments = arguments
        if any(name in parameter.opts for parameter in command.params):  # as --version, after which nothing runs
            return None
        if name not in command.commands:
            raise ValueError(f"no command {name!r}")
        command = command.commands[name]
    return command.make_context(name, list(arguments))


def engine_of_job(arguments: Sequence[str]) -> EngineConfig:
    """What jobs/summarize.py makes of its command line, without running it."""
    parsed = parse(JOBS["summarize"], arguments).params
    assert parsed["output"]
    names = {name for group in (EngineConfig, ParallelOptions, SpeculationOptions) for name in group.model_fields}
    return make_settings(
        flags={name: parsed[name] for name in names & parsed.keys() if parsed[name] not in (None, ())}
    ).engine
