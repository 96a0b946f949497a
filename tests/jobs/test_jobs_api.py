"""A job submitted to a cluster of its own, through Ray's Jobs API, with its token."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pyarrow.parquet as pq
import pytest
from ray.job_submission import JobStatus, JobSubmissionClient

from rayspec import demo

ROOT = Path(__file__).parent.parent.parent
NUM_ROWS = 200
PATIENCE_S = 240.0
ENDED = {JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED}
BROKEN = {
    "malformed_row": b'{"id": "broken", ',
    "not_utf8": b'{"id": "latin", "text": "caf\xe9"}',
    "missing_column": b'{"id": "none", "body": "text"}',
    "invalid_value": b'{"id": "null", "text": null}',
    "duplicate_id": b'{"id": "report-0-0", "text": "again"}',
    "prompt_too_long": json.dumps({"id": "long", "text": "word " * 3000}).encode(),
}
BROKEN_FILES = {"empty_file": b"", "unreadable_file": b"no parquet"}

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def cluster(ray_environment: None) -> Iterator[dict[str, str]]:
    """Its url and token."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "jobs_api.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)},
    )
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, b"")
        yield json.loads(next(line for line in lines if line.startswith(b"{")))
    finally:
        process.communicate(timeout=60)


def write_documents(folder: Path) -> None:
    """200 rows, ten of them broken, in ten ways."""
    reports = demo.sample_documents(150, num_sentences=4)
    texts = [{"id": sample.id, "text": sample.text} for sample in reports]
    texts += [{"id": sample.id, "text": sample.text[:400]} for sample in demo.python_documents(40)]
    lines = [json.dumps(row).encode() for row in texts]
    lines += [*BROKEN.values(), b'{"id": [1], "text": "an id that is a list"}', b'["no", "object"]']
    (folder / "documents.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    (folder / "empty.txt").write_bytes(BROKEN_FILES["empty_file"])
    (folder / "wrong.parquet").write_bytes(BROKEN_FILES["unreadable_file"])


def submit(client: JobSubmissionClient, entrypoint: str) -> str:
    """Ray's agent comes up some seconds after the dashboard."""
    deadline = time.monotonic() + PATIENCE_S / 4
    while True:
        try:
            return client.submit_job(entrypoint=entrypoint)
        except RuntimeError as error:  # noqa: PERF203 - a few times
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def test_two_hundred_documents_through_the_jobs_api(tmp_path: Path, cluster: dict[str, str]) -> None:
    with pytest.raises(HTTPError, match="401"):
        urlopen(f"http://{cluster['url']}/api/version")
    documents, output = tmp_path / "documents", tmp_path / "out"
    documents.mkdir()
    write_documents(documents)
    client = JobSubmissionClient(f"http://{cluster['url']}", headers={"Authorization": f"Bearer {cluster['token']}"})
    options = (
        "--model demo --dtype float32 --device cpu --num-threads 1 --strategy ar --max-model-len 512 --max-tokens 4"
    )
    job_id = submit(client, f"{sys.executable} {ROOT}/jobs/summarize.py {documents} --output {output} {options}")
    deadline = time.monotonic() + PATIENCE_S
    while client.get_job_status(job_id) not in ENDED and time.monotonic() < deadline:
        time.sleep(0.5)
    info, log = client.get_job_info(job_id), client.get_job_logs(job_id)
    assert (info.status, info.driver_exit_code) == (JobStatus.FAILED, 3), log
    assert f"{NUM_ROWS} rows, 10 failed" in log
    assert "\x1b" not in log
    rows = pq.read_table(output / "summaries.parquet").to_pylist()
    kinds = Counter(row["error_kind"] for row in rows)
    assert kinds.pop(None) == NUM_ROWS - 10
    assert kinds == {**dict.fromkeys([*BROKEN, *BROKEN_FILES], 1), "malformed_row": 2, "invalid_value": 2}
    assert json.loads((output / "manifest.json").read_text(encoding="utf-8"))["rows"]["failed"] == kinds
