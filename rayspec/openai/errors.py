"""Errors of requests, and their form in HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic_core import from_json

from rayspec.types import NonFiniteLogitsError, OutOfMemoryError, PromptTooLongError, RayspecError, RequestError

_MOST_CHARACTERS = 1000  # a message may quote what was sent


class InvalidRequestError(RequestError):
    """The body asks for something that is unknown, malformed or not supported.

    param: the field, dotted, as "messages.0.content". status: the HTTP status.
    """

    kind = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


def parse_json(content: bytes) -> Any:
    """Parse JSON. Raises InvalidRequestError, also for invalid UTF-8, half a surrogate pair, and NaN (not in JSON)."""
    try:
        return from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"not valid JSON: {error}", code="invalid_json") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiError:
    """An error in the form of HTTP and the protocol. `code` is stable."""

    status: int
    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str

    @classmethod
    def of(cls, error: RayspecError) -> ApiError:
        """Convert an error. Status: 400 for an invalid request, 500 for a request that made the model fail, 503 for an
        engine that is gone. Messages of the server's own errors are hidden from clients."""
        if not isinstance(error, RequestError):
            message = "The engine cannot serve this request now. Please try again later."
            return cls(status=503, message=message, type="server_error", param=None, code=error.kind)
        if isinstance(error, OutOfMemoryError | NonFiniteLogitsError):
            return cls(status=500, message=_short(str(error)), type="server_error", param=None, code=error.kind)
        status, param, code = 400, None, error.kind
        if isinstance(error, PromptTooLongError):
            code = "context_length_exceeded"
        elif isinstance(error, InvalidRequestError):
            status, param, code = error.status, error.param, error.code or error.kind
        message, param = _short(str(error)), None if param is None else _short(param)
        return cls(status=status, message=message, type="invalid_request_error", param=param, code=code)

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def _short(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."
