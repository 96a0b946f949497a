from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rayspec.ops.doctor.model_files import check_model, look_at_model
from tests.families import checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), path)
    return path


def test_the_bundled_model_is_whole() -> None:
    found = look_at_model("demo")
    assert (found.errors, found.notes) == ((), ())
    assert found.num_bytes > 1_000_000
    assert check_model(found).status == "ok"


def test_a_file_that_was_cut_short_is_found(folder: Path) -> None:
    weights = folder / "model.safetensors"
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.truncate(size - 1)
    finding = check_model(look_at_model(str(folder)))
    assert finding.status == "problem"
    assert "model.safetensors cannot be read" in finding.found
    assert "fetch the model again" in finding.remedy


@pytest.mark.parametrize("content", [b"", b"\x00" * 8, b"<html>not found</html>", (2**40).to_bytes(8, "little")])
def test_what_is_no_file_of_weights_is_found(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert check_model(look_at_model(str(folder))).status == "problem"


def test_every_file_of_an_index_must_be_there(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    save_file({"a": torch.zeros(4)}, folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    found = look_at_model(str(folder))
    assert found.errors == ("model-00002-of-00002.safetensors is missing",)
    save_file({"b": torch.zeros(4)}, folder / "model-00002-of-00002.safetensors")
    assert look_at_model(str(folder)).errors == ()
    (folder / "model.safetensors.index.json").write_text("[")
    assert "index.json cannot be read" in look_at_model(str(folder)).errors[0]


def test_config_weights_and_tokenizer_are_missed(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert "config.json cannot be read" in look_at_model(str(folder)).errors[0]
    for path in folder.iterdir():
        path.unlink()
    found = look_at_model(str(folder))
    assert found.errors[0] == "no config.json"
    assert "no weights" in found.errors[1]
    assert found.notes == ("no tokenizer",)


def test_a_tokenizer_is_no_more_than_a_warning(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    finding = check_model(look_at_model(str(folder)))
    assert finding.status == "warning"
    assert "no tokenizer" in finding.found


def test_a_hub_id_that_is_not_in_the_cache_can_still_be_fetched() -> None:
    finding = check_model(look_at_model("nobody/no-such-model"))
    assert finding.status == "warning"
    assert "hf download nobody/no-such-model" in finding.remedy
    assert check_model(look_at_model("/no/such/folder")).status == "problem"
    assert check_model(look_at_model("what is this?")).status == "problem"
