from __future__ import annotations

import random
import re
from html import escape
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
from markdown_it import MarkdownIt
from PIL import Image

from rayspec.batch.plots import plot_plans
from rayspec.batch.report import PLOT_NAME, RunReport
from rayspec.batch.rows import Row
from rayspec.choices import Choice
from rayspec.types import EngineStats, Plan, PlanRecord, PromptTooLongError, no_draft
from tests.exhaustive import few_of

CONFIG = {"model": "demo", "dtype": "float32", "speculation": {"strategy": "knapspec"}}


def record(rng: random.Random, *, drafts: bool = True, num_tokens: int = 100) -> PlanRecord:
    choices = tuple(rng.choices(get_args(Choice), k=32))
    return PlanRecord(
        elapsed_s=1.0,
        context=rng.randrange(100, 4000),
        batch=1,
        plan=Plan(choices=choices, num_draft_tokens=6, source="test") if drafts else no_draft(32, "test"),
        reason="drift | of context",
        estimated_acceptance=rng.random(),
        predicted_tpt=40.0,
        plain_tpt=30.0,
        optimise_s=0.05,
        num_tokens=num_tokens,
        sequence_s=num_tokens / 39.0,
        num_accepted_tokens=num_tokens // 2,
        num_tested_tokens=num_tokens,
    )


def stats_of(records: list[PlanRecord]) -> EngineStats:
    return EngineStats(total_s=10.0, draft_s=2.0, verify_s=5.0, optimise_s=0.1, gate_reason="none pays", plans=records)


def rows() -> list[Row]:
    good = Row(id="good", text="a\nB", num_prompt_tokens=100, num_output_tokens=21, decode_s=2.0)
    return [good, Row(id="bad|id").failed(PromptTooLongError("too\nlong")), Row(id="other", text="x")]


@pytest.mark.parametrize(
    ("num_records", "drafts"),
    few_of(list(product([0, 1, 7, 300], [True, False])), [(0, True), (1, False), (300, True)]),
)
def test_the_picture_is_drawn_for_any_number_of_plans(tmp_path: Path, num_records: int, drafts: bool) -> None:
    rng = random.Random(0)
    records = [record(rng, drafts=drafts, num_tokens=rng.choice([0, 200])) for _ in range(num_records)]
    plot_plans(stats_of(records), tmp_path / "p.png", title="title")
    with Image.open(tmp_path / "p.png") as image:
        assert image.size > (1000, 400)
        assert len(image.convert("RGB").getcolors(2**24) or ()) > 10


def test_the_report_says_what_happened(tmp_path: Path) -> None:
    report = RunReport()
    for row in rows():
        report.add(row)
    rng = random.Random(0)
    path = report.write(tmp_path, stats=stats_of([record(rng), record(rng, drafts=False)]), config=CONFIG, title="Run")
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# Run\n")
    assert "| rows | 3, 1 failed |" in text
    assert "| time in verify | 50 % |" in text
    assert "| prompt_too_long | 1 | too long |" in text
    assert "| good | 100 | 21 | 10.0 | - |  |" in text
    assert "| bad\\|id | - | - | - | - | prompt_too_long |" in text
    assert "drift \\| of context" in text
    assert f"]({PLOT_NAME})" in text
    assert (tmp_path / PLOT_NAME).stat().st_size > 10_000


MARKUP = [
    "![x](http://evil/b.png)",
    "[b](http://evil)",
    "<img src=http://evil>",
    "<http://evil>",
    "a|b",
    "`c`",
    "*d*",
    "e_1_",
]


def test_texts_of_others_are_no_markup(tmp_path: Path) -> None:
    report = RunReport()
    for text in MARKUP:
        report.add(Row(id=text, finish_reason="error", error_kind="k", error=text))
    path = report.write(tmp_path, stats=EngineStats(), config=CONFIG | {"model": MARKUP[0]}, title=MARKUP[1])
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(path.read_text(encoding="utf-8"))
    assert re.findall(r"<(?:a|img|code|em|script)\b[^>]{0,20}", body) == [f'<img src="{PLOT_NAME}" ']
    for text in MARKUP:
        assert f"<td>{escape(text)}</td>" in body


def test_a_report_of_many_rows_lists_the_first_and_counts_all(tmp_path: Path) -> None:
    report = RunReport()
    for number in range(200):
        report.add(Row(id=f"row-{number}", num_output_tokens=1))
    text = report.write(tmp_path, stats=EngineStats(), config=CONFIG, title="Run").read_text(encoding="utf-8")
    assert "| rows | 200, 0 failed |" in text
    assert "row-49" in text
    assert "row-50" not in text
    assert "150 more rows are in the output file." in text
