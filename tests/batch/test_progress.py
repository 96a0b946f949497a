from __future__ import annotations

import io

import pytest
from rich.console import Console

from rayspec.batch import progress
from rayspec.batch.progress import showing_progress
from rayspec.batch.rows import Row
from rayspec.batch.tally import Tally

ROW = Row(id="a", num_output_tokens=30, num_draft_tokens=20, num_accepted_tokens=15)


def shown(*, terminal: bool) -> str:
    file = io.StringIO()
    tally = Tally()
    with showing_progress(tally, Console(file=file, force_terminal=terminal, width=100)) as show:
        for _ in range(3):
            tally.add(ROW)
            show()
    return file.getvalue()


def test_a_terminal_has_a_live_line() -> None:
    text = shown(terminal=True)
    assert "3 rows" in text
    assert "acceptance 0.75" in text


def test_elsewhere_a_plain_line_comes_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(terminal=False) == ""
    monkeypatch.setattr(progress, "_PLAIN_INTERVAL_S", 0.0)
    lines = shown(terminal=False).splitlines()
    assert [line.split(",")[0] for line in lines] == ["1 rows", "2 rows", "3 rows"]
    assert "\x1b" not in "".join(lines)
