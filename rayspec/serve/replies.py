"""Errors that the endpoint itself answers with."""

from __future__ import annotations

from rayspec.openai.errors import ApiError


def invalid(status: int, code: str, message: str) -> ApiError:
    """Return an error that the client caused."""
    return ApiError(status=status, message=message, type="invalid_request_error", param=None, code=code)


def unable(status: int, code: str, message: str) -> ApiError:
    """Return an error that the server caused."""
    return ApiError(status=status, message=message, type="server_error", param=None, code=code)


UNAUTHORIZED = invalid(401, "invalid_api_key", "No valid API key: send one as 'Authorization: Bearer KEY'.")
BUSY = unable(429, "rate_limit_exceeded", "The model has too many requests waiting. Please try again later.")
STARTING = unable(503, "starting", "No replica of the model can serve now; another starts. Please try again later.")
GONE = unable(503, "engine_dead", "The engine cannot serve this request now. Please try again later.")
ENDING = unable(503, "shutting_down", "The endpoint is shutting down. Please try another, or again later.")
OVERRUN = unable(429, "rate_limit_exceeded", "The endpoint has too many requests at once. Please try again later.")
INTERNAL = unable(500, "internal_error", "The server failed on this request.")

NOT_JSON = invalid(
    415, "unsupported_media_type", "Send the body as JSON, with the header 'Content-Type: application/json'."
)
WRONG_HOST = invalid(
    403, "host_not_allowed", "The Host header names no host of this endpoint: use another, or have it allowed there."
)
WRONG_ORIGIN = invalid(403, "origin_not_allowed", "Pages of this origin may not send such a request to this endpoint.")
MALFORMED = invalid(400, "invalid_http", "This is no valid HTTP/1.1 request.")

# Java's client asks for HTTP/2 by default. Serve's proxy goes on with HTTP/1.1 then, without the body.
NO_UPGRADE = invalid(
    400, "upgrade_unsupported", "The body was lost: have the client use HTTP/1.1 and not ask for an upgrade."
)


def timed_out(timeout_s: float) -> ApiError:
    return unable(504, "timeout", f"The answer took longer than {timeout_s:g} s.")


def too_large(max_bytes: int) -> ApiError:
    return invalid(413, "request_too_large", f"The body has more than {max_bytes} bytes.")


def too_slow(timeout_s: float) -> ApiError:
    return invalid(408, "request_timeout", f"The body did not come within {timeout_s:g} s.")


class Refused(Exception):  # noqa: N818 - an answer, and no error of the program
    """A request that is answered with `error` and goes no further."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error
