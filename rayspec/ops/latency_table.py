"""Tables of a LatencyModel: the cost of a forward pass by rows and context."""

from __future__ import annotations

from rich.table import Table

from rayspec.planning.latency import LatencyModel

_ROWS = (1, 2, 4, 8, 16, 32)
_CONTEXTS = (128, 1024, 4096, 16384, 65536)


def latency_table(latency: LatencyModel, *, max_context: int) -> Table:
    """Return a table of the milliseconds of one sequence's forward pass: attention, MLP, head and total."""
    one, two = (latency.verify_s(rows=2, context=0, batch=batch) for batch in (1, 2))
    title = f"milliseconds of a forward of one sequence; each further sequence takes {1000 * (two - one):.3f} ms more"
    table = Table(title=title, title_justify="left")
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


def stage_table(latency: LatencyModel) -> Table:
    """Return a table of the cost of each stage. Its title has the time of a hop, and the delay after a pause."""
    pause = f", a pause before it {1000 * latency.wake_s:.3f} ms more" if latency.wake_s else ""
    table = Table(title=f"stages; a hop takes {1000 * latency.hop_s:.3f} ms{pause}", title_justify="left")
    for heading in ("stage", "sublayers", "attention ms", "MLP ms", "8 rows ms", "weight transfer ms", "next hop ms"):
        table.add_column(heading, justify="right")
    one, eight = (latency.sublayers_s(rows=rows, context=1024, batch=1) for rows in (1, 8))
    for stage in dict.fromkeys(latency.stages):
        mine = [index for index, own in enumerate(latency.stages) if own == stage]
        kinds = [[index for index in mine if index % 2 == parity] for parity in (0, 1)]
        table.add_row(
            str(stage),
            f"{mine[0]}-{mine[-1]}",
            *(f"{1000 * float(one[kind].sum()):.2f}" for kind in kinds),
            f"{1000 * float(eight[mine].sum()):.2f}",
            f"{1000 * sum(latency.transfer_s[index] for index in mine):.2f}",
            f"{1000 * (latency.link_s[stage] if latency.link_s else latency.hop_s):.3f}",
        )
    return table
