"""Reads generation_config.json: the tokens that end a text, the sampling defaults, and the rules of `generate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from rayspec.config import EngineConfig
from rayspec.decode.work import DecodingParams, GenerationDefaults
from rayspec.model.gguf import find_gguf
from rayspec.model.sources import check_source
from rayspec.model.weights import LOADING_ERRORS, load_config
from rayspec.types import CheckpointError, ConfigError

# Fields of GenerationConfig that have the same name in DecodingParams.
TAKEN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
    "sequence_bias",
    "forced_bos_token_id",
)
# Fields that `generate` obeys and this engine does not, with the values that have no effect.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "guidance_scale": (1,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": (),
    "typical_p": (1,),
    "top_h": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "constraints": (),
    "force_words_ids": (),
    "token_healing": (False,),
    "watermarking_config": (),
    "max_time": (),
}


def eos_token_ids(config: EngineConfig) -> tuple[int, ...]:
    """Return the tokens that end a text, by generation_config.json or else config.json. Raises CheckpointError."""
    of_model = getattr(load_config(config).get_text_config(decoder=True), "eos_token_id", None)
    eos = _read(config).eos_token_id
    found = _several(of_model if eos is None else eos)
    if not all(isinstance(token, int) for token in found):
        raise CheckpointError(f"eos_token_id of model {config.model!r} has {found!r}: it must be token ids")
    return found


def generation_defaults(config: EngineConfig) -> GenerationDefaults:
    """Return what `generate` of transformers would take from the checkpoint; nothing if option `generation_config` is
    "none". Raises CheckpointError for a field that cannot be obeyed."""
    if config.generation_config == "none":
        return GenerationDefaults()
    found = _read(config)
    for name, without_effect in REFUSED.items():
        value = getattr(found, name, None)
        if value is not None and value not in without_effect:
            raise _unusable(config, f"sets {name} to {value!r}, which rayspec cannot do")
    for name in ("max_new_tokens", "min_new_tokens", "min_length"):
        if not isinstance(value := getattr(found, name), int | None):
            raise _unusable(config, f"sets {name} to {value!r}, which is no integer")
    taken = {name: value for name in TAKEN if (value := getattr(found, name, None)) is not None}
    try:
        params = DecodingParams(
            **taken,
            stop=found.stop_strings or (),
            min_tokens=found.min_new_tokens or 0,
            max_tokens=max(found.min_new_tokens or 0, DecodingParams().max_tokens),  # each request has its own limit
            forced_eos_token_id=_several(found.forced_eos_token_id),
        )
    except ConfigError as error:
        raise _unusable(config, f"has a value that cannot be used: {error}") from error
    biases = dict(params.sequence_bias)  # of equal sequences the last one counts, as in `generate`
    return GenerationDefaults(
        params=params.replace(sequence_bias=tuple(biases.items())),
        max_new_tokens=found.max_new_tokens,
        min_length=(found.min_length or 0) if found.min_new_tokens is None else 0,
    )


def _read(config: EngineConfig) -> GenerationConfig:
    """Return the file's content; that of config.json if the file is missing or broken, as transformers does."""
    check_source(config.model, revision=config.revision)
    if find_gguf(config.model, config.revision) is not None:
        return GenerationConfig()  # type: ignore[no-untyped-call]  # the file has no defaults for sampling
    revision = config.revision or "main"
    try:
        try:
            return GenerationConfig.from_pretrained(config.model, revision=revision)
        except OSError:
            return GenerationConfig.from_pretrained(config.model, "config.json", revision=revision)
    except LOADING_ERRORS as error:
        raise CheckpointError(f"generation_config.json of model {config.model!r} cannot be read: {error}") from error


def _unusable(config: EngineConfig, reason: str) -> CheckpointError:
    return CheckpointError(
        f"generation_config.json of model {config.model!r} {reason}: give option generation_config 'none' to ignore "
        "the file's sampling defaults"
    )


def _several(token_ids: int | list[int] | None) -> tuple[int, ...]:
    return () if token_ids is None else (token_ids,) if isinstance(token_ids, int) else tuple(token_ids)
