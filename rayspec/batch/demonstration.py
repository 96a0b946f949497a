"""`rayspec demo`: the same job with plain decoding and with `auto`, and a comparison of the two."""

from __future__ import annotations

import datetime as dt
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import typer
from pydantic import Field
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

import rayspec
from rayspec import demo
from rayspec.batch.commands import backend_of
from rayspec.batch.document_task import SUMMARY_SAMPLING, DocumentTask, summary_prompt
from rayspec.batch.input_files import find_files
from rayspec.batch.job import Job, JobOptions, LocalBackend, Source
from rayspec.batch.long_documents import LongDocumentOptions
from rayspec.batch.report import dollars_per_million, page_of, token_sources
from rayspec.batch.rows import Row
from rayspec.command.locations import Location
from rayspec.command.options import Asked, with_options
from rayspec.command.terminal import EXIT_FAILED, EXIT_OK, output_console, say
from rayspec.config import EngineConfig, Options, Settings, SpeculationOptions, Strategy
from rayspec.demo import BUNDLED, SampleDocument
from rayspec.errors import counted, remedy_for
from rayspec.machine import cpu_name, num_cores
from rayspec.types import CheckpointError, ConfigError, EngineStats

_REAL = "smollm2"
_MAX_MODEL_LEN = 1024  # so that the longest document needs more than one prompt
_PROMPT = "Extract the key facts of the following document as a list.\n\n{text}"
_FOLDERS: Final[dict[Strategy, str]] = {"ar": "plain", "auto": "auto"}
_NUM_SHOWN = 2
_SHOWN_CHARS = 700
_PRICE = 0.1

app = typer.Typer()


class _DemoOptions(Options):
    price: float = Field(_PRICE, ge=0, description="dollars per hour of this machine, for the cost in the report")


@app.command("demo")
@with_options(_DemoOptions)
def run_demo(
    *,
    asked: Asked,
    output: Annotated[Path, typer.Option("--output", "-o", help="folder for documents, rows and report")] = Path(
        "demo-out"
    ),
    model: Annotated[
        str | None,
        typer.Option(help="folder, hub id, smollm2 or demo [default: smollm2 if it can be fetched, else demo]"),
    ] = None,
    with_ray: Annotated[
        bool, typer.Option("--ray/--no-ray", help="run the jobs on Ray, where an engine has a process of its own")
    ] = False,
) -> None:
    """Try it: a job on twelve documents, with plain decoding and with `auto`, and a report that compares them.

    It takes one to two minutes on two cores. Exit code 1 if a text differs from plain decoding, or a document failed.
    """
    price = asked.own_options(_DemoOptions).price
    say("[1/4] the model")
    name = model or _available_model()
    say(f"[2/4] the documents: in {output / 'documents'}")
    documents = example_files(output / "documents", pages=name not in BUNDLED)
    comparison = compare(name, documents, output, backend=backend_of(on_ray=with_ray))
    report = output / "report.html"
    report.write_text(comparison.html(price), encoding="utf-8")
    console = output_console()
    for shown in comparison.shown():
        console.print(shown, highlight=False)
    for_own = "MODEL" if name in BUNDLED else name
    for line in (
        f"Report: {report}. Rows: {output / 'auto' / 'summaries.parquet'}.",
        f"Your own documents: rayspec summarize FILES... -o summaries.parquet --model {for_own}",
    ):
        console.print(line, highlight=False, soft_wrap=True)
    raise typer.Exit(EXIT_OK if comparison.num_same == len(comparison.pairs) else EXIT_FAILED)


def compare(model: str, documents: dict[str, SampleDocument], output: Path, *, backend: LocalBackend) -> SideBySide:
    """Summarize documents with plain decoding, then with `auto`, one document at a time, in float32. Models other than
    the bundled ones are asked for key facts.

    documents: by their names in `output / "documents"`. Raises the errors of `Job.run`.
    """
    is_bundled = model in BUNDLED
    rows: dict[Strategy, dict[str, Row]] = {strategy: {} for strategy in _FOLDERS}
    stats: dict[Strategy, EngineStats] = {}
    files = find_files([str(output / "documents")]).files
    with backend.session(None):  # one Ray for both jobs
        for number, (strategy, folder) in enumerate(_FOLDERS.items(), start=3):
            say(f"[{number}/4] {len(documents)} documents with {'plain decoding' if strategy == 'ar' else strategy}")
            engine = EngineConfig(
                model=model,
                dtype="float32",
                max_num_seqs=1,
                max_model_len=_MAX_MODEL_LEN * (2 if is_bundled else 1),  # reports are read whole
                speculation=SpeculationOptions(strategy=strategy),
            )
            sampling = SUMMARY_SAMPLING if is_bundled else SUMMARY_SAMPLING.replace(max_tokens=64)
            task = DocumentTask(
                settings=Settings(engine=engine, sampling=sampling),
                template=summary_prompt(model) if is_bundled else _PROMPT,
                long=LongDocumentOptions(long="map-reduce"),
                instruct=not is_bundled,
            )
            job = Job(
                backend=backend,
                task=task,
                output=str(output / folder),
                name="summaries",
                text_column="summary",
                options=JobOptions(overwrite=True),
                export=partial(_keep, rows[strategy]),
            )
            stats[strategy] = job.run(Source(files=files)).stats
    pairs = [
        Pair(name=name, document=document.text, plain=rows["ar"][name], fast=rows["auto"][name])
        for name, document in documents.items()
    ]
    return SideBySide(model=model, pairs=pairs, plain=stats["ar"], fast=stats["auto"])


