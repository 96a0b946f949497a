"""Decides which stored rows count. It keeps columns only: a row takes the memory of its id and hash, not its text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rayspec.batch.rows import TRANSIENT_KINDS, Row

_MAX_CHUNKS = 1000

Mask = npt.NDArray[np.bool_]

INDEX_SCHEMA: Final = pa.schema(
    {
        "id": pa.large_string(),
        "source": pa.string(),  # set where a row was not read or has the id of another row; else null
        "input_hash": pa.string(),
        "error_kind": pa.string(),
        "is_final": pa.bool_(),
    }
)
DESCRIBED_BY: Final = ("id", "source", "input_hash", "error_kind", "finish_reason")
"""The columns of the output that `described` needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Numbers of rows: the total, and the failed rows by error kind."""

    total: int
    failed: Counter[str]

    def as_dict(self) -> dict[str, Any]:
        """Return the counts in the form of the manifest."""
        return {
            "total": self.total,
            "succeeded": self.total - self.failed.total(),
            "failed": dict(self.failed.most_common()),
        }


class RowIndex:
    """Decides which of the stored rows with one id counts: the last final row, or the last row where none is final.

    An error row for a row that could not be read, or has the id of another row, counts in addition, one for each place
    in the input. Every session finds these errors anew; so those in `stored`, of earlier sessions, do not count.

    Rows are numbered in the order in which they are stored. stored: a table of INDEX_SCHEMA.
    """

    def __init__(self, stored: pa.Table | None = None) -> None:
        self._table = stored if stored is not None else INDEX_SCHEMA.empty_table()
        self._is_ignored = _is_input_error(self._table)
        self._is_reopened: Mask = np.zeros(len(self._table), dtype=bool)
        self._counting: Mask | None = None

    @property
    def num_stored(self) -> int:
        return len(self._table)

    @property
    def stored(self) -> pa.Table:
        """All rows, with INDEX_SCHEMA."""
        return self._table

    @property
    def ignores_some(self) -> bool:
        """Whether earlier sessions stored rows that could not be read."""
        return bool(self._is_ignored.any())

    def append(self, rows: pa.Table, *, start: int) -> None:
        """Add the rows of a new part, with INDEX_SCHEMA. They replace all rows from number `start` on, so that a call
        that a signal interrupted can be repeated."""
        self._counting = None
        table = pa.concat_tables([self._table.slice(0, start), rows])
        self._table = table.combine_chunks() if table["id"].num_chunks > _MAX_CHUNKS else table

    def reopen(self, row_ids: pa.Array) -> None:
        """Mark rows to be done again. Until their new results are appended, the earlier results count. Call this before
        the first `append`."""
        is_named = _mask(pc.is_in(self._table["id"], value_set=row_ids.cast(pa.large_string())))
        self._is_ignored = self._now(self._is_ignored) | is_named & ~self.counting
        self._is_reopened = self._now(self._is_reopened) | is_named
        self._counting = None

    @property
    def counting(self) -> Mask:
        """For each stored row, whether the row counts."""
        if self._counting is None:
            self._counting = self._decide()
        return self._counting

    def _decide(self) -> Mask:
        codes = codes_of(_keys(self._table))
        place, is_final, is_ignored = np.arange(len(codes)), self._is_final, self._now(self._is_ignored)
        last = np.full(int(codes.max(initial=-1)) + 1, -1)
        for group in (~is_final & ~is_ignored, is_final & ~is_ignored):
            last[codes[group]] = place[group]  # of equal codes the last assignment holds
        counting = np.zeros(len(codes), dtype=bool)
        counting[last[last >= 0]] = True
        return counting

    @property
    def _is_final(self) -> Mask:
        return _mask(self._table["is_final"]) & ~self._now(self._is_reopened)

    def _now(self, mask: Mask) -> Mask:
        """Extend a mask of the first rows to all rows; the later rows are False."""
        return np.concatenate([mask, np.zeros(len(self._table) - len(mask), dtype=bool)])

    def __len__(self) -> int:
        """The number of rows that count."""
        return int(self.counting.sum())

    @property
    def is_complete(self) -> bool:
        return bool(self._is_final[self.counting].all())

    @property
    def done(self) -> pa.Table:
        """Table of `id` and `input_hash` of the rows that an engine has done. An unknown hash is null."""
        is_done = self.counting & self._is_final & ~_is_input_error(self._table)
        return self._table.select(["id", "input_hash"]).filter(is_done)

    def summary(self) -> RowCounts:
        """Return the counts of the final rows."""
        kinds = self._table["error_kind"].filter(self.counting & self._is_final)
        failed = {found["values"]: found["counts"] for found in pc.value_counts(kinds.drop_null()).to_pylist()}
        return RowCounts(total=len(kinds), failed=Counter(failed))


def described(rows: pa.Table) -> pa.Table:
    """Return the columns of INDEX_SCHEMA for output rows, which have the columns DESCRIBED_BY."""
    is_transient = pc.is_in(rows["error_kind"], value_set=pa.array(sorted(TRANSIENT_KINDS)))
    is_aborted = pc.fill_null(pc.equal(rows["finish_reason"], "abort"), fill_value=False)
    is_input_error = pc.and_(pc.is_valid(rows["error_kind"]), pc.is_null(rows["input_hash"]))
    null = pa.scalar(None, pa.string())
    columns = {
        **{name: rows[name] for name in ("id", "input_hash", "error_kind")},
        "source": pc.if_else(is_input_error, pc.fill_null(rows["source"], ""), null),
        "is_final": pc.invert(pc.or_(is_transient, is_aborted)),
    }
    return pa.table({name: columns[name] for name in INDEX_SCHEMA.names}).cast(INDEX_SCHEMA)


def described_rows(rows: Iterable[Row]) -> pa.Table:
    """Return the columns of INDEX_SCHEMA for rows in memory."""
    listed = list(rows)
    return described(
        pa.table({name: pa.array([getattr(row, name) for row in listed], pa.string()) for name in DESCRIBED_BY})
    )


def _keys(table: pa.Table) -> pa.ChunkedArray:
    """Return a key for each row: its id, for an error of the input with its source. One row of each key counts."""
    if table["source"].null_count == len(table):
        return table["id"]
    source = table["source"].cast(pa.large_string())
    with_source = pc.binary_join_element_wise(table["id"], source, pa.scalar("\0", pa.large_string()))
    return pc.if_else(pc.is_valid(source), with_source, table["id"])


def codes_of(values: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Return numbers from 0 on that are equal where the values are equal."""
    chunks = values.dictionary_encode().chunks
    return np.concatenate([np.empty(0, np.int64), *(chunk.indices.to_numpy(zero_copy_only=False) for chunk in chunks)])


def _is_input_error(table: pa.Table) -> Mask:
    return _mask(pc.is_valid(table["source"]))


def _mask(values: pa.ChunkedArray) -> Mask:
    return np.asarray(values.to_numpy(), dtype=bool)
