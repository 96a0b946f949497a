"""The command as a user runs it: real files, the bundled model, and for signals real processes."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from rayspec import demo
from rayspec.cli import app
from tests.waiting import wait_until

FAST = ("--model", "demo", "--dtype", "float32", "--num-threads", "1", "--max-model-len", "1024")
PLAIN = (*FAST, "--strategy", "ar")


def write_rows(path: Path, *rows: dict[str, Any] | str) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    if path.suffix == ".parquet":
        return {row["id"]: row for row in pq.read_table(path).to_pylist()}
    return {row["id"]: row for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


def report_rows(count: int) -> list[dict[str, Any]]:
    return [{"id": doc.id, "text": doc.text} for doc in demo.sample_documents(count, num_sentences=8)]


def test_summaries_of_good_and_bad_rows(run: Any, tmp_path: Path) -> None:
    good = report_rows(3)
    write_rows(tmp_path / "in.jsonl", *good, "no json", {"id": "long", "text": "word " * 3000})
    result = run("summarize", "in.jsonl", "absent.txt", "-o", "out.parquet", *FAST, "--max-tokens", "60")
    assert result.exit_code == 3, result.output
    rows = read_rows(tmp_path / "out.parquet")
    assert {name: row["error_kind"] for name, row in rows.items() if row["error_kind"]} == {
        "in.jsonl:4": "malformed_row",
        "long": "prompt_too_long",
        "absent.txt": "unreadable_file",
    }
    for row in good:
        assert rows[row["id"]]["summary"].startswith("Review of the ")
        assert rows[row["id"]]["num_prompt_tokens"] > 50
        assert rows[row["id"]]["num_output_tokens"] <= 60
    assert "6 rows, 3 failed" in result.stdout
    assert re.search("^malformed_row: in.jsonl:4: not valid JSON", result.stdout, re.MULTILINE), "one of each kind"
    assert "rows are in out.parquet, the report is in out.parquet.run" in result.stdout
    saved = yaml.safe_load((tmp_path / "out.parquet.run" / "config.yaml").read_text(encoding="utf-8"))
    assert (saved["model"], saved["dtype"], saved["sampling"]["max_tokens"]) == ("demo", "float32", 60)
    assert "malformed_row" in (tmp_path / "out.parquet.run" / "report.md").read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.parquet", "out.parquet.run"]


def test_without_an_output_the_texts_are_printed_or_the_rows_and_nothing_is_kept(run: Any, tmp_path: Path) -> None:
    one, other = report_rows(2)
    write_rows(tmp_path / "in.jsonl", one, {**other, "id": "with\u2028a break of its own"})
    arguments = ("summarize", "in.jsonl", *PLAIN, "--max-tokens", "5")
    rows = [json.loads(line) for line in run(*arguments, "-o", "-").stdout.strip().split("\n")]
    assert [row["num_output_tokens"] for row in rows] == [5, 5]
    printed = run(*arguments)
    assert printed.stdout == "".join(f"{row['id']}\n{row['summary']}\n\n" for row in rows)
    assert "2 rows, 10 tokens" in printed.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    assert (
        "option 'format' is 'parquet', of a file: name one as 'output'" in run(*arguments, "--format", "parquet").stderr
    )


def test_a_text_that_is_empty_is_printed_as_such(run: Any, tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", {"id": "a", "prompt": "The annual review of"})
    greedy = ("--temperature", "0", "--max-tokens", "3")
    result = run("generate", "in.jsonl", *PLAIN, *greedy, "--set", 'sampling.stop=[" "]')
    assert (result.exit_code, result.stdout) == (0, "\n\n"), result.output


def test_ids_and_names_are_printed_as_they_are(run: Any, tmp_path: Path) -> None:
    """The table's library would drop a tag, replace ":bug:" by a picture, and raise for a tag that closes nothing."""
    rows = [{"id": name, "prompt": "a"} for name in ("[red]b[/red]", "[/c] :bug:", "d\x1b[2J\ne")]
    write_rows(tmp_path / "in.jsonl", *rows)
    result = run("generate", "in.jsonl", "-o", "[b]out.jsonl", *PLAIN, "--max-tokens", "1")
    assert result.exit_code == 0, result.output
    for shown in ("[red]b[/red]", "[/c] :bug:", r"d\x1b[2J\ne", "rows are in [b]out.jsonl"):
        assert shown in result.stdout


