"""Reads the config of a checkpoint, and refuses models that cannot run before any weight is loaded."""

from __future__ import annotations

import copy
from functools import lru_cache
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig

from rayspec.model.gguf import find_gguf, located
from rayspec.model.sources import check_source
from rayspec.types import CheckpointError, UnsupportedModelError


def read_config(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PretrainedConfig:
    """Read the config of a folder, a path to a config.json, or a hub id, without weights.

    Raises CheckpointError for a config that cannot be read, UnsupportedModelError for a model that is no decoder-only
    causal LM, and the errors of `check_source`.
    """
    if not Path(source).is_file():
        check_source(source, revision=revision)
    file = find_gguf(source, revision)
    try:
        if file is None:
            config: PretrainedConfig = AutoConfig.from_pretrained(
                source, revision=revision, trust_remote_code=trust_remote_code
            )
        else:
            config = copy.deepcopy(_of_gguf(file, file.stat().st_mtime_ns))
    except StrictDataclassError as error:
        raise invalid_config(source, error) from error
    # The last two for JSON with unexpected types.
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, TypeError, AttributeError) as error:
        raise CheckpointError(f"config of model {source!r} could not be read: {in_one_line(error)}") from error
    # A config may name a kernel of the hub, which transformers would fetch and run. The setter sets parts, too.
    config._attn_implementation = "eager"
    _require_causal_lm(source, config)
    return config


@lru_cache(maxsize=2)  # reading takes seconds, and a load asks several times; a file that was replaced is read again
def _of_gguf(file: Path, modified_ns: int) -> PretrainedConfig:
    with located(str(file)) as (place, keywords):
        config: PretrainedConfig = AutoConfig.from_pretrained(place, **keywords)
    return config


def invalid_config(source: str, error: StrictDataclassError) -> CheckpointError:
    """Return the error for a config.json in which a field has a wrong type or value."""
    return CheckpointError(
        f"config.json of {source!r} is not valid: {in_one_line(error)}: correct that field, or fetch the file again"
    )


def in_one_line(error: Exception) -> str:
    """Return the error's text without line breaks, cut after 200 characters: some texts of transformers list all its
    model types."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:200]}..."


def _require_causal_lm(source: str, config: PretrainedConfig) -> None:
    named = f"model {source!r} of type {config.model_type!r}"
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{named} is an encoder-decoder model, which is not supported: name a decoder-only model"
        )
    has_own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not has_own_code:
        raise UnsupportedModelError(
            f"{named} is not a causal LM in transformers (AutoModelForCausalLM): name a text model, or the checkpoint "
            "of this model's language part"
        )
