import os
from pathlib import Path

import pytest

from rayspec.batch.input_files import file_type, find_files
from rayspec.types import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, so that names are short."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fill(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def found(*inputs: str) -> list[str]:
    return [os.path.relpath(file.path) for file in find_files(inputs).files]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("A.JSONL", (".jsonl", None)), ("a.b.parquet", (".parquet", None)), ("a.TXT.GZ", (".txt", "gzip")),
        ("a.csv.zst", (".csv", "zstd")), ("a.jsonl.xz", None),
        ("a.parquet.gz", None), ("a.gz", None), (".txt", None), ("a.jsonl.part", None),
    ],
)  # fmt: skip
def test_the_end_of_a_name_tells_the_type(name: str, expected: tuple[str, str | None] | None) -> None:
    assert file_type(name) == expected


def test_folders_and_patterns_expand_in_order(folder: Path) -> None:
    fill(folder, "in/b.txt", "in/a.txt.gz", "in/c.jsonl", "in/notes.odt", "in/deep/d.txt")
    assert found("in") == ["in/a.txt.gz", "in/b.txt", "in/c.jsonl", "in/deep/d.txt"]
    assert found("in/*.txt") == ["in/b.txt"]
    assert found("in/**/*.txt") == ["in/b.txt", "in/deep/d.txt"]
    assert found("*/deep/*", "**/c.jsonl") == ["in/deep/d.txt", "in/c.jsonl"]
    assert found("in/d*") == ["in/deep/d.txt"]


def test_every_file_is_there_once(folder: Path) -> None:
    fill(folder, "in/a.txt", "in/b.txt")
    assert found("in/b.txt", "in", "./in/a.txt", str(folder / "in" / "b.txt"), "in/*") == ["in/b.txt", "in/a.txt"]


def test_hidden_files_are_left_out_of_folders_but_can_be_named(folder: Path) -> None:
    fill(folder, "in/a.txt", "in/.hidden.txt", "in/.git/x.txt", "in/deep/.ipynb_checkpoints/y.txt", "in/b.jsonl.part")
    files = find_files(["in"])
    assert [os.path.relpath(file.path) for file in files.files] == ["in/a.txt"]
    assert str(files.warning).startswith("1 file skipped: .part (1); known")
    assert found("in/.git", "in/.hidden.txt") == ["in/.git/x.txt", "in/.hidden.txt"]
    assert found(".") == found("./in/") == ["in/a.txt"]


def test_files_of_other_types_are_counted_and_named_once(folder: Path) -> None:
    fill(folder, "in/a.txt", "in/b.odt", "in/deep/c.ODT", "in/d.xls", "more/e.xls", "more/README", "more/f.txt")
    files = find_files(["in", "more/*", "./in"])
    assert files.warning == (
        "5 files skipped: .odt (2), .xls (2), no suffix (1); known are .txt, .md, .jsonl, .ndjson, .json, .csv, .tsv, "
        ".parquet, .arrow, .pdf, .docx, .html, .htm, the first 7 also with .gz, .bz2, .zst, .lz4"
    )
    assert find_files(["in/a.txt"]).warning is None


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["*.jsonl"], "input '*.jsonl': it matches nothing"),
        (["*.odt"], "input '*.odt': it matches no file of a known type (.odt (1) left out)"),
        (["absent.txt"], "input 'absent.txt': there is no such file; name files, folders or patterns that exist"),
        (["x/absent.txt", "b.odt", "x"], "no such file, and 2 more inputs cannot be read either; name files"),
        (["b.odt"], "input 'b.odt': its type is not known; known are .txt"),
        (["x"], "input 'x': the folder holds no file of a known type"),
        (["a.txt/b.txt"], "there is no such file"),
    ],
)
def test_inputs_that_nothing_can_come_of_are_refused(folder: Path, inputs: list[str], message: str) -> None:
    fill(folder, "a.txt", "b.odt", "x/.hidden.txt")
    with pytest.raises(ConfigError) as caught:
        find_files(inputs)
    assert message in str(caught.value)


def test_inputs_in_the_folder_of_the_output_are_said_to_be(folder: Path) -> None:
    fill(folder, "data/in/a.txt", "data/in/b.odt")
    for name in ("data/in", "data/in/*"):
        with pytest.raises(ConfigError, match=r"no file of a known type \(in the output \(2\) left out\)"):
            find_files([name], outputs=["data"])


