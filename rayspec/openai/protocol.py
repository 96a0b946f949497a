"""Objects that clients send, and errors that they get. Every field takes effect, changes no text, or is refused."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pydantic
from pydantic import model_validator
from pydantic_core import PydanticCustomError, from_json
from typing_extensions import Self

from rayspec.prompts import without_nulls
from rayspec.types import NonFiniteLogitsError, OutOfMemoryError, PromptTooLongError, RayspecError, RequestError

_MOST_CHARACTERS = 1000  # a message may quote what was sent
# Each part of a body costs memory and time far beyond its bytes; items of arrays cost less than the others.
_MOST_PARTS, _PARTS = 100_000, b"{[:"  # objects, arrays and fields, and what they begin with
_MOST_ITEMS, _ITEMS = 2_000_000, b","
_BYTES_OF_ITEM, _BYTES_OF_OBJECT = 40, 250  # in memory, once they are parsed


class InvalidRequestError(RequestError):
    """The body asks for something that is unknown, malformed or not supported. param: the field, dotted, as
    "messages.0.content". status: the HTTP status."""

    kind = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(_short(message))
        self.param, self.code, self.status = None if param is None else _short(param), code, status

    @classmethod
    def of(cls, param: str, problem: str, *, code: str = "invalid_value", status: int = 400) -> Self:
        """Make the error of a field. problem: what follows the field's name in the message."""
        return cls(f"{param}: {problem}", param=param, code=code, status=status)


def invalid(field: str, problem: str) -> PydanticCustomError:
    """Make the error of a field, for a validator of pydantic."""
    return PydanticCustomError("invalid_value", "{problem}", {"problem": problem, "field": field})


def parse_json(content: bytes, *, max_bytes: int | None = None, most_items: int = _MOST_ITEMS) -> Any:
    """Parse JSON. Raises InvalidRequestError, also for invalid UTF-8, half a surrogate pair, and NaN (not in JSON), for
    more than 200 levels, for more objects, arrays and fields than any request needs, for a key that stands twice in an
    object, and for more than `max_bytes` or `most_items`."""
    if max_bytes is not None and len(content) > max_bytes:
        raise InvalidRequestError(f"more than {max_bytes} bytes", code="request_too_large", status=413)
    if _has_more(_MOST_PARTS, _PARTS, content) or _has_more(most_items, _ITEMS, content):
        message = f"more than {_MOST_PARTS} objects, arrays and fields, or {most_items} items: split the request"
        raise InvalidRequestError(message, code="request_too_large", status=413)
    try:
        found = from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"not valid JSON: {error}", code="invalid_json") from None
    if (num_keys := _num_keys(found)) != content.count(b":") and num_keys != _num_outside(content, b":"):
        json.loads(content, object_pairs_hook=_check_keys)  # which names the key, and takes several times as long
    return found


def parsed_bytes(content: bytes) -> int:
    """Return about how many bytes the objects, arrays and items of JSON take in memory. A text of so
    many bytes takes about as long to be read."""
    return _BYTES_OF_ITEM * content.count(b",") + _BYTES_OF_OBJECT * (content.count(b"{") + content.count(b"["))


def bytes_in_memory(content: bytes) -> int:
    """Return about how many bytes the values of JSON take in memory beyond those of its text. A text with one character
    beyond Latin-1 takes two bytes for each of its characters, with an emoji four."""
    width = 0
    if any(bytes((lead,)) in content for lead in range(0xF0, 0xF5)) or _HALF_PAIR.search(content):
        width = 4
    elif not content.isascii() or b"\\u" in content:
        width = 2
    return parsed_bytes(content) + width * len(content)


_HALF_PAIR = re.compile(rb"\\u[dD][89aAbB]")  # an emoji in ASCII


def utf8_length(text: str) -> int:
    """Return the length in UTF-8. A text has at most as many tokens, with an emoji four for a character."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def size_of(content: bytes) -> int:
    """Return how many bytes JSON has or, if these are more, about how many its parsed values have."""
    return max(len(content), parsed_bytes(content))


def _num_keys(value: Any) -> int:
    """Return how many keys the objects of a JSON value have."""
    if isinstance(value, dict):
        return len(value) + sum(map(_num_keys, value.values()))
    is_deep = isinstance(value, list) and not {dict, list}.isdisjoint(map(type, value))
    return sum(map(_num_keys, value)) if is_deep else 0


def _check_keys(pairs: list[tuple[str, Any]]) -> None:
    """Raise InvalidRequestError if two keys of an object are the same."""
    twice = next((name for name, number in Counter(name for name, _ in pairs).items() if number > 1), None)
    if twice is not None:
        raise InvalidRequestError.of(_short(twice), "it stands twice in one object; leave one out")


def _has_more(most: int, signs_of: bytes, content: bytes) -> bool:
    """Return whether JSON has more than `most` of the signs, which count outside of texts only."""
    return sum(content.count(sign) for sign in signs_of) > most and _num_outside(content, signs_of) > most


def _num_outside(content: bytes, signs_of: bytes) -> int:
    """Return how many of the signs JSON has outside of its texts."""
    table = bytes(2 if code in signs_of else int(code == ord('"')) for code in range(256))
    codes = content.replace(b"\\\\", b"").replace(b'\\"', b"").translate(table)
    signs = np.frombuffer(codes, dtype=np.uint8)
    is_in_text = np.bitwise_xor.accumulate(signs & 1)
    return int(np.count_nonzero(signs >> 1 > is_in_text))


@dataclass(frozen=True, slots=True)
class ApiError:
    """An error in the form of HTTP and the protocol. `code` is stable."""

    status: int
    code: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: RayspecError) -> ApiError:
        """Convert an error. Status: 400 for an invalid request, 500 for a request that made the model fail, 503 for an
        engine that is gone. Messages of the server's own errors are hidden from clients."""
        if not isinstance(error, RequestError):
            return cls(503, error.kind, "The engine cannot serve this request now. Please try again later.")
        message = _short(str(error))
        if isinstance(error, OutOfMemoryError | NonFiniteLogitsError):
            return cls(500, error.kind, message)
        if isinstance(error, InvalidRequestError):
            return cls(error.status, error.code or error.kind, message, error.param)
        return cls(400, "context_length_exceeded" if isinstance(error, PromptTooLongError) else error.kind, message)

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 or self.status == 429 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


INTERNAL = ApiError(500, "internal_error", "The server failed on this request.")


def _short(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."


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
    unsupported fields. ignored: fields that change no text, whatever their value. Each list that may be long fails at
    its first invalid item (`fail_fast`): pydantic would collect an error of a kilobyte for each. most_items: of all
    arrays."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )
    refused: ClassVar[Refusals] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()
    most_items: ClassVar[int] = _MOST_ITEMS

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
        return cls.parse(parse_json(content, most_items=cls.most_items))

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
