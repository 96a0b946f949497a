"""An OpenAI batch file through the job; the official types read what comes out."""

import json
from pathlib import Path
from typing import Any

import openai.types as official
import openai.types.chat as official_chat
import pytest
from openai.types.responses import Response
from typer.testing import CliRunner

from rayspec.cli import app
from tests.jobs.job_process import FAST

NUM_GOOD = 45

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def request(number: int, **changes: Any) -> dict[str, Any]:
    """Chats, plain prompts and inputs of the Responses API by turns."""
    text = f"The annual review number {number}."
    url, own = (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 3}),
        ("/v1/completions", {"prompt": text, "max_tokens": 3}),
        ("/v1/responses", {"input": text, "max_output_tokens": 3}),
    )[number % 3]
    body = {"model": "demo", "temperature": 0, **own}
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body} | changes


BAD: tuple[object, ...] = (
    b"no json",
    request(0),  # a second one of this custom_id
    request(101, url="/v1/embeddings"),
    request(102, body={"model": "another", "messages": [{"role": "user", "content": "x"}]}),
    request(103, body={"model": "demo", "prompt": "x", "max_tokens": -1}),
)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_fifty_lines_of_which_five_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [request(number) for number in range(NUM_GOOD)]
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in (*rows, *BAD)]
    (tmp_path / "batch.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    arguments = ["batch.jsonl", "--output", "out", *FAST, "--max-model-len", "128"]
    result = CliRunner().invoke(app, ["job", "openai-batch", *arguments])
    assert result.exit_code == 3, result.output
    assert "50 rows, 5 failed (" in result.output

    answers, failures = read_lines(tmp_path / "out" / "output.jsonl"), read_lines(tmp_path / "out" / "errors.jsonl")
    assert {line["custom_id"] for line in answers} == {f"r{number}" for number in range(NUM_GOOD)}
    for line in answers:
        assert line["response"]["status_code"] == 200
        kind = (official_chat.ChatCompletion, official.Completion, Response)[int(line["custom_id"][1:]) % 3]
        usage: Any = kind.model_validate(line["response"]["body"], strict=kind is not Response).usage
        assert 0 < (usage.output_tokens if kind is Response else usage.completion_tokens) <= 3
    assert sorted(str(line["custom_id"]) for line in failures) == ["None", "r0", "r101", "r102", "r103"]
    for line in failures:
        if line["error"] is not None:
            official.BatchError.model_validate(line["error"], strict=True)
        else:
            official.ErrorObject.model_validate(line["response"]["body"]["error"], strict=True)

    before = (tmp_path / "out" / "output.jsonl").read_bytes()
    again = CliRunner().invoke(app, ["job", "openai-batch", *arguments])
    assert again.exit_code == 3
    assert "50 rows (47 of an earlier run), 5 failed (" in again.output
    assert (tmp_path / "out" / "output.jsonl").read_bytes() == before
