"""Errors as HTTP tells them, and JSON that is none."""

import openai.types as official
import pytest

from rayspec.decode.engine_loop import EngineDeadError
from rayspec.decode.stages import StageLostError
from rayspec.openai.protocol import ApiError, InvalidRequestError, parse_json
from rayspec.types import OutOfMemoryError, PromptTooLongError, RayspecError


@pytest.mark.parametrize(
    "content", [b'{"a": "\\ud83d"}', b"\xff", b'{"a": NaN}', b'{"a": 1', b"{} {}", b"[" * 100_000, b""]
)
def test_what_is_not_json_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        parse_json(content)


def test_a_key_that_stands_twice_is_refused_by_its_name() -> None:
    for content in (
        b'{"a": 1, "a": 1}',
        b'{"b": [{"a": ":", "a": {}}]}',
        b'{"b": "\\":", "c": [0, {"a": 1, "\\u0061": 2}]}',
    ):
        with pytest.raises(InvalidRequestError, match="a: it stands twice in one object"):
            parse_json(content)
    assert parse_json(b'{"a": {"a": ":\\\\"}, "b": [{"a": 1}, {"a": 2}]}') == {
        "a": {"a": ":\\"},
        "b": [{"a": 1}, {"a": 2}],
    }


@pytest.mark.parametrize("sign", [b"{", b","])
def test_many_parts_are_refused_but_not_in_a_text(sign: bytes) -> None:
    assert len(parse_json(b'"' + 2_100_000 * sign + b'"')) == 2_100_000
    with pytest.raises(InvalidRequestError, match="split the request"):
        parse_json(b"[" + 2_100_000 * (b"0" + sign) + b"0]")


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (PromptTooLongError("long"), 400, "invalid_request_error", "context_length_exceeded"),
        (
            InvalidRequestError("who", code="model_not_found", status=404),
            404,
            "invalid_request_error",
            "model_not_found",
        ),
        (InvalidRequestError("later", code="busy", status=429), 429, "server_error", "busy"),
        (OutOfMemoryError("full"), 500, "server_error", "out_of_memory"),
        (EngineDeadError("at /secret/place"), 503, "server_error", "engine_dead"),
        (StageLostError("at 10.0.0.1"), 503, "server_error", "stage_lost"),
    ],
)
def test_errors_have_a_status_and_a_code(error: RayspecError, status: int, kind: str, code: str) -> None:
    told = ApiError.of(error)
    body = official.ErrorObject.model_validate(told.body["error"])
    assert (told.status, body.type, body.code) == (status, kind, code)
    assert not body.model_extra
    assert (str(error) in body.message) == (status < 503)


def test_what_was_sent_comes_back_only_in_part() -> None:
    told = ApiError.of(InvalidRequestError("x" * 10**6, param="y" * 10**6))
    assert told.message.startswith("xxx")
    assert told.message.endswith("x...")
    assert len(told.message) == len(told.param or "") == 1000
