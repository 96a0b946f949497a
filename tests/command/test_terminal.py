from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from rayspec.batch.input_files import found_inputs
from rayspec.command.terminal import clean_exit, exit_on_sigterm


def test_a_sigterm_ends_with_its_code_and_the_handler_is_that_of_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, clean_exit():
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_other_threads_have_no_signals_to_handle() -> None:
    done = []

    def work() -> None:
        with clean_exit():
            exit_on_sigterm()
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]


def test_files_that_are_left_out_are_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.txt", "b.pdf", "c.[red]"):
        (tmp_path / name).touch()
    assert [Path(name).name for name in found_inputs([str(tmp_path)])] == ["a.txt"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("2 files skipped: .[red] (1), .pdf (1); known are .txt, ")
    found_inputs([str(tmp_path / "a.txt")])
    assert capsys.readouterr().err == ""
