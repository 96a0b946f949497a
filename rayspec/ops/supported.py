"""How each model type generates: `supported_models.csv` as a table, and what a checkpoint does.

`python -m tests.every_type` writes the file and the page of the documentation that shows it.
"""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from rayspec import demo
from rayspec.command.terminal import hide_progress_bars
from rayspec.config import EngineConfig

TABLE = Path(__file__).with_name("supported_models.csv")
# What warnings of a load say in front of the reason, and what differs from run to run.
_NOT_THE_REASON = (
    r"speculation is off for this model, which decodes plainly: ",
    r"drafts of this model are only copied or recycled tokens: ",
    r"^measuring how fast this machine .*",
    r"^loading .*: [\d.]+ GiB become .*",
    r"^.*: the model runs in b?float.*",
    r"^[\w.-]+: ",
    r" \((largest difference|by) [^)]*\)",
    r"of this model: ",
)


@dataclass(frozen=True, slots=True)
class Supported:
    """How a type or a checkpoint generates. models: popular models of the type; empty for other types. way: "drafts"
    (by skipped sublayers and copies), "copies" (copied and recycled tokens only), "plain" (no drafts) or "refused".
    why: the reason for fewer drafts, or for slower ones."""

    type: str
    models: str
    way: str
    why: str


def read_table() -> tuple[Supported, ...]:
    """Return all types that transformers maps to a causal LM, popular types first. Rows with # are variants."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return tuple(Supported(**row) for row in csv.DictReader(file))


def supported(model: str | None) -> tuple[Supported, ...]:
    """Return the whole table; for a type, its rows; for a checkpoint, what it does. A checkpoint on this machine is
    loaded and checked as for generation. A checkpoint without weights here is looked up by the type in its config.json.
    Raises ConfigError, CheckpointError and UnsupportedModelError as `load_engine` does."""
    rows = read_table()
    of_type = tuple(row for row in rows if row.type.partition("#")[0] == model)
    if model is None or (of_type and not Path(model).exists()):
        return of_type or rows
    # These imports load torch, which the table need not wait for.
    from rayspec.local_engine import load_engine, way_of  # noqa: PLC0415
    from rayspec.model.weights import read_config  # noqa: PLC0415
    from rayspec.ops.doctor.machine import check_model  # noqa: PLC0415

    model = demo.local_path(model)
    model_type = read_config(model).model_type
    row = next((row for row in rows if row.type == model_type), Supported(model_type, "", "unknown", ""))
    if check_model(model)[1] is None:
        note = "by its type, because its weights are not here"
        return (replace(row, why=f"{note}; {row.why}" if row.why else note),)
    hide_progress_bars()
    with recorded_warnings() as warnings:
        engine = load_engine(EngineConfig(model=model), with_tokenizer=False)
    return (replace(row, way=way_of(engine), why=reason(warnings)),)


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Record the warnings of a load in the list that this yields."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rayspec").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("rayspec").removeHandler(handler)


def reason(warnings: Sequence[str]) -> str:
    """Return the reasons in the warnings of a load, without the words that all such warnings share."""
    for other in _NOT_THE_REASON:
        warnings = [re.sub(other, "", warning) for warning in warnings]
    return "; ".join(filter(None, warnings))


def supported_table(rows: Sequence[Supported], model: str | None = None) -> Table:
    """Return the rows as a table, with a line below the popular types. model: as in `supported`."""
    table = Table(box=box.SIMPLE_HEAD, title=model, title_justify="left")
    for heading in ("type", "way", "models", "why"):
        table.add_column(heading, overflow="fold")
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        ends = following is not None and bool(row.models) and not following.models
        table.add_row(row.type, row.way, row.models, Text(row.why), end_section=ends)
    return table
