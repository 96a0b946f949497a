"""Jobs as an outsider attacks them: kills at random moments, many rows done.

Each job is a process of its own with a private Ray. Its other processes are found by their names and killed.
"""

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rayspec import LLM
from rayspec.batch.document_task import PromptBuilder, summary_prompt
from rayspec.batch.documents import input_row
from rayspec.config import SamplingParams
from tests.jobs.job_process import FAST, documents, num_committed, start, wait_until_gone, write_lines
from tests.waiting import wait_until

OPTIONS = (*FAST, "--max-model-len", "256", "--max-tokens", "8", "--temperature", "0")
DRIVER, ENGINE, SHARD, COORDINATOR = "summarize.py", "EngineWorker", "ray::Shard", "ray::Coordinator"

pytestmark = [pytest.mark.ray, pytest.mark.exhaustive, pytest.mark.timeout(900)]


@dataclass(frozen=True, slots=True)
class Jobs:
    """Runs jobs in a folder, with Ray's files in another."""

    folder: Path
    ray_folder: Path

    @contextmanager
    def running(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        job = start(self.folder, *arguments, *OPTIONS)
        try:
            yield job
        finally:
            job.kill()
            job.communicate()

    def processes(self, name: str) -> list[int]:
        """Those of the job with this name that are not dead."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if name.encode() not in (entry / "cmdline").read_bytes():
                    continue
                is_of_job = str(self.ray_folder).encode() in (entry / "environ").read_bytes()
                is_dead = "\nState:\tZ" in (entry / "status").read_text()
            except OSError:
                continue
            if is_of_job and not is_dead:
                found.append(int(entry.name))
        return found

    def kill(self, name: str) -> bool:
        """Kills a process of this name, if there is one."""
        for process in self.processes(name)[:1]:
            os.kill(process, signal.SIGKILL)
            return True
        return False

    def texts(self) -> dict[str, str]:
        rows: list[dict[str, Any]] = pq.read_table(self.folder / "out" / "summaries.parquet").to_pylist()
        assert max(Counter(row["id"] for row in rows).values()) == 1
        assert {row["error_kind"] for row in rows} == {None}
        return {row["id"]: row["summary"] for row in rows}


@pytest.fixture
def jobs(tmp_path: Path, own_ray_folder: Path) -> Jobs:
    return Jobs(tmp_path, own_ray_folder)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, str]:
    """The texts of the rows by an engine in this process."""
    rows = [input_row(row["id"], source=row["id"], text=row["text"]) for row in documents(160)]
    params = SamplingParams(temperature=0.0, max_tokens=8)
    with LLM(
        model="demo", dtype="float32", device="cpu", num_threads=1, max_model_len=256, speculation={"strategy": "ar"}
    ) as llm:
        prompts = PromptBuilder(llm=llm, template=summary_prompt("demo"))
        outputs = llm.generate([prompts.tokens(row) for row in rows], params)
        return {row.id: output.outputs[0].text for row, output in zip(rows, outputs, strict=True)}


def test_a_pipeline_that_is_lost_at_the_tail_is_started_again(jobs: Jobs, undisturbed: dict[str, str]) -> None:
    write_lines(jobs.folder / "in.jsonl", documents(40))
    pipeline = ("--stages", "2", "--max-restarts", "0", "--cpus-per-shard", "0.25", "--max-num-seqs", "2")
    with jobs.running("in.jsonl", "-o", "out", *pipeline) as job:
        wait_until(lambda: bool(jobs.processes(SHARD)), process=job)
        wait_until(lambda: num_committed(jobs.folder / "out") >= 1, process=job)  # 32 rows: the first part
        wait_until(lambda: jobs.kill(SHARD), process=job)
        output, errors = job.communicate(timeout=400)
    assert job.returncode == 0, errors
    assert "40 rows, " in output
    texts = jobs.texts()
    assert len(texts) == 40
    assert texts.items() <= undisturbed.items()


def test_ten_rows_that_are_left_of_fifty_thousand_start_at_once(jobs: Jobs) -> None:
    equal = [{"id": f"r{number}", "text": "The annual review."} for number in range(50_000)]  # which run once
    for lines in (equal, [*equal, *({"id": f"s{number}", "text": f"Review {number}."} for number in range(10))]):
        write_lines(jobs.folder / "in.jsonl", lines)
        started = time.monotonic()
        with jobs.running("in.jsonl", "-o", "out") as job:
            wait_until(lambda job=job: bool(jobs.processes(ENGINE)), process=job)
            engine_s = time.monotonic() - started
            output, errors = job.communicate(timeout=400)
            ended_s = time.monotonic() - started
        assert job.returncode == 0, errors
    print(f"engine started after {engine_s:.1f} s, the job has ended after {ended_s:.1f} s")
    assert "50010 rows (50000 of an earlier run)" in output
    # All ten rows are done, merged with the others and reported soon: 9 s, and 16 s beside another test process.
    assert ended_s - engine_s < 30


NUM_KILLS = 5
LAYOUTS = {
    "one engine": (),
    "two stages": ("--stages", "2", "--cpus-per-shard", "0.25"),
    "four replicas": ("--replicas", "4", "--cpus-per-shard", "0.25"),
    "two replicas of two stages": ("--replicas", "2", "--stages", "2", "--cpus-per-shard", "0.25"),
}


@pytest.mark.parametrize("seed", range(12))
def test_random_kills_lose_double_or_change_nothing(jobs: Jobs, seed: int, undisturbed: dict[str, str]) -> None:
    """60 kills over 12 jobs of four layouts. The driver that is killed is started again."""
    chance = random.Random(seed)
    write_lines(jobs.folder / "in.jsonl", documents(160))
    layout = list(LAYOUTS)[seed % len(LAYOUTS)]
    victims = (DRIVER, ENGINE, *((SHARD, COORDINATOR) if "stages" in layout else ()))
    arguments = ("in.jsonl", "-o", "out", "--max-num-seqs", "2", "--max-engine-restarts", "20", *LAYOUTS[layout])
    killed: list[str] = []
    for _ in range(30):
        with jobs.running(*arguments) as job:
            while job.poll() is None and len(killed) < NUM_KILLS:
                victim, awaited = chance.choice(victims), chance.choice(victims)  # a driver dies at its start, or later
                wait_until(
                    lambda job=job, names=(victim, awaited): job.poll() is not None or all(map(jobs.processes, names))
                )
                time.sleep(chance.uniform(0.5, 8.0))
                killed += [victim] * jobs.kill(victim)
                if victim == DRIVER:
                    job.wait()
            output, errors = job.communicate(timeout=400)
        if job.returncode == 0:
            break
        assert job.returncode == -signal.SIGKILL, f"seed {seed}, {layout}, {killed}: {errors}"
        wait_until_gone(jobs.ray_folder, timeout_s=60)
    print(f"seed {seed}, {layout}: killed {', '.join(killed)}")
    assert job.returncode == 0
    assert "160 rows" in output
    assert jobs.texts() == undisturbed
