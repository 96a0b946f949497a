import json
from pathlib import Path

from typer.testing import CliRunner

from benchmarks.host_time import app


def test_rounds_are_timed_on_the_path_of_a_gpu(tmp_path: Path) -> None:
    """Drafts of sublayers that do nothing are right, so a static round commits all four and the bonus token."""
    asked = ["--shapes", "bundled", "--strategies", "ar,static,auto", "--batches", "2", "--temperatures", "0,1"]
    path = tmp_path / "times.json"
    result = CliRunner().invoke(app, [*asked, "--context", "40", "--rounds", "3", "--json", str(path)])
    assert result.exit_code == 0, result.output
    rounds = json.loads(path.read_text())["rounds"]
    assert [(one["strategy"], one["tokens"]) for one in rounds[:4]] == [("ar", 1)] * 2 + [("static", 5)] * 2
    assert all(0 < one["best_ms"] <= one["median_ms"] for one in rounds)
