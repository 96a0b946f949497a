"""What has become of an input since rows of it were done: pure decisions over ids, sources and hashes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from rayspec.batch.documents import as_duplicate
from rayspec.batch.rows import Row
from rayspec.types import ConfigError

Changed = Literal["keep", "redo", "fail"]
"""What to do about rows whose text has changed since they were done: keep their results, do them again, or fail."""

_NUM_NAMED = 3


@dataclass(slots=True, kw_only=True)
class Survey:
    """sources: where the row of each id is in the input. errors: rows that could not be read, and rows with the id of
    another row. changed, absent: ids of rows that are done, and have other text or are in the input no more. num_left:
    rows that are not done."""

    sources: dict[str, str | None] = field(default_factory=dict)
    errors: list[Row] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    num_left: int = 0

    def check(self, changed: Changed) -> None:
        """Raises ConfigError if the input has changed and this is to be an error."""
        if changed == "fail" and (self.changed or self.absent):
            raise ConfigError(
                f"option 'changed' is 'fail', and {self.describe()}: pass --changed keep or redo, or choose another "
                "output folder"
            )

    def describe(self) -> str:
        """The changes, with some of the ids. Empty if there are none."""
        parts = (
            (self.changed, "have other text than when they were done"),
            (self.absent, "of the output are no longer in the input"),
        )
        return ", and ".join(f"{len(ids)} rows {what} ({_named(ids)})" for ids, what in parts if ids)


def check_changed(value: str) -> Changed:
    """Raises ConfigError."""
    for known in get_args(Changed):
        if value == known:
            return known  # type: ignore[no-any-return]
    raise ConfigError(f"option 'changed' is {value!r}: give {', '.join(get_args(Changed))}")


def survey(seen: Iterable[Row], done: Mapping[str, str | None], *, is_whole: bool = True) -> Survey:
    """Compares an input with the rows that are done.

    seen: the input's rows in order, see `data.seen_rows`. done: input hash by id, None where it is not known. is_whole:
    `seen` is the whole input, so that other rows are absent from it.

    Of several rows with one id, one keeps the id: the row with the text that was done, or else the first.
    """
    result = Survey()
    hashes: dict[str, str | None] = {}
    for row in seen:
        if row.error_kind is not None:
            result.errors.append(row)
        elif row.id not in hashes:
            hashes[row.id], result.sources[row.id] = row.input_hash, row.source
        elif row.source != result.sources[row.id]:
            loser = row
            if row.id in done and row.input_hash == done[row.id] != hashes[row.id]:
                loser = Row(id=row.id, source=result.sources[row.id])
                hashes[row.id], result.sources[row.id] = row.input_hash, row.source
            result.errors.append(as_duplicate(loser, result.sources[row.id]))
    result.changed = [row_id for row_id, now in hashes.items() if done.get(row_id) not in (None, now)]
    result.absent = [row_id for row_id in done if row_id not in hashes] if is_whole else []
    result.num_left = sum(row_id not in done for row_id in hashes)
    return result


def _named(ids: list[str]) -> str:
    more = ", ..." if len(ids) > _NUM_NAMED else ""
    return ", ".join(map(repr, ids[:_NUM_NAMED])) + more
