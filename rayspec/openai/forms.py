"""The form that a body asks its output to have: OpenAI's `response_format`, and the fields of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayspec.errors import ConfigError, GrammarError, RequestError
from rayspec.openai.errors import InvalidRequestError, invalid
from rayspec.structured import FORMS, StructuredOutputsParams

# vLLM's older fields, each with its name in `structured_outputs`.
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_whitespace_pattern": "whitespace_pattern",
}
_SCHEMA_FIELDS = {"name", "description", "schema", "strict"}


def asked_form(body: Mapping[str, Any]) -> tuple[str, StructuredOutputsParams] | None:
    """Return the form that a body asks for, and the field that has it; None for any text. body: the fields that are
    given. Raises PydanticCustomError, which names the field."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    if "response_format" in body and (one := _response_format(body["response_format"])) is not None:
        found.append(one)
    if "structured_outputs" in body:
        found.append(("structured_outputs", body["structured_outputs"]))
    if guided := {name: body[field] for field, name in GUIDED.items() if field in body}:
        found.append((next(field for field in GUIDED if field in body), guided))
    if len(found) > 1:
        raise invalid(found[1][0], f"{found[0][0]} is set, too: give one of them")
    for field, values in found:
        try:
            form = StructuredOutputsParams.of(values)
        except ConfigError as error:
            raise invalid(field, str(error).removeprefix("structured_outputs: ")) from None
        name = next(name for name in FORMS if getattr(form, name) is not None)
        return f"{field}.{name}" if field == "structured_outputs" else field, form
    return None


def refusal(error: GrammarError, asked: tuple[str, StructuredOutputsParams] | None) -> RequestError:
    """Return the error of a form that cannot be compiled, or kept, by the name that the body has for it."""
    if asked is None:
        return error
    place = str(error).removeprefix("structured_outputs")
    for name in FORMS:
        place = place.removeprefix(f".{name}")
    return InvalidRequestError(f"{asked[0]}{place}", param=asked[0], code="invalid_value")


def _response_format(value: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    kind = value.get("type")
    known = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    if kind not in ("text", "json_object", "json_schema"):
        raise invalid("response_format.type", "it must be 'text', 'json_object' or 'json_schema'")
    if unknown := [name for name in value if name not in known]:
        raise invalid(f"response_format.{unknown[0]}", "unknown field; leave it out")
    if kind != "json_schema":
        return None if kind == "text" else ("response_format", {"json_object": True})
    inner = value.get("json_schema")
    if not isinstance(inner, Mapping) or not isinstance(inner.get("schema"), Mapping):
        raise invalid("response_format.json_schema", 'it must be an object with a "schema", which is an object')
    if unknown := [name for name in inner if name not in _SCHEMA_FIELDS]:
        raise invalid(f"response_format.json_schema.{unknown[0]}", "unknown field; leave it out")
    return "response_format.json_schema.schema", {"json": inner["schema"]}
