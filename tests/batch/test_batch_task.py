"""Lines of a batch file as rows of a job, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rayspec.batch.batch_task import BatchFiles, BatchTask, answered, read_requests
from rayspec.batch.documents import input_row
from rayspec.batch.rows import Row
from rayspec.command.locations import Location
from rayspec.command.settings import make_settings
from rayspec.openai.batch import BatchLine
from rayspec.types import ConfigError


def line_of(custom_id: str) -> bytes:
    body = {"model": "demo", "prompt": "x"}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}).encode()


def task(**options: Any) -> BatchTask:
    return BatchTask(settings=make_settings(flags={"model": "demo", "max_model_len": 64} | options), served="demo")


def test_a_file_becomes_documents_and_rows_that_failed_with_ids_that_stay(tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_bytes(b"\n".join([line_of("a"), b"no json", line_of("b"), line_of("a")]))
    documents, refused = read_requests(str(path))
    lines = [BatchLine(**json.loads(document.document or "")) for document in documents]
    assert [line.custom_id for line in lines] == ["a", "b"]
    assert [document.id for document in documents] == [line.result(200, {}).id for line in lines]
    assert [(row.error_kind, row.num_output_tokens) for row in refused] == [
        ("invalid_json", 0), ("duplicate_custom_id", 0)
    ]  # fmt: skip
    assert len({*(document.id for document in documents), *(row.id for row in refused)}) == 4
    assert read_requests(str(path)) == (documents, refused)


def test_a_file_that_cannot_be_read_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.jsonl"):
        read_requests(str(tmp_path / "no.jsonl"))


def test_answers_and_failures_go_to_their_files(tmp_path: Path) -> None:
    asked = input_row("x", source="x", text=json.dumps({"custom_id": "c"}))
    line = BatchLine(digest="d", custom_id="a", url="/v1/completions", model=None, text="{}")
    usage = {"usage": {"prompt_tokens": 5, "completion_tokens": 7}}
    good = answered(asked, line.result(200, usage))
    bad = answered(asked, line.result(400, {"error": {"code": None, "type": "invalid_request_error"}}))
    gone = Row(id="x", finish_reason="error", error_kind="stage_lost", error="gone")
    assert (good.num_prompt_tokens, good.num_output_tokens, good.finish_reason, good.error_kind) == (5, 7, "stop", None)
    assert (bad.num_prompt_tokens, bad.finish_reason, bad.error_kind) == (0, "error", "invalid_request_error")
    BatchFiles([asked])(lambda: iter([bad, good, gone]), Location.parse(str(tmp_path)))
    (answer,) = (tmp_path / "output.jsonl").read_text(encoding="utf-8").splitlines()
    failure, unanswered = (tmp_path / "errors.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(answer)["response"]["body"] == usage
    assert json.loads(failure)["response"]["status_code"] == 400
    result = json.loads(unanswered)
    assert (result["custom_id"], result["response"], result["error"]["code"]) == ("c", None, "stage_lost")


def test_what_decides_the_answers_is_the_identity() -> None:
    assert task().identity == task(strategy="ar", max_num_seqs=2, num_threads=1).identity
    assert task().identity != task(max_model_len=128).identity
    assert task().identity != task(verification="rejection").identity
    json.dumps(task().identity)
