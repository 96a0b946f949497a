"""A Markdown page that compares the papers' results with our predictions, and explains the differences."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from json import dumps
from operator import attrgetter
from pathlib import Path
from typing import Any

import rayspec
from benchmarks.papers.choices import choices_markdown, predict_choices
from benchmarks.papers.rows import (
    BUDGETS,
    DEFAULT_ACCELERATOR,
    IN_SAMPLE_DRAFT_TOKENS,
    LONG_DOCUMENT,
    MAX_DRAFT_TOKENS,
    SHORT_PROMPT,
    PaperRow,
    Prediction,
    predict_papers,
)
from benchmarks.papers.sentences import (
    explain,
    explain_steps,
    explain_tpt,
    has_gain,
    meaning,
    number,
    one_decimal,
    paragraph,
    percent,
    sides,
    signed,
)
from rayspec.bench.result import markdown_table

_INTRO = f"""# Published speed-ups and our own predictions

Made by `python -m benchmarks papers`; `--json FILE` writes the numbers. Nothing was run for it, and no GPU was used:
the papers' figures are those in [published.csv](../../benchmarks/papers/published.csv), and the predictions are
arithmetic on them. Our own measurements are in the other files of this folder.

- **a**: acceptance, the probability that a drafted token is the target's, given that those before it were.
- **c**: time of a draft step over that of a plain decoding step, LM head included. A draft breaks even at a = c.
- **predicted**: by `best_choice`, the function that the plan search uses, with that a and c, for drafts that always
  reach their length, the best one; after "to", the bound 1/(ac + 1 - a), which a rule that ends every draft just before
  the token to be rejected would reach.
- **ideal**: each forward reads its weights and its keys and values once. **reference**: the cache handling of
  KnapSpec's published code, whose attention moves keys and values 3 + 2 x (query heads per KV head) times, and which
  copies those of all layers in every forward, a draft's too. Both are bytes over bandwidth, of an {DEFAULT_ACCELERATOR}
  where no GPU is named; the bandwidth cancels in c. Contexts are assumed, for no row gives its own: {LONG_DOCUMENT}
  tokens for GovReport, PG19 and BookSum, {SHORT_PROMPT} otherwise.
- **residual**: published over predicted, less 1.

The papers print accepted over drafted tokens. That is a only where nothing ends drafts early; a confidence rule spares
the tokens that would be rejected, and raises the share. Read as the share, the speed-up is (1 + an) / (1 + cn) with n
tokens drafted a round, whatever ends the drafts: the first table gives the n that would explain the published figure.

