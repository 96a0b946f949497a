"""A LatencyModel for people: what a forward costs by rows and context."""

from __future__ import annotations

from rich.table import Table

from rayspec.planning.latency import LatencyModel

_ROWS = (1, 2, 4, 8, 16, 32)
_CONTEXTS = (128, 1024, 4096, 16384, 65536)


def latency_table(latency: LatencyModel, *, max_context: int) -> Table:
    """Milliseconds of one sequence's forward: its attention sublayers, its MLP sublayers, the head, all of it."""
    table = Table(title="milliseconds of a forward of one sequence", title_justify="left")
    for heading in ("rows", "context", "attention", "MLP", "head", "forward", "attention share"):
        table.add_column(heading, justify="right")
    for context in [context for context in _CONTEXTS if context <= max_context] or [max_context]:
        for rows in _ROWS:
            seconds = latency.sublayers_s(rows=rows, context=context, batch=1)
            attention_s, mlp_s = float(seconds[::2].sum()), float(seconds[1::2].sum())
            forward_s = latency.verify_s(rows=rows, context=context, batch=1)
            table.add_row(
                str(rows),
                str(context),
                *(f"{1000 * part:.2f}" for part in (attention_s, mlp_s, latency.head_s(rows), forward_s)),
                f"{100 * attention_s / (attention_s + mlp_s):.0f} %",
                end_section=rows == _ROWS[-1],
            )
    return table
