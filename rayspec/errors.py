"""The errors that all packages of rayspec raise on purpose. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Packages that an installation without extras leaves out, and the extra that brings each.
_EXTRAS = {
    **dict.fromkeys(("ray", "zmq"), "ray"),
    **dict.fromkeys(("aiohttp", "fastapi", "h11", "starlette", "uvicorn"), "serve"),
    "deepspeed": "deepspeed",
    "gguf": "gguf",
    "llguidance": "structured",
    "pypdf": "documents",
    "triton": "cuda",
}


class RayspecError(Exception):
    """Base of every error rayspec raises on purpose. `kind` is a stable name for reports and output rows."""

    kind = "internal"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy the error without a call of its `__init__`, whose parameters are not its `args` in every class."""
        return type(self).__new__, (type(self), *self.args), self.__dict__


class ConfigError(RayspecError, ValueError):
    """An option is unknown or has a value that cannot work."""

    kind = "config"


class CheckpointError(RayspecError):
    """The model or tokenizer could not be loaded completely."""

    kind = "checkpoint"


class UnsupportedModelError(RayspecError):
    """The architecture cannot be run in the requested way."""

    kind = "unsupported_model"


class RequestError(RayspecError, ValueError):
    """A single request or input row failed; the others are not affected."""

    kind = "request"


class EmptyPromptError(RequestError):
    kind = "empty_prompt"


class PromptTooLongError(RequestError):
    kind = "prompt_too_long"


class InvalidTokenError(RequestError):
    kind = "invalid_token"


class InvalidMessagesError(RequestError):
    """Chat messages cannot be converted to a prompt, or the model's chat template refuses them."""

    kind = "invalid_messages"


class InputFileError(RequestError):
    """A file or row of the input could not be read, or has the wrong content. kind: a stable name of what is wrong."""

    kind = "input"

    def __init__(self, message: str, kind: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind or self.kind


class GrammarError(RequestError):
    """The form that a request asks for cannot be compiled, or cannot be followed any further."""

    kind = "grammar"


class UnfinishedFormError(RequestError):
    """The output reached `max_tokens` before it had the form that was asked for."""

    kind = "unfinished_form"


class NonFiniteLogitsError(RequestError):
    """The model produced NaN or infinite logits for this sequence."""

    kind = "non_finite_logits"


class OutOfMemoryError(RequestError):
    """The KV cache or the device cannot hold this sequence."""

    kind = "out_of_memory"


class TransportError(RayspecError):
    """A message could not be sent, was malformed, or is missing."""

    kind = "transport"


@contextmanager
def naming_the_extra() -> Iterator[None]:
    """Raise ConfigError for a missing package that an extra of rayspec brings. The error names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _EXTRAS:
            raise
        raise ConfigError(f"package {name!r} is not installed here: {remedy_for(name)}") from error


def remedy_for(package: str) -> str:
    """Return how to install a package that an extra brings. The name `rayspec` belongs to another project on PyPI."""
    return f"run `pip install '.[{_EXTRAS[package]}]'` in rayspec's checkout"


def reason_of(error: BaseException) -> str:
    """Return the type of an error and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def counted(number: int, name: str) -> str:
    """Return the number of what has this name, as "1 core" or "2 cores"."""
    return f"{number} {name}{'s' * (number != 1)}"


def plainly(message: str) -> str:
    """Return pydantic's reason in the words of our own errors."""
    return (
        message.removeprefix("Value error, ")
        .replace("Input should be", "it must be")
        .replace("a valid tuple", "a list")
        .partition(", unable to")[0]
    )
