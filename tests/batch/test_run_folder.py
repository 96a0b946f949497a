import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from rayspec.batch.rows import Row
from rayspec.batch.run_folder import DamagedOutputError, OutputError, RunFolder, output_places
from rayspec.command.locations import Location, Store
from rayspec.types import ConfigError

IDENTITY = {"model": "demo", "sampling": {"temperature": 0.0, "max_tokens": 64}, "prompt": "Summarize:"}


def open_folder(location: Path | Location, **changes: Any) -> RunFolder:
    place = location if isinstance(location, Location) else Location.parse(str(location))
    options = {"identity": IDENTITY, "overwrite": False, "text_column": "summary", "file_format": "parquet", **changes}
    options.setdefault("merged", place.join(f"summaries.{options['file_format']}"))
    return RunFolder(place, **options)


def manifest_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return content


def parts_of(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "rows").iterdir())


def merged_rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


def done_ids(folder: RunFolder) -> set[str]:
    return set(folder.parts.done["id"].to_pylist())


def done(row_id: str, text: str = "a summary") -> Row:
    return Row(id=row_id, text=text, finish_reason="stop")


def failed(row_id: str, kind: str, source: str | None = None, input_hash: str | None = "0f") -> Row:
    return Row(id=row_id, finish_reason="error", error_kind=kind, error="why", source=source, input_hash=input_hash)


@pytest.fixture(params=["parquet", "jsonl"])
def file_format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_job_from_beginning_to_end(tmp_path: Path, file_format: str) -> None:
    rows = [replace(done(f"r{n}", "Grüße\n世界"), tree='{"parts": []}', source=f"a.jsonl:{n}") for n in range(70)]
    with open_folder(tmp_path / "new" / "out", file_format=file_format) as folder:
        for row in [*rows, failed("bad", "prompt_too_long")]:
            folder.add(row)
        folder.note({"note": {"x": 1}})
        folder.finish({"output_tokens": 7})
        assert list(folder.parts.rows()) == [*rows, failed("bad", "prompt_too_long")]
    out = tmp_path / "new" / "out"
    assert sorted(p.name for p in out.iterdir()) == [".lock", "manifest.json", "rows", f"summaries.{file_format}"]
    assert [name[:12] for name in parts_of(out)] == ["part-000001-", "part-000002-", "part-000003-"]
    merged = merged_rows(out / f"summaries.{file_format}")
    assert [(row["id"], row["summary"]) for row in merged] == [*((row.id, row.text) for row in rows), ("bad", None)]
    manifest = manifest_of(out)
    assert (manifest["status"], manifest["identity"]) == ("complete", IDENTITY)
    assert manifest["rows"] == {"total": 71, "succeeded": 70, "failed": {"prompt_too_long": 1}}
    assert manifest["extra"] == {"note": {"x": 1}}
    (session,) = manifest["sessions"]
    assert session["started"] <= session["finished"]
    with open_folder(out, file_format=file_format) as folder:
        folder.add(done("more"))
        folder.finish({"output_tokens": 1})
    manifest = manifest_of(out)
    assert manifest["rows"]["total"] == 72
    assert [one["counts"] for one in manifest["sessions"]] == [{"output_tokens": 7}, {"output_tokens": 1}]


def test_parts_grow_with_the_job_and_lose_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayspec.batch.run_folder._MIN_PARTS", 1)
    with open_folder(tmp_path) as folder:
        for number in range(200):
            folder.add(done(str(number)))
        folder.finish({})
        assert [row.id for row in folder.parts.rows()] == [str(number) for number in range(200)]
    assert [pq.read_metadata(path).num_rows for path in sorted((tmp_path / "rows").iterdir())] == [32, 32, 64, 72]


def test_a_commit_that_fails_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_disk_full(*_: object) -> None:
        raise OSError(28, "disk full")

    with open_folder(tmp_path) as folder:
        folder.add(done("a"))
        with monkeypatch.context() as patch:
            patch.setattr("os.replace", raise_disk_full)
            with pytest.raises(
                OutputError, match=rf"the output '{tmp_path}' cannot be written \(disk full\): make room"
            ):
                folder.commit()
        assert parts_of(tmp_path) == []
        folder.add(done("b"))
        folder.commit()
        assert done_ids(folder) == {"a", "b"}


