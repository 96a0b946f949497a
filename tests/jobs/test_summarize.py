"""The job as a user runs it: in a process of its own, on a Ray that is there or on one that it starts and stops."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import ray
import yaml
from typer.testing import CliRunner

from jobs.summarize import app
from rayspec import demo

JOB = Path(__file__).parent.parent.parent / "jobs" / "summarize.py"
FAST = ("--model", "demo", "--dtype", "float32", "--device", "cpu", "--num-threads", "1", "--strategy", "ar")

pytestmark = pytest.mark.ray


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(JOB), *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def processes_of(folder: Path) -> list[str]:
    """Command lines of what still runs with files in `folder`."""
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            lines.append(line)
    return lines


def wait_until_gone(folder: Path, timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while processes_of(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes_of(folder)


@pytest.fixture
def own_ray_folder(tmp_path: Path, ray_folder: Path, ray_environment: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = ray_folder / tmp_path.name[-6:]
    folder.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    return folder


def test_documents_become_summaries_and_a_report(
    tmp_path: Path, ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    samples = demo.sample_documents(5, num_sentences=8)
    lines = [json.dumps({"id": sample.id, "body": sample.text}) for sample in samples]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "no json"]) + "\n", encoding="utf-8")
    (tmp_path / "long.txt").write_text("word " * 3000, encoding="utf-8")
    (tmp_path / "empty.txt").touch()
    arguments = (
        "*.*",
        "--output",
        "out",
        *FAST,
        "--max-model-len",
        "512",
        "--text-column",
        "body",
        "--max-tokens",
        "30",
    )
    job = start(tmp_path, *arguments)
    output, errors = job.communicate(timeout=120)
    assert job.returncode == 3, errors
    assert "8 rows, 3 failed" in output
    rows = {row["id"]: row for row in pq.read_table(tmp_path / "out" / "summaries.parquet").to_pylist()}
    assert {row["error_kind"] for row in rows.values()} == {None, "malformed_row", "prompt_too_long", "empty_file"}
    for sample in samples:
        assert rows[sample.id]["summary"].startswith("Review of the ")
        assert rows[sample.id]["num_output_tokens"] <= 30
    assert "prompt_too_long" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert (tmp_path / "out" / "skip-map.png").stat().st_size > 10_000
    saved = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text(encoding="utf-8"))
    assert (saved["model"], saved["max_model_len"]) == ("demo", 512)
    assert ray.is_initialized()


def test_a_job_that_is_stopped_leaves_the_rows_so_far(tmp_path: Path, own_ray_folder: Path) -> None:
    lines = [json.dumps({"id": str(n), "text": "The annual review."}) for n in range(20_000)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    job = start(tmp_path, "a.jsonl", "--output", "out", *FAST, "--max-model-len", "64", "--max-tokens", "2")
    try:
        partial = tmp_path / "out" / ".summaries.parquet.partial"
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and not (partial.exists() and partial.stat().st_size > 4):
            assert job.poll() is None, job.communicate()
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)  # as `ray job stop` does
        _, errors = job.communicate(timeout=60)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 143, errors
    assert "Traceback" not in errors
    table = pq.read_table(tmp_path / "out" / "summaries.parquet")
    assert 0 < table.num_rows < 20_000
    assert set(table["num_output_tokens"].to_pylist()) <= {1, 2}
    wait_until_gone(own_ray_folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "out"], "error: option 'model' is missing"),
        (["--output", "out", *FAST, "--max-num-seqs", "0"], "error: option 'max_num_seqs' is 0"),
        (["--output", "done", *FAST], "which exists: choose another name or pass --overwrite"),
    ],
)
def test_wrong_usage_is_told_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "summaries.parquet").touch()
    monkeypatch.setattr(ray, "init", pytest.fail)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.stderr
