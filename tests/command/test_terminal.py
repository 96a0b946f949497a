import errno
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from rayspec import cli
from rayspec.command.terminal import clean_exit, output_console, print_text, save_json, say


def test_a_sigterm_ends_with_its_code_and_the_handler_is_that_of_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, clean_exit():
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
def test_a_place_without_room_is_named_in_one_line(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, clean_exit():
        raise OSError(number, "no\nroom", "out.json")
    assert ended.value.code == 1
    said = "error: 'out.json' cannot be written (no room): make room or choose another place\n"
    assert capsys.readouterr().err == said


def test_a_place_that_is_no_file_is_named_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file" / "out.json", tmp_path / ("a" * 300), Path("/proc/x/out.json")):
        with pytest.raises(SystemExit) as ended, clean_exit():
            save_json({}, place)
        assert ended.value.code == 2
        assert re.match(r"error: .(/proc/x|.*/).* cannot be used", capsys.readouterr().err)


@pytest.mark.parametrize("module", ["rayspec.cli", "rayspec.ops.commands"])
def test_ctrl_c_while_modules_are_imported_ends_with_its_code(module: str) -> None:
    code = f"""
import sys
class Interrupted:
    def find_spec(self, name, path, target=None):
        if name == "{module}":
            raise KeyboardInterrupt
from rayspec.__main__ import main
sys.meta_path.insert(0, Interrupted())
main()
"""
    done = subprocess.run([sys.executable, "-c", code, "models"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (130, "")


def test_what_is_printed_is_utf_8_in_every_locale() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "rayspec", "fetch"]
    for given, said in (("größe".encode(), "größe"), (b"gr\xf6", r"gr\udcf6")):
        done = subprocess.run([*map(os.fsencode, command), given], capture_output=True, env=environment, check=False)
        assert done.returncode == 2
        assert f"argument 'name' is '{said}'" in done.stderr.decode()


def test_progress_that_cannot_be_written_ends_no_command() -> None:
    code = "from rayspec.command.terminal import clean_exit, say\nwith clean_exit(): say('a'); print('b'); say('c')"
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "b\n")


# Sets a terminal's title, clears it, ends a line early, and shows "exe.txt" as "txt.exe".
ACTIVE = "a\x1b]0;b\x07\x9b2J\rc\u202eexe.txt"
INERT = r"a\x1b]0;b\x07\x9b2J\rc\u202eexe.txt"


def test_what_is_printed_has_no_effect_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table("name")
    table.add_row(ACTIVE)
    output_console().print(ACTIVE, table)
    say(ACTIVE)
    with clean_exit():
        assert logging.lastResort is not None  # what prints the log of a command
        logging.lastResort.handle(logging.makeLogRecord({"levelno": logging.ERROR, "msg": ACTIVE}))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_text(f"\u0928\u200d\u00a0{ACTIVE}\r\n\tb")
    out, err = capsys.readouterr()
    assert (out.count(r"a\x1b]0;b"), err.count(r"a\x1b]0;b")) == (3, 2)
    assert out.endswith(f"\u0928\u200d\u00a0{INERT}\r\n\tb\n")
    assert not re.search("[\x1b\x07\x9b\u202e]", out + err)


def test_a_text_is_printed_to_a_pipe_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_text(ACTIVE)
    assert capsys.readouterr().out == f"{ACTIVE}\n"


def test_streams_that_were_closed_before_the_start_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(sys, name, None)
    print_text("a")
    assert list(cli._lines()) == []
