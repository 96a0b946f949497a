"""A job that goes on copies from the rows that it has."""

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rayspec.batch.document_task import DocumentTask
from rayspec.batch.documents import input_row
from rayspec.batch.job import Job, JobOptions, LocalBackend, Source
from rayspec.batch.report import RunReport
from rayspec.batch.rows import Row
from rayspec.command.settings import make_settings
from rayspec.config import SamplingParams
from tests.exhaustive import few_of

ENGINE = {"model": "demo", "dtype": "float32", "num_threads": 1, "max_model_len": 256, "max_num_seqs": 1}
SAMPLING = SamplingParams(max_tokens=48, temperature=3.0, seed=5, ignore_eos=True)
FIRST = input_row("first", source="first", text="The meeting of the council")


def run(folder: Path, *rows: Row) -> RunReport:
    job = Job(
        backend=LocalBackend(),
        task=DocumentTask(template="{text}", chat=False, settings=make_settings(flags=ENGINE, sampling=SAMPLING)),
        output=str(folder),
        name="texts",
        text_column="text",
        options=JobOptions(changed="redo"),
    )
    return job.run(Source(rows=rows))


def texts_of(folder: Path) -> dict[str, str]:
    return {row["id"]: row["text"] for row in pq.read_table(folder / "texts.parquet").to_pylist()}


@pytest.mark.parametrize("is_redone", few_of([True, False], [False]))
def test_a_job_that_goes_on_copies_from_the_rows_that_it_has(tmp_path: Path, is_redone: bool) -> None:
    report = run(tmp_path, FIRST)
    assert report.stats.accepted_by_source.get("corpus", 0) == 0
    same = replace(FIRST, input_hash="0" * 16) if is_redone else replace(FIRST, id="second")
    report = run(tmp_path, *([same] if is_redone else [FIRST, same]))
    assert report.stats.accepted_by_source["corpus"] >= 8
    assert " % corpus" in (tmp_path / "report.md").read_text()
    texts = texts_of(tmp_path)
    assert texts.keys() == ({"first"} if is_redone else {"first", "second"})
    assert len(set(texts.values())) == 1
