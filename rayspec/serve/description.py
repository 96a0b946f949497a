"""The endpoint's OpenAPI document. FastAPI does not know the bodies: the routes read and write them themselves."""

from __future__ import annotations

import json
from html import escape
from typing import Any, Literal

import msgspec
import pydantic
from fastapi import FastAPI
from fastapi.responses import HTMLResponse

_SCHEMAS = "#/components/schemas/"
_EVENT = {
    "type": "object",
    "description": "each server-sent event, with stream: true",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
_STYLE = "body{font:15px system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}td{padding-right:1rem}"
Responses = dict[int | str, dict[str, Any]]
PAGE_HEADERS = {"x-content-type-options": "nosniff", "content-security-policy": "frame-ancestors 'none'"}


class ErrorDetail(pydantic.BaseModel):
    """An error. code: a stable identifier. param: dotted path of the field at fault."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str


class ErrorBody(pydantic.BaseModel):
    """Body of every error response, on every route."""

    error: ErrorDetail


ERRORS: Responses = {"default": {"model": ErrorBody, "description": "An error. `code` says which."}}


class Description:
    """Makes the options of routes, and keeps the schemas that they refer to."""

    def __init__(self) -> None:
        self._schemas: dict[str, Any] = {}

    def answers(self, model: Any, *, streamed: bool = False) -> Responses:
        """Return the `responses` of a route that answers with a `model` body or, if `streamed`, events on request."""
        (schema,), found = msgspec.json.schema_components([model], ref_template=_SCHEMAS + "{name}")
        self._schemas |= found
        content: dict[str, Any] = {"application/json": {"schema": schema}}
        events = {"text/event-stream": {"schema": _EVENT}} if streamed else {}
        return {200: {"description": "The answer.", "content": content | events}}

    def takes(self, request: type[pydantic.BaseModel], answer: Any, *, streamed: bool = False) -> dict[str, Any]:
        """Return the options of a route that parses a `request` body itself."""
        schema = request.model_json_schema(ref_template=_SCHEMAS + "{model}")
        self._schemas |= schema.pop("$defs", {}) | {request.__name__: schema}
        body = {"required": True, "content": {"application/json": {"schema": {"$ref": _SCHEMAS + request.__name__}}}}
        return {"responses": self.answers(answer, streamed=streamed), "openapi_extra": {"requestBody": body}}

    def install(self, app: FastAPI, *, open_paths: frozenset[str], has_keys: bool) -> None:
        """Make the application, which has all its routes, serve the document. open_paths: paths that need no key."""
        document = app.openapi()
        components: dict[str, Any] = document.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        schemas |= self._schemas
        for path, operations in document["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)  # FastAPI adds it for path parameters, but any text is valid
                if path in open_paths:
                    operation["security"] = []
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        if has_keys:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
        app.openapi = lambda: document  # type: ignore[method-assign]  # its own would be made anew for each new route
        page = HTMLResponse(_page(document), headers=PAGE_HEADERS)
        app.add_api_route("/docs", lambda: page, include_in_schema=False)


def _page(document: dict[str, Any]) -> str:
    """Return the document as a page that needs no script and no network."""
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>API</title><style>{_STYLE}</style>"]
    parts.append(f"<h1>{escape(document['info']['title'])} {escape(document['info']['version'])}</h1>")
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            contents = [operation.get("requestBody", {}), operation["responses"].get("200", {})]
            types = [[_type(one.get("schema", {})) for one in each.get("content", {}).values()] for each in contents]
            told = " &rarr; ".join(" or ".join(names) for names in types)
            parts.append(f"<p><code>{method.upper()} {escape(path)}</code> {told}</p>")
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts.append(f'<h2 id="{name}">{name}</h2><p>{escape(schema.get("description", ""))}</p><table>')
        for field, value in schema.get("properties", {}).items():
            default = "required" if field in schema.get("required", ()) else json.dumps(value.get("default"))
            parts.append(f"<tr><td><code>{escape(field)}</code><td>{_type(value)}<td>{escape(default)}")
        parts.append("</table>")
    return "".join(parts)


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_SCHEMAS)
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(map(_type, schema["anyOf"])))
    known = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if known is not None:
        return escape(" | ".join(map(json.dumps, known)))
    return f"list of {_type(schema['items'])}" if "items" in schema else escape(str(schema.get("type", "any")))
