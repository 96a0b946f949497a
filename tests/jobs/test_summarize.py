"""The job as a user runs it: in a process of its own, on a Ray that is there or on one that it starts and stops."""

import json
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import ray
import yaml
from typer.testing import CliRunner

from rayspec import demo
from rayspec.cli import app
from tests.jobs.job_process import FAST, committed, num_committed, start, wait_until_gone, write_lines
from tests.waiting import wait_until

pytestmark = pytest.mark.ray


def test_summaries_and_a_report_are_made(tmp_path: Path, ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    samples = demo.sample_documents(5, num_sentences=8)
    lines = [json.dumps({"id": sample.id, "body": sample.text}) for sample in samples]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "no json"]) + "\n", encoding="utf-8")
    (tmp_path / "long.txt").write_text("word " * 3000, encoding="utf-8")
    (tmp_path / "empty.txt").touch()
    options = "--max-model-len 512 --text-column body --max-tokens 30"
    job = start(tmp_path, "*.*", "--output", "out", *FAST, *options.split())
    output, errors = job.communicate(timeout=280)
    assert job.returncode == 3, errors
    assert "8 rows, 3 failed" in output
    rows = {row["id"]: row for row in pq.read_table(tmp_path / "out" / "summaries.parquet").to_pylist()}
    assert {row["error_kind"] for row in rows.values()} == {None, "malformed_row", "prompt_too_long", "empty_file"}
    for sample in samples:
        assert rows[sample.id]["summary"].startswith("Review of the ")
        assert rows[sample.id]["num_output_tokens"] <= 30
    assert "prompt_too_long" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "<h2>Failed rows</h2>" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    saved = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text(encoding="utf-8"))
    assert (saved["model"], saved["max_model_len"]) == ("demo", 512)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["status"], manifest["rows"]["total"]) == ("complete", 8)
    assert "\x1b" not in output + errors  # neither is a terminal
    assert ray.is_initialized()


def test_a_resumed_job_keeps_its_data_type(run: Any, tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"id": "a", "text": "The annual review."}])
    chosen = ["--device", "cpu", "--num-threads", "1", "--strategy", "ar", "--max-tokens", "2"]
    arguments = ["summarize", "a.jsonl", "--output", "out", "--model", "demo", *chosen]
    assert run(*arguments).exit_code == 0
    manifest = tmp_path / "out" / "manifest.json"  # as if another kind of machine had begun the job
    chose = json.loads(manifest.read_text(encoding="utf-8"))
    (other,) = {"float32", "bfloat16"} - {chose["extra"]["config"]["dtype"]}
    chose["extra"]["config"]["dtype"] = other
    manifest.write_text(json.dumps(chose), encoding="utf-8")
    write_lines(tmp_path / "a.jsonl", [{"id": "a", "text": "The annual review."}, {"id": "b", "text": "The review."}])
    assert run(*arguments).exit_code == 0
    config = (tmp_path / "out" / "config.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(config)["dtype"] == other


@pytest.mark.exhaustive
def test_a_job_that_is_stopped_leaves_the_rows_so_far(tmp_path: Path, own_ray_folder: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"id": str(n), "text": f"Review {n}."} for n in range(20_000)])
    job = start(tmp_path, "a.jsonl", "--output", "out", *FAST, "--max-model-len", "64", "--max-tokens", "2")
    try:
        wait_until(lambda: num_committed(tmp_path / "out") > 0, process=job)
        job.send_signal(signal.SIGTERM)  # as `ray job stop` does
        _, errors = job.communicate(timeout=60)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 143, errors
    assert "Traceback" not in errors
    ids = committed(tmp_path / "out")
    assert 0 < len(ids) == len(set(ids)) < 20_000
    assert not (tmp_path / "out" / "summaries.parquet").exists()
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["status"], manifest["rows"]["succeeded"]) == ("interrupted", len(ids))
    wait_until_gone(own_ray_folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "out"], "error: option 'model' is missing"),
        (["--output", "out", *FAST, "--max-num-seqs", "0"], "error: option 'max_num_seqs' is 0"),
        (["--output", "done", *FAST], "holds 'summaries.parquet' and no manifest.json of a job"),
    ],
)
def test_wrong_usage_is_told_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "summaries.parquet").touch()
    monkeypatch.setattr(ray, "init", pytest.fail)
    result = CliRunner().invoke(app, ["job", "summarize", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
