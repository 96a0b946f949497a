"""What a next run makes of an output whose input is another, or goes by another name. In this process; jobs on Ray run
the same code."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rayspec import demo
from rayspec.batch import job as jobs
from rayspec.batch.job import in_sample
from rayspec.cli import app
from tests.batch.test_documents import pdf
from tests.exhaustive import few_of
from tests.jobs.job_process import FAST, committed, documents, num_committed, write_lines
from tests.waiting import wait_until

OPTIONS = ("-o", "out", *FAST, "--max-model-len", "256", "--max-tokens", "8")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, code: int = 0) -> str:
    """What the command wrote to its terminal."""
    result = CliRunner().invoke(app, ["summarize", *arguments, *OPTIONS])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table("out/summaries.parquet").to_pylist()
    return found


def texts() -> dict[str, str]:
    assert {row["error_kind"] for row in rows()} == {None}
    return {row["id"]: row["summary"] for row in rows()}


@pytest.mark.parametrize("with_ids", [True, False])
def test_a_finished_job_is_finished_by_whatever_path_its_input_is_named(
    folder: Path, with_ids: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = documents(7) if with_ids else [{"text": row["text"]} for row in documents(7)]
    pq.write_table(pa.Table.from_pylist(given), "in.parquet")
    (folder / "mount").symlink_to(folder)
    run("in.parquet")
    before = rows()
    monkeypatch.setattr("rayspec.batch.rows.load_llm", pytest.fail)
    for name in ("./in.parquet", str(folder / "in.parquet"), "mount/in.parquet", f"file://{folder}/*.parquet", "."):
        said = run(name)
        assert "7 rows (7 of an earlier run), 0 tokens" in said
        assert "changed" not in said
    assert rows() == before
    assert len(committed(folder / "out")) == len(before) == 7


def test_rows_come_and_go_and_change(folder: Path) -> None:
    given = documents(7)
    write_lines(folder / "in.jsonl", given)
    run("in.jsonl")
    before = texts()
    write_lines(folder / "in.jsonl", [{"id": "extra", "text": "The annual review."}, *given])
    assert "8 rows (7 of an earlier run)" in run("in.jsonl")
    assert "| rows | 8, 0 failed; 7 of an earlier run" in (folder / "out" / "report.md").read_text(encoding="utf-8")
    with_extra = texts()
    assert with_extra == before | {"extra": with_extra["extra"]}
    given[4]["text"] = documents(1, seed=9)[0]["text"]
    write_lines(folder / "in.jsonl", given)
    said = run("in.jsonl")
    assert f"1 rows have other text than when they were done ('{given[4]['id']}')" in said
    assert "1 rows of the output are no longer in the input ('extra'): the earlier results are kept" in said
    assert texts() == with_extra
    assert "option 'changed' is 'fail'" in run("in.jsonl", "--changed", "fail", code=2)
    said = run("in.jsonl", "--changed", "redo")
    assert "1 are done again" in said
    assert "8 rows (7 of an earlier run)" in said
    report = (folder / "out" / "report.md").read_text(encoding="utf-8")
    assert report.count(f"| {given[4]['id']} |") == 1
    assert "more rows" not in report
    after = texts()
    assert [row_id for row_id in with_extra if with_extra[row_id] != after[row_id]] == [given[4]["id"]]
    assert "other text" not in run("in.jsonl")
    shown = run("out/summaries.parquet", "--text-column", "summary", "--overwrite", code=2)
    assert "--overwrite would delete 'out/summaries.parquet', which this job reads" in shown
    assert texts() == after


@pytest.mark.parametrize("name", few_of(["config.yaml", "report.md", "report.html"], ["config.yaml"]))
def test_a_job_is_complete_only_with_all_its_files(folder: Path, name: str) -> None:
    write_lines(folder / "in.jsonl", documents(2))
    run("in.jsonl")
    write_lines(folder / "in.jsonl", documents(3))
    (folder / "out" / name).unlink()
    (folder / "out" / name).mkdir()
    message = run("in.jsonl", code=1)
    assert "error: the output 'out' cannot be written (" in message
    assert f"{name}: Is a directory)" in message
    (folder / "out" / name).rmdir()
    run("in.jsonl")
    assert len(texts()) == 3
    assert (folder / "out" / name).is_file()


def test_a_report_that_was_deleted_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(folder / "in.jsonl", documents(2))
    run("in.jsonl")
    page = (folder / "out" / "report.html").read_text(encoding="utf-8")
    (folder / "out" / "report.md").unlink()
    monkeypatch.setattr("rayspec.batch.rows.load_llm", pytest.fail)
    run("in.jsonl")
    assert "| rows | 2, 0 failed; 2 of an earlier run" in (folder / "out" / "report.md").read_text(encoding="utf-8")
    assert (folder / "out" / "report.html").read_text(encoding="utf-8") == page


def test_an_input_that_is_repaired_leaves_no_error_behind(folder: Path) -> None:
    good = [json.dumps(row) for row in documents(3)]
    (folder / "in.jsonl").write_text("\n".join([*good, "no json", good[0]]) + "\n", encoding="utf-8")
    assert "2 failed (" in run("in.jsonl", code=3)
    assert len(rows()) == 5
    (folder / "in.jsonl").write_text("\n".join(good) + "\n", encoding="utf-8")
    run("in.jsonl")
    assert len(texts()) == 3


def test_duplicates_are_found_across_runs_and_counted_once(folder: Path) -> None:
    write_lines(folder / "a.jsonl", [{"id": "x", "text": "The annual review."}, {"id": "y", "text": "The review."}])
    write_lines(folder / "b.jsonl", [{"id": "x", "text": "Another."}, {"id": "z", "text": "The annual report."}])
    run("a.jsonl")
    for _ in range(2):  # the second time nothing is left to do
        said = run("a.jsonl", "b.jsonl", code=3)
        assert "4 rows (" in said
        assert "1 failed (duplicate_id 1)" in said
    assert Counter((row["id"], row["error_kind"]) for row in rows()) == Counter(
        [("x", None), ("x", "duplicate_id"), ("y", None), ("z", None)]
    )


def test_a_limited_run_is_taken_further_and_a_share_is_the_same_every_time(folder: Path) -> None:
    write_lines(folder / "a.jsonl", [{"id": f"r{n}", "text": "The review."} for n in range(30)])
    run("a.jsonl", "--limit", "5")
    run("a.jsonl", "--limit", "9")
    assert set(texts()) == {f"r{n}" for n in range(9)}
    share = {f"r{n}" for n in range(30) if in_sample(f"r{n}", 0.4)}
    assert 0 < len(share) < 30
    run("a.jsonl", "--sample", "0.4")
    assert set(texts()) == {f"r{n}" for n in range(9)} | share
    assert len(committed(folder / "out")) == len(rows())


def test_every_output_has_the_schema_or_an_error_of_its_own_kind(folder: Path) -> None:
    """The schema decides the text: the same command is finished, another schema is another run."""
    short = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}
    too_long = {"type": "string", "minLength": 200}
    for name, schema in (("short", short), ("long", too_long), ("wrong", {"type": "objekt"})):
        (folder / f"{name}.json").write_text(json.dumps(schema), encoding="utf-8")
    write_lines(folder / "in.jsonl", documents(3))
    run("in.jsonl", "--json-schema", "short.json")
    assert set(texts().values()) <= {f"[{first}, {second}]" for first in (1, 2) for second in (1, 2)}, "on one line"
    assert "(3 of an earlier run)" in run("in.jsonl", "--json-schema", "short.json")
    assert "structured_outputs" in run("in.jsonl", "--json-schema", "long.json", code=2)
    run("in.jsonl", "--json-schema", "long.json", "--overwrite", code=1)
    assert {row["error_kind"] for row in rows()} == {"unfinished_form"}
    run("in.jsonl", "--json-schema", "wrong.json", "--overwrite", code=1)
    assert {(row["error_kind"], row["error"]) for row in rows()} == {
        ("grammar", "structured_outputs.json: Invalid type: objekt")
    }
    assert "option 'json_schema' is 'none.json': No such file" in run("in.jsonl", "--json-schema", "none.json", code=2)


def test_a_template_over_the_columns_of_a_csv_file_makes_the_prompts(folder: Path) -> None:
    (folder / "in.csv").write_text("id,kind,subject\na,annual,harbour\nb,other,mill\n", encoding="utf-8")
    (folder / "t.jinja").write_text("The {{ kind }} review of the {{ subject }}.", encoding="utf-8")
    write_lines(folder / "same.jsonl", [{"id": "a", "text": "The annual review of the harbour."}])
    run("same.jsonl")
    expected = texts()
    run("in.csv", "--prompt-template", "t.jinja", "--overwrite")
    assert texts()["a"] == expected["a"] != texts()["b"]
    said = run("in.csv", "--prompt-template", "t.jinja")
    assert "2 rows (2 of an earlier run)" in said
    (folder / "t.jinja").write_text("The {{ kid }} review.", encoding="utf-8")
    said = run("in.csv", "--prompt-template", "t.jinja", "--overwrite", code=2)
    assert "in.csv:1: option 'prompt_template': 'kid' is undefined; the row has 'id', 'kind', 'subject'" in said
    assert len(rows()) == 2, "nothing was begun"
    assert "is given without inputs" in run("--prompt-template", "t.jinja", code=2)
    said = run("in.csv", "--prompt-template", "t.jinja", "--text-column", "subject", code=2)
    assert "options 'text_column' and 'prompt_template' are both given: leave one out" in said
    assert "'prompt_template' only" in run("in.csv", "--prompt-template", "t.jinja", "--long", "refine", code=2)


def test_a_budget_ends_a_run_that_can_be_taken_further(folder: Path) -> None:
    write_lines(folder / "in.jsonl", documents(7))
    run("in.jsonl", "--overwrite")
    expected = texts()
    num_tokens = [row["num_prompt_tokens"] + row["num_output_tokens"] for row in rows()]
    budget = ("--max-total-tokens", str(sum(num_tokens) // 2))
    said = run("in.jsonl", *budget, "--overwrite", code=4)
    assert "ended by option 'max_total_tokens' with rows left" in said
    so_far = texts()
    assert 1 <= len(so_far) < 7
    assert sum(row["num_prompt_tokens"] + row["num_output_tokens"] for row in rows()) <= sum(num_tokens) // 2
    assert json.loads((folder / "out" / "manifest.json").read_bytes())["status"] == "interrupted"
    assert "'max_hours'" in run("in.jsonl", "--max-hours", "1e-9", code=4)
    assert texts() == so_far
    assert "'max_total_tokens'" in run("in.jsonl", "--max-total-tokens", "1", code=4), "each run gets further"
    assert len(texts()) == len(so_far) + 1
    run("in.jsonl")
    assert texts() == expected
    assert json.loads((folder / "out" / "manifest.json").read_bytes())["status"] == "complete"
    assert "7 rows (7 of an earlier run)" in run("in.jsonl", *budget)


@pytest.mark.exhaustive
def test_a_job_killed_twice_extracts_fields_of_pdf_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a kill comes before or after the job's end, every file has its typed fields."""
    (folder / "docs").mkdir()
    for number, sample in enumerate(demo.sample_documents(40, num_sentences=2)):
        (folder / "docs" / f"{number}.pdf").write_bytes(pdf(sample.text.replace("(", "").replace(")", "")))
    fields = {"title": {"type": "string", "maxLength": 8}, "year": {"type": "integer"}, "is_open": {"type": "boolean"}}
    fields["year"] |= {"minimum": 0, "maximum": 2100}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    (folder / "schema.json").write_text(json.dumps(schema), encoding="utf-8")
    options = ("--json-schema", "schema.json", "--cache", "cache", "--max-model-len", "512", "--max-tokens", "99")
    command = [sys.executable, "-m", "rayspec", "summarize", "docs", *FAST, *options, "--max-num-seqs", "2"]
    command += ["-o", "out"]
    for target in (1, 33):
        job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def is_far(job: subprocess.Popen[bytes] = job, target: int = target) -> bool:
            return num_committed(folder / "out") >= target or job.poll() is not None

        try:
            wait_until(is_far, 300)
        finally:
            job.kill()
            job.wait()
    result = CliRunner().invoke(app, command[3:])
    assert result.exit_code == 0, result.output
    table = pq.read_table("out/summaries.parquet")
    assert [str(table.schema.field(name).type) for name in fields] == ["string", "int64", "bool"]
    found = {row["id"]: {name: row[name] for name in fields} for row in table.to_pylist()}
    assert found == {row["id"]: json.loads(row["summary"]) for row in table.to_pylist()}
    assert len(found) == 40
    monkeypatch.setattr(jobs, "LocalPool", None)  # no engine can be started
    again = CliRunner().invoke(app, [*command[3:-1], "again"])
    assert again.exit_code == 0, again.output
    rows_again = pq.read_table("again/summaries.parquet").to_pylist()
    assert {row["id"]: {name: row[name] for name in fields} for row in rows_again} == found
