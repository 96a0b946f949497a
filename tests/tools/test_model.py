import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rayspec.demo import model_path, sample_tasks
from tools.demo_model.evaluate import score
from tools.demo_model.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    return loaded


def test_the_checkpoint_names_no_path_and_is_complete() -> None:
    files = {path.name: path for path in Path(model_path()).iterdir()}
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "MODEL_CARD.md"}
    assert expected <= files.keys()
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        values = json.loads(files[name].read_text())
        assert not [value for value in values.values() if isinstance(value, str) and value.startswith("/")]
    assert json.loads(files["config.json"].read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("domain", "size", "num_tasks", "least_share"),
    [
        ("summary", 15, 2, 0.9),
        ("ledger", 12, 2, 0.9),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (("summary", 50, 3, 0.9), ("question", 30, 12, 0.5), ("ledger", 12, 4, 0.9))
        ),
    ],
)
def test_most_lines_are_exact(
    model: PreTrainedModel, domain: str, size: int, num_tasks: int, least_share: float
) -> None:
    tasks = sample_tasks(domain, num_tasks, size=size, seed=77)
    result = score(model, load_tokenizer(), tasks, batch_size=num_tasks)
    assert result.exact_lines >= least_share * result.lines
