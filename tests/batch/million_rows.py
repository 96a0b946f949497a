"""A job of a million rows that are done but for a few: its input, its output folder, and what a resume of it costs.

    python -m tests.batch.million_rows make FOLDER --rows 1000000 --left 10
    python -m tests.batch.million_rows resume FOLDER

`resume` prints when the engine was asked for and when the first row came, in seconds after the process began, and the
driver's largest memory. The engine is the bundled model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from rayspec.batch.document_task import DocumentTask
from rayspec.batch.job import Job, Source
from rayspec.batch.parts import output_schema
from rayspec.batch.ray_backend import RayBackend
from rayspec.batch.run_folder import RunFolder
from rayspec.command.settings import make_settings
from rayspec.config import SamplingParams

_ENGINE = {"model": "demo", "dtype": "float32", "device": "cpu", "num_threads": 1, "max_model_len": 256}
_ROWS_PER_GROUP = 10_000
_TEXT = "The annual review of the northern region names {number} reasons for the delay of the new bridge. " * 3


def job_of(folder: Path) -> Job:
    settings = make_settings(flags=_ENGINE, sampling=SamplingParams(temperature=0.0, max_tokens=8))
    task = DocumentTask(settings=settings, template="{text}")
    return Job(
        backend=RayBackend(),
        task=task,
        output=str(folder / "out"),
        name="texts",
        title="Texts",
        text_column="text",
    )


def source_of(folder: Path) -> Source:
    return Source(inputs=[str(folder / "in")])


def make(folder: Path, num_rows: int, num_left: int, rows_per_part: int, num_files: int) -> None:
    """Parquet files of the input, and an output of parts in which all rows but the last ones are done."""
    (folder / "in").mkdir(parents=True)
    (folder / "out" / "rows").mkdir(parents=True)
    for index in range(num_files):
        table = _input_rows(range(index * num_rows // num_files, (index + 1) * num_rows // num_files))
        pq.write_table(table, folder / "in" / f"in-{index}.parquet", row_group_size=_ROWS_PER_GROUP)
    _write_output(folder / "out", num_rows - num_left, rows_per_part)
    manifest = {
        "version": 2,
        "status": "interrupted",
        "identity": job_of(folder).task.identity,
        "text_column": "text",
        "file_format": "parquet",
        "sessions": [],
    }
    (folder / "out" / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def _input_rows(numbers: range) -> pa.Table:
    return pa.table({"id": list(map(_row_id, numbers)), "text": [_TEXT.format(number=number) for number in numbers]})


def _write_output(out: Path, num_done: int, rows_per_part: int) -> None:
    for part, start in enumerate(range(0, num_done, rows_per_part), start=1):
        numbers = range(start, min(start + rows_per_part, num_done))
        pq.write_table(_output_rows(numbers), out / "rows" / f"part-{part:06d}-0a1b2c3d.parquet")


def _output_rows(numbers: range) -> pa.Table:
    def column(name: str) -> list[Any]:
        values = {
            "id": _row_id,
            "text": lambda number: f"A summary of document {number}. " * 8,
            "finish_reason": lambda _: "stop",
            "source": lambda number: f"in:{number}",
            "input_hash": _input_hash,
        }
        other = 1 if pa.types.is_integer(schema.field(name).type) else None
        return [values[name](number) if name in values else other for number in numbers]

    schema = output_schema("text")
    return pa.table({name: column(name) for name in schema.names}, schema=schema)


def _row_id(number: int) -> str:
    return f"document-{number:09d}"


def _input_hash(number: int) -> str:
    return hashlib.blake2b(_TEXT.format(number=number).encode(), digest_size=8).hexdigest()


def resume(folder: Path) -> None:
    marks: dict[str, float] = {}
    started_s = psutil.Process().create_time()

    def mark(name: str) -> None:
        marks.setdefault(name, time.time() - started_s)

    def marking(name: str, action: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*arguments: Any, **options: Any) -> Any:
            mark(name)
            return action(*arguments, **options)

        return marked

    run: Any = Job
    run._complete = marking("engine asked for", run._complete)
    folder_class: Any = RunFolder
    folder_class.add = marking("first row", folder_class.add)
    mark("imported")
    report = job_of(folder).run(source_of(folder))
    mark("end")
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    seconds = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in marks.items())
    print(f"{report.tally}\n{seconds}; CPU {time.process_time():.1f} s; memory {memory_mb:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=["make", "resume"])
    parser.add_argument("folder", type=Path)
    for name, default in (("rows", 1_000_000), ("left", 10), ("rows-per-part", 16_384), ("files", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    if asked.what == "make":
        make(asked.folder, asked.rows, asked.left, asked.rows_per_part, asked.files)
    else:
        resume(asked.folder)


if __name__ == "__main__":
    main()
