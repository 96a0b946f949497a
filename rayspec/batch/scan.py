"""Scans an input and compares it with the rows that are done, by columns of ids, places and hashes."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rayspec.batch.columns import Columns
from rayspec.batch.documents import Piece, as_duplicate, read_piece
from rayspec.batch.parts import codes_of
from rayspec.batch.rows import Row
from rayspec.types import ConfigError

Changed = Literal["keep", "redo", "fail"]
"""What to do about rows whose text has changed since they were done: keep their results, do them again, or fail."""

SCAN_SCHEMA: Final = pa.schema(
    {"id": pa.large_string(), "input_hash": pa.string(), "piece": pa.int32(), "number": pa.int64()}
)

_SCHEMA_WITH_ERRORS = pa.schema([*SCAN_SCHEMA, pa.field("is_taken", pa.bool_()), pa.field("error", pa.string())])
_ROWS_AT_ONCE = 2**16
_NUM_NAMED = 3

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """The rows of an input, in order. rows: a table of SCAN_SCHEMA; `piece` and `number` say where a row is, and
    `number` is 0 where the piece is one row. names: the names of the pieces. errors: rows that could not be read.

    A row takes the memory of its id and about 40 bytes.
    """

    rows: pa.Table
    names: Sequence[str]
    errors: Sequence[Row] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> Row:
        """Return the row with this index, without its text."""
        fields = self.rows.slice(index, 1).to_pylist()[0]
        name, number = self.names[fields["piece"]], fields["number"]
        source = f"{name}:{number}" if number else name
        return Row(id=fields["id"], source=source, input_hash=fields["input_hash"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """An input compared with the rows that are done.

    left: indices of the scanned rows that are not done. errors: rows that could not be read, and rows with the id of
    another row. changed: ids of done rows that now have another text. absent: ids of done rows that the input no longer
    has. redoable: indices of the scanned rows that have changed.
    """

    left: Indices
    errors: Sequence[Row]
    changed: pa.ChunkedArray
    absent: pa.ChunkedArray
    redoable: Indices

    def check(self, changed: Changed) -> None:
        """Check the input for changes. Raises ConfigError if it has changed and `changed` is "fail"."""
        if changed == "fail" and (len(self.changed) or len(self.absent)):
            raise ConfigError(
                f"option 'changed' is 'fail', and {self.describe()}: pass --changed keep or redo, or choose another "
                "output folder"
            )

    def describe(self) -> str:
        """Return the changes in words, with some of the ids. The text is empty if there are none."""
        parts = (
            (self.changed, "have other text than when they were done"),
            (self.absent, "of the output are no longer in the input"),
        )
        return ", and ".join(f"{len(ids)} rows {what} ({_named(ids)})" for ids, what in parts if len(ids))


@dataclass(frozen=True, slots=True)
class Share:
    """Selects a share of the rows by a hash of their ids, so that every run selects the same rows. None selects all."""

    of_rows: float | None

    def __call__(self, row_id: str) -> bool:
        if self.of_rows is None:
            return True
        digest = hashlib.blake2b(row_id.encode(errors="surrogatepass"), digest_size=4).digest()
        return int.from_bytes(digest, "big") < self.of_rows * 2**32


ALL_ROWS = Share(None)


def scan_pieces(
    found: Sequence[Piece], first: int, columns: Columns, takes: Share, limit: int | None
) -> Iterator[pa.Table]:
    """Yield tables of the rows of some pieces, up to `limit` rows. first: the index of the first of these pieces."""
    num_left = sys.maxsize if limit is None else limit
    for index, piece in enumerate(found, start=first):
        rows = ((number, row.without_input()) for number, row in read_piece(piece, columns))
        while some := list(itertools.islice(rows, min(_ROWS_AT_ONCE, num_left))):
            num_left -= len(some)
            fields = {
                "id": [row.id for _, row in some],
                "input_hash": [row.input_hash for _, row in some],
                "piece": np.full(len(some), index, np.int32),
                "number": [number for number, _ in some],
                "is_taken": [takes(row.id) for _, row in some],
                "error": [json.dumps(asdict(row)) if row.error_kind is not None else None for _, row in some],
            }
            yield pa.table(fields, schema=_SCHEMA_WITH_ERRORS)


def scan_of(scanned: Iterable[pa.Table], found: Sequence[Piece], *, limit: int | None = None) -> Scan:
    """Return the rows of tables of `scan_pieces`, which are in order. limit: number of rows from the beginning; `takes`
    then selects among these."""
    tables, num_left = [_SCHEMA_WITH_ERRORS.empty_table()], sys.maxsize if limit is None else limit
    for table in scanned:
        tables.append(table.slice(0, num_left))
        num_left -= len(tables[-1])
        if num_left == 0:
            break
    rows = pa.concat_tables(tables)
    rows = rows.filter(rows["is_taken"])
    is_error = pc.is_valid(rows["error"])
    errors = [Row(**json.loads(error)) for error in rows["error"].filter(is_error).to_pylist()]
    good = rows.filter(pc.invert(is_error)).select(SCAN_SCHEMA.names).combine_chunks()
    return Scan(rows=good, names=[piece.name for piece in found], errors=errors)


def scan_rows(rows: Sequence[Row], takes: Share = ALL_ROWS) -> Scan:
    """Return the same as `scan_of`, for rows in memory. Each row is a piece."""
    taken = [index for index, row in enumerate(rows) if takes(row.id) and row.error_kind is None]
    columns = {
        "id": [rows[index].id for index in taken],
        "input_hash": [rows[index].input_hash for index in taken],
        "piece": taken,
        "number": [0] * len(taken),
    }
    errors = [row.without_input() for row in rows if takes(row.id) and row.error_kind is not None]
    names = [row.source or "" for row in rows]
    return Scan(rows=pa.table(columns, schema=SCAN_SCHEMA), names=names, errors=errors)


def compared(scan: Scan, done: pa.Table, *, is_whole: bool = True) -> Comparison:
    """Compare an input with the rows that are done.

    done: `id` and `input_hash` of rows; an unknown hash is null. is_whole: `scan` is of the whole input, so that a done
    row that is not in `scan` is absent from the input.

    Of several rows with the same id, one keeps the id: the row with the text that was done, or else the first.
    """
    ids, done_ids = scan.rows["id"], done["id"]
    done_places = pc.index_in(ids, value_set=done_ids)
    done_hashes = done["input_hash"].take(done_places)
    is_same = pc.equal(scan.rows["input_hash"], done_hashes)  # null where the row is not done, or its hash not known
    kept, errors = _one_of_each(scan, np.asarray(pc.fill_null(is_same, fill_value=False).to_numpy(), dtype=bool))
    is_left = np.asarray(pc.is_null(done_places).to_numpy(), dtype=bool)
    is_changed = np.asarray(pc.fill_null(pc.invert(is_same), fill_value=False).to_numpy(), dtype=bool)
    redoable = kept[is_changed[kept]]
    return Comparison(
        left=kept[is_left[kept]],
        errors=[*scan.errors, *errors],
        changed=ids.take(pa.array(redoable)),
        absent=done_ids.filter(pc.invert(pc.is_in(done_ids, value_set=ids))) if is_whole else done_ids[:0],
        redoable=redoable,
    )


def _one_of_each(scan: Scan, is_done_text: npt.NDArray[np.bool_]) -> tuple[Indices, list[Row]]:
    """Return the indices of the rows that keep their id, in order, and error rows for the others. A row that stands
    twice is one row."""
    codes = codes_of(scan.rows["id"])
    place = np.arange(len(codes))
    keeper = np.empty(int(codes.max(initial=-1)) + 1, np.int64)
    keeper[codes[::-1]] = place[::-1]  # of equal codes the last assignment holds: that of the first row
    errors = []
    for index in np.flatnonzero(keeper[codes] != place):
        code = codes[index]
        row, first = scan.row(int(index)), scan.row(int(keeper[code]))
        if row.source == first.source:
            continue
        if is_done_text[index] and not is_done_text[keeper[code]]:
            keeper[code] = index
            row, first = first, row
        errors.append(as_duplicate(row, first.source))
    return np.sort(keeper), errors


def _named(ids: pa.ChunkedArray) -> str:
    more = ", ..." if len(ids) > _NUM_NAMED else ""
    return ", ".join(map(repr, ids[:_NUM_NAMED].to_pylist())) + more
