"""An OpenAI batch file as a job: each line is a row. The job writes a file of responses and a file of errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from rayspec.batch.documents import input_row
from rayspec.batch.rows import Handler, Row
from rayspec.command.locations import FILE_ERRORS, Location, limited_lines
from rayspec.config import Settings
from rayspec.decode.engine_loop import EngineDeadError
from rayspec.openai.batch import MAX_LINE_BYTES, BatchError, BatchLine, BatchResult, answer, read_batch
from rayspec.types import ConfigError, RayspecError

if TYPE_CHECKING:  # torch, transformers and ray, which others do not need
    from rayspec.llm import AsyncEngine

OUTPUT_NAME, ERRORS_NAME = "output.jsonl", "errors.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTask:
    """The task of a job over an OpenAI batch file.

    served: a name of the model that lines may use, in addition to the name that it was started with.
    """

    settings: Settings
    served: str

    @property
    def identity(self) -> dict[str, Any]:
        """The options that decide the content of the output rows."""
        return {"task": {"batch": "openai", "served": self.served}, "engine": self.settings.deciding}

    def handler(self, engine: AsyncEngine) -> Handler:
        served = (self.served, engine.llm.config.model)

        async def complete(row: Row) -> Row:
            given = json.loads(row.document or "")
            line = BatchLine(**given | {"text": given["text"].encode()})
            try:
                return answered(row, await answer(line, engine, served))
            except RayspecError as error:
                if error.kind != "stage_lost":
                    raise
                raise EngineDeadError(f"the engine has failed a row and cannot go on: {error}") from error

        return complete


def read_requests(path: str) -> list[Row]:
    """Return the requests of a batch file, with an error row for each line that is no request. Raises ConfigError."""
    rows = []
    try:
        location = Location.parse(path)
        with location.open() as file:
            for line in read_batch(limited_lines(file, MAX_LINE_BYTES), source=location.file_name):
                if isinstance(line, BatchResult):
                    rows.append(answered(Row(id=line.id, source=line.id), line))
                else:
                    document = json.dumps(asdict(line) | {"text": line.text.decode()})
                    rows.append(input_row(line.id, source=line.id, text=document))
    except FILE_ERRORS as error:
        raise ConfigError(f"batch file {path!r} could not be read: {error}") from error
    return rows


class _Used(msgspec.Struct):
    """What a job reads of a response."""

    usage: dict[str, Any]


def answered(row: Row, result: BatchResult) -> Row:
    """Return the row with the result. The text of the row is the line for the output file."""
    usage = {}
    if result.response is not None and not result.failed:
        usage = msgspec.json.decode(result.response.body, type=_Used).usage
    return replace(
        row.without_input(),
        text=result.json_line(),
        num_prompt_tokens=usage.get("prompt_tokens", usage.get("input_tokens", 0)),
        num_output_tokens=usage.get("completion_tokens", usage.get("output_tokens", 0)),
        finish_reason="error" if result.failed else "stop",
        error_kind=result.error_code,
        error=result.json_line().strip() if result.failed else None,
    )


def write_answers(requests: Sequence[Row], rows: Callable[[], Iterable[Row]], folder: Location) -> None:
    """Write output.jsonl with the responses and errors.jsonl with the failed lines, in the format of OpenAI's API.

    requests: the rows of all requests. A request without an answer gets an error line.
    """
    custom_ids = {one.id: json.loads(one.document or "{}").get("custom_id") for one in requests}
    for name, failed in ((OUTPUT_NAME, False), (ERRORS_NAME, True)):
        with folder.join(name).writing() as file:
            for row in rows():
                if (row.error_kind is not None) == failed:
                    line = row.text
                    if line is None:  # the request has no answer
                        error = BatchError(code=row.error_kind or "", message=row.error or "")
                        line = BatchResult(id=row.id, custom_id=custom_ids.get(row.id), error=error).json_line()
                    file.write(line.encode())
