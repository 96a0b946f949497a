"""Documents of users and operators name commands, options, metrics, alerts and texts that there are."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import ray._private.authentication.authentication_constants as ray_texts
import yaml

from rayspec.openai.protocol import INTERNAL
from rayspec.serve import access
from tests.cluster.commands import blocks, faults, inline, inline_commands, options, shell_blocks
from tests.serve.test_dashboard import exported

ROOT = Path(__file__).parents[2]
GUIDES = tuple(f"docs/guides/{path.name}" for path in sorted((ROOT / "docs/guides").glob("*.md")))
DOCUMENTS = (
    *("README.md", "cluster/README.md", "docs/operations.md", "docs/security.md", "docs/troubleshooting.md"),
    *GUIDES,
)
PAGES = sorted({
    *DOCUMENTS,
    *("CONTRIBUTING.md", "k8s/README.md"),
    *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
})  # fmt: skip
TROUBLES = "docs/troubleshooting.md"
SOURCES = [path for folder in ("rayspec", "jobs", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
_KEYS_OF_OTHERS = {
    *("error_kind", "json_id", "auth_token", "min_workers", "max_workers", "build_llm_processor"),  # of outputs, Ray
    *("bind_tools", "output_type", "use_responses_api", "web_search", "with_structured_output"),  # of clients
}
_KIND_ROW = re.compile(r"^\| ((?:`[a-z0-9_]+`(?:, )?)+) \|", re.MULTILINE)


def text(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


@cache
def source() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)


@cache
def words() -> set[str]:
    return set(re.findall(r"\w+", source() + (ROOT / "rayspec" / "vllm_names.json").read_text(encoding="utf-8")))


@cache
def messages() -> str:
    """All texts of the source, a line each, with … for what is put in."""
    paths = [*SOURCES, Path(str(ray_texts.__file__))]
    found = (text for path in paths for text in _texts(ast.parse(path.read_text(encoding="utf-8"))))
    return "\n".join(text.replace("\n", " ") for text in found)


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.replace("%s", "…")
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)


def section(document: str, heading: str) -> str:
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text(document), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def first_cells(table: str) -> list[str]:
    return [line.split("|")[1].strip() for line in table.splitlines() if re.match(r"\| (?!---)", line)]


@pytest.mark.parametrize("document", PAGES)
def test_commands_can_be_given(document: str) -> None:
    found = [*blocks(text(document)), *inline_commands(text(document))]
    assert [fault for words in found for fault in faults(words)] == []


@pytest.mark.parametrize("document", PAGES)
def test_commands_can_be_pasted(document: str) -> None:
    """A zsh that somebody types into takes a comment for arguments."""
    lines = [line for block in shell_blocks(text(document)) for line in block.splitlines()]
    assert [line for line in lines if re.search(r"(^|\s)#\s", line)] == []


@pytest.mark.parametrize(
    "command",
    [
        "rayspec doctor --adress auto",
        "ray exec cluster/aws.yaml 'rayspec doctor --slow'",
        "ray job submit --address http://127.0.0.1:8265 -- python jobs/summarize.py --modle demo",
        "RAY_ADDRESS=auto rayspec serve --prt 8000",
        "python jobs/summarise.py --model demo",
        "python -m benchmarks serve --num-requests many",
    ],
)
def test_a_command_that_cannot_be_given_is_found(command: str) -> None:
    (words,) = blocks(f"```\n{command}\n```\n")
    assert faults(words) != []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_options_are_known(document: str) -> None:
    named = {word for one in inline(text(document)) if one.startswith("--") for word in one.split() if word[0] == "-"}
    assert named <= options()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_names_are_those_of_the_source(document: str) -> None:
    named = {one for one in inline(text(document)) if re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", one)}
    ours = {one for one in named if not one.startswith("ray_")} - _KEYS_OF_OTHERS
    assert ours - words() == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_metrics_are_exported(document: str) -> None:
    known = {name.removesuffix("_bucket") for name in exported()}
    assert set(re.findall(r"\bray_(?:rayspec|serve)_\w+", text(document))) <= known


@pytest.mark.parametrize("document", PAGES)
def test_links_lead_somewhere(document: str) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text(document)):
        path, _, anchor = target.partition("#")
        place = (ROOT / document).parent / path if path else ROOT / document
        assert place.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", place.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, target


def test_paths_of_the_repository_are_there() -> None:
    named = {one for document in DOCUMENTS for one in inline(text(document)) if re.match(r"(k8s|cluster|docs)/", one)}
    assert {one for one in named if not list(ROOT.glob(one))} == set()


def test_alerts_are_all_explained_and_no_others() -> None:
    rules = yaml.safe_load(text("k8s/monitoring/alerts.yaml"))["spec"]["groups"][0]["rules"]
    explained = first_cells(section("docs/operations.md", "Alerts"))[1:]
    assert explained == [rule["alert"] for rule in rules]
    mentioned = {name for document in DOCUMENTS for name in re.findall(r"\bRayspec[A-Z]\w+", text(document))}
    assert mentioned <= set(explained)


@pytest.mark.parametrize("heading", ["It does not start", "A job", "The pipeline", "It is slow"])
def test_texts_are_said_by_the_source(heading: str) -> None:
    table = section(TROUBLES, heading)
    quoted = [one for cell in first_cells(table) for one in inline(cell) if " " in one and "ray_" not in one]
    assert quoted
    assert [one for one in quoted if one not in messages()] == []


def test_kinds_of_error_rows_are_those_of_the_errors() -> None:
    named = {kind for cells in _KIND_ROW.findall(section(TROUBLES, "A job")) for kind in inline(cells)}
    assert len(named) > 12
    assert named <= set(messages().splitlines())


def test_codes_of_the_endpoint_are_its_own() -> None:
    constants = (
        *(access.UNAUTHORIZED, access.BUSY, access.GONE, access.ENDING, INTERNAL, access.NO_UPGRADE),
        *(access.STARTING, access.NOT_JSON, access.WRONG_HOST, access.WRONG_ORIGIN, access.MALFORMED),
        *(access.HALF_CLOSED, access.NO_STORE),
        *(access.timed_out(1.0), access.too_large(1), access.too_slow(1.0)),
    )
    ours = {(one.status, one.code) for one in constants} | {
        (404, "model_not_found"),
        (404, "batches_disabled"),
        (400, "context_length_exceeded"),
    }
    cells = " ".join(first_cells(section(TROUBLES, "The endpoint")))
    named = {(int(status), code) for status, code in re.findall(r"(\d{3}) `(\w+)`", cells)}
    assert named - ours == {(503, "unhealthy")}
    assert ours <= named
