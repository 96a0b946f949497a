"""Tiny random checkpoints of the model families, on disk once a session and loaded the way any checkpoint is."""

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from benchmarks.device.models import RANDOM_FAMILIES, SIZES
from rayspec.choices import Choices, Weights
from rayspec.config import EngineConfig
from rayspec.model.architecture import decompose
from rayspec.model.attention import pack
from rayspec.model.fused import fuse
from rayspec.model.kv_cache import KVCache
from rayspec.model.rows import RowSpan, one_run
from rayspec.model.sublayers import Decomposition, run
from rayspec.model.weights import load_model

VOCAB_SIZE, WINDOW = SIZES["vocab_size"], 12
_MIXED_LAYERS = ["sliding_attention", "full_attention"] * 2
# What makes each family itself. Those that can be tied are tied in some and not in others.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": RANDOM_FAMILIES["gemma2"] | {"tie_word_embeddings": False},
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": _MIXED_LAYERS, "tie_word_embeddings": False},
    "phi3": {"sliding_window": WINDOW, "partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "olmo2": {"num_key_value_heads": 4},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.3,
    },
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
}
# Between them these three have every trait: tied weights, windows and softcaps with norms on both sides, experts. The
# others have one scenario each, unless all tests are asked for.
IN_EVERY_SCENARIO = ("llama", "gemma2", "qwen3_moe")
MATRIX = [
    pytest.param(family, marks=() if family in IN_EVERY_SCENARIO else (pytest.mark.exhaustive,)) for family in FAMILIES
]
# Families that the first few tokens of a prompt do not tell from others.
HARD_FAMILIES: dict[str, dict[str, Any]] = {
    "diffllama": {},  # two attention calls a layer, with the same keys
    "ministral3": {  # queries are scaled from position 32 on
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 64.0,
            "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "deepseek_v3": {  # keys are wider than values
        "num_key_value_heads": 4,
        "head_dim": 8,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}
# Families whose layers are not attention, then MLP, in a way that can be skipped: their drafts are copied.
WHOLE_FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_neox": {"use_parallel_residual": True},
    "cohere": {},
    "cohere2": {"sliding_window": WINDOW, "layer_types": _MIXED_LAYERS},
    "gpt2": {"n_positions": 2048},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
}

torch.set_num_threads(1)  # for matrices this small a second thread only gets in the way
_folder = tempfile.TemporaryDirectory(prefix="rayspec-families-")


def build(family: str, **changes: Any) -> PreTrainedModel:
    """A random model of the family, the same every time."""
    known = (FAMILIES | HARD_FAMILIES | WHOLE_FAMILIES).get(family, {})
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SIZES | known | changes))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:  # norms and biases, which start as ones and zeros and would hide mistakes
                weight.add_(torch.randn_like(weight) * 0.1)
            elif "embed" in name:
                weight.copy_(torch.randn_like(weight))
    # No EOS of its own: a test that wants one says so.
    model.generation_config = GenerationConfig(pad_token_id=0)
    model.config.eos_token_id = None
    return model


@cache
def checkpoint(family: str) -> str:
    """Folder of the family's checkpoint."""
    path = Path(_folder.name) / family
    build(family).save_pretrained(path)
    return str(path)


