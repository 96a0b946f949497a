"""Checkpoints that cannot run here are refused by their config alone, in one sentence that says what to do."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from rayspec.config import EngineConfig, ParallelOptions
from rayspec.local_engine import load_engine
from rayspec.model.weights import read_config
from rayspec.pipeline.loading import load_pipeline
from rayspec.types import CheckpointError, UnsupportedModelError
from tests.every_type import build
from tests.families import checkpoint


@pytest.mark.parametrize("family", ["t5", "musicgen"])
def test_an_encoder_decoder_model_is_called_that(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "is_encoder_decoder": True}))
    with pytest.raises(UnsupportedModelError, match=f"'{family}' is an encoder-decoder model, which is not supported"):
        load_engine(EngineConfig(model=str(tmp_path)), with_tokenizer=False)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "clip"])
def test_a_model_without_a_causal_lm_is_refused_in_one_sentence(family: str, tmp_path: Path) -> None:
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"'{family}' is not a causal LM in transformers") as caught:
        load_engine(EngineConfig(model=str(tmp_path)), with_tokenizer=False)
    assert len(str(caught.value)) < 300


def test_an_adapter_is_to_be_merged(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "demo"}))
    with pytest.raises(CheckpointError, match=r"PEFT adapter: merge it into its base model"):
        load_engine(EngineConfig(model=str(tmp_path)), with_tokenizer=False)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"num_hidden_layers": "4"}, r"config\.json.*'num_hidden_layers'.*correct that field"),
        ({"num_hidden_layers": 10**6}, r"config\.json.*num_hidden_layers.*1000000"),
        ({"num_hidden_layers": -5}, r"config\.json.*num_hidden_layers.*-5"),
        ({"hidden_size": 10**9}, r"config\.json.*hidden_size.*1000000000"),
        ({"vocab_size": -1}, r"config\.json.*vocab_size.*-1"),
        ({"num_key_value_heads": 0}, r"config\.json.*num_key_value_heads is 0 and must lie between 1"),
        ({"text_config": {"vocab_size": 8}}, "type 'llama' has no part as a config of its own"),
        ({"num_attention_heads": 0}, r"config of model .* could not be read: .* by zero: fetch its config.json"),
    ],
)
def test_fields_that_cannot_be_are_named_with_their_file(fields: dict[str, Any], match: str, tmp_path: Path) -> None:
    """Also what transformers raises for a number."""
    known = json.loads((Path(checkpoint("llama")) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(known | fields))
    for with_tokenizer in (True, False):
        with pytest.raises(CheckpointError, match=match) as caught:
            load_engine(EngineConfig(model=str(tmp_path)), with_tokenizer=with_tokenizer)
        assert "\n" not in str(caught.value)


def test_a_config_with_its_own_code_is_not_refused_by_its_type(tmp_path: Path) -> None:
    config = AutoConfig.for_model("clip")
    config.auto_map = {"AutoModelForCausalLM": "modeling.Own"}
    config.save_pretrained(tmp_path)
    assert read_config(str(tmp_path)).model_type == "clip"


def test_a_model_whose_layers_stages_cannot_divide_is_refused(tmp_path: Path) -> None:
    build("gpt2").save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), device="cpu", max_model_len=128, parallel=ParallelOptions(stages=2))
    match = "^gpt2: it does not run without weights: .*cannot be cut into stages: remove option 'parallel'"
    with pytest.raises(UnsupportedModelError, match=match):  # before Ray starts
        load_pipeline(config, with_tokenizer=False)