def _keep(found: dict[str, Row], read: Callable[[], Iterable[Row]], _: Location) -> None:
    found.update({row.id: row for row in read()})


def example_files(folder: Path, *, pages: bool) -> dict[str, SampleDocument]:
    """Write the examples into a folder, and return them by file name. Raises ConfigError if it has other files."""
    documents = {f"{one.id}.txt": one for one in demo.example_documents(pages=pages)}
    known = {*documents, *(f"{one.id}.txt" for one in demo.example_documents(pages=not pages))}
    if folder.exists() and (others := {path.name for path in folder.iterdir()} - known):
        raise ConfigError(f"folder {str(folder)!r} has other files, such as {min(others)!r}: use another --output")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, document in documents.items():
        (folder / name).write_text(document.text, encoding="utf-8")
    return documents


def _available_model() -> str:
    """Return the real model if it is in the cache or can be fetched, else the bundled model."""
    if find_spec("gguf") is None:
        reason = f"package 'gguf' is not installed: {remedy_for('gguf')}"
    else:
        try:
            demo.fetch(_REAL, say)
        except CheckpointError as error:
            reason = str(error)
        else:
            return _REAL
    say(f"the bundled model is used, which only knows audit reports: {reason}")
    return "demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A document with its text by plain decoding and by the fast strategy. document: its text."""

    name: str
    document: str
    plain: Row
    fast: Row

    @property
    def is_same(self) -> bool:
        """Whether both runs succeeded with the same text."""
        return self.plain.error_kind is None and self.fast.error_kind is None and self.plain.text == self.fast.text

    @property
    def speed_up(self) -> float | None:
        """Ratio of the decoding times."""
        return self.plain.decode_s / self.fast.decode_s if self.plain.decode_s and self.fast.decode_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """The same documents by two jobs that ran one after the other. plain, fast: the statistics of their engines."""

    model: str
    pairs: Sequence[Pair]
    plain: EngineStats
    fast: EngineStats

    @property
    def num_same(self) -> int:
        return sum(pair.is_same for pair in self.pairs)

    @property
    def rates(self) -> dict[str, tuple[float, float, float]]:
        """Tokens per second of plain decoding and of the fast strategy, and the gain: without and with the time for
        prompts."""
        found = {}
        for name, has_prompts in (("decoding", False), ("prompts included", True)):
            plain, fast = (
                each.num_generated_tokens / seconds
                if (seconds := each.total_s - (0.0 if has_prompts else each.prefill_s)) > 0
                else 0.0
                for each in (self.plain, self.fast)
            )
            found[name] = plain, fast, fast / plain if plain else 0.0
        return found

    @property
    def headline(self) -> str:
        num, ratio = len(self.pairs), self.rates["decoding"][2]
        gain = f"{ratio:.1f}x {'faster than' if ratio >= 1.05 else 'as fast as'} plain decoding"
        if self.num_same < num:
            return f"{gain}, but only {self.num_same} of {num} texts are the same"
        return f"{gain}, same text (checked: {num} of {num})"

    @property
    def examples(self) -> list[Pair]:
        """The first document of each kind, by the beginnings of their names, that has a text."""
        kinds = {pair.name.partition("-")[0]: pair for pair in reversed(self.pairs) if pair.fast.text}
        firsts = sorted(kinds.values(), key=self.pairs.index)
        more = [pair for pair in self.pairs if pair.fast.text and pair not in firsts]
        return [*firsts, *more][:_NUM_SHOWN]

    def shown(self) -> Iterator[RenderableType]:
        examples = Table(show_lines=True, expand=True, padding=(0, 1))
        examples.add_column("document", ratio=1)
        examples.add_column("text with auto", ratio=1)
        for pair in self.examples:
            text = Text(_beginning(pair.document))
            examples.add_row(Text.assemble((pair.name, "bold"), "\n", text), Text((pair.fast.text or "").strip()))
        yield examples
        rates = Table(title=f"{len(self.pairs)} documents, tokens per second", title_justify="left")
        for heading in ("", "plain decoding", "auto", "gain"):
            rates.add_column(heading, justify="right" if heading else "left")
        for name, (plain, fast, gain) in self.rates.items():
            rates.add_row(name, f"{plain:.0f}", f"{fast:.0f}", f"{gain:.1f}x")
        yield rates
        shares = (f"{100 * share:.0f} % {name}" for name, share in token_sources(self.fast))
        yield f"Tokens with auto: {'; '.join(shares)}"
        yield Text(self.headline, style="bold")

    def html(self, price: float = _PRICE) -> str:
        """Return the report: one page without scripts or outside resources. price: dollars per hour of the machine."""
        return page_of(
            "comparison.html",
            title="rayspec demo",
            headline=self.headline[:1].upper() + self.headline[1:],
            setting=f"{len(self.pairs)} documents, model {self.model}, float32, one document at a time, on "
            f"{counted(num_cores(), 'core')} ({cpu_name()}). rayspec {rayspec.__version__}, "
            f"{dt.datetime.now(tz=dt.timezone.utc).date()}.",
            decoding=self.rates["decoding"],
            in_all=self.rates["prompts included"],
            num_same=self.num_same,
            costs=[dollars_per_million(price, rate) for rate in self.rates["prompts included"][:2]],
            price=price,
            sources=token_sources(self.fast),
            examples=self.examples,
            pairs=self.pairs,
            widest=max((pair.speed_up or 0.0 for pair in self.pairs), default=0.0) or 1.0,
        )


def _beginning(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS].rpartition(" ")[0] + " ..."
