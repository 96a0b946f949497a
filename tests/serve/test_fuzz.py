"""Whatever is sent, the answer is one that the document describes, and comes soon."""

from typing import Any

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

from rayspec.serve.ingress import build_app
from tests.exhaustive import few_of
from tests.serve.endpoint_process import EndpointProcess
from tests.serve.test_ingress import ingress_of

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ANSWER_S = 120.0
LIMITS = {
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
BOUNDED = settings(
    max_examples=settings.default.max_examples // 4, database=None, suppress_health_check=list(HealthCheck)
)
PATHS: dict[str, dict[str, Any]] = build_app(ingress_of()).openapi()["paths"]
OPERATIONS = [(method.upper(), path) for path, methods in PATHS.items() for method in methods]
CASES = [(*operation, mode) for operation in OPERATIONS for mode in GenerationMode]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def document(demo_endpoint: EndpointProcess) -> Any:
    return schemathesis.openapi.from_url(f"{demo_endpoint.url}/openapi.json")


@pytest.mark.parametrize(("method", "path", "mode"), few_of(CASES, [case for case in CASES if case[0] == "POST"]))
def test_the_document_holds(document: Any, method: str, path: str, mode: GenerationMode) -> None:
    """What the document cannot say (that a prompt must fit the context) makes an answer a 400, so those checks that
    go by the request alone are left out."""

    @BOUNDED
    @given(case=document[path][method].as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            _keep_short(case.body, path)
        response = case.call(timeout=ANSWER_S)
        case.validate_response(response, checks=CHECKS)
        assert "Traceback" not in response.text
        assert ".py" not in response.text

    try:
        check()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE  # nothing can be wrong with it
        assert "requestBody" not in PATHS[path][method.lower()]


def _keep_short(body: dict[str, Any], path: str) -> None:
    if isinstance(body.get("model"), str):
        body["model"] = "demo"
    limit = LIMITS.get(path, "")
    if limit and body.get(limit) is None:
        body[limit] = 8
    for name, most in (("n", 4), ("prompt", 4), (limit, 8)):
        if isinstance(body.get(name), list):
            body[name] = body[name][:most]
        elif isinstance(body.get(name), int) and body[name] > most:
            body[name] = most
