"""What README.md shows runs as it stands, and prints what stands beneath it; links of documents lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(file for folder in ("docs", "docs/guides") for file in sorted((ROOT / folder).glob("*.md"))),
]


def test_the_quick_start_prints_what_the_readme_says(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(shown) == text.count("```python") >= 1, "every snippet stands with its output"
    for code, printed in shown:
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True, timeout=240
        )
        assert run.stdout == printed


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []
