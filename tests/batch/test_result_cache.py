"""Rows with the same request have one result, within a job and, with a folder, across jobs."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rayspec.batch import rows
from rayspec.batch.job import LocalBackend, LocalPool, Scan, Source
from rayspec.batch.result_cache import ResultCache, _digest, files_of
from rayspec.batch.rows import Row
from rayspec.cli import app
from rayspec.demo import model_path
from rayspec.types import EngineStats
from tests.jobs.job_process import FAST, write_lines

ONE, TWO = "The annual review of the harbour.", "The quarterly report of the mill."
ENGINE: dict[str, Any] = dict.fromkeys(("tokenizer", "generation_config", "revision")) | {
    "model": model_path(), "dtype": "float32", "lora_modules": {}
}  # fmt: skip
OPTIONS = (*FAST, "--max-model-len", "256", "--max-tokens", "6", "--cache", "cache")


@pytest.fixture(autouse=True)
def loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that were loaded."""
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in.jsonl", [{"id": n, "text": text} for n, text in enumerate((ONE, TWO, ONE, ONE))])
    loaded, load = list[str](), rows.load_llm

    def counted(config: Any) -> Any:
        loaded.append(config.model)
        return load(config)

    monkeypatch.setattr(rows, "load_llm", counted)
    return loaded