def test_rows_are_committed_some_time_after_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    with open_folder(tmp_path) as folder:
        for now_s, num_done in ((0.0, 0), (4.9, 0), (5.0, 3)):
            folder.add(done(str(now_s)))
            assert len(folder.parts.done) == num_done
        now_s = 9000.0  # then after 1/1000 of the time so far
        folder.add(done("last"))
        now_s = 9008.9
        folder.commit_if_due()
        assert len(folder.parts.done) == 3
        now_s = 9009.1
        folder.commit_if_due()
        assert len(folder.parts.done) == 4


def test_rows_that_failed_for_no_fault_of_theirs_are_done_again(tmp_path: Path) -> None:
    with open_folder(tmp_path) as folder:
        for row in (failed("a", "engine_dead"), failed("b", "empty_prompt"), replace(done("c"), finish_reason="abort")):
            folder.add(row)
        folder.finish({})
        assert done_ids(folder) == {"b"}
    assert manifest_of(tmp_path)["status"] == "interrupted"
    with open_folder(tmp_path) as folder:
        assert manifest_of(tmp_path)["status"] == "running"
        folder.add(done("a"))
        folder.add(done("c", "all of it"))
        folder.finish({})
        assert sorted((row.id, row.error_kind, row.text) for row in folder.parts.rows()) == [
            ("a", None, "a summary"),
            ("b", "empty_prompt", None),
            ("c", None, "all of it"),
        ]
    manifest = manifest_of(tmp_path)
    assert (manifest["status"], manifest["rows"]["failed"]) == ("complete", {"empty_prompt": 1})
    assert [session["finished"] is None for session in manifest["sessions"]] == [False, False]


def test_a_job_that_is_complete_is_merged_once(tmp_path: Path) -> None:
    merged = tmp_path / "summaries.parquet"
    with open_folder(tmp_path) as folder:
        folder.add(done("a"))
        folder.finish({"output_tokens": 7})
    before = merged.stat().st_mtime_ns
    with open_folder(tmp_path) as folder:
        assert folder.is_merged
        folder.finish({})
    assert merged.stat().st_mtime_ns == before
    with open_folder(tmp_path) as folder:
        folder.add(done("b"))
    with open_folder(tmp_path) as folder:  # the session before was cut off before it merged
        assert not folder.is_merged
        folder.finish({})
    assert merged.stat().st_mtime_ns > before
    with open_folder(tmp_path) as folder:
        folder.add(done("c"))
        folder.finish({})
    assert [row["id"] for row in merged_rows(merged)] == ["a", "b", "c"]
    (part,) = (tmp_path / "rows").glob("part-000002-*")
    last, first = (tmp_path / "rows" / f"part-00000{number}-0123abcd.parquet" for number in (4, 0))
    for place, ids in ((tmp_path / "away", "ac"), (last, "acb"), (first, "bac")):
        part = part.rename(place)
        with open_folder(tmp_path) as folder:
            folder.finish({})
        assert [row["id"] for row in merged_rows(merged)] == list(ids), "a part was taken away or put there"


def test_a_merged_file_that_is_not_as_it_was_written_is_refused(tmp_path: Path, file_format: str) -> None:
    merged = tmp_path / f"summaries.{file_format}"
    with open_folder(tmp_path, file_format=file_format) as folder:
        folder.add(done("a"))
        folder.finish({})
    whole = merged.read_bytes()
    for damaged in (b"", whole[:-9], whole + b"mine"):
        merged.write_bytes(damaged)
        with pytest.raises(DamagedOutputError, match=rf"summaries\.{file_format}: not the file that the job wrote"):
            open_folder(tmp_path, file_format=file_format)
        assert merged.read_bytes() == damaged
        assert manifest_of(tmp_path)["status"] == "complete"
    merged.unlink()
    merged.mkdir()
    with (
        pytest.raises(OutputError, match=rf"cannot be written \({merged}: Is a directory\)"),
        open_folder(tmp_path, file_format=file_format) as folder,
    ):
        folder.finish({})
    merged.rmdir()
    with open_folder(tmp_path, file_format=file_format) as folder:
        folder.finish({})
    assert merged.read_bytes() == whole


SMALL_DISK = """
import resource, sys
from pathlib import Path
from tests.batch.test_run_folder import done, open_folder
with open_folder(Path(sys.argv[1])) as folder:
    folder.add(done("a"))
    folder.commit()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))
    folder.add(done("b"))
"""


