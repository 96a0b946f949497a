"""Whatever is sent, the answer is one that the document describes, comes soon, and leaves the endpoint well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.serve.endpoint_process import EndpointProcess

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ANSWER_S = 30.0
JSON = {"content-type": "application/json"}
BOUNDED = settings(
    max_examples=settings.default.max_examples // 4, database=None, suppress_health_check=list(HealthCheck)
)
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "short", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/completions": {"model": "short", "prompt": "a", "max_tokens": 2},
    "/tokenize": {"model": "short", "prompt": "a"},
    "/detokenize": {"model": "short", "tokens": [5]},
}
WITH_BODY = [*(f"POST {path}" for path in VALID), "POST /v1/files", "POST /v1/batches"]
OPERATIONS = [
    *WITH_BODY,
    "GET /v1/files",
    "GET /v1/files/{file_id}",
    "GET /v1/files/{file_id}/content",
    "DELETE /v1/files/{file_id}",
    "GET /v1/batches",
    "GET /v1/batches/{batch_id}",
    "DELETE /v1/batches/{batch_id}",
    "POST /v1/batches/{batch_id}/cancel",
    "GET /v1/models",
    "GET /v1/models/{model}",
    "GET /health",
    "GET /status",
    "GET /metrics",
]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def http(demo_endpoint: EndpointProcess) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=demo_endpoint.url, timeout=ANSWER_S, headers=JSON) as client:
        yield client
        for body in ({"model": "short", "prompt": "The"}, {"model": "demo", "prompt": "The", "max_tokens": 4}):
            assert client.post("/v1/completions", json=body).status_code == 200
        assert client.get("/health").status_code == 200
        assert demo_endpoint.is_idle("short")
        assert demo_endpoint.is_idle("demo")


@pytest.fixture(scope="module")
def document(demo_endpoint: EndpointProcess) -> Any:
    return schemathesis.openapi.from_url(f"{demo_endpoint.url}/openapi.json")


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_document_holds(document: Any, operation: str, mode: GenerationMode) -> None:
    """What the document cannot say (that a prompt must fit the context) makes an answer a 400, so those checks that
    go by the request alone are left out."""
    method, path = operation.split()

    @BOUNDED
    @given(case=document[path][method].as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            _keep_short(case.body)
        response = case.call(timeout=ANSWER_S)
        case.validate_response(response, checks=CHECKS)
        assert_tells_nothing(response.text)

    try:
        check()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE  # nothing can be wrong with it
        assert operation not in WITH_BODY


def test_every_operation_is_tried(demo_endpoint: EndpointProcess) -> None:
    paths = httpx2.get(f"{demo_endpoint.url}/openapi.json").json()["paths"]
    assert {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods} == set(OPERATIONS)


def _keep_short(body: dict[str, Any]) -> None:
    if isinstance(body.get("model"), str):
        body["model"] = "short"
    for name, most in (("n", 4), ("prompt", 4)):
        if isinstance(body.get(name), list):
            body[name] = body[name][:most]
        elif isinstance(body.get(name), int) and body[name] > most:
            body[name] = most


def test_strange_headers(http: httpx2.Client) -> None:
    names = ("authorization", "x-request-id", "content-type", "accept", "transfer-encodin", "traceparent")
    for name in (*names, "content-encoding", "origin", "range", "if-range", "expect"):
        for value in (b"", b"a" * 5000, b"\xff\xfe", b"Bearer " + b"\xe4" * 100):
            response = http.post("/v1/completions", json=VALID["/v1/completions"], headers={name.encode(): value})
            assert response.status_code < 500


def assert_tells_nothing(text: str) -> None:
    """Of the inside."""
    assert "Traceback" not in text
    assert ".py" not in text