def test_the_saved_config_repeats_the_run(run: Any, tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", *report_rows(2))
    assert run("summarize", "in.jsonl", "-o", "a.jsonl", *PLAIN, "--max-tokens", "20").exit_code == 0
    assert run("summarize", "in.jsonl", "-o", "b.jsonl", "--config", "a.jsonl.run/config.yaml").exit_code == 0
    texts = [{name: row["summary"] for name, row in read_rows(tmp_path / f"{name}.jsonl").items()} for name in "ab"]
    assert texts[0] == texts[1]


def test_files_of_other_types_are_said_before_the_model_is_loaded(run: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_rows(tmp_path / "in" / "a.jsonl", "no json")
    (tmp_path / "in" / "b.odt").touch()
    result = run("summarize", "in", "-o", "out.jsonl", *PLAIN)
    assert result.exit_code == 1, "every row has failed"
    assert result.stderr.startswith("1 file skipped: .odt (1); known are ")
    assert len(read_rows(tmp_path / "out.jsonl")) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "out.jsonl"], "error: option 'model' is missing: give it a folder, a hub id"),
        (["-o", "out.jsonl", *PLAIN, "--truncate"], "error: option '--truncate' is now '--long truncate'; help: "),
        (["-o", "/proc/out.jsonl", *PLAIN], "error: option 'output' is '/proc/out.jsonl.run', which cannot be used"),
        ([".", "-o", "in.jsonl", "--overwrite", *PLAIN], "error: option 'output' is 'in.jsonl', which is an input too"),
        (["-o", "file://{here}/in.jsonl", "--overwrite", *PLAIN], "in.jsonl', which is an input too: choose another"),
        (["-o", "out.jsonl", *FAST, "--set", "speculation.gat=1"], "unknown option 'gat'; did you mean 'gate'?"),
        (["-o", "out.jsonl", *PLAIN, "--prompt", "Sum up"], "error: option 'prompt' is 'Sum up': it must hold {text}"),
        (["-o", "out.jsonl", *FAST, "--modle", "x"], "error: no such option: --modle"),
        (
            ["-o", "out.jsonl", *FAST, "--prompt", "\udcff{{text}}"],
            r"'\udcff{text}' is not valid UTF-8: correct this value",
        ),
        (["no*.txt", "-o", "out.jsonl", *FAST], "error: input 'no*.txt': it matches nothing"),
        (["-o", "out.jsonl", "--model", "demoo"], "error: option 'model' is 'demoo', and there is no such folder; did"),
        (
            ["-o", "out.jsonl", *PLAIN, "--set", "speculation.strategy=auto"],
            "error: option 'speculation.strategy' is given",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(run: Any, tmp_path: Path, arguments: list[str], message: str) -> None:
    before = write_rows(tmp_path / "in.jsonl", *report_rows(1)).read_bytes()
    result = run("summarize", "in.jsonl", *(one.format(here=tmp_path) for one in arguments))
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    if message.startswith("error:"):
        assert len(result.stderr.splitlines()) == 1
    assert (tmp_path / "in.jsonl").read_bytes() == before
    assert not list(tmp_path.glob(".*"))


def test_a_command_with_a_typing_error_is_one_line_that_names_the_right_one(run: Any) -> None:
    message = "error: no such command 'summarise'; did you mean 'summarize'?; help: "
    assert run("summarise").stderr.startswith(message)


def test_a_working_directory_that_was_deleted_is_one_line_and_code_2(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    result = run("summarize", "a.txt", *FAST)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("error: the working directory is gone (No such file or directory): change to one")


def test_a_model_that_is_not_there_is_one_line_and_code_1(run: Any, tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", *report_rows(1))
    result = run("summarize", "in.jsonl", "-o", "out.jsonl", "--model", "no/such-model")
    assert result.exit_code == 1
    assert "error: " in result.stderr
    assert "no/such-model" in result.stderr


def test_profile_prints_what_sublayers_cost(run: Any) -> None:
    result = run("profile", *FAST)
    assert result.exit_code == 0, result.output
    assert "attention share" in result.stdout
    assert run("profile", *PLAIN).exit_code == 2


def test_a_conversation_remembers_what_was_said(run: Any) -> None:
    alone = run("chat", "The meeting of the council", *PLAIN, "--max-tokens", "8", "--temperature", "0")
    assert alone.exit_code == 0, alone.output
    lines = b"The meeting of the council\n\n" + b"word " * 3000 + b"\ncaf\xe9 au lait\nAnd then?\n"
    both = CliRunner().invoke(app, ["chat", *PLAIN, "--max-tokens", "8", "--temperature", "0"], input=lines)
    assert both.exit_code == 0, both.output
    assert both.stdout.startswith(alone.stdout)
    assert both.stderr.count("error: ") == 2, "a line that is too long or not UTF-8 ends no conversation"
    assert len(both.stdout) > len(alone.stdout)
    other = run("run", "And then?", *PLAIN, "--max-tokens", "8", "--temperature", "0")
    assert both.stdout != alone.stdout + other.stdout


def test_a_chat_with_the_bundled_model_ends_and_names_another(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayspec.cli._MAX_TOKENS_OF_BUNDLED", 3)
    result = run("chat", "Hello", *PLAIN, "--ignore-eos")
    assert "the bundled model only knows audit reports; answers come from --model smollm2" in result.stderr
    assert 0 < len(result.stdout.split()) <= 3


def test_version_names_what_it_stands_on(run: Any) -> None:
    lines = run("version").stdout.splitlines()
    assert run("--version").stdout.splitlines() == lines
    assert [line.split()[0] for line in lines] == ["rayspec", "torch", "transformers", "ray", "pyarrow"]


def started(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "rayspec", *arguments],
        cwd=folder,
        stderr=subprocess.PIPE,
        env=os.environ.copy(),
        # a background job of a shell ignores SIGINT, and so would its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )


def test_ctrl_c_leaves_the_rows_so_far(tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", *({"id": str(n), "prompt": "The annual review of"} for n in range(6000)))
    arguments = ("generate", "in.jsonl", "-o", "out.jsonl", *PLAIN, "--max-tokens", "4", "--ignore-eos")
    process = started(tmp_path, *arguments)
    try:
        wait_until((tmp_path / "out.jsonl.run" / "rows").exists, process=process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=200)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, errors
    assert errors.endswith(
        b"interrupted: rows that were finished are kept in out.jsonl; run the same command again to resume\n"
    )
    rows = read_rows(tmp_path / "out.jsonl")
    assert len(rows) >= 3
    assert all(row["num_output_tokens"] == 4 for row in rows.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.run"]


def test_a_text_without_a_limit_ends_after_256_tokens_and_the_command_says_so(run: Any, tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", {"id": "a", "prompt": "The annual review of"})
    result = run("generate", "in.jsonl", "-o", "out.jsonl", *PLAIN, "--ignore-eos")
    assert result.exit_code == 0, result.output
    assert {row["num_output_tokens"] for row in read_rows(tmp_path / "out.jsonl").values()} == {256}
    assert "1 ended at max_tokens" in " ".join(result.stdout.split())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 KB."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_is_one_line_and_the_run_can_go_on(run: Any, tmp_path: Path, small_disk: Path) -> None:
    write_rows(tmp_path / "in.jsonl", *({"id": str(n), "prompt": "The annual review of"} for n in range(200)))
    output = small_disk / "out.jsonl"
    arguments = ("generate", "in.jsonl", "-o", output, *PLAIN, "--max-tokens", "1")
    result = run(*arguments)
    assert result.exit_code == 1
    line = result.stderr.splitlines()[-1]
    assert line.startswith(f"error: the output '{output}.run' cannot be written (No space left on device): make room")
    num_rows = sum(len(read_rows(path)) for path in (small_disk / "out.jsonl.run" / "rows").glob("part-*"))
    assert 30 < num_rows < 200
    assert line.endswith(f"then run the same command again, without --overwrite; {num_rows} rows are in it")
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    again = run(*arguments)
    assert again.exit_code == 0, again.output
    assert f"resuming: {num_rows} rows of an earlier run kept; --overwrite starts over" in again.stderr
    assert len(read_rows(output)) == 200


@pytest.mark.parametrize("name", ["version", "doctor", "summarize", "job", "k8s render"])
def test_every_command_takes_help_all(name: str) -> None:
    result = CliRunner().invoke(app, [*name.split(), "--help-all"])
    assert (result.exit_code, result.output.startswith("Usage: ")) == (0, True)
