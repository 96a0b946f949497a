"""Describes where and how a number was measured, to be reported next to the number."""

from __future__ import annotations

import datetime as dt
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from rayspec.machine import cpu_name, installed_version

_PACKAGES = ("rayspec", "torch", "transformers", "ray", "numpy")


def describe_environment() -> dict[str, object]:
    """Return the command, versions (None: not installed), hardware, threads, commit of a source checkout, and date."""
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": {"python": platform.python_version()} | {name: installed_version(name) for name in _PACKAGES},
        "hardware": _hardware(),
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
    }


def _hardware() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return cpu_name()


def _commit() -> str | None:
    """Return the commit of the checkout of this file, with a "+" if files differ from it; None without a checkout."""
    folder = Path(__file__).parent
    try:
        commit = _git(folder, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]  # git of PATH; the arguments are ours
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603
