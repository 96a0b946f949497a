"""A job submitted to a cluster of its own, through Ray's Jobs API, with its token."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
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
# Ten kinds. Chats are refused by the template below, and a prompt of 451 tokens by the cache of 400.
BROKEN = {
    "malformed_row": b'{"id": "broken", ',
    "not_utf8": b'{"id": "latin", "prompt": "caf\xe9"}',
    "missing_column": b'{"id": "none", "body": "text"}',
    "invalid_value": b'{"id": "null", "prompt": null}',
    "duplicate_id": b'{"id": "report-0-0", "prompt": "again"}',
    "prompt_too_long": json.dumps({"id": "long", "prompt": "word " * 3000}).encode(),
    "out_of_memory": json.dumps({"id": "large", "prompt": "word " * 150}).encode(),
    "invalid_messages": json.dumps({"id": "chat", "messages": [{"role": "system", "content": "Be brief."}]}).encode(),
}
BROKEN_FILES = {"empty_file": b"", "unreadable_file": b"no parquet"}
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('there is no system role') }}{% endif %}"

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.exhaustive]


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


def write_prompts(folder: Path) -> None:
    """200 rows, ten of them broken, in ten ways."""
    reports = demo.sample_documents(150, num_sentences=4)
    texts = [{"id": sample.id, "prompt": sample.text} for sample in reports]
    texts += [{"id": name, "prompt": text[:400]} for name, text in sorted(topics.items())[:40]]
    lines = [*(json.dumps(row).encode() for row in texts), *BROKEN.values()]
    (folder / "prompts.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    (folder / "empty.txt").write_bytes(BROKEN_FILES["empty_file"])
    (folder / "wrong.parquet").write_bytes(BROKEN_FILES["unreadable_file"])


def strict_model(folder: Path) -> Path:
    """The bundled model, with a chat template that refuses system messages, as that of many models does."""
    model = Path(shutil.copytree(demo.model_path(), folder / "model"))
    template = model / "chat_template.jinja"
    template.write_text(NO_SYSTEM + template.read_text(encoding="utf-8"), encoding="utf-8")
    return model


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


def test_two_hundred_rows_through_the_jobs_api(tmp_path: Path, cluster: dict[str, str]) -> None:
    with pytest.raises(HTTPError, match="401"):
        urlopen(f"http://{cluster['url']}/api/version")
    prompts, output = tmp_path / "prompts", tmp_path / "out"
    prompts.mkdir()
    write_prompts(prompts)
    client = JobSubmissionClient(f"http://{cluster['url']}", headers={"Authorization": f"Bearer {cluster['token']}"})
    options = (
        f"--model {strict_model(tmp_path)} --dtype float32 --device cpu --num-threads 1 --strategy ar "
        "--max-model-len 512 --kv-cache-tokens 400 --max-tokens 4"
    )
    job_id = submit(client, f"{sys.executable} {ROOT}/jobs/generate.py {prompts} --output {output} {options}")
    deadline = time.monotonic() + PATIENCE_S
    while client.get_job_status(job_id) not in ENDED and time.monotonic() < deadline:
        time.sleep(0.5)
    info, log = client.get_job_info(job_id), client.get_job_logs(job_id)
    assert (info.status, info.driver_exit_code) == (JobStatus.FAILED, 3), log
    assert f"{NUM_ROWS} rows, 10 failed" in log
    assert "\x1b" not in log
    rows = pq.read_table(output / "texts.parquet").to_pylist()
    kinds = Counter(row["error_kind"] for row in rows)
    assert kinds.pop(None) == NUM_ROWS - 10
    assert kinds == dict.fromkeys([*BROKEN, *BROKEN_FILES], 1)
    assert len(kinds) == 10
    assert json.loads((output / "manifest.json").read_text(encoding="utf-8"))["rows"]["failed"] == kinds
