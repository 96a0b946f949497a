"""Sentences, built from the numbers, that explain the papers' results; and number formats of the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from textwrap import fill

from benchmarks.papers.rows import PaperRow, Prediction

_CLOSE = 0.03  # a residual of at most this size needs no other explanation
_WIDTH = 118


def explain(rows: Sequence[PaperRow]) -> str:
    """Explain why a group's published speed-ups differ from the predictions, or which acceptance or cost they need."""
    sentences = [_explain_prediction(row) for row in rows if has_gain(row)]
    asked = [row for row in rows if row.published.acceptance is None and row.published.speedup > 1]
    sentences += _explain_needs([row for row in asked if row.ideal is not None], others=bool(sentences))
    sentences += _explain_unknown([row for row in asked if row.ideal is None])
    expected = [row for row in rows if row.published.expected_speedup is not None]
    if expected:
        above = [(row.published.expected_speedup or 0) / row.published.speedup - 1 for row in expected]
        sentences.append(f"The authors' own formula expected {span(above, percent)} more than they measured.")
    lost = [row for row in rows if row.published.speedup < 1]
    if lost:
        costs = [1 / row.published.speedup - 1 for row in lost]
        sentences.append(
            f"{_count(lost)} below 1, where it is best not to draft: if nothing was accepted, {span(costs)} plain "
            "steps a round went into drafts."
        )
    return paragraph(*sentences)


def _explain_prediction(row: PaperRow) -> str:
    paper, bound = row.published, _bound(row)
    start = f"{paper.model}, {paper.task}: {paper.speedup:.2f} where {sides(row, attrgetter('gain'))} is predicted"
    if paper.speedup > bound:
        return (
            f"{start}; it exceeds the bound 1/(ac + 1 - a) = {bound:.2f}: more is skipped than assumed, or the plain "
            "decoding that it is compared with has an overhead that drafts do not have."
        )
    if _least_residual(row) <= _CLOSE:
        return f"{start}; the published acceptance and {percent(row.skip_ratio or 0)} of the time skipped explain it."
    if all((each.residual or 0) > 0 for each in row.predictions):
        return (
            f"{start}; drafts that end well, which may reach {bound:.2f}, or c = {number(row.needed_cost)} explain it."
        )
    drafted = [each.drafted_per_round for each in row.predictions]
    return (
        f"{start}; it needs c = {number(row.needed_cost)} (assumed {sides(row, attrgetter('cost'))}), or an acceptance "
        f"of {sides(row, attrgetter('needed_acceptance'))} in place of {paper.acceptance:.3g}, or drafts that end "
        f"after {span(drafted)} tokens on average."
    )


def _bound(row: PaperRow) -> float:
    return max(each.oracle or 0.0 for each in row.predictions)


def _least_residual(row: PaperRow) -> float:
    return min(abs(each.residual) for each in row.predictions if each.residual is not None)


def _explain_needs(rows: Sequence[PaperRow], *, others: bool) -> list[str]:
    possible = [row for row in rows if all(each.needed_acceptance is not None for each in row.predictions)]
    sentences = []
    if possible:
        each = [prediction for row in possible for prediction in row.predictions]
        sentences.append(
            f"{'The others need' if others else 'They need'} an acceptance of "
            f"{span(one.needed_acceptance for one in each)} at c = {span(one.cost for one in each)}."
        )
    beyond = [row for row in rows if row not in possible]
    if beyond:
        sentences.append(f"{_count(beyond)} beyond any acceptance at the assumed c: more is skipped there.")
    return sentences


def _explain_unknown(rows: Sequence[PaperRow]) -> list[str]:
    if not rows:
        return []
    costs = span(row.most_cost for row in rows)
    unknown = f"Of {len(rows)} nothing is known of what is skipped:"
    return [f"{unknown} even with every token accepted a draft step may cost at most {costs} of a plain one."]


