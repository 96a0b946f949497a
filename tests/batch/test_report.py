import io
import random
import re
import time
from collections import Counter
from dataclasses import replace
from html import escape
from itertools import repeat
from typing import get_args

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from rayspec.batch import report
from rayspec.batch.report import RunReport, report_pages, showing_progress
from rayspec.batch.rows import Row
from rayspec.choices import Choice
from rayspec.types import EngineStats, Plan, PlanRecord, no_draft

CONFIG = {"model": "demo", "dtype": "float32", "speculation": {"strategy": "knapspec"}}
GOOD = Row(
    id="good",
    num_prompt_tokens=100,
    num_output_tokens=21,
    num_draft_tokens=20,
    num_accepted_tokens=15,
    decode_s=2.0,
    latency_s=8.0,
)


def bad(kind: str = "prompt_too_long") -> Row:
    return Row(id="bad|id", error_kind=kind, error="too\nlong")


def record(rng: random.Random, *, drafts: bool = True, num_tokens: int = 100) -> PlanRecord:
    choices = tuple(rng.choices(get_args(Choice), k=32))
    return PlanRecord(
        elapsed_s=1.0,
        context=rng.randrange(100, 4000),
        batch=1,
        plan=Plan(choices=choices, num_draft_tokens=6, source="test") if drafts else no_draft(32, "test"),
        reason="drift",
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
    return EngineStats(
        total_s=10.0, draft_s=2.0, verify_s=5.0, optimise_s=0.1, gate_reason="none pays", plans=records,
        num_generated_tokens=100, accepted_by_source={"own text": 60}, num_accepted_tokens=60, num_draft_tokens=80,
        num_plain_rounds=40, num_compared_rounds=40, compared_s=4.0, plain_s=9.2, died_at_s=[time.monotonic()],
    )  # fmt: skip


@pytest.mark.parametrize(("num_records", "drafts"), [(0, True), (1, False), (300, True)])
def test_the_report_and_its_short_form_say_what_happened(num_records: int, drafts: bool) -> None:
    rng = random.Random(0)
    records = [record(rng, drafts=drafts, num_tokens=rng.choice([0, 200])) for _ in range(num_records)]
    run = RunReport()
    run.stats = replace(stats_of(records), weights="fp8: stay quantised")
    for row in (GOOD, bad(), Row(id="other", text="A text | of\ntwo lines."), *repeat(GOOD, 60)):
        run.add(row)
    text, page = report_pages(run, config=CONFIG, title="Run", price=2.0).values()
    assert text.startswith("# Run\n")
    [at] = re.findall(r'<s style="left:([-\d.]+)%', page)
    assert 0 <= float(at) <= 100, "an engine died during the job"
    assert "| rows | 63, 1 failed |" in text
    assert "| time in verify | 50 % |" in text
    assert "| time in prefill |" not in text, "there was none"
    assert "| quantised weights | fp8: stay quantised |" in text
    assert "| prompt_too_long | 1 | too long |" in text
    assert "| good | 100 | 21 | 10.0 | - |  |" in text
    assert "| bad\\|id | - | - | - | - | prompt_too_long |" in text
    assert "13 more rows are in the output file." in text
    shown = " ".join(re.sub(r"<[^>]*>", " ", re.sub(r"(?s)<style>.*?</style>", "", page)).split())
    cards = (
        "2.3x the speed of plain decoding",
        "63 rows 1 failed",
        "60 % of the tokens from drafts",
        "75 % acceptance",
    )
    for said in (*cards, "at $2.00 per hour for all machines", "60 % copied from the document", "50 % verifying"):
        assert said in shown
    assert "prompt_too_long 1 too long Raise --max-model-len, or" in shown
    assert "an engine died and was replaced (1)" in shown
    assert "None pays." in shown
    assert page.count("<svg") == (min(12, num_records) if drafts else 0)
    assert page.count("<rect") == 32 * page.count("<svg")
    assert not re.findall(r"<(?:script|img|link|iframe)\b|\b(?:src|href)=|url\(|@import", page), "one file, no script"


@pytest.mark.parametrize("kind", ["out_of_memory", "does_not_shrink"])
def test_an_error_whose_remedy_depends_on_its_cause_has_that_of_its_message(kind: str) -> None:
    run = RunReport()
    run.add(bad(kind))
    assert "See the message." in report_pages(run, config=CONFIG, title="Run")["report.html"]


def test_results_that_are_shared_and_rows_that_fail_use_no_tokens() -> None:
    run = RunReport(num_left=2)
    run.add(GOOD)
    run.add(GOOD, is_shared=True)
    run.add(replace(bad(), num_prompt_tokens=50))
    assert (run.num_rows, run.num_done, run.num_shared) == (3, 2, 1)
    assert (run.num_prompt_tokens, run.num_output_tokens) == (100, 21)
    assert report.dollars_per_million(3.6, 1000.0) == "$1.00"


def test_rows_count_evenly_over_the_time_in_which_they_were_decoded() -> None:
    now_s = 0.0
    run = RunReport(clock=lambda: now_s)
    assert run.rates == []
    for second in range(1, 501):
        now_s = float(second)
        run.add(replace(GOOD, num_output_tokens=30, decode_s=3.0))
    assert len(run.rates) == 96
    assert sum(run.rates) * 500 / 96 == pytest.approx(30 * 500, rel=1e-3)
    assert run.rates[40:50] == pytest.approx([30.0] * 10, rel=1e-3)


MARKUP = [
    "![x](http://evil/b.png)", "[b](http://evil)", "<img src=http://evil>", "<http://evil>", "a|b", "`c`", "*d*",
    "e_1_",
]  # fmt: skip


def test_texts_of_others_are_no_markup() -> None:
    run = RunReport()
    for text in MARKUP:
        run.add(Row(id=text, finish_reason="error", error_kind="k", error=text))
    text, page = report_pages(run, config=CONFIG | {"model": MARKUP[0]}, title=MARKUP[1]).values()
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    for html in (body, page):
        assert re.findall(r"<(?:a|img|code|em|script)\b[^>]{0,20}", html) == []
    for text in MARKUP:
        assert f"<td>{escape(text)}</td>" in body


def test_texts_of_others_have_no_effect_on_a_terminal() -> None:
    run = RunReport()
    run.add(replace(GOOD, id="a\x1b[2J", text="b\x9b\u202ec"))
    for page in report_pages(run, config=CONFIG, title="d\x1b").values():
        assert r"a\x1b[2J" in page.replace("\\[", "[")
        assert not re.search("[\x1b\x9b\u202e]", page)


def shown(*, terminal: bool) -> str:
    file, run = io.StringIO(), RunReport()
    with showing_progress(run, Console(file=file, force_terminal=terminal, width=100)) as show:
        for _ in range(3):
            run.add(GOOD)
            show()
    return file.getvalue()


def test_elsewhere_a_plain_line_comes_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "3 rows" in shown(terminal=True)
    assert shown(terminal=False) == ""
    monkeypatch.setattr(report, "_PLAIN_INTERVAL_S", 0.0)
    lines = shown(terminal=False).splitlines()
    assert [line.split(",")[0] for line in lines] == ["1 row", "2 rows", "3 rows"]
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize(
    ("num_left", "num_done", "said"),
    [
        (100, 3, "97 rows to do, time left not known yet"),
        (100, 40, "60 rows to do, about 2 min left"),
        (100, 80, "20 rows to do, about 40 s left"),
        (100, 99, "1 row to do, about 10 s left"),
        (100, 100, "all rows are done"),
        (10_000, 100, "9900 rows to do, about 5 h 40 min left"),
    ],
)
def test_the_time_left_is_told(num_left: int, num_done: int, said: str) -> None:
    """Four rows at a time, 8 s each, begun 2 s after each other."""
    now_s = 100.0
    run = RunReport(clock=lambda: now_s)
    run.add_earlier(Counter({None: 7}), lambda with_text: [])
    assert "left" not in run.progress
    run.num_left, run.num_under_way = num_left, 4
    for number in range(num_done):
        now_s = 150.0 + 8 + 2 * number
        run.add(GOOD)
    assert run.progress == f"{run}, {said}"


def test_rows_of_an_earlier_run_count_as_rows_and_not_as_work() -> None:
    run = RunReport(clock=lambda: 1.0)
    run.add_earlier(Counter({None: 1, "prompt_too_long": 1}), lambda with_text: [bad(), bad("engine_dead")])
    run.add(GOOD)
    assert (run.num_rows, run.num_earlier, run.num_failed, run.exit_code(), len(run.listed)) == (3, 2, 1, 3, 2)
    assert (run.num_prompt_tokens, run.num_output_tokens, run.num_draft_tokens) == (100, 21, 20)
    assert str(run).startswith("3 rows (2 of an earlier run), 1 failed (prompt_too_long 1), 21 tokens")
    text, page = report_pages(run, config=CONFIG, title="Run").values()
    assert "| rows | 3, 1 failed; 2 of an earlier run, which the lines below leave out |" in text
    assert "1 failed; 2 of the rows are of an earlier run<" in page


def test_the_line_says_why_rows_failed() -> None:
    run = RunReport()
    for kind in ["a"] * 4 + ["b"] * 3 + ["c", "c", "d", "e"]:
        run.add(bad(kind))
    assert "11 rows, 11 failed (a 4, b 3, c 2, d 1, ...), " in str(run)


UNREADABLE = bad("unreadable_file")


@pytest.mark.parametrize(
    ("rows", "code", "accepting"),
    [
        ([GOOD], 0, 0),
        ([GOOD, bad()], 3, 0),
        ([bad()], 1, 0),
        ([GOOD, UNREADABLE], 3, 3),
        ([UNREADABLE], 1, 1),
        ([], 1, 1),
    ],
)
def test_failed_rows_may_be_accepted_but_not_unreadable_files(rows: list[Row], code: int, accepting: int) -> None:
    run = RunReport()
    for row in rows:
        run.add(row)
    assert (run.exit_code(), run.exit_code(accepts_failed=True)) == (code, accepting)


@pytest.mark.parametrize("speculation", [None, 5, "auto", []])
def test_a_config_that_was_edited_gives_a_report(speculation: object) -> None:
    text, _ = report_pages(RunReport(), config=CONFIG | {"speculation": speculation}, title="Run").values()
    assert "strategy None" in text
