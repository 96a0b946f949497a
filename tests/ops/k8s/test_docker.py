"""The Dockerfile: linted, pinned, without privileges, and of files that exist."""

import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import rayspec
from rayspec.ops.k8s.render import JOBS_FOLDER

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "k8s" / "docker"
DOCKERFILE = FOLDER / "Dockerfile"
HADOLINT = Path(sysconfig.get_path("scripts")) / "hadolint"


def instructions(name: str) -> list[str]:
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text(encoding="utf-8"))
    return [line.removeprefix(f"{name} ") for line in text.splitlines() if line.startswith(f"{name} ")]


def lint(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HADOLINT, "--no-color", path], capture_output=True, text=True, timeout=60, check=False)


def test_hadolint_has_nothing_to_say() -> None:
    found = lint(DOCKERFILE)
    assert (found.returncode, found.stdout) == (0, "")


def copied() -> list[str]:
    return [
        word.removeprefix("./")
        for line in instructions("COPY")
        if "--from" not in line
        for word in [part for part in line.split() if not part.startswith("--")][:-1]
    ]


def test_the_package_can_be_built_from_what_it_copies(tmp_path: Path) -> None:
    for source in copied():
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / source).symlink_to(ROOT / source)
    command = [sys.executable, "-m", "hatchling", "metadata"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, json.loads(done.stdout or "{}").get("name")) == (0, "rayspec"), done.stderr


def test_what_it_copies_is_there_and_in_the_context() -> None:
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    sources = copied()
    assert {"rayspec", "jobs", "constraints.txt"} <= set(sources)
    assert all((ROOT / source).exists() for source in sources)
    assert {f"!{source}" for source in sources} <= set(ignored)
    assert ignored[0] == "*"


def test_jobs_are_where_entrypoints_look() -> None:
    assert f"jobs {JOBS_FOLDER}" in instructions("COPY")


def test_it_is_pinned_and_has_the_version_of_the_package() -> None:
    assert all(re.search(r":\d+\.\d+\.\d+-", image) for image in instructions("FROM"))
    assert f"rayspec:{rayspec.__version__}-cpu" in DOCKERFILE.read_text(encoding="utf-8")
    assert all("constraints.txt" in line or "pip" not in line for line in instructions("RUN"))


def test_the_final_image_can_compile_what_triton_needs() -> None:
    """Its packages have a compiler and libc's headers, and its Python has its own."""
    final = DOCKERFILE.read_text(encoding="utf-8").split("\nFROM ")[-1]
    packages = re.search(r"apt-get install --yes --no-install-recommends ([\w .+-]+?) &&", final)
    assert packages is not None
    assert {"gcc", "libc6-dev"} <= set(packages[1].split())
    assert final.startswith("python:"), "this image has Python's headers, unlike Debian's own Python"
