"""The bundled model for tests: loaded once, with short documents to summarize."""

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from rayspec import demo
from rayspec.choices import Weights
from rayspec.model.sublayers import Decomposition
from tests.families import parts_of

EOS = 1
_folder = tempfile.TemporaryDirectory(prefix="rayspec-demo-")


def demo_parts(dtype: str = "float32", quantised: tuple[Weights, ...] = ()) -> Decomposition:
    return parts_of(demo.model_path(), dtype, quantised)


@cache
def shallow_demo(num_layers: int = 4) -> str:
    """Folder of the bundled model's first layers, for tests that need its tokens and not its texts."""
    path = Path(shutil.copytree(demo.model_path(), Path(_folder.name) / str(num_layers)))
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}), encoding="utf-8")
    tensors = load_file(path / "model.safetensors")
    of_later = tuple(f"model.layers.{index}." for index in range(num_layers, config["num_hidden_layers"]))
    kept = {name: each for name, each in tensors.items() if not name.startswith(of_later)}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


@cache
def demo_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo.model_path())


def demo_prompts(count: int, num_sentences: int, seed: int = 3) -> list[list[int]]:
    return [
        list(
            demo_tokenizer().apply_chat_template(
                [{"role": "user", "content": document.text}], add_generation_prompt=True, return_dict=True
            )["input_ids"]
        )
        for document in demo.sample_documents(count, num_sentences=num_sentences, seed=seed)
    ]
