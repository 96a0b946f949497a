"""The served models, in the form of /v1/models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from typing_extensions import Self

from rayspec.openai.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """created: Unix seconds. max_model_len: vLLM's extra field, the most prompt and output tokens of a request."""

    id: str
    created: int
    max_model_len: int
    owned_by: str = "rayspec"
    object: Literal["model"] = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelList:
    data: list[ModelCard]
    object: Literal["list"] = "list"

    @classmethod
    def of(cls, cards: Iterable[ModelCard]) -> Self:
        return cls(data=list(cards))


def check_served(model: str, served: Sequence[str]) -> None:
    """Check the model's name. served: the names that requests may use. Raises InvalidRequestError."""
    if model not in served:
        message = f"The model {model!r} does not exist; served here: {', '.join(map(repr, served))}."
        raise InvalidRequestError(message, param="model", code="model_not_found", status=404)
