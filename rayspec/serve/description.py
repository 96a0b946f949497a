"""The endpoint's OpenAPI document. FastAPI does not know the bodies: the routes read and write them themselves."""

from __future__ import annotations

import json
from html import escape
from typing import Any, Literal

import msgspec
import pydantic
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse

_SCHEMAS = "#/components/schemas/"
_EVENT = {
    "type": "object",
    "description": "each server-sent event, with stream: true",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
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
        """Return the `responses` of a route that answers with a `model` body or, if `streamed`, with events on
        request."""
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
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
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
        app.openapi = lambda: document  # type: ignore[method-assign]
        page = HTMLResponse(_page(document), headers=PAGE_HEADERS)
        app.add_api_route("/docs", lambda: page, include_in_schema=False)


def _page(document: dict[str, Any]) -> str:
    """Return the document as a page that needs no script and no network."""
    parts = [f"<h1>{escape(document['info']['title'])} {escape(document['info']['version'])}</h1><ul>"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {}).values()
            taken = " and ".join(_type(one["schema"]) for one in content)
            answers = operation["responses"].get("200", {}).get("content", {}).items()
            given = " or ".join(
                kind if kind == "text/event-stream" else _type(one.get("schema", {})) for kind, one in answers
            )
            parts.append(f"<li><code>{method.upper()} {escape(path)}</code> {taken} &rarr; {given}</li>")
    parts.append("</ul>")
    for name, schema in sorted(document["components"]["schemas"].items()):
        note = escape(schema.get("description", "")).replace("\n", " ")
        parts.append(f'<h2 id="{name}">{name}</h2><p>{note}</p><table>')
        for field, value in schema.get("properties", {}).items():
            default = escape(json.dumps(value["default"])) if "default" in value else ""
            is_required = field in schema.get("required", ())
            row = (f"<code>{escape(field)}</code>", _type(value), "required" if is_required else default)
            parts.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>")
        parts.append("</table>")
    style = "body{font:15px system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}td{padding:0 1rem 0 0}"
    head = (
        f"<meta charset=utf-8><meta name=viewport content='width=device-width'><title>API</title><style>{style}</style>"
    )
    return f"<!doctype html><html lang=en>{head}{''.join(parts)}</html>"


def _type(schema: dict[str, Any]) -> str:
    """Return the type of a value as HTML."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_SCHEMAS)
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(map(_type, schema["anyOf"])))
    if "enum" in schema or "const" in schema:
        return escape(" | ".join(map(json.dumps, schema.get("enum", [schema.get("const")]))))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return escape(str(schema.get("type", "any")))
