"""A job in a process of its own, and the processes around it."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pyarrow.parquet as pq

from rayspec import demo
from tests.waiting import wait_until

JOB = Path(__file__).parent.parent.parent / "jobs" / "summarize.py"
FAST = ("--model", "demo", "--dtype", "float32", "--device", "cpu", "--num-threads", "1", "--strategy", "ar")


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(JOB), *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def documents(num_rows: int, seed: int = 0) -> list[dict[str, str]]:
    samples = demo.sample_documents(num_rows, num_sentences=4, seed=seed)
    return [{"id": sample.id, "text": sample.text} for sample in samples]


def write_lines(path: Path, rows: Iterable[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def committed(folder: Path) -> list[str]:
    """Ids of the rows, in the order of their parts."""
    parts = sorted((folder / "rows").glob("part-*.parquet"))
    return [row_id for part in parts for row_id in pq.read_table(part)["id"].to_pylist()]


def num_committed(folder: Path) -> int:
    return len(committed(folder))


AGENTS = (b"ray::DashboardAgent", b"ray::RuntimeEnvAgent", b"/dashboard/agent.py", b"/runtime_env/agent/main.py")


def processes_of(folder: Path) -> list[str]:
    """Command lines of what still runs with the folder in its command line or environment. Ray's agents are left out:
    they end by themselves, about a minute after a driver was killed."""
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:
            continue
        is_agent = any(word.endswith(AGENTS) for word in line.split(b"\0")[:3])  # before and after it takes its title
        if str(folder).encode() in line + environment and not is_agent:
            lines.append(line.replace(b"\0", b" ").decode(errors="replace"))
    return lines


def wait_until_gone(folder: Path, timeout_s: float = 15.0) -> None:
    wait_until(lambda: not processes_of(folder), timeout_s)
