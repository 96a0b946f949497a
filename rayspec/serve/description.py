"""The endpoint's OpenAPI document: request bodies from the models that read them, and the errors of each route."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import pydantic
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from rayspec.openai.batches import Batch, BatchList, BatchRequest, FileDeleted, FileList, FileObject
from rayspec.openai.requests import ChatRequest, CompletionRequest
from rayspec.openai.responses import ChatCompletion, Completion, ModelCard, ModelList
from rayspec.openai.tokenizing import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from rayspec.serve.status import EndpointStatus

_SCHEMAS = "#/components/schemas/"
_BODIES = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, BatchRequest)
_ANSWERS = (
    ChatCompletion,
    Completion,
    ModelCard,
    ModelList,
    TokenizeResponse,
    DetokenizeResponse,
    EndpointStatus,
    FileObject,
    FileList,
    FileDeleted,
    Batch,
    BatchList,
)
_EVENT = {
    "type": "object",
    "description": "each server-sent event, with stream: true",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
_EVENTS = {"text/event-stream": {"schema": _EVENT}}
_GENERATION_ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)
_MEANINGS = {
    400: "The request is at fault; `param` names the field.",
    401: "No valid API key.",
    403: "The host or the page's origin is not allowed.",
    404: "There is no such model, object or route.",
    408: "The body did not come in time.",
    409: "The object is not in a state for this.",
    413: "The body is too large.",
    415: "The body is not announced as JSON, or has an unknown encoding.",
    429: "Too many requests are waiting. Retry-After says when to try again.",
    500: "The server failed on this request.",
    503: "The model cannot serve now. Retry-After says when to try again.",
    504: "The answer took too long.",
}


class ErrorDetail(pydantic.BaseModel):
    """An error. code: a stable identifier. param: dotted path of the field at fault."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str


class ErrorBody(pydantic.BaseModel):
    """Body of every error response, on every route."""

    error: ErrorDetail


def answers(model: type, *, streamed: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route that answers with a `model` body or, if `streamed`, with events on request."""
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": _SCHEMAS + model.__name__}}}
    return {200: {"description": "The answer.", "content": content | (_EVENTS if streamed else {})}}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route for these error statuses."""
    return {status: {"model": ErrorBody, "description": _MEANINGS[status]} for status in statuses}


def generation(request: type[pydantic.BaseModel], answer: type, *, streamed: bool = False) -> dict[str, Any]:
    """Return the options of a route that parses a `request` body itself, and has a model answer it."""
    return _takes(request, answers(answer, streamed=streamed) | errors(*_GENERATION_ERRORS))


def takes(request: type[pydantic.BaseModel], answer: type, *statuses: int) -> dict[str, Any]:
    """Return the options of a route that parses a `request` body itself, and may fail with these statuses."""
    return _takes(request, answers(answer) | errors(*statuses))


def _takes(request: type[pydantic.BaseModel], responses: dict[int | str, dict[str, Any]]) -> dict[str, Any]:
    schema = {"$ref": _SCHEMAS + request.__name__}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"responses": responses, "openapi_extra": {"requestBody": body}}


def describe(app: FastAPI, *, open_paths: frozenset[str], has_keys: bool) -> None:
    """Make the application serve the complete OpenAPI document. open_paths: paths that need no key."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, open_paths, has_keys=has_keys)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI, open_paths: frozenset[str], *, has_keys: bool) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    components: dict[str, Any] = document.setdefault("components", {})
    models: Any = [(model, "validation") for model in _BODIES]
    _, definitions = models_json_schema(models, ref_template=_SCHEMAS + "{model}")
    _, answered = msgspec.json.schema_components(_ANSWERS, ref_template=_SCHEMAS + "{name}")
    components.setdefault("schemas", {}).update(definitions["$defs"] | answered)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI adds it for path parameters, but any text is valid
            if path in open_paths:
                operation["security"] = []
    if has_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    _drop_unused(components["schemas"], document)
    return document


def _drop_unused(schemas: dict[str, Any], document: Mapping[str, Any]) -> None:
    """Remove the schemas that FastAPI adds for the removed response 422."""
    for name in ("HTTPValidationError", "ValidationError"):
        if f'{_SCHEMAS}{name}"' not in str(document["paths"]):
            schemas.pop(name, None)
