import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rayspec import demo
from rayspec.ops.doctor.machine import Finding
from rayspec.ops.doctor.model_files import check_model
from tests.families import checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), path)
    return path


def refused(folder: Path) -> Finding:
    """Return the finding of a model that cannot be loaded."""
    finding, place = check_model(str(folder))
    assert (finding.status, place) == ("problem", None)
    assert "fetch the model again" in finding.remedy
    return finding


def test_the_bundled_model_is_whole() -> None:
    finding, place = check_model("demo")
    assert (finding.status, place) == ("ok", demo.model_path())


def test_a_file_that_was_cut_short_is_found(folder: Path) -> None:
    weights = folder / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size - 1)
    assert "model.safetensors cannot be read" in refused(folder).found


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", (2**40).to_bytes(8, "little")])
def test_what_is_no_file_of_weights_is_found(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    refused(folder)
    gguf = folder / "model.gguf"
    gguf.write_bytes(content)
    assert "is no GGUF file" in refused(gguf).found
    gguf.write_bytes(b"GGUF")
    assert check_model(str(gguf))[1] == str(gguf)


def test_every_file_of_an_index_must_be_there(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    save_file({"a": torch.zeros(4)}, folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert refused(folder).found.endswith(": model-00002-of-00002.safetensors is missing")
    save_file({"b": torch.zeros(4)}, folder / "model-00002-of-00002.safetensors")
    assert check_model(str(folder))[1] == str(folder)
    (folder / "model.safetensors.index.json").write_text("[")
    assert "index.json cannot be read" in refused(folder).found


def test_config_weights_and_tokenizer_are_missed(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    finding, place = check_model(str(folder))
    assert (finding.status, place) == ("warning", str(folder))
    assert "no tokenizer" in finding.found
    (folder / "config.json").write_text("{")
    assert "config.json cannot be read" in refused(folder).found
    for path in folder.iterdir():
        path.unlink()
    assert "no config.json; no weights" in refused(folder).found


def test_a_hub_id_that_is_not_in_the_cache_can_still_be_fetched() -> None:
    finding, place = check_model("nobody/no-such-model")
    assert (finding.status, place) == ("warning", None)
    assert "hf download nobody/no-such-model" in finding.remedy
    refused(Path("/no/such/folder"))
    refused(Path("what is this?"))
