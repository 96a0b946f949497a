"""Lines of a batch file as rows of a job, and back."""

import json
from pathlib import Path

import pytest

from rayspec.batch.batch_task import answered, read_requests, write_answers
from rayspec.batch.documents import input_row
from rayspec.batch.rows import Row
from rayspec.command.locations import Location
from rayspec.openai.batch import BatchLine
from rayspec.types import ConfigError


def test_a_file_that_cannot_be_read_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.jsonl"):
        read_requests(str(tmp_path / "no.jsonl"))


def test_answers_and_failures_go_to_their_files(tmp_path: Path) -> None:
    asked = input_row("x", source="x", text=json.dumps({"custom_id": "c"}))
    line = BatchLine(digest="d", custom_id="a", url="/v1/completions", model=None, text=b"{}")
    usage = {"usage": {"prompt_tokens": 5, "completion_tokens": 7}}
    good = answered(asked, line.result(200, json.dumps(usage).encode()))
    bad = answered(asked, line.result(400, b'{"error": {"code": null, "type": "invalid_request_error"}}'))
    gone = Row(id="x", finish_reason="error", error_kind="stage_lost", error="gone")
    assert (good.num_prompt_tokens, good.num_output_tokens, good.finish_reason, good.error_kind) == (5, 7, "stop", None)
    assert (bad.num_prompt_tokens, bad.finish_reason, bad.error_kind) == (0, "error", "invalid_request_error")
    write_answers([asked], lambda: iter([bad, good, gone]), Location.parse(str(tmp_path)))
    (answer,) = (tmp_path / "output.jsonl").read_text(encoding="utf-8").splitlines()
    failure, unanswered = (tmp_path / "errors.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(answer)["response"]["body"] == usage
    assert json.loads(failure)["response"]["status_code"] == 400
    result = json.loads(unanswered)
    assert (result["custom_id"], result["response"], result["error"]["code"]) == ("c", None, "stage_lost")
