"""Imports point down only and form no circle, and each floor keeps to the libraries that it may use."""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """A module or package and what it may import: other floors by name, and of the libraries all but `without`, or,
    where `only` is given, the standard library and those."""

    name: str
    below: frozenset[str]
    without: frozenset[str] = frozenset()
    only: frozenset[str] | None = field(default=None)


BASEMENT = frozenset(
    f"rayspec.{name}"
    for name in ("choices", "config", "errors", "machine", "prompts", "structured", "types", "vllm_names")
)
PLANNING = BASEMENT | {"rayspec.planning"}
MODEL = PLANNING | {"rayspec.model"}
FORMS = BASEMENT | {"rayspec.forms"}
DECODE = MODEL | FORMS | {"rayspec.decode"}
STRATEGIES = DECODE | {"rayspec.strategies"}
RAY_SESSION = BASEMENT | {"rayspec.ray_session"}
PIPELINE = STRATEGIES | {"rayspec.pipeline"}
POOL = PIPELINE | {"rayspec.pool"}
PLAN = PIPELINE | RAY_SESSION | {"rayspec.ops.plan"}
LLM = PLAN | POOL | {"rayspec", "rayspec.demo", "rayspec.llm"}
LLM |= {"rayspec.local_engine", "rayspec.request_engine"}
COMMAND = LLM | {"rayspec.command"}
OPENAI = COMMAND | {"rayspec.openai"}
BATCH = OPENAI | {"rayspec.batch"}
SERVE = OPENAI | {"rayspec.serve"}
OPS = COMMAND | {"rayspec.ops"}
BENCH = BATCH | {"rayspec.bench"}
CLI = BENCH | SERVE | OPS | {"rayspec.cli"}
NO_RAY = frozenset({"ray"})

FLOORS = (
    Floor(name="rayspec.errors", below=frozenset(), only=frozenset()),
    Floor(name="rayspec.choices", below=frozenset(), only=frozenset()),
    Floor(name="rayspec.vllm_names", below=frozenset({"rayspec.errors"}), only=frozenset()),
    Floor(name="rayspec.machine", below=frozenset({"rayspec.errors"}), only=frozenset()),
    Floor(name="rayspec.structured", below=BASEMENT, only=frozenset()),
    Floor(name="rayspec.types", below=BASEMENT, only=frozenset()),
    Floor(name="rayspec.prompts", below=BASEMENT, only=frozenset()),
    Floor(name="rayspec.config", below=BASEMENT, only=frozenset({"pydantic", "typing_extensions"})),
    Floor(name="rayspec.planning", below=PLANNING, only=frozenset({"msgspec", "numpy", "scipy", "typing_extensions"})),
    Floor(name="rayspec.model", below=MODEL, without=NO_RAY),
    Floor(name="rayspec.forms", below=FORMS, without=NO_RAY),
    Floor(name="rayspec.decode", below=DECODE, without=NO_RAY),
    Floor(name="rayspec.strategies", below=STRATEGIES, without=NO_RAY),
    # The documents of the demo are plain Python; what makes and changes the model needs torch.
    Floor(name="rayspec.demo", below=BASEMENT | {"rayspec.demo", "rayspec.machine"}, without=NO_RAY),
    Floor(name="rayspec.pipeline", below=PIPELINE),
    Floor(name="rayspec.pool", below=POOL),
    Floor(name="rayspec.ray_session", below=BASEMENT, only=frozenset({"ray"})),
    Floor(name="rayspec.local_engine", below=STRATEGIES, without=NO_RAY),
    Floor(name="rayspec.request_engine", below=LLM - {"rayspec", "rayspec.llm"}, without=NO_RAY),
    # It leaves the pipeline alone until it is asked for one.
    Floor(name="rayspec.llm", below=LLM - {"rayspec"}, without=NO_RAY),
    Floor(name="rayspec.command", below=COMMAND, without=NO_RAY),
    Floor(name="rayspec.openai", below=OPENAI, without=NO_RAY),
    Floor(name="rayspec.batch", below=BATCH),
    Floor(name="rayspec.serve", below=SERVE),
    Floor(name="rayspec.ops.plan", below=PLAN),
    Floor(name="rayspec.ops", below=OPS),
    Floor(name="rayspec.bench", below=BENCH),
    Floor(name="rayspec.cli", below=CLI),
    Floor(name="rayspec.__main__", below=frozenset({"rayspec.cli"}), only=frozenset()),
    Floor(name="rayspec.data", below=frozenset({"rayspec.batch", "rayspec.errors"})),
    Floor(name="jobs", below=CLI | {"jobs"}),
    Floor(name="benchmarks", below=CLI | {"benchmarks"}),
    Floor(name="tools", below=CLI | {"tools"}),
    Floor(name="rayspec", below=BASEMENT | {"rayspec.llm", "rayspec"}, only=frozenset({"typing_extensions"})),
)
# Floors that one box of the picture in docs/architecture.md shows together; every other floor has a box of its own.
BOXES = {
    "config, types, prompts, choices, errors": tuple(sorted(BASEMENT)),
    "Python API": ("rayspec", "rayspec.llm", "rayspec.local_engine", "rayspec.request_engine"),
    "planner": ("rayspec.ops.plan",),
    "Ray session": ("rayspec.ray_session",),
    "cli, jobs": ("rayspec.__main__", "rayspec.cli", "rayspec.data", "jobs"),
}
NEEDS_NO_MODEL = ("rayspec/demo/__init__.py", "rayspec/demo/corpus.py")


