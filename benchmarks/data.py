"""The overhead of Ray Data: the same documents through an engine in this process, and through Ray Data and an actor.

The two ways alternate, repeat by repeat, after one warm-up repeat of each. Both engines are loaded first, with the same
options. Only one works at a time: the device needs memory for two copies of the model. A repeat begins with the
documents and ends with the last row. For Ray Data it includes the start of the workers, which every job has once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import rayspec
from rayspec.batch.document_task import DocumentTask, PromptBuilder, summary_prompt
from rayspec.batch.documents import input_row
from rayspec.batch.job import CompletedRows, Source
from rayspec.batch.long_documents import LongDocumentOptions
from rayspec.batch.ray_backend import RayBackend, reading
from rayspec.batch.rows import Row, RowEngineFactory
from rayspec.bench.options import BenchOptions, WorkloadOptions
from rayspec.bench.result import describe_environment, markdown_table
from rayspec.bench.run import engine_config, model_folder
from rayspec.bench.workloads import file_documents, fitting_tasks
from rayspec.command.terminal import exit_on_sigterm, hide_progress_bars, load_llm
from rayspec.config import EngineConfig, SamplingParams, Settings
from rayspec.demo import Task
from rayspec.machine import num_cores
from rayspec.pool.supervisor import EnginePool
from rayspec.ray_session import ray_session
from rayspec.types import ConfigError, Request

_Way: TypeAlias = Callable[[Sequence[Row]], Iterable[Row]]

BARE, RAY_DATA = "bare engine", "ray data"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSample:
    """One repeat of one way. first_row_s: seconds from the start to the first finished row."""

    seconds: float
    first_row_s: float
    num_tokens: int
    texts: dict[str, str | None]

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRow:
    """The results of one way. Rates and seconds are medians over the repeats. ratio, min_ratio, max_ratio: median and
    range over the repeats of the rate divided by the bare engine's rate. `identical` of `total` texts equal those of
    the bare engine's first repeat."""

    way: str
    tokens_per_s: float
    min_tokens_per_s: float
    max_tokens_per_s: float
    seconds: float
    first_row_s: float
    ratio: float
    min_ratio: float
    max_ratio: float
    identical: int
    total: int