How much a draft skips is published for few rows. Elsewhere the method's budget stands in, for KnapSpec
{percent(BUDGETS["knapspec"])} of the time and for CLaSp the middle of what it says, and the tables say what would have
to hold for the published figure: the acceptance at that c, or the c at that acceptance. That a figure can be explained
so does not prove that it came about so."""
_TPT_INTRO = paragraph(
    "The paper prints tokens per time (TPT) with and without a draft, estimated on the very tokens that the draft was",
    "chosen by. If all of them agreed and the draft was the longest of its grid,",
    f"{IN_SAMPLE_DRAFT_TOKENS} tokens, the ratio gives c.",
)
_STEP_INTRO = "What speed-ups are ratios to. KnapSpec's is from an isolated, synchronised profile of its modules."


def run_paper(json: Path | None = None) -> str:
    """Return the page of `python -m benchmarks papers` in Markdown. json: file to write the numbers to."""
    rows = predict_papers()
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_text(dumps(paper_json(rows), indent=2) + "\n", encoding="utf-8")
    return paper_markdown(rows) + "\n" + choices_markdown(predict_choices())


def paper_json(rows: Sequence[PaperRow]) -> dict[str, Any]:
    """Return assumptions and rows as JSON values."""
    assumed = {
        "accelerator": DEFAULT_ACCELERATOR,
        "max_draft_tokens": MAX_DRAFT_TOKENS,
        "context": {"long_documents": LONG_DOCUMENT, "other": SHORT_PROMPT},
    }
    return {"rayspec": rayspec.__version__, "assumed": assumed, "rows": [asdict(row) for row in rows]}


def paper_markdown(rows: Sequence[PaperRow]) -> str:
    """Return the page without the choices section, and without a newline at its end."""
    parts = [
        _INTRO,
        "## Where acceptance was published",
        _predicted_table([row for row in rows if has_gain(row)]),
        "## What each figure needs",
        'Two numbers are ideal / reference. "Most c" is what a draft step may cost if every token were accepted.',
    ]
    for name, group in itertools.groupby(rows, key=lambda row: row.published.group):
        members = list(group)
        parts += [f"### {name}", _needs_table(members), explain(members), _sources(members)]
    estimated = [row for row in rows if row.tpt_cost is not None]
    timed = [row for row in rows if row.published.decode_step_ms is not None]
    if estimated:
        parts += ["## KnapSpec's own estimate", _TPT_INTRO, _tpt_table(estimated), explain_tpt(estimated)]
    if timed:
        parts += ["## A plain decoding step", _STEP_INTRO, _step_table(timed), explain_steps(timed)]
    return "\n\n".join([*parts, "## What it means", meaning(rows)])


def _predicted_table(rows: Sequence[PaperRow]) -> str:
    headings = (
        "model", "task", "a", "c, ideal / reference", "predicted, ideal", "predicted, reference", "published",
        "residual, ideal / reference", "c needed at a", "drafted a round that would explain it",
    )  # fmt: skip
    return markdown_table(
        headings,
        (
            (
                row.published.model,
                row.published.task,
                f"{row.published.acceptance:.3g}",
                sides(row, attrgetter("cost")),
                _predicted(row.ideal),
                _predicted(row.reference),
                f"{row.published.speedup:.2f}",
                sides(row, attrgetter("residual"), signed),
                number(row.needed_cost),
                sides(row, attrgetter("drafted_per_round"), one_decimal),
            )
            for row in rows
        ),
    )


def _needs_table(rows: Sequence[PaperRow]) -> str:
    headings = (
        "method", "model", "task", "published", "a", "skipped", "c = break-even acceptance", "acceptance needed",
        "most c", "note",
    )  # fmt: skip
    return markdown_table(
        headings,
        (
            (
                row.published.method,
                row.published.model or "-",
                row.published.task or "-",
                f"{row.published.end} {row.published.speedup:.2f}".strip(),
                "-" if row.published.acceptance is None else f"{row.published.acceptance:.3g}",
                _skipped(row),
                sides(row, attrgetter("cost")),
                sides(row, attrgetter("needed_acceptance"), none="none does"),
                number(row.most_cost),
                row.published.note,
            )
            for row in rows
        ),
    )


def _tpt_table(rows: Sequence[PaperRow]) -> str:
    headings = ("model", "task", "TPT ratio", "c from it", "c of the half", "published", "a", "predicted at c from it",
                "acceptance needed there")  # fmt: skip
    return markdown_table(
        headings,
        (
            (
                row.published.model,
                row.published.task,
                number(row.published.tpt_gain),
                number(row.tpt_cost),
                sides(row, attrgetter("cost")),
                f"{row.published.speedup:.2f}",
                "-" if row.published.acceptance is None else f"{row.published.acceptance:.3g}",
                _predicted(row.at_tpt_cost),
                number(row.at_tpt_cost.needed_acceptance if row.at_tpt_cost else None),
            )
            for row in rows
        ),
    )


def _step_table(rows: Sequence[PaperRow]) -> str:
    return markdown_table(
        ("paper", "model", "task", "published, ms", "ideal, ms", "reference, ms"),
        (
            (
                row.published.paper,
                row.published.model,
                row.published.task,
                f"{row.published.decode_step_ms:.3g}",
                *("-" if step is None else f"{step:.1f}" for step in (row.ideal_step_ms, row.reference_step_ms)),
            )
            for row in rows
        ),
    )


def _sources(rows: Sequence[PaperRow]) -> str:
    return f"Source: {'; '.join(dict.fromkeys(row.published.source for row in rows))}."


def _skipped(row: PaperRow) -> str:
    if row.skip_ratio is None:
        return "-"
    return f"{'budget, ' if row.published.skip_ratio is None else ''}{percent(row.skip_ratio)}"


def _predicted(prediction: Prediction | None) -> str:
    if prediction is None or prediction.gain is None:
        return "-"
    return f"{prediction.gain:.2f} ({prediction.num_draft_tokens} tokens) to {number(prediction.oracle)}"
