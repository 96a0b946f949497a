"""Jobs that are commands: they start as scripts, and say what they take."""

import runpy
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from rayspec.batch.commands import _run
from rayspec.batch.job import Job, LocalBackend, Source
from rayspec.batch.report import RunReport
from tests.exhaustive import few_of

JOBS = Path(__file__).parent.parent.parent / "jobs"


@pytest.mark.parametrize(
    ("job", "option"),
    few_of(
        [("measure.py", "--cluster"), ("bench.py", "--strategies"), ("openai_batch.py", "--served-model-name")],
        [("measure.py", "--cluster")],
    ),
)
def test_a_job_says_what_it_takes(
    job: str, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [job, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(JOBS / job), run_name="__main__")
    assert not ended.value.code
    assert option in capsys.readouterr().out


def test_an_input_that_is_not_there_ends_a_job_before_anything_is_started(tmp_path: Path) -> None:
    command = [sys.executable, JOBS / "generate.py", "none*.jsonl", "-o", "out", "--model", "demo"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: input 'none*.jsonl': it matches nothing; correct it, or leave it out\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("output", "is_told"), [("out", True), ("/tmp/out", False), ("file:///tmp/out", False)])
def test_an_output_in_rays_copy_of_the_working_folder_is_told(
    output: str, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After `ray job submit --working-dir`, where Ray deletes it sooner or later."""
    folder = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_0"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(Job, "run", lambda _job, _source: RunReport())
    job = Job(backend=LocalBackend(), task=Mock(), output=output, name="texts", text_column="text")
    _run(job, Source())
    assert ("which Ray deletes: name another place" in " ".join(capsys.readouterr().err.split())) is is_told


def test_no_job_hides_a_module_of_python() -> None:
    """A script's folder comes first on its path."""
    assert not {path.stem for path in JOBS.glob("*.py")} & set(sys.stdlib_module_names)
