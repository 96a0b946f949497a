"""A span of a checkpoint's layers: loaded by itself, exactly the whole model's tensors; run in turn, its logits."""

import json
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rayspec.config import EngineConfig
from rayspec.model import weights
from rayspec.model.architecture import decompose
from rayspec.model.attention import pack
from rayspec.model.kv_cache import KVCache
from rayspec.model.rows import RowSpan, one_run
from rayspec.model.sublayers import Decomposition, run
from rayspec.model.weights import load_model
from rayspec.types import CheckpointError, UnsupportedModelError
from tests.families import (
    MATRIX,
    build,
    changed_checkpoint,
    checkpoint,
    fp8_checkpoint,
    int4_checkpoints,
    modules_of,
    packed_checkpoints,
    ragged_prompts,
)

CPU = torch.device("cpu")
NUM_LAYERS = 4
# Of 1, 2, 3 and 4 stages.
CUTS = {
    num_stages: [
        range(NUM_LAYERS * stage // num_stages, NUM_LAYERS * (stage + 1) // num_stages) for stage in range(num_stages)
    ]
    for num_stages in range(1, NUM_LAYERS + 1)
}


def _config(path: str | Path, **changes: Any) -> EngineConfig:
    return EngineConfig(model=str(path), device="cpu", **changes)


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    return {**model.state_dict(), **dict(model.named_buffers())}


def _require_same_tensors(span: PreTrainedModel, whole: PreTrainedModel) -> set[str]:
    expected = _tensors(whole)
    for name, tensor in _tensors(span).items():
        assert tensor.device == CPU
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name
    return set(_tensors(span))


@cache
def _stage(family: str, layers: range) -> tuple[PreTrainedModel, Decomposition]:
    model = load_model(_config(checkpoint(family)), layers=layers)
    return model, decompose(model, layers=layers)


@pytest.mark.parametrize("family", MATRIX)
def test_spans_hold_the_tensors_of_the_whole_model_and_every_one_is_in_a_span(family: str) -> None:
    whole = load_model(_config(checkpoint(family)))
    for spans in CUTS.values():
        seen: set[str] = set()
        for layers in spans:
            span, _ = _stage(family, layers)
            assert not span.training
            assert span.dtype == whole.dtype
            assert (type(span).__module__, type(span).__name__) == (type(whole).__module__, type(whole).__name__)
            own = _require_same_tensors(span, whole)
            assert {int(name.split(".")[2]) for name in own if name.startswith("model.layers.")} == set(layers)
            seen |= own
        assert seen == set(_tensors(whole))


def _run_in_turn(stages: list[Decomposition], prompt: list[int], pieces: list[int]) -> Tensor:
    """Logits of the prompt, piece by piece through all stages, each with a cache of its own."""
    caches = [KVCache(parts.shapes, 64, dtype=parts.dtype, device=CPU) for parts in stages]
    logits, done = [], 0
    for count in pieces:
        hidden = stages[0].embed(torch.tensor(prompt[done : done + count]))
        for parts, own in zip(stages, caches, strict=True):
            rows = pack(own, [RowSpan(one_run(7, 1000), done, count)], device=CPU)
            parts.rotate(hidden, rows)
            hidden = run(parts.sublayers, hidden, rows)
        logits.append(stages[-1].head(hidden))
        done += count
    return torch.cat(logits)


@pytest.mark.parametrize("family", MATRIX)
@torch.inference_mode()
def test_spans_one_after_another_compute_the_logits_of_the_whole_model(family: str) -> None:
    whole = modules_of(checkpoint(family))
    (prompt,) = ragged_prompts([30], seed=3)
    expected = _run_in_turn([whole], prompt, [21, 1, 8])
    for spans in CUTS.values():
        stages = [_stage(family, layers)[1] for layers in spans]
        assert torch.equal(_run_in_turn(stages, prompt, [21, 1, 8]), expected)
        sublayers = [sublayer for parts in stages for sublayer in parts.sublayers]
        assert [sublayer.index for sublayer in sublayers] == [sublayer.index for sublayer in whole.sublayers]
        assert [sublayer.layer for sublayer in sublayers] == [sublayer.layer for sublayer in whole.sublayers]
        assert [list(parts.shapes) for parts in stages] == [list(layers) for layers in spans]
        assert [name for parts in stages for name in parts.curve_names] == whole.curve_names
        assert {parts.dtype for parts in stages} == {whole.dtype}
        assert [parts.embedding is not None for parts in stages] == [0 in layers for layers in spans]
        assert [parts.lm_head is not None for parts in stages] == [NUM_LAYERS - 1 in layers for layers in spans]


def _shifted_embedding(model: PreTrainedModel) -> None:
    def shift(trunk: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        ids, embedded = options.pop("input_ids", None), options.pop("inputs_embeds", None)
        embedded = trunk.embed_tokens(ids) if embedded is None else embedded
        return (), options | {"inputs_embeds": embedded + 0.1}

    model.base_model.register_forward_pre_hook(shift, with_kwargs=True)


def _scaled_head(model: PreTrainedModel) -> None:
    model.register_forward_hook(lambda _, __, output: output.logits.mul_(1.01) and None)


def _scaled_layers(model: PreTrainedModel) -> None:
    for layer in model.base_model.layers:
        layer.forward = lambda *args, forward=layer.forward, **options: forward(*args, **options) * 1.01


@pytest.mark.parametrize(
    ("plant", "wrong"),
    [
        (_shifted_embedding, [True, False, True, True]),
        (_scaled_head, [False, False, True, True]),
        (_scaled_layers, [True] * 4),
    ],
)
def test_a_split_that_is_wrong_is_found_where_it_is(plant: Any, wrong: list[bool]) -> None:
    """In the spans that have what is wrong."""
    for layers, expected in zip([*CUTS[3], range(NUM_LAYERS)], wrong, strict=True):
        span = load_model(_config(checkpoint("qwen2")), layers=layers)
        plant(span)
        with pytest.raises(UnsupportedModelError, match="qwen2") if expected else nullcontext():
            decompose(span, layers=layers)


def _sharded(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    build("qwen2").save_pretrained(tmp_path, max_shard_size="100KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    return tmp_path, index["weight_map"]


def _files_of(weight_map: dict[str, str], layers: range) -> set[str]:
    names = tuple(f"model.layers.{number}." for number in layers)
    return {file for name, file in weight_map.items() if name.startswith(names)}


def test_files_without_a_tensor_of_the_span_are_not_needed(tmp_path: Path) -> None:
    folder, weight_map = _sharded(tmp_path)
    wanted = _files_of(weight_map, range(1, 2))
    assert len(wanted) < len(set(weight_map.values())) - 1
    for file in set(weight_map.values()) - wanted:
        (folder / file).unlink()
    _require_same_tensors(load_model(_config(folder), layers=range(1, 2)), load_model(_config(checkpoint("qwen2"))))
    with pytest.raises(CheckpointError, match="safetensors"):
        load_model(_config(folder), layers=range(2, 3))


@pytest.mark.parametrize("layers", [None, range(1, 2)])
def test_a_file_that_the_index_names_and_is_gone_is_named(tmp_path: Path, layers: range | None) -> None:
    folder, weight_map = _sharded(tmp_path)
    file = min(_files_of(weight_map, range(1, 2)))
    (folder / file).unlink()
    unused = {"weight_map": {"a": "pytorch_model-00001-of-00001.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(unused))
    with pytest.raises(
        CheckpointError, match=f"lacks {file}, which model.safetensors.index.json names: fetch it again"
    ):
        load_model(_config(folder), layers=layers)


@pytest.mark.parametrize("layers", [None, range(1, 2)])
@pytest.mark.parametrize("index_name", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
@pytest.mark.parametrize("file", [3, None, ["a"], "", "../{}", "part/../../{}", "/{}"])
def test_an_index_names_only_files_of_its_folder(
    tmp_path: Path, layers: range | None, index_name: str, file: Any
) -> None:
    folder, weight_map = _sharded(tmp_path / "model")
    (folder / "part").mkdir()
    for name in set(weight_map.values()):  # they are there
        (folder / name).rename(tmp_path / name)
    (folder / "model.safetensors.index.json").unlink()
    if isinstance(file, str):
        above = str(tmp_path).lstrip("/")
        weight_map = {
            key: file.format(f"{above}/{name}" if file[:1] == "/" else name) for key, name in weight_map.items()
        }
    else:
        weight_map[next(iter(weight_map))] = file
    (folder / index_name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=re.escape(index_name) + " (names|cannot be read)"):
        load_model(_config(folder), layers=layers)


def test_files_of_an_index_may_lie_in_folders_and_be_links(tmp_path: Path) -> None:
    """Two files may have one name in two folders. Links out of the folder are those of the hub's cache."""
    folder, weight_map = _sharded(tmp_path / "model")
    places = {file: f"{number}/model.safetensors" for number, file in enumerate(sorted(set(weight_map.values())))}
    for file, place in places.items():
        (folder / place).parent.mkdir()
        (folder / file).rename(tmp_path / file)
        (folder / place).symlink_to(tmp_path / file)
    content = {"metadata": {}, "weight_map": {key: places[file] for key, file in weight_map.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    whole = load_model(_config(checkpoint("qwen2")))
    _require_same_tensors(load_model(_config(folder)), whole)
    _require_same_tensors(load_model(_config(folder), layers=range(3)), whole)


def test_of_a_hub_id_only_the_spans_files_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, weight_map = _sharded(tmp_path)
    fetched = []

    def download(repo: str, name: str, *, revision: str | None) -> str:
        assert (repo, revision) == ("some/model", "v1")
        if not (folder / name).is_file():
            raise EntryNotFoundError(name)
        fetched.append(name)
        return str(folder / name)

    monkeypatch.setattr(weights, "hf_hub_download", download)
    monkeypatch.setattr(weights, "check_source", lambda name, **_: None)
    monkeypatch.setattr(weights, "load_config", lambda config: build("qwen2").config)
    span = load_model(_config("some/model", revision="v1"), layers=range(2, 4))
    _require_same_tensors(span, load_model(_config(checkpoint("qwen2"))))
    wanted = _files_of(weight_map, range(2, 4)) | {weight_map["model.norm.weight"], weight_map["lm_head.weight"]}
    assert {name for name in fetched if name.startswith("model-")} == wanted
    assert span.config.name_or_path == "some/model"

    def offline(repo: str, name: str, *, revision: str | None) -> str:
        if name != "config.json":
            raise LocalEntryNotFoundError(name)
        return str(folder / name)

    monkeypatch.setattr(weights, "hf_hub_download", offline)
    with pytest.raises(CheckpointError, match="is not here, and the hub was not reached"):
        load_model(_config("some/model", revision="v1"), layers=range(2, 4))


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda tensors: tensors.pop(UP), UP),
        (lambda tensors: tensors.update({UP: torch.zeros(8, 8)}), UP),
        (lambda tensors: tensors.update({"model.layers.1.stray.weight": torch.zeros(3)}), "stray"),
        (lambda tensors: tensors.pop("model.embed_tokens.weight"), "model.embed_tokens.weight"),
    ],
)
def test_a_wrong_tensor_is_an_error_of_its_own_span(change: Any, name: str, tmp_path: Path) -> None:
    folder = changed_checkpoint("qwen2", tmp_path / "model", change)
    for layers in (range(2), None):
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            load_model(_config(folder), layers=layers)
    load_model(_config(folder), layers=range(2, 4))


def test_weights_saved_without_the_models_prefix_are_loaded(tmp_path: Path) -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    folder = changed_checkpoint("qwen2", tmp_path / "model", rename)
    whole = load_model(_config(folder))
    for layers in CUTS[3]:
        _require_same_tensors(load_model(_config(folder), layers=layers), whole)


def test_a_checkpoint_without_safetensors_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("qwen2"), folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="convert"):
        load_model(_config(folder), layers=range(1))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2", {}),
        ("llama", {"layout": "awq"}),
        ("qwen2", {"layout": "gptq", "in_order": False}),
        ("qwen3_moe", {"layout": "gptq", "bits": 8}),
        ("qwen3", {"layout": "gptq_v2", "bits": 2}),
    ],
)
def test_spans_of_a_checkpoint_of_few_bits(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """By compressed-tensors, or by GPTQ and AWQ."""
    if not options:
        pytest.importorskip("compressed_tensors")
    packed, plain = packed_checkpoints(family, tmp_path, **options) if options else int4_checkpoints(family, tmp_path)
    whole = load_model(_config(plain))
    _require_same_tensors(load_model(_config(packed)), whole)
    for layers in CUTS[3]:
        _require_same_tensors(load_model(_config(packed), layers=layers), whole)


def test_scales_of_activations_are_not_needed_by_plain_matrices(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    packed, plain = int4_checkpoints("llama", tmp_path)
    tensors = load_file(packed / "model.safetensors")
    names = ("q_proj.input_scale", "o_proj.input_global_scale", "k_scale")
    more = {f"model.layers.0.self_attn.{name}": torch.ones(1) for name in names}
    save_file(tensors | more, packed / "model.safetensors")
    _require_same_tensors(load_model(_config(packed)), load_model(_config(plain)))
    save_file(tensors | {"model.layers.1.self_attn.k_scales": torch.ones(1)}, packed / "model.safetensors")
    with pytest.raises(CheckpointError, match="1 unexpected keys"):
        load_model(_config(packed))


def test_some_experts_of_an_awq_checkpoint_may_be_plain(tmp_path: Path) -> None:
    packed, plain = packed_checkpoints("qwen3_moe", tmp_path, layout="awq")
    tensors, weights = load_file(packed / "model.safetensors"), load_file(plain / "model.safetensors")
    of_experts = [name for name in weights if name.startswith("model.layers.0.mlp.experts.")]
    for name in of_experts:
        for part in ("qweight", "qzeros", "scales"):
            del tensors[name.removesuffix("weight") + part]
    save_file(tensors | {name: weights[name] for name in of_experts}, packed / "model.safetensors")
    _require_same_tensors(load_model(_config(packed)), load_model(_config(plain)))


def test_biases_of_gptq_that_the_model_does_not_have_must_be_zero(tmp_path: Path) -> None:
    packed, plain = packed_checkpoints("llama", tmp_path)
    tensors = load_file(packed / "model.safetensors")
    bias = torch.zeros_like(tensors["model.layers.1.self_attn.o_proj.scales"][0])
    for value in (0, 1):
        extra = {f"model.layers.{n}.self_attn.o_proj.bias": bias + value for n in range(4)}
        save_file(tensors | extra, packed / "model.safetensors", metadata={"format": "pt"})
        if value == 0:
            _require_same_tensors(load_model(_config(packed), layers=range(2)), load_model(_config(plain)))
            continue
        with pytest.raises(CheckpointError, match=r"4 unexpected keys, such as model.layers.0.self_attn.o_proj.bias"):
            load_model(_config(packed))


def test_spans_of_a_quantized_checkpoint(tmp_path: Path) -> None:
    family = "qwen3_moe"
    config = _config(fp8_checkpoint(family, tmp_path / "fp8"))
    whole = load_model(config)
    name = "model.layers.1.self_attn.q_proj.weight"
    exact = load_model(_config(checkpoint(family))).get_parameter(name)
    assert not torch.equal(whole.get_parameter(name), exact)
    torch.testing.assert_close(whole.get_parameter(name), exact, atol=0.1, rtol=0.1)
    for layers in CUTS[3]:
        span = load_model(config, layers=layers)
        _require_same_tensors(span, whole)
        decompose(span, layers=layers)


_MEASURE = """
import sys
from pathlib import Path
sys.modules["triton"] = None
import torch
torch.set_num_threads(1)
from rayspec.config import EngineConfig
from rayspec.model.architecture import decompose
from rayspec.model.offload import offload
from rayspec.model.weights import load_model

def num_bytes(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) * 1024

torch.ops.rayspec.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5, 0.0)  # operators on a CPU need no triton
small, large, layers = sys.argv[1], sys.argv[2], range(*map(int, sys.argv[3:]))
load_model(EngineConfig(model=small, device="cpu"), layers=range(1))  # imports what is imported late
with open("/proc/self/clear_refs", "w") as peak:
    peak.write("5")
before = num_bytes("VmRSS")
model = load_model(EngineConfig(model=large, device="cpu"), layers=layers)
for weight in model.parameters():
    weight.sum()  # brings in what is only mapped so far
print(num_bytes("VmHWM") - before)
parts = decompose(model, layers=layers)
sizes = [sum(weight.nbytes for weight in sublayer.block.parameters()) for sublayer in parts.sublayers]
before = num_bytes("VmRSS")
offload(parts, [sublayer.index for sublayer in parts.sublayers], to="disk", folder=Path(large))
print(before - num_bytes("VmRSS"), sum(sizes), max(sizes))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory as Linux reports it")
@pytest.mark.exhaustive
def test_a_span_takes_the_memory_of_its_weights_and_offloaded_that_of_two_sublayers(tmp_path: Path) -> None:
    config = LlamaConfig(
        num_hidden_layers=8, hidden_size=768, intermediate_size=2048, num_attention_heads=12, vocab_size=1000
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="30MB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) >= 4
    command = [sys.executable, "-c", _MEASURE, checkpoint("llama"), str(tmp_path), "2", "6"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    peak, saved, num_bytes, largest = map(int, result.stdout.split()[-4:])
    assert num_bytes > 100 * 2**20
    assert 0.9 * num_bytes < peak < 1.6 * num_bytes
    assert saved > 0.9 * (num_bytes - 2 * largest)