def fp8_checkpoint(family: str, folder: Path) -> Path:
    """The family's checkpoint as block-quantized float8, which transformers turns back into floats on a CPU."""
    shutil.copytree(checkpoint(family), folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        weight = tensors[name]
        scale = weight.abs().max() / torch.finfo(torch.float8_e4m3fn).max
        tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale.expand([-(-size // 32) for size in weight.shape]).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def int4_checkpoints(family: str, folder: Path) -> tuple[Path, Path]:
    """The family's checkpoint with weights of 16 levels in groups of 32 columns: as compressed-tensors packs them, and
    as plain matrices."""
    packed, plain = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, weight in load_file(Path(checkpoint(family)) / "model.safetensors").items():
        if not name.endswith("proj.weight"):
            packed[name] = plain[name] = weight
            continue
        groups = weight.view(len(weight), -1, 32)
        scales = groups.abs().amax(-1, keepdim=True) / 7
        levels = (groups / scales).round().clamp(-8, 7)
        plain[name] = (levels * scales).view_as(weight)
        numbers = (levels.view(len(weight), -1, 8) + 8).long() << torch.arange(0, 32, 4)
        packed[f"{name}_packed"] = numbers.sum(-1).to(torch.uint32).view(torch.int32)
        packed[f"{name}_scale"], packed[f"{name}_shape"] = scales[..., 0].contiguous(), torch.tensor(weight.shape)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    return _saved(family, folder, packed, plain, settings)


def packed_checkpoints(
    family: str, folder: Path, *, layout: str = "gptq", bits: int = 4, in_order: bool = True
) -> tuple[Path, Path]:
    """The family's checkpoint with random weights of few bits: as GPTQ (or its second format "gptq_v2") or AWQ packs
    them, and as plain matrices. in_order: whether groups are of neighbouring columns."""
    packed, plain = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    random_numbers = torch.Generator().manual_seed(0)
    places = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7] if layout == "awq" else range(32 // bits))

    ones = sum(1 << place for place in range(0, 32, bits))  # subtracted from whole numbers, as GPTQModel does

    def in_numbers(levels: torch.Tensor) -> torch.Tensor:
        joined = levels.view(len(levels), -1, len(places)) << (bits * places)
        return joined.sum(-1).to(torch.uint32).view(torch.int32)

    for name, weight in load_file(Path(checkpoint(family)) / "model.safetensors").items():
        if not name.endswith("proj.weight"):
            packed[name] = plain[name] = weight
            continue
        (num_rows, num_columns), place = weight.shape, name.removesuffix(".weight")
        levels = torch.randint(2**bits, (num_columns, num_rows), generator=random_numbers)
        zeros = torch.rand(num_columns // 32, num_rows, generator=random_numbers).gt(0.1).long() * 2 ** (bits - 1)
        scales = (torch.rand(zeros.shape, generator=random_numbers) / 2**bits).half()
        groups = torch.arange(num_columns) // 32
        if not in_order:
            groups = groups[torch.randperm(num_columns, generator=random_numbers)]
        plain[name] = ((levels - zeros[groups]) * scales.float()[groups]).T.contiguous()
        packed[f"{place}.scales"] = scales
        packed[f"{place}.qzeros"] = in_numbers(zeros) - (ones if layout == "gptq" else 0)
        numbers = in_numbers(levels) if layout == "awq" else in_numbers(levels.T.contiguous()).T
        packed[f"{place}.qweight"] = numbers.contiguous()
        if layout != "awq":
            packed[f"{place}.g_idx"] = groups.int()
    settings = {"quant_method": layout.removesuffix("_v2"), "bits": bits, "group_size": 32}
    settings["version" if layout == "awq" else "checkpoint_format"] = "gemm" if layout == "awq" else layout
    return _saved(family, folder, packed, plain, settings)


def _saved(
    family: str,
    folder: Path,
    packed: dict[str, torch.Tensor],
    plain: dict[str, torch.Tensor],
    settings: dict[str, Any],
) -> tuple[Path, Path]:
    folders = folder / "packed", folder / "plain"
    for one, tensors in zip(folders, (packed, plain), strict=True):
        shutil.copytree(checkpoint(family), one)
        save_file(tensors, one / "model.safetensors", metadata={"format": "pt"})
    file = folders[0] / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))
    return folders


def changed_checkpoint(family: str, folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of the family's checkpoint, whose tensors are changed in place."""
    shutil.copytree(checkpoint(family), folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def small_config(path: str, **options: Any) -> EngineConfig:
    """Of an engine in float32 on the CPU, with little room."""
    values = {"dtype": "float32", "device": "cpu", "max_model_len": 512, "kv_cache_tokens": 1024}
    return EngineConfig(model=path, **(values | options))


@cache
def reference(path: str) -> PreTrainedModel:
    """The checkpoint as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@cache
def parts_of(path: str, dtype: str = "float32", quantised: tuple[Weights, ...] = ()) -> Decomposition:
    """The checkpoint as an engine runs it: loaded, split and fused. quantised: the copies that drafts have."""
    return fuse(modules_of(path, dtype), quantised=quantised)


def modules_of(path: str, dtype: str = "float32") -> Decomposition:
    """The checkpoint, loaded and split, with transformers' modules."""
    return decompose(load_model(EngineConfig(model=path, dtype=dtype, device="cpu")))  # type: ignore[arg-type]


@cache
def operator_parts_of(path: str, dtype: str = "float32") -> Decomposition:
    """The checkpoint as an engine on a GPU runs it, of operators."""
    return fuse(modules_of(path, dtype), use_operators=True)


@torch.inference_mode()
def logits_of(parts: Decomposition, tokens: Sequence[int], choices: Choices | None = None) -> torch.Tensor:
    """Of these tokens as one sequence, in a cache of its own."""
    cpu = torch.device("cpu")
    cache = KVCache(parts.shapes, len(tokens), dtype=parts.dtype, device=cpu)
    rows = pack(cache, [RowSpan(one_run(0, len(tokens)), 0, len(tokens))], device=cpu)
    hidden = parts.embed(torch.tensor(tokens))
    parts.rotate(hidden, rows)
    return parts.head(run(parts.sublayers, hidden, rows, choices=choices))


def greedy(
    path: str, prompts: Sequence[Sequence[int]], max_tokens: int, eos: Sequence[int] = ()
) -> list[tuple[int, ...]]:
    """What transformers' generate makes of each prompt by itself."""
    return [_generated(path, tuple(prompt), max_tokens, tuple(eos)) for prompt in prompts]


@cache
def _generated(path: str, prompt: tuple[int, ...], max_tokens: int, eos: tuple[int, ...]) -> tuple[int, ...]:
    tokens = reference(path).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
    )
    return tuple(tokens[0, len(prompt) :].tolist())


@torch.no_grad()
def margins(path: str, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """By how much the most likely token leads, at each token of the output."""
    logits = reference(path)(torch.tensor([[*prompt, *output]]), use_cache=False).logits[0]
    top = logits[len(prompt) - 1 : -1].float().topk(2).values
    return top[:, 0] - top[:, 1]


@dataclass(frozen=True)
class Cases:
    """Prompts and what transformers' generate makes of them."""

    prompts: list[list[int]]
    expected: list[tuple[int, ...]]


@cache
def cases(path: str, lengths: tuple[int, ...], max_tokens: int) -> Cases:
    """Random prompts of these lengths whose greedy continuation has no near-tie, which float32 rounding could flip."""
    prompts, expected, seed = [], [], 0
    for length in lengths:
        while True:
            (prompt,), seed = ragged_prompts([length], seed), seed + 1
            (output,) = greedy(path, [prompt], max_tokens)
            if float(margins(path, prompt, output).min()) > 2e-3:
                break
        prompts.append(prompt)
        expected.append(output)
    return Cases(prompts, expected)


def ragged_prompts(lengths: Sequence[int], seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for length in lengths]
