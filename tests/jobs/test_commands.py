"""Jobs that are commands: they start as scripts, in a process of their own, and say what they take."""

import subprocess
import sys
from pathlib import Path

import pytest

JOBS = Path(__file__).parent.parent.parent / "jobs"


def run(job: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(JOBS / job), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder, timeout=60)


@pytest.mark.parametrize(
    ("job", "option"),
    [("measure.py", "--cluster"), ("bench.py", "--strategies"), ("openai_batch.py", "--served-model-name")],
)
def test_a_job_says_what_it_takes(job: str, option: str, tmp_path: Path) -> None:
    result = run(job, tmp_path, "--help")
    assert result.returncode == 0, result.stderr
    assert option in result.stdout


def test_an_input_that_is_not_there_ends_a_job_before_anything_is_started(tmp_path: Path) -> None:
    result = run("generate.py", tmp_path, "none*.jsonl", "-o", "out", "--model", "demo")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: input 'none*.jsonl': it matches nothing; correct it, or leave it out\n"
    assert not (tmp_path / "out").exists()


def test_no_job_hides_a_module_of_python() -> None:
    """A script's folder comes first on its path."""
    assert not {path.stem for path in JOBS.glob("*.py")} & set(sys.stdlib_module_names)
