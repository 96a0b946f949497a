"""`rayspec demo` as a newcomer runs it: without a network, with the bundled model, in this process."""

import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rayspec import demo
from rayspec.batch import demonstration
from rayspec.batch.demonstration import Pair, SideBySide
from rayspec.batch.rows import Row
from rayspec.cli import app
from rayspec.types import CheckpointError, EngineStats
from tools.demo_model.evaluate import exact_lines


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["demo", *arguments])


@pytest.mark.slow
def test_without_a_registry_the_bundled_model_shows_its_gain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str, say: Any) -> Path:
        raise CheckpointError(f"model {name!r} could not be fetched: no network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "fetch", unreachable)
    monkeypatch.setattr(demo, "_NUM_EXAMPLES", 1)
    result = invoke("--no-ray")
    assert result.exit_code == 0, result.output
    assert "'smollm2' could not be fetched: no network" in result.stderr
    assert [line[:5] for line in result.stderr.splitlines() if line.startswith("[")] == [
        "[1/4]", "[2/4]", "[3/4]", "[4/4]",
    ]  # fmt: skip
    (gain,) = re.findall(r"^(\d+\.\d)x .* plain decoding, same text \(checked: 1 of 1\)$", result.stdout, re.MULTILINE)
    (by_model,) = re.findall(r"(\d+) % written by the full model", " ".join(result.stdout.split()))
    assert int(by_model) < 100, "drafts were accepted"
    assert "failed" not in result.output
    assert "not drafting" not in result.output

    out = tmp_path / "demo-out"
    plain, fast = (
        {row["id"]: row for row in pq.read_table(out / name / "summaries.parquet").to_pylist()}
        for name in ("plain", "auto")
    )
    assert {name: row["summary"] for name, row in plain.items()} == {name: row["summary"] for name, row in fast.items()}
    expected = {f"{document.id}.txt": document for document in demo.example_documents(pages=False)}
    assert fast.keys() == expected.keys() == {path.name for path in (out / "documents").iterdir()}
    exact = [exact_lines(fast[name]["summary"], document.summary or "") for name, document in expected.items()]
    assert sum(right for right, _ in exact) > 0.9 * sum(lines for _, lines in exact)
    page = (out / "report.html").read_text(encoding="utf-8")
    assert f"{gain}x faster than plain decoding, same text (checked: 1 of 1)" in page
    assert page.count('<th scope="row">') == 1
    assert "Review of the " in result.stdout


def test_without_gguf_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demonstration, "find_spec", lambda name: None)
    assert demonstration._available_model() == "demo"
    assert "pip install '.[gguf]'" in capsys.readouterr().err


def test_files_of_others_are_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "demo-out" / "documents" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.touch()
    result = invoke("--model", "demo", "--no-ray")
    assert (result.exit_code, mine.exists()) == (2, True)
    assert "has other files, such as 'mine.txt': use another --output" in result.stderr


def test_a_text_that_differs_is_said_and_ends_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [
        Pair(name=name, document="<b>", plain=Row(id=name, text="a"), fast=Row(id=name, text=text, decode_s=1.0))
        for name, text in (("a", "a"), ("b", "<i>"))
    ]
    stats = EngineStats(num_generated_tokens=10, total_s=2.0)
    comparison = SideBySide(model="demo", pairs=pairs, plain=stats, fast=stats)
    assert comparison.headline == "1.0x as fast as plain decoding, but only 1 of 2 texts are the same"
    assert "&lt;b&gt;" in comparison.html()
    assert "<i>" not in comparison.html()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demonstration, "compare", lambda *args, **options: comparison)
    assert invoke("--model", "demo", "--no-ray").exit_code == 1
