"""The output: one row an input row, as JSON lines or Parquet; a file of them is whole or not there."""

from __future__ import annotations

import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from typing_extensions import Self

from rayspec.types import ConfigError, RayspecError, RequestOutput

FileFormat = Literal["parquet", "jsonl"]

_TRANSIENT_KINDS: Final = frozenset({"aborted", "engine_dead", "stage_lost", "stages_replaced", "transport"})
"""Errors of the engine and not of the row, which is done again."""
_ROWS_PER_GROUP = 64


class DamagedRowsError(RayspecError):
    """A file of output rows is not as it was written."""

    kind = "damaged_rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """What became of one input row. `error_kind` is stable and None for a row that succeeded; `latency_s` runs from the
    engine's taking the request to its last token. tree: the parts of a hierarchical summary, as JSON. source: where the
    input row is, its file and number. input_hash: `Document.input_hash` of the row that the engine was given; None for
    a row that never reached the engine."""

    id: str
    text: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str | None = None
    error_kind: str | None = None
    error: str | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance_rate: float | None = None
    latency_s: float | None = None
    decode_s: float | None = None
    tree: str | None = None
    source: str | None = None
    input_hash: str | None = None

    @property
    def is_input_error(self) -> bool:
        """The row could not be read, or has the id of another row."""
        return self.error_kind is not None and self.input_hash is None

    @classmethod
    def of_output(cls, row_id: str, output: RequestOutput) -> ResultRow:
        """The first completion of a finished request. A failed one keeps what it had generated."""
        metrics, completion = output.metrics, output.outputs[0] if output.outputs else None
        return cls(
            id=row_id,
            text=completion.text if completion is not None else None,
            num_prompt_tokens=len(output.prompt_token_ids),
            num_output_tokens=len(completion.token_ids) if completion is not None else 0,
            finish_reason="error" if output.error is not None else completion.finish_reason if completion else None,
            error_kind=output.error.kind if output.error is not None else None,
            error=str(output.error) if output.error is not None else None,
            num_draft_tokens=metrics.num_draft_tokens,
            num_accepted_tokens=metrics.num_accepted_tokens,
            acceptance_rate=metrics.acceptance_rate,
            latency_s=_between(metrics.arrival_s, metrics.finished_s),
            decode_s=_between(metrics.first_token_s, metrics.finished_s),
        )

    @classmethod
    def of_error(cls, row_id: str, error: RayspecError) -> ResultRow:
        return cls(id=row_id, finish_reason="error", error_kind=error.kind, error=str(error))


def is_final(row: ResultRow) -> bool:
    """Whether the row would be the same if it were done again."""
    return row.error_kind not in _TRANSIENT_KINDS and row.finish_reason != "abort"


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return end_s - start_s if start_s is not None and end_s is not None else None


class RowEncoder(ABC):
    """Writes rows to an open file. `finish` completes what is in the file, and leaves it open."""

    def __init__(self, file: IO[bytes], text_column: str) -> None:
        self._file = file
        self._text_column = text_column

    @abstractmethod
    def write(self, row: ResultRow) -> None: ...

    @abstractmethod
    def finish(self) -> None: ...

    def _columns(self, row: ResultRow) -> dict[str, Any]:
        return {self._text_column if name == "text" else name: value for name, value in asdict(row).items()}


class JsonlEncoder(RowEncoder):
    """A line a row, on disk as soon as it is written."""

    def write(self, row: ResultRow) -> None:
        self._file.write(json.dumps(self._columns(row), ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def finish(self) -> None:
        self._file.flush()


class ParquetEncoder(RowEncoder):
    """A row group every 64 rows."""

    def __init__(self, file: IO[bytes], text_column: str) -> None:
        super().__init__(file, text_column)
        self._schema = parquet_schema(text_column)
        self._writer = pq.ParquetWriter(file, self._schema)
        self._rows: list[dict[str, Any]] = []

    def write(self, row: ResultRow) -> None:
        self._rows.append(self._columns(row))
        if len(self._rows) >= _ROWS_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
        self._rows.clear()

    def finish(self) -> None:
        if self._rows:
            self._flush()
        self._writer.close()


def parquet_schema(text_column: str) -> pa.Schema:
    integers = {"num_prompt_tokens", "num_output_tokens", "num_draft_tokens", "num_accepted_tokens"}
    reals = {"acceptance_rate", "latency_s", "decode_s"}
    return pa.schema(
        (
            text_column if name == "text" else name,
            pa.int64() if name in integers else pa.float64() if name in reals else pa.string(),
        )
        for name in ResultRow.__dataclass_fields__
    )


_ENCODERS: dict[FileFormat, type[RowEncoder]] = {"jsonl": JsonlEncoder, "parquet": ParquetEncoder}


def write_rows(file: IO[bytes], rows: Iterable[ResultRow], *, text_column: str, file_format: FileFormat) -> None:
    """`rows` as the whole content of an open file."""
    encoder = _ENCODERS[file_format](file, text_column)
    for row in rows:
        encoder.write(row)
    encoder.finish()


def read_rows(
    file: IO[bytes], *, text_column: str, file_format: FileFormat, with_text: bool = True
) -> Iterator[ResultRow]:
    """The rows of a file that write_rows wrote; columns it did not have are at their defaults.

    with_text: False leaves out the long columns, text and tree. Raises DamagedRowsError for a file that holds anything
    else, or ends early; OSError.
    """
    left_out = set() if with_text else {text_column, "tree"}
    try:
        for columns in _read_jsonl(file) if file_format == "jsonl" else _read_parquet(file, left_out):
            known = {name: value for name, value in columns.items() if name not in left_out}
            text = known.pop(text_column) if with_text else None
            yield ResultRow(**known, text=text)
    except (pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise DamagedRowsError(f"not rows as they were written ({error})") from error


def _read_jsonl(file: IO[bytes]) -> Iterator[dict[str, Any]]:
    for line in file:
        if not line.endswith(b"\n"):
            raise ValueError("the last line is cut off")
        columns = json.loads(line)
        if not isinstance(columns, dict):
            raise TypeError("a line is no JSON object")
        yield columns


def _read_parquet(file: IO[bytes], left_out: Collection[str]) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(file) as content:
        names = [name for name in content.schema_arrow.names if name not in left_out]
        for batch in content.iter_batches(batch_size=_ROWS_PER_GROUP, columns=names):
            yield from batch.to_pylist()


class ResultWriter:
    """Writes rows to a hidden file beside `path` and moves it there when closed, whatever ends the `with` block: an
    interrupted run leaves the rows it had. `text_column` names the column of the generated text."""

    def __init__(self, path: Path, text_column: str) -> None:
        self.path = path
        self.partial_path = path.with_name(f".{path.name}.partial")
        self._file = self.partial_path.open("wb")
        self._encoder = _ENCODERS[_FORMATS[path.suffix.lower()]](self._file, text_column)

    def write(self, row: ResultRow) -> None:
        self._encoder.write(row)

    def close(self) -> None:
        self._encoder.finish()
        self._file.close()
        os.replace(self.partial_path, self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_FORMATS: dict[str, FileFormat] = {".jsonl": "jsonl", ".parquet": "parquet"}


def open_writer(path: Path, *, text_column: str) -> ResultWriter:
    """The writer for the suffix of `path`, which check_output has accepted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return ResultWriter(path, text_column)


def check_output(path: Path, *, overwrite: bool) -> None:
    """Raises ConfigError for an output that cannot be, or must not be, written. Called before anything is loaded."""
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"option 'output' is {str(path)!r}: its name must end in {' or '.join(_FORMATS)}")
    if path.exists() and not overwrite:
        raise ConfigError(f"option 'output' is {str(path)!r}, which exists: choose another name or pass --overwrite")
    if path.is_dir():
        raise ConfigError(f"option 'output' is {str(path)!r}, a folder: name a file")
    ancestor = next(parent for parent in path.absolute().parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=ancestor):
            pass
    except OSError as error:
        raise ConfigError(
            f"option 'output' is {str(path)!r}: {str(ancestor)!r} cannot be written to ({error.strerror}); choose "
            "another place"
        ) from error


def save_config(path: Path, config: Mapping[str, Any]) -> None:
    """The resolved options as YAML that `--config` reads back."""
    path.write_text(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True), encoding="utf-8")