def test_an_output_that_cannot_be_written_is_named_and_the_folder_is_given_back(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", SMALL_DISK, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert f"OutputError: the output '{tmp_path}' cannot be written (File too large)" in process.stderr
    assert manifest_of(tmp_path)["status"] == "running"  # as if the driver was killed
    with open_folder(tmp_path) as folder:
        assert done_ids(folder) == {"a"}


def test_a_complete_job_stays_complete_where_a_run_adds_nothing(tmp_path: Path) -> None:
    """As where option 'changed' is 'fail'."""
    with open_folder(tmp_path) as folder:
        folder.add(done("a"))
        folder.finish({})
    with pytest.raises(RuntimeError), open_folder(tmp_path):
        raise RuntimeError
    assert manifest_of(tmp_path)["status"] == "complete"
    with pytest.raises(RuntimeError), open_folder(tmp_path) as folder:
        folder.add(done("b"))
        raise RuntimeError
    assert manifest_of(tmp_path)["status"] == "interrupted"


def test_without_locks_what_another_driver_is_writing_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Location, "lock", lambda _: None)
    with open_folder(tmp_path) as folder:
        with folder.location.join("rows", "part-000001-1f2e3d4c.parquet").writing():
            open_folder(tmp_path).close()
        assert parts_of(tmp_path) == ["part-000001-1f2e3d4c.parquet"]


@pytest.mark.parametrize("how", ["deleted", "replaced", "made a link"])
def test_a_folder_that_is_another_gets_no_rows(tmp_path: Path, how: str) -> None:
    with open_folder(tmp_path / "other", identity={"prompt": "another"}) as folder:
        folder.add(done("theirs"))
    before = {path: path.read_bytes() for path in (tmp_path / "other").rglob("*") if path.is_file()}
    with pytest.raises(OutputError, match="was moved, deleted or replaced"), open_folder(tmp_path / "out") as folder:
        folder.add(done("a"))
        folder.commit()
        (tmp_path / "out").rename(tmp_path / "moved")
        if how == "replaced":
            (tmp_path / "other").rename(tmp_path / "out")
        elif how == "made a link":
            (tmp_path / "out").symlink_to("other")
        folder.add(done("b"))
        folder.finish({})
    assert (tmp_path / "out").exists() is (how != "deleted")
    (tmp_path / ("out" if how == "replaced" else "other")).rename(tmp_path / "unchanged")
    found = {path: path.read_bytes() for path in (tmp_path / "unchanged").rglob("*") if path.is_file()}
    assert list(found.values()) == list(before.values())
    with open_folder(tmp_path / "moved") as folder:
        assert done_ids(folder) == {"a"}


def test_another_identity_is_refused_by_name(tmp_path: Path) -> None:
    with open_folder(tmp_path) as folder:
        folder.add(done("a"))
    before = manifest_of(tmp_path)
    changed = {"model": "demo", "sampling": {"temperature": 0.5, "max_tokens": 64}, "dtype": "float32"}
    with pytest.raises(ConfigError) as caught:
        open_folder(tmp_path, identity=changed, text_column="text")
    for part in (
        "sampling.temperature was 0.0 and is 0.5",
        'dtype was not given and is "float32"',
        'prompt was "Summarize:" and is not given',
        'text_column was "summary" and is "text"',
        "choose another folder, or pass --overwrite",
    ):
        assert part in str(caught.value)
    assert "max_tokens" not in str(caught.value)
    assert manifest_of(tmp_path) == before
    open_folder(tmp_path).close()  # the refusal has given the lock back


def test_a_value_that_the_engine_chose_may_be_named(tmp_path: Path) -> None:
    def identity(**engine: Any) -> dict[str, Any]:
        return {"engine": {"dtype": "auto", "max_model_len": None, "revision": None} | engine}

    with open_folder(tmp_path, identity=identity()) as folder:
        folder.add(done("a"))
        folder.note({"config": {"dtype": "bfloat16", "max_model_len": 64, "revision": None}})
    open_folder(tmp_path, identity=identity(dtype="bfloat16", max_model_len=64)).close()
    open_folder(tmp_path, identity=identity()).close()
    with pytest.raises(ConfigError, match=r'engine\.dtype was "bfloat16" and is "float32"; engine\.revision was null'):
        open_folder(tmp_path, identity=identity(dtype="float32", max_model_len=64, revision="other"))