def violations(path: str, source: str) -> list[str]:
    """What the module at `path` (as rayspec/planning/knapsack.py) imports and must not."""
    module = _module(path)
    if module.split(".")[0] == "rayspec" and module != "rayspec" and _floor(module).name == "rayspec":
        return [f"{path}: stands on no floor; name its floor in this test"]
    floor = _floor(module)
    imports = _imports(path, source, {floor.name for floor in FLOORS})
    return [
        f"{path}:{line}: {floor.name} must not import {name}"
        for line, name in imports
        if not _allowed(floor, path, name)
    ]


def circle(sources: Mapping[str, str]) -> list[str] | None:
    """Modules of which each imports the next, the last is the first again; None if there is no such circle.

    sources: the source of each module, by its path. Imports inside functions and under TYPE_CHECKING count. The
    implicit import of a parent package does not.
    """
    modules = {_module(path) for path in sources}
    graph = {_module(path): _imported(path, source, modules) for path, source in sources.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    return None


def picture(sources: Mapping[str, str]) -> str:
    """The boxes and who imports whom, in Mermaid's language, without arrows that follow from others."""
    modules = {_module(path) for path in sources}
    below: dict[str, set[str]] = {}
    for path, source in sources.items():
        imported = {_box(module) for module in _imported(path, source, modules)}
        below.setdefault(_box(_module(path)), set()).update(imported)
    for box, others in below.items():
        others.discard(box)
    arrows = sorted(
        (-_height(box, below), box, -_height(other, below), other)
        for box, others in below.items()
        for other in others - {low for higher in others for low in _all_below(higher, below)}
    )
    lines = [f"  {_id(box)}[{box}] --> {_id(other)}[{other}]" for _, box, _, other in arrows]
    return "\n".join(["```mermaid", "graph TD", *lines, "```"])


def _id(box: str) -> str:
    return box.replace(", ", "_").replace(" ", "_")


def _height(box: str, below: Mapping[str, set[str]]) -> int:
    """Boxes on the longest way down."""
    return 1 + max((_height(other, below) for other in below[box]), default=0)


def _all_below(box: str, below: Mapping[str, set[str]]) -> set[str]:
    return below[box].union(*(_all_below(other, below) for other in below[box]))


def _box(module: str) -> str:
    floor = _floor(module).name
    return next((box for box, floors in BOXES.items() if floor in floors), floor.removeprefix("rayspec."))


def _imported(path: str, source: str, modules: set[str]) -> set[str]:
    return {name for _, name in _imports(path, source, modules)} & modules


def _imports(path: str, source: str, modules: Collection[str]) -> Iterator[tuple[int, str]]:
    """Lines and imported modules; `from package import name` imports the module of that name if `modules` has it."""
    package = _module(path) if path.endswith("__init__.py") else _module(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.rsplit(".", node.level - 1)[0].split(".") if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            names = (f"{origin}.{alias.name}" for alias in node.names)
            yield from ((node.lineno, name if name in modules else origin) for name in names)


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _floor(module: str) -> Floor:
    return next(floor for floor in FLOORS if module == floor.name or module.startswith(floor.name + "."))


def _allowed(floor: Floor, path: str, name: str) -> bool:
    top = name.split(".", maxsplit=1)[0]
    if top in {"rayspec", "jobs", "benchmarks", "tools"}:
        return _floor(name).name in floor.below
    if path in NEEDS_NO_MODEL and top in {"torch", "transformers"}:
        return False
    if floor.only is not None:
        return top in sys.stdlib_module_names or top in floor.only
    return top not in floor.without


def _tree() -> dict[str, str]:
    paths = [path for folder in ("rayspec", "jobs") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(paths) > 20
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def test_the_tree_keeps_its_floors() -> None:
    found = [violation for path, source in _tree().items() for violation in violations(path, source)]
    assert not found, "\n".join(found)


def test_no_modules_import_each_other() -> None:
    found = circle(_tree())
    assert found is None, " imports ".join(found or [])


def test_the_picture_of_the_floors_is_drawn_from_the_imports() -> None:
    drawn = picture(_tree())
    assert drawn in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"), f"put this there:\n{drawn}"


@pytest.mark.parametrize(
    "source",
    [
        "from rayspec.model import b",
        "def f():\n    from rayspec.model.b import name",
        "if TYPE_CHECKING:\n    from rayspec.model.b import Name",
    ],
)
def test_a_planted_circle_is_found(source: str) -> None:
    found = circle({"rayspec/model/a.py": source, "rayspec/model/b.py": "from rayspec.model import a, name"})
    assert found is not None
    assert (len(found), set(found)) == (3, {"rayspec.model.a", "rayspec.model.b"})


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("rayspec/types.py", "import numpy"),
        ("rayspec/planning/knapsack.py", "from ..decode import engine"),
        ("rayspec/planning/knapsack.py", "def f():\n    import ray"),
        ("rayspec/model/sublayers.py", "from rayspec.decode.engine import Engine"),
        ("rayspec/model/sublayers.py", "from rayspec import LLM"),
        ("rayspec/demo/__init__.py", "import torch"),
        ("rayspec/llm.py", "from ray import get"),
        ("rayspec/pipeline/shard.py", "from rayspec import cli"),
        ("rayspec/__init__.py", "import torch"),
        ("rayspec/new_module.py", ""),
    ],
)
def test_a_planted_violation_is_found(path: str, source: str) -> None:
    assert violations(path, source)
