import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import rayspec
from rayspec.cli import LAZY_HELP, lazy_command

ROOT = Path(__file__).parent.parent


def test_constraints_allow_what_is_required() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            pins[pin.name.lower()] = next(iter(pin.specifier)).version
    required = [Requirement(text) for text in metadata.requires("rayspec") or ()]
    pinned = [requirement for requirement in required if requirement.name.lower() in pins]
    assert len(pinned) > 15
    for requirement in pinned:
        version = pins[requirement.name.lower()]
        assert requirement.specifier.contains(version), f"constraints.txt has {version}, pyproject asks {requirement}"


def test_a_pin_that_the_oldest_python_cannot_install_does_not_hold_for_it() -> None:
    oldest = metadata.metadata("rayspec")["Requires-Python"].removeprefix(">=")
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        pin = Requirement(line) if line and not line.startswith("#") else None
        if pin is not None and (pin.marker is None or pin.marker.evaluate({"python_version": oldest})):
            assert oldest in SpecifierSet(metadata.metadata(pin.name).get("Requires-Python", "")), line


@pytest.mark.parametrize(
    "arguments", [["-c", "import rayspec, rayspec.demo, rayspec.types"], ["-m", "rayspec", "--help"]]
)
def test_importing_rayspec_and_its_help_bring_no_large_package(arguments: list[str]) -> None:
    """`rayspec --help` takes 0.3 s of CPU time so; torch alone takes 4 s."""
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    large = {"torch", "ray", "numpy", "pyarrow", "httpx", "httpx2", "huggingface_hub", "transformers"}
    assert "pydantic" in imported
    assert not imported & large


@pytest.mark.parametrize("name", LAZY_HELP)
def test_the_list_of_commands_has_the_help_of_each(name: str) -> None:
    command = lazy_command(name)
    first, _, _ = command.help.partition("\n\n")
    assert " ".join(first.split()).startswith(LAZY_HELP[name].rstrip(".")), "of a command that is loaded when it runs"
    assert command.name == name


def test_what_a_release_needs_is_there_and_names_things_that_exist() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == rayspec.__version__
    files = [*ROOT.glob(".github/*/*.yml"), ROOT / ".pre-commit-config.yaml", ROOT / ".devcontainer/devcontainer.json"]
    assert len(files) == 6
    text = "".join(path.read_text(encoding="utf-8") for path in files if yaml.safe_load(path.read_text()))
    targets = set(re.findall(r"make (\w+)", text))
    scripts = re.findall(r"run: (\.ci/\w+)", text)
    assert (targets, scripts) == ({"setup", "lint"}, [".ci/run", ".ci/release"])
    assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for target in targets)
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)
    (included,) = re.findall(
        r"sdist\]\ninclude = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE
    )
    assert {"README.md", "CITATION.cff", ".ci", ".github"} <= set(re.findall(r'"(.+?)"', included))


def test_an_interpreter_completes_the_public_names() -> None:
    assert set(rayspec.__all__) <= set(dir(rayspec))


def test_the_processes_that_only_pass_rows_and_requests_on_need_no_torch() -> None:
    """The driver of a job and the process that `rayspec serve` runs. torch takes 4 s and 300 MB."""
    code = "import sys, rayspec.batch.job, rayspec.serve.run; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


WITHOUT_EXTRAS = """
import sys
from importlib.machinery import PathFinder

WITHOUT = {"ray", "zmq", "aiohttp", "fastapi", "starlette", "uvicorn", "deepspeed", "pyarrow", "llguidance"}

class Found(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in WITHOUT else super().find_spec(name, path, target)

sys.meta_path = [Found if finder is PathFinder else finder for finder in sys.meta_path]

from rayspec import LLM, SamplingParams
with LLM("demo", dtype="float32", num_threads=1, max_model_len=256, kv_cache_tokens=512) as llm:
    (output,) = llm.generate("one two three", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    print(len(output.outputs[0].token_ids))
    form = SamplingParams(structured_outputs={"regex": "a"})
    print(llm.generate("one", form, use_tqdm=False)[0].error)
for parallel in ({"stages": 2}, "auto"):
    try:
        LLM("demo", parallel=parallel)
    except Exception as error:
        print(type(error).__name__, error, flush=True)

WITHOUT.discard("pyarrow")
from rayspec.cli import app
job = ["summarize", "--model", "demo", "--dtype", "float32", "--num-threads", "1", "--max-tokens", "3", "--limit", "2"]
for command in (["job", *job, "-o", "out-2"], ["serve", "demo"], [*job, "-o", "out"]):
    try:
        app(command)
    except SystemExit as end:
        print(end.code, file=sys.stderr)
try:
    import rayspec.data
except Exception as error:
    print(type(error).__name__, error)
"""


def test_what_needs_no_package_of_an_extra_works_without_and_the_rest_names_the_extra(tmp_path: Path) -> None:
    """As in an environment without the extras: their packages cannot be imported."""
    command = [sys.executable, "-c", WITHOUT_EXTRAS]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    first, form, *shards = done.stdout.splitlines()[:4]
    assert first == "4"
    shards.append(done.stdout.splitlines()[-1])
    assert form.startswith(
        "structured_outputs.regex: package 'llguidance' is not installed here: run `pip install '.[structured]'"
    )
    for line in shards:
        assert line.startswith("ConfigError package ")
        assert line.endswith("run `pip install '.[ray]'` in rayspec's checkout")
    errors = done.stderr.splitlines()
    line = "error: package 'ray' is not installed here: run `pip install '.[ray]'` in rayspec's checkout"
    assert errors[-1] == "0", errors
    assert [*errors[errors.index(line) :]][:4] == [line, "2"] * 2
    assert (tmp_path / "out" / "report.html").exists()


def test_type_checkers_read_the_types_of_the_package() -> None:
    assert (Path(rayspec.__file__).parent / "py.typed").is_file(), "PEP 561: without it, all names are Any"
