"""Files and batches over HTTP with OpenAI's own client, and what happens when a process is lost in the middle."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.serve.conftest import MAX_FILE_BYTES, MAX_LINES
from tests.serve.endpoint_process import ENGINE, EndpointProcess, begun, client_of, ended, line_of, serving
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

KEY = "correct-horse"
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def client(demo_endpoint: EndpointProcess) -> openai.OpenAI:
    return client_of(demo_endpoint)


def rows_of(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def answered(client: openai.OpenAI, batch: Any) -> dict[str, str]:
    """The texts by custom_id. Each is there once."""
    rows = rows_of(client, batch.output_file_id)
    texts = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows}
    assert len(texts) == len(rows)
    return texts


def counts(batch: Any) -> tuple[int, int, int]:
    return batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed


def test_a_batch_of_200_requests(client: openai.OpenAI) -> None:
    names = [f"request {number}" for number in range(200)]
    faulty = [line_of("no such model", model="absent"), line_of("too cold", temperature=-1), line_of("b", stream=True)]
    batch = begun(client, [*map(line_of, names), *faulty], metadata={"for": "test"})
    assert batch.status == "validating"
    # Interactive requests are answered meanwhile.
    assert client.completions.create(model="demo", prompt="The", max_tokens=4).choices[0].text
    batch = ended(client, batch)
    assert (batch.status, counts(batch), batch.metadata) == ("completed", (203, 200, 3), {"for": "test"})
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    texts = answered(client, batch)
    assert set(texts) == set(names)
    for name in names[:3]:
        alone = client.completions.create(model="demo", prompt=f"The agency {name}", max_tokens=4, temperature=0)
        assert texts[name] == alone.choices[0].text
    errors = {row["custom_id"]: row["response"] for row in rows_of(client, batch.error_file_id)}
    statuses = {name: one["status_code"] for name, one in errors.items()}
    assert statuses == {"no such model": 404, "too cold": 400, "b": 400}
    output = client.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.bytes) == ("batch_output", len(client.files.content(output.id).content))
    assert client.batches.list(limit=1).data[0].id == batch.id


def test_the_guide_runs_and_prints_what_it_says(demo_endpoint: EndpointProcess, tmp_path: Path) -> None:
    guide = Path(__file__).parents[2] / "docs/guides/batches_api.md"
    code = re.search(r"```python\n(.*?)```", guide.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    script = code[1].replace("http://127.0.0.1:8000", demo_endpoint.url)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("completed BatchRequestCounts(completed=2, failed=0, total=2)\n{")


def test_a_batch_with_bad_lines_fails_and_says_which(client: openai.OpenAI) -> None:
    chat = line_of("c", url="/v1/chat/completions")
    batch = ended(client, begun(client, [line_of("a"), b"{not json\n", line_of("a"), chat]))
    assert batch.status == "failed"
    found = [(one.line, one.code) for one in batch.errors.data]
    assert found == [(2, "invalid_json"), (3, "duplicate_custom_id"), (None, "mismatched_endpoint")]
    assert batch.output_file_id is batch.error_file_id is None
    assert ended(client, begun(client, [b"\n"])).errors.data[0].code == "empty_file"
    many = ended(client, begun(client, [line_of(str(number)) for number in range(MAX_LINES + 1)]))
    assert many.errors.data[0].code == "too_many_lines"


LONG = [line_of(f"long {number}", max_tokens=400, ignore_eos=True) for number in range(120)]


def test_a_cancelled_batch_keeps_what_it_has(client: openai.OpenAI, demo_endpoint: EndpointProcess) -> None:
    batch = begun(client, LONG)
    wait_until(lambda: counts(client.batches.retrieve(batch.id))[1] > 0, TIMEOUT_S)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch)
    total, completed, _ = counts(batch)
    assert (batch.status, total) == ("cancelled", len(LONG))
    assert 0 < completed < total
    assert batch.cancelling_at <= batch.cancelled_at
    assert len(answered(client, batch)) == completed
    codes = [row["error"]["code"] for row in rows_of(client, batch.error_file_id)]
    assert codes == ["batch_cancelled"] * (total - completed)
    wait_until(demo_endpoint.is_idle)
    with pytest.raises(openai.ConflictError, match="is cancelled"):
        client.batches.cancel(batch.id)


def test_a_batch_whose_window_ends_expires(client: openai.OpenAI) -> None:
    batch = ended(client, begun(client, LONG, window="2s"))
    total, completed, _ = counts(batch)
    assert (batch.status, batch.expires_at) == ("expired", batch.created_at + 2)
    codes = [row["error"]["code"] for row in rows_of(client, batch.error_file_id)]
    assert codes == ["batch_expired"] * (total - completed)


def test_files(client: openai.OpenAI) -> None:
    content = line_of("naïve ✓") * 3
    files = [client.files.create(file=(f"../{n}/näme {n}.jsonl", content), purpose="batch") for n in range(3)]
    assert [one.filename for one in files] == [f"näme {n}.jsonl" for n in range(3)]
    assert {one.bytes for one in files} == {len(content)}
    assert client.files.content(files[0].id).content == content
    listed = client.files.list(limit=2, purpose="batch")
    assert [one.id for one in listed.data] == [files[2].id, files[1].id]
    assert files[0].id in [one.id for one in listed.get_next_page().data]
    assert client.files.delete(files[1].id).deleted
    for gone in (files[1].id, "file-" + "0" * 32, "../../etc/passwd", "batch_" + "0" * 32):
        for act in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                act(gone)
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id=files[1].id, endpoint="/v1/completions", completion_window="24h")
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve(files[0].id)


def test_what_is_refused(client: openai.OpenAI, demo_endpoint: EndpointProcess) -> None:
    file = client.files.create(file=("a.jsonl", line_of("a")), purpose="batch")
    create: Any = client.batches.create
    asked = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    for wrong in ({"completion_window": "soon"}, {"endpoint": "/v1/embeddings"}, {"metadata": {"k": "v" * 600}}):
        with pytest.raises(openai.BadRequestError) as caught:
            create(**asked | wrong)
        assert caught.value.param == next(iter(wrong))
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("a.jsonl", b"x"), purpose="vision")
    with pytest.raises(openai.APIStatusError, match=f"more than {MAX_FILE_BYTES} bytes"):
        client.files.create(file=("a.jsonl", b"x" * (MAX_FILE_BYTES + 1)), purpose="batch")
    for content_type, status in (("application/json", 415), ("multipart/form-data; boundary=b", 400)):
        answer = httpx2.post(f"{demo_endpoint.url}/v1/files", content=b"{}", headers={"content-type": content_type})
        assert (answer.status_code, set(answer.json())) == (status, {"error"})
    page = {"origin": "https://other.example"}
    response = httpx2.delete(f"{demo_endpoint.url}/v1/files/{file.id}", headers=page)
    assert response.json()["error"]["code"] == "origin_not_allowed"


def own_endpoint(folder: Path) -> AbstractContextManager[EndpointProcess]:
    options = {"batches": str(folder / "kept"), "api_keys": [KEY], "engine_timeout_s": 30.0}
    engine = {**ENGINE, "speculation": {"strategy": "ar"}}
    return serving(folder, {**os.environ, "OMP_NUM_THREADS": "1"}, engine, **options)


@pytest.mark.exhaustive
def test_killed_parts_and_a_restarted_endpoint_go_on(ray_environment: None, tmp_path: Path) -> None:
    names = [f"request {number}" for number in range(150)]
    titles = ("ray::ServeReplica:rayspec:Model", "ray::ServeReplica:rayspec-batches")
    with own_endpoint(tmp_path) as first:
        client = client_of(first, KEY)
        batch = begun(client, [line_of(name, max_tokens=20, ignore_eos=True) for name in names])
        for num_done, title in zip((5, 30), titles, strict=True):
            wait_until(lambda most=num_done: counts(client.batches.retrieve(batch.id))[1] > most, TIMEOUT_S)  # type: ignore[misc]
            for pid in first.pids(title):
                os.kill(pid, signal.SIGKILL)
        assert counts(client.batches.retrieve(batch.id))[1] < len(names)
    with own_endpoint(tmp_path) as second:  # the first has ended by SIGTERM
        client = client_of(second, KEY)
        batch = ended(client, batch)
        assert (batch.status, counts(batch)) == ("completed", (150, 150, 0))
        assert set(answered(client, batch)) == set(names)
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").files.content(batch.input_file_id)
