import json
import shutil
from base64 import b64encode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from rayspec import demo
from rayspec.config import EngineConfig
from rayspec.decode.generation_config import eos_token_ids
from rayspec.model.weights import (
    dtype_of_plain_weights,
    load_config,
    load_model,
    load_tokenizer,
    num_layers,
    read_config,
    resolve_device,
    route_of_weights,
    vocab_size,
    weights_fingerprint,
)
from rayspec.types import CheckpointError, ConfigError, UnsupportedModelError
from tests.families import build, changed_checkpoint, checkpoint, small_config


def _config(path: str | Path) -> EngineConfig:
    return EngineConfig(model=str(path), dtype="float32", device="cpu")


def _copy(tmp_path: Path) -> Path:
    return changed_checkpoint("qwen2", tmp_path / "model", lambda tensors: None)


def test_dtype_auto_is_the_checkpoints_own() -> None:
    config = EngineConfig(model=demo.model_path(), device="cpu")
    assert load_model(config).dtype == torch.bfloat16
    assert load_model(config.replace(dtype="float16")).dtype == torch.float16


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_config_without_a_data_type_has_that_of_the_files(is_sharded: bool, tmp_path: Path) -> None:
    """As for transformers. Plans count bytes by it, and all stages load by it."""

    def halve(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {name: tensor.half() for name, tensor in tensors.items()}

    folder = changed_checkpoint("qwen2", tmp_path / "model", halve)
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del content["dtype"]
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    weights = folder / "model.safetensors"
    if is_sharded:
        index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(weights), "model-1.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        weights = weights.rename(folder / "model-1.safetensors")
    assert read_config(str(folder / "config.json")).dtype == torch.float16
    assert load_model(EngineConfig(model=str(folder), device="cpu")).dtype == torch.float16
    weights.unlink()
    config = read_config(str(folder))
    assert dtype_of_plain_weights(config) == torch.float32
    config.quantization_config = {"quant_method": "mxfp4"}
    assert dtype_of_plain_weights(config) == torch.bfloat16, "as of gpt-oss"


def test_several_threads_load_models_at_the_same_time() -> None:
    """transformers unties all models of the process for as long as it loads one, and for good where loads overlap."""
    configs = [_config(checkpoint(family)) for family in ("llama", "qwen3")]  # both are tied
    with ThreadPoolExecutor(4) as threads:
        models = [*threads.map(load_model, 4 * configs), load_model(configs[0])]
    for model in models:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_masks_of_early_checkpoints_are_left_out(tmp_path: Path) -> None:
    masks = {"attn.masked_bias": torch.tensor(-1e4), "attn.bias": torch.ones(1, 1, 8, 8).tril()}
    held = {f"transformer.h.{layer}.{name}": mask.clone() for layer in range(4) for name, mask in masks.items()}
    folder = changed_checkpoint("gpt2", tmp_path / "model", lambda tensors: tensors.update(held))
    assert (
        load_model(_config(folder)).state_dict().keys() == load_model(_config(checkpoint("gpt2"))).state_dict().keys()
    )
    held = {"transformer.h.0.attn.c_attn.scale": torch.ones(1)}
    folder = changed_checkpoint("gpt2", tmp_path / "other", lambda tensors: tensors.update(held))
    with pytest.raises(CheckpointError, match=r"1 unexpected keys, such as transformer.h.0.attn.c_attn.scale"):
        load_model(_config(folder))


def test_a_shard_that_is_cut_short_is_an_error(tmp_path: Path) -> None:
    folder = _copy(tmp_path)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="model"):
        load_model(_config(folder))


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
@pytest.mark.parametrize("layers", [None, range(1)])
def test_a_config_cannot_bring_an_attention_of_its_own(tmp_path: Path, key: str, layers: range | None) -> None:
    """transformers would fetch a kernel of this name from the hub, and run it."""
    folder = _copy(tmp_path)
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(content | {key: "kernels-community/evil"}), encoding="utf-8")
    assert load_config(_config(folder))._attn_implementation == "eager"
    assert load_model(_config(folder), layers=layers).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("content", [b"", b"cos\nsystem\n(S'true'\ntR.", b"PK\x03\x04broken", b"\x80\x02broken"])
def test_weights_that_are_no_plain_tensors_are_an_error(tmp_path: Path, content: bytes) -> None:
    folder = _copy(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match="could not be loaded"):
        load_model(_config(folder))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"pad_token_id": 10**6}, r"Padding_idx .* \(see its config.json\)"),
    ],
)
def test_a_value_in_the_config_that_torch_refuses_is_named(change: Any, problem: str, tmp_path: Path) -> None:
    folder = _copy(tmp_path)
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(content | change), encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"could not be loaded: {problem}"):
        load_model(_config(folder))


@pytest.mark.parametrize(("on_cpu", "said"), [(True, "fp8: become plain"), (False, "fp8: stay quantised")])
def test_what_becomes_of_weights_is_said_where_they_are_not_loaded(on_cpu: bool, said: str) -> None:
    """The process that owns the shards of a model on GPUs may have none."""
    config = EngineConfig(model=demo.model_path(), device="cuda")
    found = load_config(config)
    found.quantization_config = {"quant_method": "fp8"}
    assert route_of_weights(config, found, on_cpu=on_cpu).startswith(said)


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'torchao.core'", name="torchao.core")

    monkeypatch.setattr("rayspec.model.weights._load", lacks)
    with pytest.raises(CheckpointError, match=r"No module named 'torchao.core': pip install torchao"):
        load_model(_config(_copy(tmp_path)))


