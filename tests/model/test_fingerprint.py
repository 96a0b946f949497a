import shutil
from pathlib import Path

import pytest

from rayspec.config import EngineConfig
from rayspec.model.weights import weights_fingerprint
from rayspec.types import CheckpointError
from tests.families import build, checkpoint


def _fingerprint(path: Path | str) -> str:
    return weights_fingerprint(EngineConfig(model=str(path)))


def test_it_is_of_the_weights_and_not_of_where_they_lie(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no weight files"):
        _fingerprint(tmp_path)
    shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    assert _fingerprint(tmp_path / "copy") == _fingerprint(checkpoint("llama"))
    assert len(_fingerprint(tmp_path / "copy")) == 16
    model = build("llama")
    for weight in model.parameters():
        weight.data += 1e-3
    model.save_pretrained(tmp_path / "trained")
    assert _fingerprint(tmp_path / "trained") != _fingerprint(checkpoint("llama"))


@pytest.mark.parametrize("place", [0, -1])
def test_the_ends_of_a_file_are_looked_at_and_its_size(tmp_path: Path, place: int) -> None:
    file = tmp_path / "model.safetensors"
    content = bytearray(1_000_000)
    file.write_bytes(content)
    before = _fingerprint(tmp_path)
    content[place] = 1
    file.write_bytes(content)
    assert _fingerprint(tmp_path) != before
    file.write_bytes(bytes(1_000_001))
    assert _fingerprint(tmp_path) != before