def run(output: str, *more: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """The rows by their ids, and what the command said."""
    result = CliRunner().invoke(app, ["summarize", "in.jsonl", "-o", output, *OPTIONS, *more])
    assert result.exit_code == code, result.output
    lines = Path(output).read_text(encoding="utf-8").splitlines()
    return {row["id"]: row for row in map(json.loads, lines)}, " ".join(result.output.split())


def test_equal_rows_run_once_and_the_same_job_starts_no_engine(loads: list[str]) -> None:
    first, said = run("a.jsonl", "--logprobs", "2")
    assert "4 rows, 12 tokens" in said
    assert "2 had the result of an equal row" in said
    assert first["0"]["summary"] == first["2"]["summary"] == first["3"]["summary"] != first["1"]["summary"]
    assert (first["0"]["num_output_tokens"], first["3"]["num_output_tokens"]) == (6, 6)
    again, said = run("b.jsonl", "--logprobs", "2")
    assert len(loads) == 1
    assert again["2"]["logprobs"] == first["0"]["logprobs"]
    assert "".join(one["token"] for one in first["0"]["logprobs"]).strip() == first["0"]["summary"].strip()
    for one in first["0"]["logprobs"]:
        assert one["top"][0] == {"token": one["token"], "logprob": one["logprob"]}, "greedy"
        assert len(one["top"]) == 2
    assert "4 had the result of an equal row" in said
    assert {key: row["summary"] for key, row in again.items()} == {key: row["summary"] for key, row in first.items()}
    assert again["3"]["source"] == "in.jsonl:4"
    assert [again[key]["input_hash"] for key in again] == [first[key]["input_hash"] for key in again]
    write_lines(Path("in.jsonl"), [{"id": n, "text": text} for n, text in enumerate((ONE, TWO, ONE, "New."))])
    _, said = run("b.jsonl", "--logprobs", "2")
    assert "1 rows have other text than when they were done ('3')" in said


def summaries(rows: dict[str, Any]) -> dict[str, str]:
    return {name: row["summary"] for name, row in rows.items()}


def test_what_decides_the_text_is_in_the_key(loads: list[str], tmp_path: Path) -> None:
    shutil.copytree(model_path("demo"), tmp_path / "model")
    model = ("--model", "model")
    for number, more in enumerate([(), ("--max-tokens", "5"), ("--temperature", "1", "--seed", "3"), model, model]):
        run(f"{number}.jsonl", *more)
    assert len(loads) == 4, "the last one has all"
    os.utime(tmp_path / "model" / "config.json", (1, 1))
    run("touched.jsonl", *model)
    assert len(loads) == 5
    _, said = run("random.jsonl", "--temperature", "1")
    assert "'cache' has no effect" in said
    assert "equal row" not in said, "each row has a text of its own"


def test_an_adapter_that_has_changed_has_no_results(tmp_path: Path) -> None:
    for name in ("model", "adapter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("1")
    engine = ENGINE | {"model": str(tmp_path / "model"), "lora_modules": {"a": str(tmp_path / "adapter")}}
    ResultCache(str(tmp_path / "cache"), {"engine": engine}).keep(Row(id="1", text="a", input_hash="0"))
    assert ResultCache(str(tmp_path / "cache"), {"engine": engine}).find("0") is not None
    base = json.dumps({"base_model_name_or_path": str(tmp_path / "model")})
    (tmp_path / "adapter" / "adapter_config.json").write_text(base)
    of_folder = {"engine": ENGINE | {"model": str(tmp_path / "adapter")}}
    ResultCache(str(tmp_path / "cache"), of_folder).keep(Row(id="1", text="a", input_hash="0"))
    os.utime(tmp_path / "model" / "weights", (1, 1))
    assert ResultCache(str(tmp_path / "cache"), of_folder).find("0") is None
    ResultCache(str(tmp_path / "cache"), {"engine": engine}).keep(Row(id="1", text="a", input_hash="0"))
    (tmp_path / "model" / "lost").symlink_to("nowhere")
    assert ResultCache(str(tmp_path / "cache"), {"engine": engine}).find("0") is not None
    os.utime(tmp_path / "adapter" / "weights", (1, 1))
    assert ResultCache(str(tmp_path / "cache"), {"engine": engine}).find("0") is None


def test_a_run_that_goes_on_says_that_the_model_was_written_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(model_path(), tmp_path / "model")
    options = ("--model", "model", "--dtype", "float32", "--strategy", "ar", "--max-tokens", "2", "--prompt", "{text}")

    def warns(*more: str) -> bool:
        result = CliRunner().invoke(app, ["summarize", "in.jsonl", "-o", "a.jsonl", *options, *more])
        assert result.exit_code == 0, result.output
        return "these rows stay, but files of the model were written since" in " ".join(result.output.split())

    assert [warns(), warns()] == [False, False]
    os.utime(tmp_path / "model" / "model.safetensors", (1, 1))
    write_lines(tmp_path / "in.jsonl", [{"id": n, "text": text} for n, text in enumerate((ONE, TWO, ONE, ONE, "New."))])
    assert [warns(), warns()] == [True, True], "with a row that the other model does, and without"
    assert [warns("--overwrite"), warns()] == [False, False]
    stats = LocalPool.stats

    def replaced(pool: LocalPool) -> EngineStats:
        """As of a pool whose engine died, and another read a new model."""
        os.utime(tmp_path / "model" / "model.safetensors", (2, 2))
        return replace(stats(pool), died_at_s=[0.0])

    monkeypatch.setattr(LocalPool, "stats", replaced)
    assert warns("--overwrite")


def test_broken_results_are_computed_again(loads: list[str], tmp_path: Path) -> None:
    first, _ = run("a.jsonl")
    kept = sorted((tmp_path / "cache").rglob("*.json"))
    assert len(kept) == 2
    whole = [file.read_bytes() for file in kept]
    kept[0].write_bytes(whole[0][:-9])
    kept[1].write_bytes(whole[1].replace(b"The", b"the").replace(b"stop", b"shop").replace(b"length", b"lengta"))
    again, _ = run("b.jsonl")
    assert len(loads) == 2
    assert summaries(again) == summaries(first)
    assert [file.read_bytes() for file in kept] == whole


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b'{"text": 5}', b'{"words": 1}', b"\xff", b"1"],
    ids=["nested", "text", "words", "bytes", "number"],
)
def test_a_broken_result_with_a_right_checksum_is_named(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ResultCache(str(tmp_path / "cache"), {"engine": ENGINE})
    cache.keep(Row(id="1", text="a", input_hash="0"))
    (broken,) = (tmp_path / "cache").rglob("*.json")
    broken.write_bytes(_digest(content).encode() + b"\n" + content)
    assert cache.find("0") is None
    assert [broken.name in one for one in caplog.messages if "is broken" in one] == [True]


def test_a_document_that_cannot_be_read_needs_no_engine(loads: list[str], tmp_path: Path) -> None:
    bad = ("bad.docx", "same.docx")
    for name in bad:
        (tmp_path / name).write_bytes(b"nothing")
    first, _ = run("a.jsonl", *bad, code=3)
    again, _ = run("b.jsonl", *bad, code=3)
    assert len(loads) == 1
    for rows_of_run in (first, again):
        assert [rows_of_run[name]["error_kind"] for name in bad] == ["unreadable_document"] * 2
        assert [rows_of_run[name]["error"].partition(":")[0] for name in bad] == [*bad]
    assert len(again) == 6


@pytest.mark.parametrize(
    ("model", "file"),
    [("o/n", "config.json"), ("gpt2", "config.json"), ("o/n:m.gguf", "m.gguf"), ("o/n:a/m.gguf", "a/m.gguf")],
)
def test_a_model_of_the_hub_is_told_by_its_commit(
    model: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert files_of(ENGINE | {"model": model}) == ""
    found = []
    for commit in ("a" * 40, "b" * 40):
        repository = model.partition(":")[0].replace("/", "--")
        place = tmp_path / f"models--{repository}" / "snapshots" / commit / file
        place.parent.mkdir(parents=True)
        place.touch()
        found.append(files_of(ENGINE | {"model": model, "revision": commit}))
    assert found[0] != found[1]
    assert "" not in found


def test_a_path_of_other_machines_is_not_looked_for_on_the_hub() -> None:
    assert files_of(ENGINE | {"model": "/models-of-other-machines"}) == ""


def test_a_folder_with_the_name_of_an_options_value_is_no_part_of_the_model(tmp_path: Path) -> None:
    engine = ENGINE | {"generation_config": "auto"}
    before = files_of(engine)
    (tmp_path / "auto").mkdir()
    (tmp_path / "auto" / "manifest.json").touch()
    assert files_of(engine) == before


def test_an_input_that_is_replaced_while_it_is_read_loses_no_row_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rows of the new file have other numbers."""
    scan = LocalBackend.scan

    def replaced(backend: LocalBackend, source: Source) -> Scan:
        found = scan(backend, source)
        rows = [{"id": "new", "text": "New."}, *map(json.loads, Path("in.jsonl").read_text().splitlines())]
        write_lines(Path("in.jsonl"), rows)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "scan", replaced)
        first, said = run("a.jsonl", code=3)
    assert "1 failed (unreadable_file 1)" in said
    assert (first["1"]["source"], first["1"]["summary"]) == ("in.jsonl:2", None)
    assert "changed; run the same command again" in first["1"]["error"]
    again, _ = run("a.jsonl")
    assert sorted(again) == ["0", "1", "2", "3", "new"]
    assert all(row["summary"] for row in again.values())
    # A row that is done again has an earlier result, which is no answer to its new text.
    before = map(json.loads, Path("in.jsonl").read_text().splitlines())
    changed = [row | {"text": "Changed."} if row["id"] == 1 else row for row in before]
    write_lines(Path("in.jsonl"), changed)
    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "scan", replaced)
        _, said = run("a.jsonl", "--changed", "redo", code=3)
    assert "1 failed (unreadable_file 1)" in said
