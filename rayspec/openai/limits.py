"""Limits of a single request."""

from __future__ import annotations

from dataclasses import dataclass

from rayspec.openai.errors import InvalidRequestError
from rayspec.openai.requests import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """A larger request is refused, so that no single request fills the queue. OpenAI has n 128, 4 stop strings."""

    max_n: int = 128
    max_prompts: int = 1024
    max_stop_strings: int = 16

    def check(self, request: Request) -> None:
        """Check a request. Raises InvalidRequestError."""
        _at_most(self.max_n, request.n or 1, "n")
        _at_most(self.max_prompts, request.num_prompts, "prompt", " prompts")
        _at_most(self.max_stop_strings, len(request.stop or ()), "stop", " stop strings")


def _at_most(limit: int, asked: int, param: str, unit: str = "") -> None:
    if asked > limit:
        message = f"{param}: {asked}{unit}; at most {limit} here, split the request"
        raise InvalidRequestError(message, param=param, code="invalid_value")


DEFAULT_LIMITS = Limits()
