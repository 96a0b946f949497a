"""OpenAI's Batch format, and the objects of its Files and Batch APIs. A resumed run writes the same ids."""

from __future__ import annotations

import codecs
import hashlib
import itertools
import json
import logging
import re
import reprlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

import msgspec
from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from rayspec.openai.answer import respond
from rayspec.openai.items import ResponsesRequest
from rayspec.openai.places import Places
from rayspec.openai.protocol import INTERNAL, ApiError, InvalidRequestError, StrictBody, parse_json
from rayspec.openai.requests import ChatRequest, CompletionRequest, Request
from rayspec.openai.responses import json_body
from rayspec.openai.tokenizing import in_thread_if_large
from rayspec.types import RayspecError, RequestError

if TYPE_CHECKING:
    from rayspec.llm import AsyncEngine

_logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 16 * 2**20  # as many as a body may have by default
LARGE_LINE = 2**20
_MAX_CUSTOM_ID = 512
# Line ends for `splitlines` of clients, which JSON allows within strings.
_LINE_ENDS = {ord(one): f"\\u{ord(one):04x}" for one in "\x85\u2028\u2029"}

Url = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
ENDPOINTS: Mapping[str, type[ChatRequest | CompletionRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
}
Purpose = Literal["batch", "batch_output"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
FINAL: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})

_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MOST_WINDOW_S = 30 * 86400
_MOST_METADATA, _MOST_KEY, _MOST_VALUE = 16, 64, 512


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a line is no request, with its number from 1 as `line`, or why it has no answer; as in OpenAI's files."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response as HTTP would have returned it. body: {"error": ...}, a ChatCompletion, a Completion or a Response. It
    is JSON, because many log-probabilities take ten times as much memory in plain types."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the output: a response, or the error that kept the line from being a request."""

    id: str
    custom_id: str | None
    response: BatchResponse | None = None
    error: BatchError | None = None

    @property
    def failed(self) -> bool:
        """Whether the line belongs in the error file."""
        return self.response is None or self.response.status_code != 200

    @property
    def error_code(self) -> str | None:
        """The code of the error; None for a line that did not fail."""
        if self.response is None or not self.failed:
            return None if self.error is None else self.error.code
        error = msgspec.json.decode(self.response.body).get("error", {})
        return str(error.get("code") or error.get("type") or self.response.status_code)

    def json_line(self) -> str:
        return msgspec.json.encode(self).decode().translate(_LINE_ENDS) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """A request of a batch file. digest: the hash in its ids. model: its body's model, if any. text: the line in UTF-8.
    Its body is not validated yet; parsed, it would take many times as much memory."""

    digest: str
    custom_id: str
    url: Url
    model: str | None
    text: bytes

    def request(self) -> Request:
        """Return the validated body. Raises InvalidRequestError."""
        kind = ENDPOINTS[self.url]
        request = kind.parse(parse_json(self.text, most_items=kind.most_items)["body"])
        if request.stream:
            raise InvalidRequestError.of("stream", "not in a batch; leave it out", code="unsupported_value")
        return request

    @property
    def id(self) -> str:
        return f"batch_req_{self.digest}"

    def result(self, status_code: int, body: bytes) -> BatchResult:
        response = BatchResponse(status_code=status_code, request_id=f"req_{self.digest}", body=msgspec.Raw(body))
        return BatchResult(id=self.id, custom_id=self.custom_id, response=response)

    def unanswered(self, code: str, message: str) -> BatchResult:
        return BatchResult(id=self.id, custom_id=self.custom_id, error=BatchError(code=code, message=message))


class _Fields(StrictBody):
    custom_id: Annotated[str, Field(min_length=1, max_length=_MAX_CUSTOM_ID)]
    method: Literal["POST"]
    url: Url
    body: dict[str, Any]


def read_batch(
    lines: Iterable[bytes], *, source: str, large: AbstractContextManager[Any] | None = None
) -> Iterator[BatchLine | BatchResult]:
    """Yield the requests of a file, in order and on demand. A line that is no request yields a failed result; so does a
    custom_id that an earlier line has. lines: of `limited_lines`. source: the file's name, which is part of the ids.
    large: a lock, under which large lines are read: the values of one take some hundred megabytes.
    """
    seen: set[str] = set()  # hashes of ids, which are shorter
    for number, line in enumerate(lines, start=1):
        content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if content.strip():
            with large if large is not None and len(content) > LARGE_LINE else nullcontext():
                found = _read_line(content, number, seen, source)
            del line, content  # the reader may wait long before the next
            yield found


def _read_line(content: bytes, number: int, seen: set[str], source: str) -> BatchLine | BatchResult:
    """seen: the hashes of the ids of earlier lines, to which that of this line is added."""
    custom_id = None
    try:
        row = parse_json(content, max_bytes=MAX_LINE_BYTES)
        name = row.get("custom_id") if isinstance(row, dict) else None
        if isinstance(name, str) and 0 < len(name) <= _MAX_CUSTOM_ID:
            custom_id = name  # errors of the line, too, are reported with it
            if (digest := _digest(source, name)) in seen:
                message = f"custom_id {reprlib.repr(name)} is that of an earlier line; each line needs its own"
                raise InvalidRequestError(  # noqa: TRY301
                    message, param="custom_id", code="duplicate_custom_id"
                )
            seen.add(digest)
        fields = _Fields.parse(row)
    except InvalidRequestError as error:
        failure = BatchError(
            code=error.code or error.kind, message=f"line {number}: {error}", param=error.param, line=number
        )
        return BatchResult(id=f"batch_req_{_digest(source, number)}", custom_id=custom_id, error=failure)
    model = fields.body.get("model")
    return BatchLine(
        digest=_digest(source, fields.custom_id),
        custom_id=fields.custom_id,
        url=fields.url,
        model=model if isinstance(model, str) else None,
        text=content.strip(),
    )


def _digest(source: str, name: str | int) -> str:
    """Return the hash for the ids of a line, from its custom_id; for an invalid line, from its number."""
    return hashlib.sha256(json.dumps([source, name]).encode()).hexdigest()[:32]


async def answer(
    line: BatchLine,
    engine: AsyncEngine,
    served: tuple[str, ...],
    *,
    background: Places | None = None,
    logprobs: Places | None = None,
    clock: Callable[[], float] = time.time,
) -> BatchResult:
    """Answer a line with an engine; an error of the line is in the result. served, background, logprobs: see `respond`.
    Raises EngineDeadError and StageLostError if the engine is gone; then another engine may answer the line."""
    try:
        request = await in_thread_if_large(line.request, len(line.text), engine.client_name)
        options: Any = {"created": int(clock()), "background": background, "logprobs": logprobs}
        response = await respond(request, engine, served, name=line.digest, **options)
    except RequestError as error:
        failure = ApiError.of(error)
        return line.result(failure.status, json_body(failure))
    except RayspecError:
        raise
    except Exception:  # a fault of ours is one line's, too
        _logger.exception("line %r failed", line.custom_id)
        return line.result(INTERNAL.status, json_body(INTERNAL))
    return line.result(200, json_body(response))


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
        data = list(itertools.islice(found, limit + 1))
        shown = data[:limit]
        ends = (shown[0].id, shown[-1].id) if shown else (None, None)
        return cls(data=shown, has_more=len(data) > limit, first_id=ends[0], last_id=ends[1])


class BatchRequest(StrictBody):
    """The body of POST /v1/batches. completion_window: any time up to 30 days, as "90s", "30m", "24h" or "7d"."""

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