def explain_tpt(rows: Sequence[PaperRow]) -> str:
    """Explain which c the authors' own estimates give."""
    above = [(row.published.tpt_gain or 0) / row.published.speedup - 1 for row in rows]
    halves = [row.ideal.cost for row in rows if row.ideal is not None]
    over = [row for row in rows if row.ideal is not None and (row.tpt_cost or 0) > row.ideal.cost]
    needed = [row.at_tpt_cost.needed_acceptance for row in rows if row.at_tpt_cost is not None]
    return paragraph(
        f"The estimates are {span(above, percent)} above what was measured. They give c = "
        f"{span(row.tpt_cost for row in rows)}, in {len(over)} of {len(rows)} rows more than the {span(halves)} of",
        "a draft that skips half of the time: by this reading those skip less, and the rows need an acceptance of",
        f"{span(needed)}.",
    )


def explain_steps(rows: Sequence[PaperRow]) -> str:
    """Compare the published times of a plain step with the predicted times of reading its bytes."""
    clauses = []
    for row in rows:
        measured = row.published.decode_step_ms or 0
        ways = (("the ideal", row.ideal_step_ms), ("the reference path", row.reference_step_ms))
        ratios = " and ".join(f"{measured / step:.1f} times {name}" for name, step in ways if step is not None)
        clauses.append(f"{row.published.model} takes {ratios} ({row.published.paper})")
    return paragraph(
        f"{'; '.join(clauses)}. What is more than the reference path is in neither model; launches and synchronisation "
        "are the likely part of it. A draft saves them with the sublayers that it skips, so a speed-up over a slow "
        "baseline says little about one over an engine with good kernels."
    )


def meaning(rows: Sequence[PaperRow]) -> str:
    """Return a list of conclusions from all tables."""
    predicted = [row for row in rows if has_gain(row)]
    near = [row for row in predicted if _least_residual(row) <= _CLOSE]
    beyond = [row for row in predicted if row.published.speedup > _bound(row)]
    costs = [each.cost for row in rows if row.published.method == "knapspec" for each in row.predictions]
    points = (
        paragraph(
            f"Of {len(predicted)} figures with an acceptance above 0, {len(near)} are within {percent(_CLOSE)} of a",
            f"prediction, and {len(beyond) or 'none'} beyond the bound. KnapSpec's acceptance counts the rounds that",
            "its code drafts with the whole model while it has no plan yet, which are accepted by construction: it is",
            "an upper end. The half of the time is an upper end too, of what is skipped.",
        ),
        paragraph(
            f"With half of the time skipped c is {span(costs)} for KnapSpec's models, most for the small ones, for",
            "their LM head. No draft gains more than 1/c, and at an acceptance below c every draft loses.",
        ),
        paragraph(
            "Most rows lack both the acceptance and what was skipped. What one of them explains is no test of the",
            "prediction; rows that gave both would be one.",
        ),
        "Nothing here says what rayspec gains: `rayspec bench` measures that.",
    )
    return "\n".join(fill(f"- {point}", _WIDTH, subsequent_indent="  ", break_on_hyphens=False) for point in points)


def paragraph(*sentences: str) -> str:
    """Join the sentences and wrap the lines, so that the Markdown source is readable, too."""
    return fill(" ".join(sentences), _WIDTH, break_long_words=False, break_on_hyphens=False)


def has_gain(row: PaperRow) -> bool:
    return any(each.gain is not None for each in row.predictions)


def _count(rows: Sequence[PaperRow]) -> str:
    return "One figure is" if len(rows) == 1 else f"{len(rows)} figures are"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def one_decimal(value: float) -> str:
    return f"{value:.1f}"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def signed(value: float) -> str:
    return f"{round(100 * value, 1) + 0.0:+.1f} %"  # adding 0.0 turns -0 into +0


def sides(
    row: PaperRow,
    get: Callable[[Prediction], float | None],
    show: Callable[[float], str] = number,
    *,
    none: str = "-",
) -> str:
    """Return "ideal / reference"; a missing prediction is left out, and "-" stands for none at all."""
    values = [get(each) for each in row.predictions]
    return " / ".join(none if value is None else show(value) for value in values) or "-"


def span(values: Iterable[float | None], show: Callable[[float], str] = number) -> str:
    """Return the range from least to greatest of the known values; "-" without any."""
    known = [value for value in values if value is not None]
    ends = dict.fromkeys((show(min(known)), show(max(known)))) if known else ()
    return " to ".join(ends) or "-"
