"""The documents and what the package says are in plain English: no private words, no long sentences."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "k8s/README.md", "cluster/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# What users and operators read in addition: the changelog, web page, reports, manifests, dashboard, alerts, notebooks.
SHOWN = [
    *(ROOT / name for name in ("CHANGELOG.md", "Makefile", "mkdocs.yml", "pyproject.toml", "rayspec/vllm_names.json")),
    *(
        path
        for folder in ("rayspec", "k8s", "cluster", "examples", ".github", ".devcontainer")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".css", ".html", ".ipynb", ".j2", ".js", ".md", ".yaml", ".yml"}
        or path.parent.name == "grafana"
        or path.name in {"Dockerfile", "devcontainer.json"}
    ),
]
MODULES = [
    path
    for folder in ("rayspec", "jobs", "benchmarks", "tools", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.parts[-2:] != ("demo", "corpus.py")
]
# Words with a private meaning, and what to write in their place. In code, a name of the code may stand.
BETTER = {
    r"beside": "next to, in addition to, together with",
    r"promis(?:e|es|ed|ing)(?!\()": "predict",  # JavaScript has Promise(...)
    r"contested": "full",
    r"hoped(?: for)?": "expected",
    r"on trial": "tested",
    r"rivals?": "alternative, other method",
    r"spine": "chain",
    r"arenas?": "KV cache",
    r"workshop": "fuser",
    r"mailbox(?:es)?": "inbox",
    r"quarantined?": "isolation, isolated",
    r"suspects?": "isolated row",
    r"doubts?": "uncertainty",
    r"steadiness": "spread",
    r"spare tokens": "name the quantity",
    r"open share": "name the quantity",
    r"what goes where": "layout",
    r"(?:row|document|line of the output|summary) each": "one row per ...",
    r"found out": "detected",
    r"fused bod(?:y|ies)": "fused layer",
    r"doors?": "interface",
    r"situations?": "case, state",
    r"openings?": "beginning",
    r"flights?": "running, under way",
    r"land(?:s|ed|ing)?": "arrive, complete",
    r"news": "result, message",
    r"evidence": "measurement, observation",
    r"woke|wak(?:es|ing)": "start",
    r"page tables?": "block table",
    r"slots? lists?": "slot mapping",
    r"recipes?": "factory",
    r"surveys?": "scan",
}
# These name things in the code; where users read, they are private words.
BETTER_FOR_USERS = {
    r"tapp?(?:s|ed)?": "captured hidden states",
    r"not drafting": "drafting is off",
    r"verdicts?": "result",
    r"told|tells?": "say, show",
    r"pieces?": "chunk, part",
    r"cohorts?": "microbatch",
    r"(?:its|without a|what the) gate|gate (?:limits|compares|says|is)": "speculation switch",
}
FOR_DEVELOPERS = {"internals.md", "tried.md", "architecture.md", "adding_a_strategy.md", "figures.md"}


def _found(words: dict[str, str], text: str) -> list[str]:
    if not re.search(rf"\b(?:{'|'.join(words)})\b", text, re.IGNORECASE):
        return []
    shown = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    return [
        f"{match[0]!r} in {shown[max(0, match.start() - 30) : match.end() + 30]!r}: write {better}"
        for word, better in words.items()
        for match in re.finditer(rf"\b(?:{word})\b", shown, re.IGNORECASE)
    ]


def _texts(module: Path) -> Iterator[tuple[str, bool]]:
    """Yield the texts of a module, and whether each is a docstring or a comment."""
    source = module.read_text(encoding="utf-8")
    yield from ((comment, True) for comment in re.findall(r"(?:^|\s)# (.*)$", source, re.MULTILINE))
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value, id(node) in docstrings


def _sentences(text: str) -> list[str]:
    """Return the sentences of a page, without code, tables and headings. A code span counts as one word."""
    text = re.sub(r"^```.*?^```|<!--.*?-->|^[|#!].*?$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "Code", text))
    blocks = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", text)
    found = (part for block in blocks for part in re.split(r"(?<=[.!?:])\s+(?=[A-Z\"(0-9])", block))
    return [part for part in found if re.search("[A-Za-z]", part)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_no_private_words_and_no_long_sentences(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert _found(BETTER, text) == []
    if page.name not in FOR_DEVELOPERS:
        assert _found(BETTER_FOR_USERS, text) == []
    lengths = [len(sentence.split()) for sentence in _sentences(text)]
    if len(lengths) > 4:
        assert sum(lengths) / len(lengths) <= 20, sorted(_sentences(text), key=lambda each: -len(each.split()))[:3]


def test_what_the_package_says_has_no_private_words() -> None:
    texts = [(path, *each) for path in MODULES for each in _texts(path)]
    assert len(texts) > 3000
    words = [
        f"{path.relative_to(ROOT)}: {found}"
        for path, text, is_docstring in texts
        for found in _found(BETTER if is_docstring else {**BETTER, **BETTER_FOR_USERS}, text)
    ]
    assert words == []


def test_what_users_are_shown_has_no_private_words() -> None:
    assert {path.suffix for path in SHOWN} >= {".css", ".html", ".ipynb", ".j2", ".js", ".json", ".md", ".yaml"}
    words = {**BETTER, **BETTER_FOR_USERS}
    assert [(path, found) for path in SHOWN for found in _found(words, path.read_text(encoding="utf-8"))] == []


def test_the_table_finds_words() -> None:
    assert len(_found(BETTER, "A row each beside the door.")) == 3
    assert _found(BETTER, "`beside`\n```\nbeside\n```\n") == []
