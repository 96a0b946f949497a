"""The objects of OpenAI's Files and Batch APIs, and the requests to these APIs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Generic, Literal, TypeVar

import msgspec
from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from rayspec.openai.batch import BatchError, Url
from rayspec.openai.strict_body import StrictBody

Purpose = Literal["batch", "batch_output"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
FINAL: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})

_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MOST_WINDOW_S = 30 * 86400
_MOST_METADATA, _MOST_KEY, _MOST_VALUE = 16, 64, 512


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A stored file. bytes: its size. created_at: Unix seconds."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    object: Literal["file"] = "file"


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """Says that a file is deleted; or a batch, as an extra of rayspec: OpenAI keeps batches."""

    id: str
    object: Literal["file", "batch"]
    deleted: bool = True


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of a batch's lines: all lines, answered lines, and lines that failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True):
    data: Sequence[BatchError]
    object: Literal["list"] = "list"


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as clients see it. Times are Unix seconds; None if the event has not happened."""

    id: str
    endpoint: Url
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: Mapping[str, str] | None = None
    object: Literal["batch"] = "batch"


T = TypeVar("T", FileObject, Batch)


class Page(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A part of a list, with the ids of its first and last object."""

    data: Sequence[T]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"

    @classmethod
    def of(cls, found: Iterable[T], limit: int) -> Self:
        """Take the first `limit` of the objects."""
        data = list(itertools.islice(found, limit + 1))
        shown = data[:limit]
        ends = (shown[0].id, shown[-1].id) if shown else (None, None)
        return cls(data=shown, has_more=len(data) > limit, first_id=ends[0], last_id=ends[1])


class BatchRequest(StrictBody):
    """The body of POST /v1/batches. completion_window: "24h" as OpenAI has it, or any other time up to 30 days, as
    "90s", "30m" or "7d"."""

    input_file_id: str
    endpoint: Url
    completion_window: str
    metadata: dict[str, str] | None = None

    @field_validator("completion_window")
    @classmethod
    def _a_time(cls, text: str) -> str:
        if not 0 < _seconds_of(text) <= _MOST_WINDOW_S:
            raise PydanticCustomError("invalid_value", "it must be a time up to 30 days, as '24h', '30m' or '7d'")
        return text

    @field_validator("metadata")
    @classmethod
    def _small(cls, metadata: dict[str, str] | None) -> dict[str, str] | None:
        items = (metadata or {}).items()
        if len(items) > _MOST_METADATA or any(len(key) > _MOST_KEY or len(value) > _MOST_VALUE for key, value in items):
            raise PydanticCustomError(
                "invalid_value",
                f"at most {_MOST_METADATA} keys of {_MOST_KEY} characters, values of {_MOST_VALUE} characters",
            )
        return metadata

    @property
    def window_s(self) -> int:
        return _seconds_of(self.completion_window)


def _seconds_of(window: str) -> int:
    match = re.fullmatch(r"([1-9]\d{0,5})([smhd])", window)
    return 0 if match is None else int(match[1]) * _UNIT_S[match[2]]


class PageRequest(StrictBody):
    """The query parameters of a list. after: the page begins after the object with this id."""

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=10_000, strict=False)] | None = None
    order: Literal["asc", "desc"] = "desc"
    purpose: Purpose | None = None
