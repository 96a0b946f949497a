"""The overhead of a job: rows go through the whole path of a job, to engines that only wait.

Everything but the model is real: files of rows, Ray Data's read tasks, the driver, the pool, an actor for each engine,
the output folder. An engine takes a given time for a row and a given number of rows at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from rayspec.batch.input_files import find_files
from rayspec.batch.job import CONFIG_NAME, Job, Source
from rayspec.batch.ray_backend import RayBackend
from rayspec.batch.rows import Row
from rayspec.bench.result import describe_environment, markdown_table
from rayspec.config import DType, EngineConfig, ParallelOptions, SamplingParams, Settings
from rayspec.decode.stages import Progress
from rayspec.pool.worker import Beginning, Callback
from rayspec.ray_session import ray_session
from rayspec.types import EngineLoad, EngineStats

_LOOK_EVERY_S = 0.1
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedOptions:
    """row_s: seconds that an engine takes for a row; it works on `max_num_seqs` rows at once. words: length of a
    document. output_words: length of its result."""

    num_rows: int = 20_000
    num_engines: int = 4
    max_num_seqs: int = 64
    row_s: float = 0.0
    words: int = 200
    output_words: int = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """CPU use of all processes with one name, from the start of the first engine to the end of the job.

    ms_per_row: CPU milliseconds a row, summed over the processes. busiest: share of one core that the busiest process
    took.
    """

    process: str
    count: int
    ms_per_row: float
    busiest: float


@dataclass(frozen=True, slots=True)
class WaitingTask:
    """A task without a model; the results have fixed text."""

    options: FeedOptions

    @property
    def settings(self) -> Settings:
        options = self.options
        parallel = ParallelOptions(replicas=options.num_engines, cpus_per_shard=0.01)
        engine = EngineConfig(model="demo", device="cpu", max_num_seqs=options.max_num_seqs, parallel=parallel)
        return Settings(engine=engine, sampling=SamplingParams())

    @property
    def identity(self) -> dict[str, Any]:
        return asdict(self.options)

    def handler(self, engine: object) -> Any:
        raise NotImplementedError("the factory of this task has an engine of its own")


@dataclass(frozen=True, slots=True)
class WaitingEngineFactory:
    """Makes engines that only wait."""

    task: WaitingTask

    @property
    def engine(self) -> EngineConfig:
        return self.task.settings.engine

    def load(self, config: EngineConfig) -> WaitingEngine:
        return WaitingEngine(self.task.options)

    def beginning(self, item: Row) -> Beginning:
        return item.document


class WaitingEngine:
    """An engine in an actor. It waits `row_s` seconds for each row and returns a fixed text."""

    def __init__(self, options: FeedOptions) -> None:
        self.info = {"max_num_seqs": options.max_num_seqs}  # the part of an engine's config that a job reads
        answered: Future[None] = Future()
        answered.set_result(None)
        self.client: Any = SimpleNamespace(
            engine=None,
            info=SimpleNamespace(config=EngineConfig(model="demo", dtype="float32")),
            stats=EngineStats(),
            load=EngineLoad(num_running=0, num_waiting=0, kv_used_tokens=0, kv_total_tokens=0),
            progress=Progress(),
            ping=lambda: answered,
        )
        self._row_s = options.row_s
        self._text = "done " * options.output_words
        self._room = asyncio.Semaphore(options.max_num_seqs)

    async def handle(self, item: Row, callback: Callback) -> Row:
        async with self._room:
            await asyncio.sleep(self._row_s)
        return replace(item.without_input(), text=self._text, num_output_tokens=len(self._text) // 4)

    def stop(self) -> None: ...


class _WaitingJob(Job):
    def factory(self, dtype: DType | None, texts: Sequence[str] = ()) -> WaitingEngineFactory:
        assert isinstance(self.task, WaitingTask)
        return WaitingEngineFactory(self.task)


def run_feed_bench(options: FeedOptions, say: Callable[[str], None]) -> dict[str, Any]:
    """Run a job with engines that only wait, and measure it. Raises ConfigError, and the errors of a job."""
    with TemporaryDirectory() as folder:
        inputs, watch = Path(folder) / "in.jsonl", _Watch(Path(folder) / "out" / CONFIG_NAME)
        _write_rows(inputs, options)
        say(f"{options.num_rows} rows through {options.num_engines} engines that take {options.row_s:g} s a row")
        job = _WaitingJob(
            backend=RayBackend(),
            task=WaitingTask(options),
            output=f"{folder}/out",
            name="rows",
            text_column="text",
        )
        with ray_session():
            job.run(Source(files=find_files([str(inputs)]).files))
            seconds, spent = watch.end()
    return {
        "environment": describe_environment(),
        "options": asdict(options),
        "rows_per_s": options.num_rows / seconds,
        "results": [asdict(share) for share in _shares(spent, seconds, options.num_rows)],
    }


def feed_markdown(result: dict[str, Any]) -> str:
    """Return the result as a Markdown table, below a line with options, hardware and rows per second."""
    options, rows_per_s = result["options"], result["rows_per_s"]
    busiest = max(row["busiest"] for row in result["results"])
    heading = (
        f"{options['num_rows']} rows of {options['words']} words through {options['num_engines']} engines that take "
        f"{options['row_s']:g} s a row and {options['max_num_seqs']} rows at once, on "
        f"{result['environment']['hardware']}, commit {result['environment']['commit']}: {rows_per_s:.0f} rows/s; the "
        f"busiest process takes {busiest:.0%} of a core"
    )
    cells = (
        [row["process"], str(row["count"]), f"{row['ms_per_row']:.3f}", f"{row['busiest']:.1%}"]
        for row in result["results"]
    )
    headings = ("process", "number", "CPU ms a row", "busiest, of a core")
    return f"{heading}\n\n{markdown_table(headings, cells, num_left=1)}"


def _write_rows(path: Path, options: FeedOptions) -> None:
    with path.open("w", encoding="utf-8") as file:
        for number in range(options.num_rows):
            file.write(json.dumps({"id": f"r{number}", "text": f"document {number} " * (options.words // 2)}) + "\n")


@dataclass(frozen=True, slots=True)
class _Spent:
    """The name of a process and the CPU seconds that it has used."""

    name: str
    cpu_s: float


class _Watch:
    """A thread that samples the CPU time of processes, as some end early. It starts when the file `sign` appears."""

    def __init__(self, sign: Path) -> None:
        self._sign = sign
        self._start_s = time.monotonic()
        self._before: dict[int, _Spent] = {}
        self._latest: dict[int, _Spent] = {}
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="rayspec-watch", daemon=True)
        self._thread.start()

    def end(self) -> tuple[float, list[_Spent]]:
        """Stop, and return the seconds since the file appeared and the CPU time of each process in that time."""
        seconds, nothing = time.monotonic() - self._start_s, _Spent("", 0.0)
        self._has_ended.set()
        self._thread.join()
        return seconds, [
            _Spent(one.name, one.cpu_s - self._before.get(number, nothing).cpu_s)
            for number, one in self._latest.items()
        ]

    def _look(self) -> None:
        while not self._sign.exists() and not self._has_ended.wait(0.01):
            pass
        self._start_s, self._before = time.monotonic(), _spent_by_processes()
        while not self._has_ended.wait(_LOOK_EVERY_S):
            self._latest |= _spent_by_processes()


def _spent_by_processes() -> dict[int, _Spent]:
    """Return name and CPU time of this process and of Ray's processes on this machine, by process number."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        number = int(entry.name)
        name = "driver" if number == os.getpid() else _name_of(line)
        if name:
            found[number] = _Spent(name, (int(fields[11]) + int(fields[12])) / _TICKS_PER_S)
    return found


def _name_of(line: str) -> str:
    """Return the name of a Ray process from its command line; empty for any other process."""
    if line.startswith("ray::"):
        return line.split(maxsplit=1)[0].removeprefix("ray::")
    return next((name for name in ("raylet", "gcs_server") if f"/{name}" in line.split(" ", 1)[0]), "")


def _shares(spent: Sequence[_Spent], seconds: float, num_rows: int) -> list[Share]:
    """Sum by name, in falling order of CPU time. Leave out names whose processes each take at most 0.1 % of a core."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for one in spent:
        by_name[one.name].append(one.cpu_s)
    shares = (
        Share(process=name, count=len(each), ms_per_row=1000 * sum(each) / num_rows, busiest=max(each) / seconds)
        for name, each in by_name.items()
    )
    return sorted((one for one in shares if one.busiest > 0.001), key=lambda one: -one.ms_per_row)
