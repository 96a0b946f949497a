"""Objects of the protocol as clients send them. Every field takes effect, is known to change no text, or is refused."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pydantic
from pydantic import model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from rayspec.openai.errors import InvalidRequestError, parse_json
from rayspec.prompts import without_nulls

_CODES = {
    "missing": "missing_required_parameter",
    "unknown_parameter": "unknown_parameter",
    "unsupported_parameter": "unsupported_parameter",
}

_MOST_NAME = 64  # characters; no field of the protocol has half as many

Refusals = Mapping[str, Sequence[Any]]
"""Unsupported fields, each with the values that are accepted because they have no effect."""


class StrictBody(pydantic.BaseModel):
    """An object of the protocol. A field that is null counts as left out, known or not, at every depth. refused:
    unsupported fields. ignored: fields that change no text, whatever their value."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )
    refused: ClassVar[Refusals] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_asks_for_nothing(cls, body: Any) -> Any:
        if not isinstance(body, Mapping):
            raise PydanticCustomError("invalid_value", "it must be a JSON object")
        return {name: value for name, value in body.items() if cls._takes_effect(name, value)}

    @classmethod
    def _takes_effect(cls, name: str, value: Any) -> bool:
        if name in cls.model_fields:
            return True
        if name in cls.ignored:
            return False
        if name not in cls.refused:
            name = name[:_MOST_NAME]  # the search takes 0.4 s for each megabyte
            near = difflib.get_close_matches(name, [*cls.model_fields, *cls.refused, *cls.ignored], n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out"
            raise PydanticCustomError("unknown_parameter", "unknown field; {hint}", {"field": name, "hint": hint})
        if value not in cls.refused[name]:
            raise PydanticCustomError("unsupported_parameter", "not supported here; leave it out", {"field": name})
        return False

    @classmethod
    def read(cls, content: bytes) -> Self:
        """Parse and validate JSON. Raises InvalidRequestError."""
        return cls.parse(parse_json(content))

    @classmethod
    def parse(cls, body: object) -> Self:
        """Validate the result of `parse_json`. Raises InvalidRequestError, which names the first invalid field."""
        try:
            return cls.model_validate(without_nulls(body))
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            names = [*first["loc"], *filter(None, [first.get("ctx", {}).get("field")])]
            param = ".".join(map(str, names)) or None
            message = first["msg"].removeprefix("Value error, ")
            raise InvalidRequestError(
                f"{param or 'body'}: {message}", param=param, code=_CODES.get(first["type"], "invalid_value")
            ) from None
