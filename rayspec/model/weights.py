"""Loading a checkpoint for real: every tensor comes from the files, or it is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rayspec.config import EngineConfig
from rayspec.types import CheckpointError, ConfigError


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"option 'device' is {name!r}: use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"option 'device' is {name!r} but torch sees no CUDA device: use cpu")
    return device


def load_model(config: EngineConfig) -> PreTrainedModel:
    """The causal LM of a local folder or hub id, in evaluation mode on its device.

    Raises CheckpointError for unreadable files, missing shards, and missing, unexpected or misshaped tensors.
    transformers would fill such tensors with random numbers and go on.
    """
    device = resolve_device(config.device)
    options: dict[str, Any] = {
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
        "dtype": config.dtype if config.dtype == "auto" else getattr(torch, config.dtype),
        "attn_implementation": "eager",
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # so that they are reported by name, below
    }
    if config.quantization_config is not None:
        options |= {"quantization_config": config.quantization_config, "device_map": {"": device}}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(config.model, **options)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise CheckpointError(f"model {config.model!r} could not be loaded: {error}") from error
    model, info = loaded
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(name) for name in info.get(problem) or ())
        if names:
            raise CheckpointError(
                f"model {config.model!r} has {len(names)} {problem.replace('_', ' ')}, such as {names[0]}: "
                "the checkpoint does not belong to its config.json, or is incomplete; fetch it again"
            )
    if config.quantization_config is None:
        model = model.to(device)
    return model.eval()  # type: ignore[no-any-return]


def load_tokenizer(config: EngineConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of `config.tokenizer`, by default the model's. Raises CheckpointError."""
    source = config.tokenizer or config.model
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        hint = "" if Path(source).exists() else "; it is not a local folder"
        raise CheckpointError(f"tokenizer {source!r} could not be loaded{hint}: {error}") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # what some families make of a folder without its files
        raise CheckpointError(f"tokenizer {source!r} has no vocabulary: its files are missing; set option 'tokenizer'")
    return tokenizer