def test_the_sizes_of_a_composite_model_are_those_of_its_language_model() -> None:
    config = AutoConfig.for_model("gemma3", text_config={"num_hidden_layers": 3, "vocab_size": 77})
    assert (num_layers(config), vocab_size(config)) == (3, 77)


def test_a_language_model_has_the_data_type_of_the_whole(tmp_path: Path) -> None:
    AutoConfig.for_model("gemma3", dtype="float16").save_pretrained(tmp_path)
    assert load_config(_config(tmp_path)).dtype == torch.float16


def test_a_config_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    for content in ("", "{", "[]", "[" * 100_000, json.dumps({"model_type": "never-heard-of"})):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=rf"{tmp_path.name}.*[^.]: fetch its config.json again, or name"):
            load_config(_config(tmp_path))
    for read in (load_config, eos_token_ids):
        with pytest.raises(ConfigError, match="no-such-model"):
            read(_config(tmp_path / "no-such-model"))


@pytest.mark.parametrize(
    ("of_config", "of_generation", "expected"),
    [(None, None, ()), (2, None, (2,)), ([2, 7], None, (2, 7)), (2, 5, (5,)), (2, [5, 6], (5, 6)), (None, 0, (0,))],
)
def test_the_generation_config_has_the_word_on_the_end_of_a_text(
    of_config: int | list[int] | None, of_generation: int | list[int] | None, expected: tuple[int, ...], tmp_path: Path
) -> None:
    model = build("qwen2")
    model.config.eos_token_id = of_config
    model.generation_config.eos_token_id = of_generation
    model.save_pretrained(tmp_path)
    assert eos_token_ids(_config(tmp_path)) == expected
    if of_generation is None:
        (tmp_path / "generation_config.json").unlink()
        assert eos_token_ids(_config(tmp_path)) == expected, "by the config"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokenizer_config.json", lambda text: json.dumps(json.loads(text) | {"chat_template": ["x"]})),
        ("tokenizer.json", lambda text: "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 2703"),
        ("tokenizer.json", lambda text: json.dumps(json.loads(text) | {"model": {"type": "OfNextYear"}})),
    ],
)
def test_a_tokenizer_whose_files_are_damaged_is_an_error(
    name: str, change: Callable[[str], str], tmp_path: Path
) -> None:
    folder = shutil.copytree(demo.model_path(), tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    (folder / name).write_text(change((folder / name).read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer .* could not be loaded: .+$"):
        load_tokenizer(_config(folder))


def test_a_tokenizer_of_mistral_common_becomes_one_of_transformers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """transformers takes that package for Mistral's files, where it is installed. It has no chat template."""
    marks = [
        {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(("<unk>", "<s>", "</s>"))
    ]
    single = [{"rank": byte, "token_bytes": b64encode(bytes([byte])).decode()} for byte in range(256)]
    sizes = {"pattern": ".", "default_vocab_size": 259, "default_num_special_tokens": 3}
    content = {"config": sizes | {"version": "v3"}, "vocab": single, "special_tokens": marks}
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    own = type("MistralCommonBackend", (), {})()
    own._tokenizer_path = tmp_path / "tekken.json"
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: own)
    tokenizer = load_tokenizer(_config(demo.model_path()))
    assert tokenizer.eos_token_id == 2
    assert tokenizer.convert_ids_to_tokens(tokenizer("a</s>")["input_ids"]) == ["<s>", "a", "</s>"]
    assert tokenizer.get_chat_template() == "{{ messages[0].content }}"


def test_no_tokenizer_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="tokenizer"):
        load_tokenizer(_config(checkpoint("qwen2")))
    config = EngineConfig(model=checkpoint("qwen2"), tokenizer=demo.model_path())
    assert load_tokenizer(config).decode([5]) != ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_cuda_without_cuda_is_an_error() -> None:
    for name in ("gpu", "", "cuda:0"):
        with pytest.raises(ConfigError, match="option 'device'"):
            resolve_device(name)
    assert resolve_device("auto") == torch.device("cpu")


def test_a_device_that_is_not_here_or_of_another_type_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [resolve_device(name).index for name in ("cuda", "cuda:0", "cuda:1")] == [None, 0, 1]
    for name in ("cuda:2", "xpu", "mps", "meta"):
        with pytest.raises(ConfigError, match=f"option 'device' is '{name}'.*(use auto, cpu|no more than cuda:1)"):
            resolve_device(name)


def _fingerprint(path: Path | str) -> str:
    return weights_fingerprint(_config(path))


def test_a_fingerprint_is_of_the_weights_and_not_of_where_they_lie(tmp_path: Path) -> None:
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


def test_rows_that_depend_on_the_others_of_their_pass_are_refused() -> None:
    path, settings = checkpoint("llama"), {"quant_method": "bitsandbytes", "load_in_8bit": True}
    for given in (settings, settings | {"llm_int8_threshold": 6.0}):
        with pytest.raises(UnsupportedModelError, match="llm_int8_threshold to 0"):
            load_config(small_config(path, quantization_config=given))
    load_config(small_config(path, quantization_config=settings | {"llm_int8_threshold": 0}))
