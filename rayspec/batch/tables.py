"""Delta, Lance and Iceberg tables: folders of data files, with a log that says which files and rows make a version.

Each data file is a piece of the input. A table may be written to while it is read: all pieces are of one version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import pyarrow as pa

from rayspec.command.locations import Location, UnreadableFileError
from rayspec.errors import RayspecError, reason_of
from rayspec.types import ConfigError

_ROWS_AT_ONCE = 256
# The folder and the end of the name of a log's files, two levels below the table's folder.
_LOGS = {
    ("_delta_log", ".json"): "Delta",
    ("_versions", ".manifest"): "Lance",
    ("metadata", ".metadata.json"): "Iceberg",
}


@dataclass(frozen=True, slots=True)
class Table:
    """place: the absolute path or URI of its folder; of an Iceberg table, the file with the version's metadata.
    version: None in place of the newest."""

    kind: str
    place: str
    version: int | None = None

    @property
    def files(self) -> list[str]:
        """Names of the data files, in an order that later versions keep."""
        return sorted(_opened(self).files)

    @property
    def columns(self) -> list[str]:
        return _opened(self).columns

    def batches(self, file: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a data file that the version has. Raises UnreadableFileError."""
        with _reporting(self):
            for batch in _opened(self).files[file](columns=list(columns) or self.columns):
                yield batch.select(list(columns))


def kind_of_log(file: Location) -> str | None:
    """Return the kind of the table whose log has this file; None if it is of no log."""
    folder, name = file.absolute().folder.file_name, file.file_name
    return next((kind for (log, end), kind in _LOGS.items() if folder == log and name.endswith(end)), None)


def newest_table(kind: str, logs: Sequence[Location]) -> Table:
    """Return the newest version of the table of a log. Raises ConfigError if the table or its package fails."""
    place = logs[0].absolute().folder.folder
    if kind == "Iceberg":
        numbers = [int("0" + "".join(filter(str.isdigit, one.file_name.partition("-")[0]))) for one in logs]
        newest = [one.absolute() for one, number in zip(logs, numbers, strict=True) if number == max(numbers)]
        if len(newest) > 1:
            raise ConfigError(
                f"input {place.name!r}: {newest[0].file_name} and {newest[1].file_name} are both its newest version: "
                "name one of these files as the input"
            )
        place = newest[0]
    try:
        return Table(kind, place.name, _open(Table(kind, place.name)).version)
    except UnreadableFileError as error:
        raise ConfigError(f"input {error}") from error


@dataclass(frozen=True, slots=True)
class _Opened:
    """files: by name, what yields the rows of a data file with some columns."""

    version: int | None
    columns: list[str]
    files: Mapping[str, Callable[..., Iterable[pa.RecordBatch]]]


@contextmanager
def _reporting(table: Table) -> Iterator[None]:
    try:
        yield
    except RayspecError:
        raise
    except ModuleNotFoundError as error:
        package = {"Delta": "deltalake", "Lance": "pylance", "Iceberg": "pyiceberg"}[table.kind]
        raise ConfigError(
            f"input {table.place!r} is of {table.kind}, which needs a package ({error}): run `pip install {package}`"
        ) from error
    except Exception as error:  # each package has errors of its own
        problem = f"{table.place}: the {table.kind} table cannot be read: {reason_of(error)}"
        raise UnreadableFileError(problem) from error


def _open(table: Table) -> _Opened:
    with _reporting(table):
        return {"Delta": _delta, "Lance": _lance, "Iceberg": _iceberg}[table.kind](table)


_opened = lru_cache(maxsize=4)(_open)


def _delta(table: Table) -> _Opened:
    from deltalake import DeltaTable  # noqa: PLC0415

    opened = DeltaTable(table.place, version=table.version)
    dataset = opened.to_pyarrow_dataset()

    schema, fragments = dataset.schema, dataset.get_fragments()
    files = {one.path: partial(one.to_batches, schema=schema, batch_size=_ROWS_AT_ONCE) for one in fragments}
    return _Opened(opened.version(), schema.names, files)


def _lance(table: Table) -> _Opened:
    import lance  # noqa: PLC0415

    dataset = lance.dataset(table.place, version=table.version)

    fragments = dataset.get_fragments()
    files = {f"{one.fragment_id:08}": partial(one.to_batches, batch_size=_ROWS_AT_ONCE) for one in fragments}
    return _Opened(dataset.version, dataset.schema.names, files)


def _iceberg(table: Table) -> _Opened:
    from pyiceberg.io.pyarrow import ArrowScan  # noqa: PLC0415
    from pyiceberg.table import StaticTable  # noqa: PLC0415

    opened = StaticTable.from_metadata(table.place)

    def read(task: Any, columns: list[str]) -> Iterator[pa.RecordBatch]:
        scan = opened.scan(selected_fields=tuple(columns))
        yield from ArrowScan(opened.metadata, opened.io, scan.projection(), scan.row_filter).to_record_batches([task])

    tasks = {one.file.file_path.removeprefix(f"{opened.location()}/"): one for one in opened.scan().plan_files()}
    files = {name: partial(read, one) for name, one in tasks.items()}
    return _Opened(None, [one.name for one in opened.schema().fields], files)