def test_overwriting_removes_what_a_job_left_and_nothing_else(tmp_path: Path) -> None:
    with open_folder(tmp_path, file_format="jsonl") as folder:
        folder.add(done("a"))
        folder.finish({})
    for name in ("report.md", "precious.txt", "rows/mine.parquet"):
        (tmp_path / name).touch()
    with open_folder(tmp_path, identity={"model": "other"}, overwrite=True, report_files=["report.md"]) as folder:
        assert (len(folder.parts.done), len(folder.manifest.sessions)) == (0, 1)
    # What killed writers left is removed at every start.
    ours = [".manifest.json.0a1b2c3d.partial", ".summaries.jsonl.0a1b2c3d.partial"]
    for name in [*ours, "rows/.part-000001-0a1b2c3d.parquet.0a1b2c3d.partial", ".other.jsonl.partial"]:
        (tmp_path / name).touch()
    open_folder(tmp_path, identity={"model": "a folder without rows may become another job"}).close()
    assert parts_of(tmp_path) == ["mine.parquet"]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".lock", ".other.jsonl.partial", "manifest.json", "precious.txt", "rows"]


@pytest.mark.parametrize("name", ["config.yaml", "summaries.jsonl"])
def test_overwriting_replaces_no_file_that_no_job_wrote(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / name).write_text("precious", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"holds '{name}' and no manifest\.json of a job: .* move '{name}' away"):
        open_folder(tmp_path, overwrite=True, report_files=["config.yaml"])
    assert (tmp_path / name).read_text(encoding="utf-8") == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["a.txt", name])


def test_overwriting_deletes_no_file_that_the_job_reads(tmp_path: Path) -> None:
    with open_folder(tmp_path / "out") as folder:
        folder.add(done("a"))
        folder.finish({})
    (tmp_path / "link").symlink_to("out")
    before = sorted((tmp_path / "out").rglob("*"))
    for name in ("summaries.parquet", f"rows/{parts_of(tmp_path / 'out')[0]}"):
        for path in (tmp_path / "out" / name, tmp_path / "link" / name, f"file://{tmp_path}/out/{name}"):
            with pytest.raises(ConfigError, match=rf"--overwrite would delete '\S+{name}', which this job reads"):
                open_folder(tmp_path / "out", overwrite=True, reads=[str(path)])
    assert sorted((tmp_path / "out").rglob("*")) == before
    open_folder(tmp_path / "out", overwrite=True, reads=["s3://b/a.jsonl", str(tmp_path / "a.jsonl")]).close()
    assert parts_of(tmp_path / "out") == []


def test_leftovers_next_to_an_output_of_the_working_folder_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(".out.jsonl.0a1b2c3d.partial").touch()
    open_folder(Path("out.jsonl.run"), merged=Location.parse("out.jsonl")).close()
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl.run"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("out/thesis.tex", "", r"holds 'thesis\.tex' and no manifest\.json.*--overwrite"),
        ("out", "", "a file: name a folder"),
        ("out/manifest.json", "{", r"manifest\.json: not a manifest that can be read.*--overwrite"),
        ("out/manifest.json", '{"version": 1}', r"manifest\.json: not a manifest that can be read.*--overwrite"),
        (
            "out/manifest.json",
            '{"identity": {}, "text_column": "summary", "file_format": "parquet", "extra": {"config": "x"}}',
            r"manifest\.json: not a manifest that can be read.*\$\.extra",
        ),
    ],
)
def test_a_place_of_something_else_is_left_alone(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content, encoding="utf-8")
    with pytest.raises((ConfigError, DamagedOutputError), match=message):
        open_folder(tmp_path / "out")
    assert path.read_text(encoding="utf-8") == content
    if name != "out":
        open_folder(tmp_path / "out", overwrite=True).close()


