"""Checkpoints that cannot run here are refused by their config alone, in one sentence that says what to do."""

import json
from pathlib import Path

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


def test_a_field_of_a_wrong_type_is_named_with_its_file(tmp_path: Path) -> None:
    known = json.loads((Path(checkpoint("llama")) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(known | {"num_hidden_layers": "4"}))
    for with_tokenizer in (True, False):
        with pytest.raises(CheckpointError, match=r"config\.json.*'num_hidden_layers'.*correct that field") as caught:
            load_engine(EngineConfig(model=str(tmp_path)), with_tokenizer=with_tokenizer)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_hidden_layers", 10**6), ("num_hidden_layers", -5), ("hidden_size", 10**9), ("vocab_size", -1)],
)
def test_an_absurd_number_is_named_with_its_file(name: str, value: int, tmp_path: Path) -> None:
    known = json.loads((Path(checkpoint("llama")) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(known | {name: value}))
    with pytest.raises(CheckpointError, match=rf"config\.json.*{name}.*{value}"):
        load_engine(EngineConfig(model=str(tmp_path)), with_tokenizer=False)


def test_a_part_that_the_type_does_not_have_is_refused(tmp_path: Path) -> None:
    known = json.loads((Path(checkpoint("llama")) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(known | {"text_config": {"vocab_size": 8}}))
    with pytest.raises(CheckpointError, match="type 'llama' has no part as a config of its own"):
        load_engine(EngineConfig(model=str(tmp_path)), with_tokenizer=False)


def test_whatever_transformers_raises_for_a_number_is_an_error_of_the_config(tmp_path: Path) -> None:
    known = json.loads((Path(checkpoint("llama")) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(known | {"num_attention_heads": 0}))
    with pytest.raises(
        CheckpointError, match=r"config of model .* could not be read: .* by zero: fetch its config.json"
    ):
        load_engine(EngineConfig(model=str(tmp_path)), with_tokenizer=False)


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
