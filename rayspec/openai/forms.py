"""What a body asks its output to be: a form (OpenAI's `response_format`, and the fields of vLLM), or calls of tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from rayspec.errors import ConfigError
from rayspec.openai.protocol import StrictBody, invalid
from rayspec.structured import FORMS, StructuredOutputsParams

# vLLM's older fields, each with its name in `structured_outputs`.
GUIDED = {
    f"guided_{name}": name for name in ("json", "regex", "choice", "grammar", "json_object", "whitespace_pattern")
}
MOST_TOOLS = 128  # as OpenAI's
_MOST_CHARACTERS = 1 << 17
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


def schema_beside_tools(form: StructuredOutputsParams) -> dict[str, Any] | None:
    """Return the JSON schema of a form that outputs without calls may have; None for other forms."""
    if form == StructuredOutputsParams(json_object=True):
        return {"type": "object"}
    is_plain = form.json is not None and form == StructuredOutputsParams(json=form.json)
    return dict(json.loads(str(form.json))) if is_plain else None


class Function(StrictBody):
    """strict: in automatic calls, too, the arguments are sure to have their schema."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False

    @field_validator("parameters")
    @classmethod
    def _is_schema_of_an_object(cls, given: dict[str, Any]) -> dict[str, Any]:
        properties, required = given.get("properties", {}), given.get("required", [])
        is_object = given.get("type", "object") == "object" and isinstance(properties, dict)
        if not is_object or not isinstance(required, list) or not all(isinstance(one, str) for one in required):
            raise PydanticCustomError("invalid_value", 'it must be a JSON schema of "type": "object"')
        return given

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """The JSON schema of the arguments: only the named properties, unless it says otherwise itself."""
        given = self.parameters or {}
        is_plain = not given or "properties" in given
        return {"type": "object"} | ({"additionalProperties": False} if is_plain else {}) | given


class Tool(StrictBody):
    type: Literal["function"]
    function: Function

    @property
    def for_template(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


def check_tools(tools: Sequence[Tool]) -> None:
    """Raise PydanticCustomError for two functions of one name, and for more text than a grammar takes."""
    names = [tool.function.name for tool in tools]
    if twice := {name for name in names if names.count(name) > 1}:
        raise invalid("tools", f"two functions are called {min(twice)!r}: give each its own name")
    num_characters = len(json.dumps([tool.for_template for tool in tools]))
    if num_characters > _MOST_CHARACTERS:
        raise invalid("tools", f"{num_characters} characters of JSON; at most {_MOST_CHARACTERS} here, shorten them")


def read_choice(choice: Any) -> Any:
    """Return "none", "auto", "required", or the object that names a function. Raises PydanticCustomError."""
    if choice in ("none", "auto", "required"):
        return choice
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    if not isinstance(function, Mapping) or list(function) != ["name"] or len(choice) != 2:
        known = '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
        raise PydanticCustomError("invalid_value", "it must be {known}", {"known": known})
    return choice