def test_a_second_driver_and_a_text_column_of_another_column_are_refused(tmp_path: Path) -> None:
    with open_folder(tmp_path):
        for overwrite in (False, True):
            with pytest.raises(ConfigError, match=r"where process \d+ of .*, since 20.*, is writing: wait"):
                open_folder(tmp_path, overwrite=overwrite)
    with pytest.raises(ConfigError, match="text_column is 'tree'"):
        open_folder(tmp_path, text_column="tree")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_an_output_that_is_a_file_has_the_rows_so_far_however_a_run_ends(tmp_path: Path, suffix: str) -> None:
    output, file_format = tmp_path / f"out{suffix}", suffix[1:]
    folder, merged, found = output_places(str(output), None)
    assert (folder.name, found) == (f"{output}.run", file_format)

    def rows() -> list[str]:
        return [row["id"] for row in merged_rows(output)]

    def interrupted() -> None:
        with open_folder(folder, merged=merged, file_format=file_format) as run:
            for number in range(40):
                run.add(done(f"{number:02}"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert rows() == [f"{number:02}" for number in range(40)]
    with open_folder(folder, merged=merged, file_format=file_format) as run:
        run.add(done("40"))
        run.finish({})
    assert rows() == [f"{number:02}" for number in range(41)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [output.name, f"{output.name}.run"]
    output.unlink()
    with open_folder(folder, merged=merged, file_format=file_format) as run:
        assert not run.is_merged
        run.finish({})
    assert len(rows()) == 41


def test_a_file_of_something_else_is_not_replaced_unasked(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("precious\n", encoding="utf-8")
    folder, merged, _ = output_places(str(tmp_path / "out.jsonl"), None)
    with pytest.raises(ConfigError, match=r"out\.jsonl', which exists: choose another name or pass --overwrite"):
        open_folder(folder, merged=merged, file_format="jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    with open_folder(folder, merged=merged, file_format="jsonl", overwrite=True) as run:
        assert (tmp_path / "out.jsonl").read_text(encoding="utf-8") == "precious\n", "until there are rows"
        run.finish({})
    assert (tmp_path / "out.jsonl").read_text(encoding="utf-8") == ""
    with pytest.raises(ConfigError, match=r"option 'format' is 'jsonl' and option 'output' is 'x\.parquet': leave"):
        output_places("x.parquet", "jsonl")
    for name in ("", " "):
        with pytest.raises(ConfigError, match=r"option 'output' is ' ?': name a file or folder"):
            output_places(name, None)
    for name in ("x.csv", "x.JSON", "x.jsonl.gz"):
        with pytest.raises(ConfigError, match=rf"{name}': name a \.jsonl or \.parquet file, or a folder"):
            output_places(name, None)
        (tmp_path / name).mkdir()
        assert output_places(str(tmp_path / name), None)[1] is None
    (tmp_path / "x.parquet").mkdir()
    assert output_places(str(tmp_path / "x.parquet"), None)[1] is None, "a folder, whatever its name"
    assert output_places("new.jsonl/", None)[:2] == (Location.parse("new.jsonl"), None)


@pytest.mark.parametrize("name", ["out", "out.jsonl"])
def test_a_link_that_leads_nowhere_is_refused_and_stays(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("absent/rows")
    folder, merged, _ = output_places(str(tmp_path / name), None)
    with pytest.raises(ConfigError, match=r"out.*', a link to 'absent/rows', where nothing is: delete the link"):
        open_folder(folder, merged=merged or folder.join("rows.parquet"), overwrite=True)
    assert [path.name for path in tmp_path.iterdir() if path.is_symlink()] == [name]


@pytest.mark.parametrize("name", ["docs", "docs/report.jsonl"])
def test_a_place_beyond_a_folder_that_is_missing_is_no_place(tmp_path: Path, name: str) -> None:
    """With this folder made, it would be a place that holds other files."""
    (tmp_path / "docs").mkdir()
    for file in ("report.md", "report.jsonl"):
        (tmp_path / "docs" / file).write_text("precious", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    folder, merged, file_format = output_places(f"{tmp_path}/absent/../{name}", None)
    with pytest.raises(ConfigError, match=rf"absent/\.\./{name}.*cannot be used \(No such file or directory\)"):
        open_folder(folder, merged=merged or folder.join("rows.parquet"), file_format=file_format)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("damage", [lambda content: content[: len(content) // 2], lambda _: b"", lambda _: b"{}\n"])
def test_a_damaged_part_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    with open_folder(tmp_path) as folder:
        for number in range(33):
            folder.add(done(str(number), "text " * 50))
    part = tmp_path / "rows" / parts_of(tmp_path)[0]
    content = part.read_bytes()
    part.write_bytes(damage(content))
    with pytest.raises(DamagedOutputError, match=f"{part.name}: .*delete it to have its rows done again"):
        open_folder(tmp_path)
    assert len(manifest_of(tmp_path)["sessions"]) == 1
    part.unlink()
    with open_folder(tmp_path) as folder:
        assert done_ids(folder) == {"32"}
        folder.add(done("0"))
    assert [name[:12] for name in parts_of(tmp_path)] == ["part-000002-", "part-000003-"]


@pytest.fixture
def bucket() -> Iterator[Location]:
    filesystem = fsspec.filesystem("memory")
    store = Store(filesystem=fs.PyFileSystem(fs.FSSpecHandler(filesystem)), uri="memory://b", base="/b")
    yield Location(replace(store, has_atomic_put=True), "out")
    filesystem.store.clear()  # one for the process
    filesystem.pseudo_dirs[:] = [""]


def test_a_part_that_the_store_does_not_give_is_not_called_damaged(
    bucket: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_folder(bucket) as folder:
        folder.add(done("a"))
    opened = fs.FSSpecHandler.open_input_file

    def slow_down(handler: fs.FSSpecHandler, path: str) -> pa.NativeFile:
        if "part-" in path:
            raise OSError("SLOW_DOWN")
        return opened(handler, path)

    with monkeypatch.context() as patch:
        patch.setattr(fs.FSSpecHandler, "open_input_file", slow_down)
        with pytest.raises(OutputError, match=r"part-\S+: could not be read \(SLOW_DOWN\): run the same command again"):
            open_folder(bucket)
    with open_folder(bucket) as folder:
        assert done_ids(folder) == {"a"}


def test_a_job_in_a_remote_store(bucket: Location) -> None:
    of_another_driver = bucket.join("rows", ".part-000001-1f2e3d4c.parquet.0a1b2c3d.partial")
    with open_folder(bucket) as folder:
        folder.add(done("a"))
        of_another_driver.write(b"half")
    with open_folder(bucket) as folder:
        assert done_ids(folder) == {"a"}
        folder.add(done("b"))
        folder.finish({})
    assert of_another_driver.exists
    with bucket.join("summaries.parquet").open() as file:
        assert pq.read_table(file)["id"].to_pylist() == ["a", "b"]
    with open_folder(bucket) as first, open_folder(bucket) as second:  # two drivers, which a store does not refuse
        for folder, own in ((first, "c"), (second, "d")):
            folder.add(done(own))
            folder.add(done("both"))
            folder.commit()
        first.finish({})
        manifest = bucket.join("manifest.json").read()
        second.add(done("a", "a text that changes the size"))
        second.finish({})
        bucket.join("manifest.json").write(manifest)  # the second was killed before it wrote its own
    with open_folder(bucket) as folder:
        assert not folder.is_merged
        assert sorted(row.id for row in folder.parts.rows()) == ["a", "b", "both", "c", "d"]


def test_of_two_jobs_with_other_options_in_a_store_one_goes_on(bucket: Location) -> None:
    with (
        pytest.raises(OutputError, match="a job with other options has begun in it meanwhile"),
        open_folder(bucket) as first,
        open_folder(bucket, identity={"prompt": "another"}) as second,
    ):
        second.add(done("a", "a text of the other prompt"))
        second.finish({})
        first.add(done("a"))
        first.finish({})
    with open_folder(bucket, identity={"prompt": "another"}) as folder:
        assert folder.is_merged
        assert [row.text for row in folder.parts.rows()] == ["a text of the other prompt"]


_WRITER = """
import sys
from pathlib import Path
from tests.batch.test_run_folder import done, done_ids, open_folder
with open_folder(Path(sys.argv[1])) as folder:
    before = done_ids(folder)
    for number in map(str, range(int(sys.argv[2]))):
        if number not in before:
            folder.add(done(number, f"text {number} " * 20))
            if int(number) % 3 == 0:
                folder.commit()
                print(number, flush=True)
    folder.finish({})
"""


def test_a_driver_that_is_killed_again_and_again_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    chance, num_rows, reported, num_killed = random.Random(2), 60, set(), 0
    for _ in range(10):
        command = [sys.executable, "-c", _WRITER, str(tmp_path), str(num_rows)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            num_lines = chance.randrange(1, 18)  # a kill falls anywhere in what follows so many commits
            for line in writer.stdout:
                reported.add(line.strip())
                num_lines -= 1
                if num_lines == 0:
                    time.sleep(chance.uniform(0, 0.01))
                    writer.kill()
        if writer.returncode == 0:
            break
        assert writer.returncode == -9
        num_killed += 1
        with open_folder(tmp_path) as folder:
            assert reported <= done_ids(folder)
    assert num_killed >= 2
    with open_folder(tmp_path) as folder:
        rows = list(folder.parts.rows())
    assert sorted(int(row.id) for row in rows) == list(range(num_rows))
    assert all(row.text == f"text {row.id} " * 20 for row in rows)
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".partial"]
    assert len(merged_rows(tmp_path / "summaries.parquet")) == num_rows