def run_data_bench(options: BenchOptions, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure both ways. In `options`, `num_prompts` is the number of rows, and `strategies` has exactly one name.

    Raises ConfigError, CheckpointError, and the error of an invalid document.
    """
    if len(options.strategies) != 1:
        raise ConfigError(
            f"option 'strategies' is {','.join(options.strategies)!r}: one at a time is measured, name one"
        )
    hide_progress_bars()
    with model_folder(options.engine, options.widen) as folder, ray_session(), reading():
        exit_on_sigterm()
        config = engine_config(options, folder, options.strategies[0])
        config = config.replace(num_threads=config.num_threads or num_cores())
        say("loading")
        samples = _measured(options, config, say)
    rows = [asdict(row) for row in data_rows(samples)]
    return {"environment": describe_environment(), "options": options.model_dump(mode="json"), "results": rows}


def _measured(options: BenchOptions, config: EngineConfig, say: Callable[[str], None]) -> dict[str, list[DataSample]]:
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
    template = summary_prompt(options.engine.model)
    with load_llm(config) as llm, _loaded_pool(config, params, template) as pool:
        (context,) = options.context
        prompts = PromptBuilder(llm=llm, template=template, max_prompt_tokens=context)
        documents = _documents(prompts, options)
        ways: dict[str, _Way] = {
            BARE: partial(_by_llm, llm, prompts, params),
            RAY_DATA: partial(_through_ray_data, pool, num_wanted=2 * config.num_seqs),
        }
        samples: dict[str, list[DataSample]] = {way: [] for way in ways}
        for repeat in range(1 + options.repeats):
            for name, way in ways.items():
                sample = timed(partial(way, documents))
                samples[name].append(sample)
                say(f"{f'repeat {repeat}' if repeat else 'warming up'}: {name} {sample.tokens_per_s:.1f} tokens/s")
    return {name: each[1:] for name, each in samples.items()}


def _documents(prompts: PromptBuilder, options: WorkloadOptions) -> list[Row]:
    """Return documents of a file, or bundled ones sized to fit the context, so that none is cut."""
    (name,), (context,) = options.input, options.context
    if name != "demo":
        return file_documents(name, options.num_prompts)
    whole = replace(prompts, max_prompt_tokens=None)

    def num_tokens(task: Task) -> int:
        return len(whole.fitting_tokens(task.document))

    seed, num_tasks = options.workload_seed, options.num_prompts
    tasks = fitting_tasks("summary", num_tokens, context=context, num_tasks=num_tasks, seed=seed)
    return [input_row(f"report-{index}", source="demo", text=task.document) for index, task in enumerate(tasks)]


@contextmanager
def _loaded_pool(config: EngineConfig, params: SamplingParams, template: str) -> Iterator[EnginePool]:
    settings = Settings(engine=config, sampling=params)
    task = DocumentTask(settings=settings, template=template, long=LongDocumentOptions(long="truncate"))
    pool = EnginePool(RowEngineFactory(task), max_restarts=0)
    try:
        pool.begin()
        yield pool
    finally:
        pool.stop()


def _by_llm(
    llm: rayspec.LLM, prompts: PromptBuilder, params: SamplingParams, documents: Sequence[Row]
) -> Iterator[Row]:
    """Complete documents with the engine alone."""
    by_id = {str(number): row for number, row in enumerate(documents)}
    requests = (
        Request(request_id=request_id, params=params, prompt_token_ids=prompts.tokens(row))
        for request_id, row in by_id.items()
    )
    for output in llm.stream(requests):
        yield by_id[output.request_id].completed(output)


def _through_ray_data(pool: EnginePool, documents: Sequence[Row], num_wanted: int) -> Iterator[Row]:
    """Complete documents in an engine's actor, while Ray Data reads the rows, as in a job."""
    backend, source = RayBackend(), Source(rows=documents)
    read = backend.rows(source, backend.scan(source).rows, "input")
    with CompletedRows(pool.submit, read, num_wanted=num_wanted) as rows:
        yield from rows


def timed(complete_all: Callable[[], Iterable[Row]]) -> DataSample:
    """Measure one repeat, from its start to its last row. Raises ConfigError for a row that failed."""
    start_s = time.perf_counter()
    first_row_s, rows = None, []
    for row in complete_all():
        if row.error_kind is not None:
            raise ConfigError(f"row {row.id!r} failed, and only rows that succeed can be measured: {row.error}")
        if first_row_s is None:
            first_row_s = time.perf_counter() - start_s
        rows.append(row)
    seconds = time.perf_counter() - start_s
    return DataSample(
        seconds=seconds,
        first_row_s=seconds if first_row_s is None else first_row_s,
        num_tokens=sum(row.num_output_tokens for row in rows),
        texts={row.id: row.text for row in rows},
    )


def data_rows(samples: dict[str, list[DataSample]]) -> list[DataRow]:
    """Return one row for each way. samples: by way, repeat by repeat; the bare engine must be included."""
    expected = samples[BARE][0].texts
    rows = []
    for way, own in samples.items():
        rates = [sample.tokens_per_s for sample in own]
        ratios = [mine / bare.tokens_per_s for mine, bare in zip(rates, samples[BARE], strict=True)]
        texts = [(row_id, text) for sample in own for row_id, text in sample.texts.items()]
        rows.append(
            DataRow(
                way=way,
                tokens_per_s=median(rates),
                min_tokens_per_s=min(rates),
                max_tokens_per_s=max(rates),
                seconds=median(sample.seconds for sample in own),
                first_row_s=median(sample.first_row_s for sample in own),
                ratio=median(ratios),
                min_ratio=min(ratios),
                max_ratio=max(ratios),
                identical=sum(text == expected[row_id] for row_id, text in texts),
                total=len(expected) * len(own),
            )
        )
    return rows


def data_markdown(result: dict[str, Any]) -> str:
    """Return the result as a Markdown table, below a line with model, hardware and options."""
    options, environment = result["options"], result["environment"]
    heading = (
        f"{options['engine']['model']} in {options['engine']['dtype']}, {options['widen']} times as wide, on "
        f"{environment['hardware']}, commit {environment['commit']}: {options['num_prompts']} rows of up to "
        f"{options['context'][0]} tokens, {options['max_tokens']} output tokens, {options['strategies'][0]}, batch "
        f"{options['batch']}, {options['repeats']} repeats"
    )
    headings = ("way", "tokens/s", "min to max", "seconds", "first row, s", "of bare", "min to max", "identical")
    return f"{heading}\n\n{markdown_table(headings, map(_cells, result['results']), num_left=1)}"


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["way"],
        f"{row['tokens_per_s']:.1f}",
        f"{row['min_tokens_per_s']:.1f} to {row['max_tokens_per_s']:.1f}",
        f"{row['seconds']:.1f}",
        f"{row['first_row_s']:.1f}",
        f"{row['ratio']:.3f}",
        f"{row['min_ratio']:.3f} to {row['max_ratio']:.3f}",
        f"{row['identical']} of {row['total']}",
    ]
