"""`rayspec models` as a user runs it."""

import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING
from typer.testing import CliRunner

from rayspec.cli import app
from rayspec.ops.supported import read_table, reason
from tests.every_type import build


def rows(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["models", *arguments, "--json", str(folder / "out.json")])
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads((folder / "out.json").read_text())["models"]
    assert f" {found[0]['type']} " in result.output
    return found


def test_all_types_popular_ones_first_and_the_rows_of_one_type(tmp_path: Path) -> None:
    found = rows(tmp_path)
    assert len(found) == len(read_table())
    names = [row["models"] for row in found]
    assert all(names[: names.index("")])
    assert not any(names[names.index("") :])
    assert [row["type"] for row in rows(tmp_path, "ministral3")] == ["ministral3", "ministral3#beta"]


def test_a_checkpoint_is_loaded_if_its_weights_are_here_else_its_type_answers(tmp_path: Path) -> None:
    mamba, llama = (tmp_path / name for name in ("mamba", "llama"))
    build("mamba2").save_pretrained(mamba)
    (bundled,) = rows(tmp_path, "demo")
    assert (bundled["way"], bundled["why"]) == ("drafts", "")
    assert reason(["loading a b.gguf: 0.09 GiB become 0.50 GiB in float32"]) == ""
    runs = "the model runs in float32; dtype bfloat16 keeps the checkpoint's data type"
    assert reason([f"this CPU (AVX2) multiplies matrices 6.5 times as fast in float32 as in bfloat16: {runs}"]) == ""
    (loaded,) = rows(tmp_path, str(mamba))
    assert (loaded["type"], loaded["models"], loaded["way"]) == ("mamba2", "Mamba 2", "copies")
    assert loaded["why"].startswith("state of linear_attention layers cannot be cropped")
    CONFIG_MAPPING["llama"]().save_pretrained(llama)
    (by_type,) = rows(tmp_path, str(llama))
    assert by_type["way"] == "drafts"
    assert "its weights are not here" in by_type["why"]
    CONFIG_MAPPING["t5"]().save_pretrained(tmp_path)
    refused = CliRunner().invoke(app, ["models", str(tmp_path)])
    assert refused.exit_code == 1
    assert "encoder-decoder" in refused.stderr