def test_one_name_without_a_file_does_not_lose_the_others(folder: Path) -> None:
    fill(folder, "a.txt", "b.odt", "empty/c.odt")
    assert found("absent.txt", "a.txt", "b.odt", "empty") == ["absent.txt", "a.txt", "b.odt", "empty"]


def test_links_are_followed_and_may_go_in_a_circle(folder: Path) -> None:
    fill(folder, "in/z/a.txt", "elsewhere/b.txt")
    (folder / "in" / "a-link").symlink_to(folder / "in" / "z")
    (folder / "in" / "z" / "up").symlink_to("..")
    (folder / "in" / "z" / "self.txt").symlink_to("self.txt")
    (folder / "in" / "other").symlink_to(folder / "elsewhere")
    (folder / "in" / ".hidden").symlink_to(folder / "elsewhere")
    (folder / "in" / "file.txt").symlink_to(folder / "elsewhere" / "b.txt")
    (folder / "in" / "gone.txt").symlink_to("nowhere")
    os.mkfifo(folder / "in" / "pipe.txt")
    expected = ["in/file.txt", "in/gone.txt", "in/other/b.txt", "in/z/a.txt", "in/z/self.txt"]
    assert found("in") == expected
    assert found("in/**/*.txt") == expected


def test_a_file_that_links_to_its_folder_lead_to_is_there_once(folder: Path) -> None:
    fill(folder, "in/2026/a.txt", "in/2026/deep/b.txt")
    (folder / "in" / "1-link").symlink_to("2026")
    (folder / "in" / "latest").symlink_to("2026")
    assert found("in/*/a.txt") == found("in/*/a.txt", "in/2026/a.txt") == ["in/2026/a.txt"]
    assert found("in/*") == found("in") == ["in/2026/a.txt", "in/2026/deep/b.txt"]


def test_a_folder_that_cannot_be_listed_stays_as_a_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(folder, "in/a.txt", "in/secret/b.txt")
    scan = os.scandir

    def scandir(path: str) -> object:
        if path.endswith("secret"):
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)  # the superuser may list everything
    assert found("in") == ["in/a.txt", "in/secret"]
    assert found("in/secret") == ["in/secret"]


def test_the_results_of_an_earlier_run_are_no_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        "docs/a.txt",
        "docs/out/summaries.jsonl",
        "docs/out/rows/part-000001-1f2e3d4c.jsonl",
        "docs/output.txt",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}", encoding="utf-8")
    (tmp_path / "link").symlink_to(tmp_path / "docs" / "out")
    for output in ("docs/out", "./docs/out/", str(tmp_path / "docs" / "out"), "link", f"file://{tmp_path}/docs/out"):
        assert [file.name for file in find_files(["docs"], outputs=[output]).files] == ["a.txt", "output.txt"]
        assert [file.name for file in find_files(["docs/**"], outputs=[output]).files] == ["a.txt", "output.txt"]
    assert len(find_files(["docs"], outputs=["elsewhere"]).files) == 4


def test_what_earlier_jobs_wrote_below_an_input_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But a job's folder may be the input of another job, which reads each row once."""
    monkeypatch.chdir(tmp_path)
    part = "rows/part-000001-1f2e3d4c.parquet"
    for name in (
        "docs/a.txt", "docs/rows/b.txt", "docs/done.jsonl", "docs/own.parquet",
        *(f"docs/done.jsonl.run/{own}" for own in ("manifest.json", "report.html", part)),
        *(f"docs/out/{own}" for own in ("manifest.json", "report.html", "job.parquet", part)),
        *(f"docs/begun/{own}" for own in ("manifest.json", part)),
        "data/manifest.json", "data/c.txt",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}", encoding="utf-8")
    for name in ("docs", "docs/**"):
        found = find_files([name])
        assert [file.name for file in found.files] == ["a.txt", "own.parquet", "rows/b.txt"]
        assert "10 files skipped: results of a job (10)" in str(found.warning)
    assert [file.name for file in find_files(["docs/out"]).files] == ["job.parquet"]
    assert [file.name for file in find_files(["docs/begun"]).files] == [part]
    assert [file.name for file in find_files(["docs/done.jsonl"]).files] == ["done.jsonl"]
    assert [file.name for file in find_files(["data"]).files] == ["c.txt"]
