"""What README.md and docs/ show runs as it stands, and prints what stands beneath it."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rayspec
from rayspec import demo
from tests.real_models import smollm2

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "k8s/README.md", "cluster/README.md")),
    *(file for folder in ("docs", "docs/guides") for file in sorted((ROOT / folder).glob("*.md"))),
]
TIMEOUT_S = 1200.0  # for 40 s of work, on a machine that does other things too
# A block of code, the comment above it, and what it prints.
SNIPPET = re.compile(
    r"(?:^<!-- (?P<note>[^\n]+) -->\n)?^```(?P<language>python|sh|console)\n(?P<code>.*?)^```$"
    r"(?:\n\n^```text\n(?P<printed>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
# Runs the snippets of a page one after the other, as a reader does. Those in Python share their names.
RUN = """
import contextlib, io, json, subprocess, sys
names, printed = {"__name__": "__main__"}, []
for language, code in json.load(sys.stdin):
    out = io.StringIO()
    if language == "python":
        with contextlib.redirect_stdout(out):
            exec(code, names)
    else:
        done = subprocess.run(["bash", "-euc", code], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{code}exit code {done.returncode}\\n{done.stdout}{done.stderr}")
        out.write(done.stdout)
    printed.append(out.getvalue())
json.dump(printed, sys.stdout)
"""


def _snippets(page: Path) -> list[re.Match[str]]:
    return list(SNIPPET.finditer(page.read_text(encoding="utf-8")))


def _runs(snippet: re.Match[str]) -> bool:
    return not (snippet["note"] or "").startswith("not run here: ")


def _params() -> list[Any]:
    """README's Python in every run; the rest with the tests that take minutes."""
    pages = [page for page in PAGES if any(map(_runs, _snippets(page)))]
    all_of = [pytest.param(page, ".*", id=page.stem, marks=pytest.mark.exhaustive) for page in pages]
    return [pytest.param(PAGES[0], "python", id="README's Python"), *all_of]


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(("page", "languages"), _params())
def test_snippets_run_and_print_what_the_page_says(
    page: Path, languages: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    snippets = [each for each in _snippets(page) if _runs(each) and re.fullmatch(languages, each["language"])]
    if any((snippet["note"] or "") == "needs smollm2" for snippet in snippets):
        file = smollm2()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        demo.cached_path("smollm2").parent.mkdir(parents=True)
        demo.cached_path("smollm2").symlink_to(file)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    (work := tmp_path / "work").mkdir()
    asked = json.dumps([(snippet["language"], snippet["code"]) for snippet in snippets])
    if languages == "python":  # in this process, which has torch
        monkeypatch.setattr(sys, "stdin", io.StringIO(asked))
        monkeypatch.chdir(work)
        exec(RUN, {})
        out = capsys.readouterr().out
    else:
        options: Any = {"cwd": work, "input": asked, "timeout": TIMEOUT_S, "capture_output": True, "text": True}
        done = subprocess.run([sys.executable, "-c", RUN], check=False, **options)
        assert done.returncode == 0, done.stderr
        out = done.stdout
    for snippet, printed in zip(snippets, json.loads(out.splitlines()[-1]), strict=True):
        if snippet["printed"] is not None:
            assert printed == snippet["printed"]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    assert [name for name in rayspec.__all__ if not re.search(rf"\b{name}\b", text)] == ["__version__"]
