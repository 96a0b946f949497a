"""The scripts in examples/ run as they are, with the bundled model."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SAID = {
    "offline.py": ["Prompt: 'The agency reported that', generated text: '", "Prompt: 'The committee met in May and'"],
    "chat.py": ["Answer: '", "Continued: '"],
    "scores.py": ["tokens: 'The report was published in May.'", "tokens: 'The report were publish on in May.'"],
    "stream.py": ["Review of the zoning program of the Parks Council in Linton, 2001\nFinding 1: "],
    "compare.py": ["ar: ", "auto: ", " tokens/s, prompts not counted", "same texts: True"],
    "adapters.py": ["None: 'Review of the zoning program of the ", "\nlegal: '", "\nmedical: '"],
    "ray_data.py": ["report-0-0: Review of the ", "report-0-1: Review of the ", "report-0-2: Review of the "],
}
LONG = {
    "adapters.py": [pytest.mark.exhaustive],
    "compare.py": [pytest.mark.exhaustive],
    "ray_data.py": [pytest.mark.ray, pytest.mark.exhaustive],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG.get(name, ())) for name in SAID])
def test_an_example_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, which has imported already what takes most of the time of a script."""
    if name == "ray_data.py":  # it starts a Ray of its own
        command = [sys.executable, EXAMPLES / name]
        printed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    else:
        monkeypatch.setattr(sys, "argv", [name])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        printed = capsys.readouterr().out
    for said in SAID[name]:
        assert said in printed
    if name == "scores.py":
        right, wrong = (float(line.split()[0]) for line in printed.splitlines())
        assert wrong < right < 0
    if name == "adapters.py":
        assert len({line.split(": ", 1)[1] for line in printed.splitlines() if ": " in line}) == 3, "each adapter shows"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", pytest.param("compare_strategies", marks=pytest.mark.exhaustive)])
def test_a_notebook_runs_and_prints_what_it_shows(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Cells with the tag `varies` print speeds."""
    names = {"__name__": "__main__"}
    for cell in json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
            printed = capsys.readouterr().out
            shown = "".join(text for output in cell["outputs"] for text in output["text"])
            assert bool(printed) == bool(shown)
            assert printed == shown or cell["metadata"].get("tags") == ["varies"]
    assert "  NO" not in printed


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*SAID, "endpoint.py", "tools.py"}, (
        "the endpoint's tests run the last two"
    )
