from pathlib import Path

import pytest

from benchmarks.papers.rows import PaperRow, predict_papers
from benchmarks.papers.run import run_paper


@pytest.fixture(scope="module")
def rows() -> tuple[PaperRow, ...]:
    return predict_papers()


@pytest.fixture
def known(rows: tuple[PaperRow, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command has the predictions that are made already."""
    monkeypatch.setattr("benchmarks.papers.run.predict_papers", lambda: rows)


def row_of(rows: tuple[PaperRow, ...], model: str, task: str, method: str = "knapspec") -> PaperRow:
    key = (method, model, task)
    (found,) = [row for row in rows if (row.published.method, row.published.model, row.published.task) == key]
    return found


def test_predictions_by_hand(rows: tuple[PaperRow, ...]) -> None:
    """A 70B draft keeps 40 of 80 layers and the head: c = (40 * 1.711 + 2.101 + KV) / (80 * 1.711 + 2.101 + KV) GB."""
    row = row_of(rows, "Llama-3.1-70B", "GovReport")
    layer_gb = 2 * (2 * 8192 * 128 * 72 + 3 * 8192 * 28672) / 1e9 + 4096 * 12_800 / 1e9
    head_gb = 2 * 8192 * 128256 / 1e9
    cost = (40 * layer_gb + head_gb) / (80 * layer_gb + head_gb)
    assert row.ideal is not None
    assert row.ideal.cost == pytest.approx(cost)
    gain = max((1 - 0.944 ** (g + 1)) / (1 - 0.944) / (g * cost + 1) for g in range(1, 19))
    assert row.ideal.gain == pytest.approx(gain)
    assert row.ideal.residual == pytest.approx(1.47 / gain - 1)
    assert row.ideal.oracle == pytest.approx(1 / (0.944 * cost + 0.056))
    drafted = row.ideal.drafted_per_round
    assert drafted is not None
    assert (1 + 0.944 * drafted) / (1 + cost * drafted) == pytest.approx(1.47)


def test_the_document_is_the_command_s(known: None) -> None:
    document = Path(__file__).parents[3] / "docs" / "benchmarks" / "papers.md"
    assert document.read_text(encoding="utf-8") == run_paper() + "\n"
