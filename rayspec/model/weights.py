"""Loading a checkpoint, or a span of its layers, for real: every tensor comes from the files, or it is an error."""

from __future__ import annotations

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rayspec.config import EngineConfig
from rayspec.model.architecture import trunk_and_layers
from rayspec.model.sources import check_source
from rayspec.types import CheckpointError, ConfigError

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_CONFIGS = ("config.json", "generation_config.json")  # the second is optional
# What transformers, huggingface_hub and safetensors raise for files that are not there or not what they should be.
_LOADING_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError)


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


def load_config(config: EngineConfig) -> PretrainedConfig:
    """The config of a local folder or hub id, without its weights. Raises CheckpointError and ConfigError."""
    check_source(config.model, revision=config.revision)
    try:
        loaded: PretrainedConfig = AutoConfig.from_pretrained(
            config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (*_LOADING_ERRORS, TypeError, AttributeError) as error:  # the last two for JSON of another shape
        raise CheckpointError(f"config of model {config.model!r} could not be read: {error}") from error
    return loaded


def num_layers(config: PretrainedConfig) -> int:
    """Decoder layers of the model that `config` describes, or of its language model."""
    return int(config.get_text_config(decoder=True).num_hidden_layers)


def vocab_size(config: PretrainedConfig) -> int:
    """Logits a token: rows of the LM head, padding rows included."""
    return int(config.get_text_config(decoder=True).vocab_size)


def eos_token_ids(config: EngineConfig) -> tuple[int, ...]:
    """Tokens that end a text: generation_config.json has the word, then config.json. Raises CheckpointError."""
    of_model = getattr(load_config(config).get_text_config(decoder=True), "eos_token_id", None)
    try:
        eos = GenerationConfig.from_pretrained(config.model, revision=config.revision or "main").eos_token_id
    except OSError:  # most likely there is none, which is fine; transformers makes do without a broken one as well
        eos = None
    eos = of_model if eos is None else eos
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


def load_model(config: EngineConfig, *, layers: range | None = None) -> PreTrainedModel:
    """The causal LM of a local folder or hub id, in evaluation mode on its device.

    layers: load these decoder layers only, with the embedding if they are the first and with final norm and LM head if
        they are the last. Modules that are not loaded are nn.Identity; the others keep their names and numbers, and
        hold the very tensors that they have in the whole model. A tied matrix is loaded at both ends. Only files that
        hold some of these tensors are opened or, of a hub id, fetched.

    Raises CheckpointError for unreadable files, missing shards, and missing, unexpected or misshaped tensors, as far as
    they belong to `layers`: transformers would fill such tensors with random numbers and go on. Raises
    UnsupportedModelError for `layers` of a model without a list of decoder layers. Raises what `check_source` raises.
    """
    check_source(config.model, revision=config.revision)
    device = resolve_device(config.device)
    options: dict[str, Any] = {
        "dtype": config.dtype if config.dtype == "auto" else getattr(torch, config.dtype),
        "attn_implementation": "eager",
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # so that they are reported by name, below
    }
    if config.quantization_config is not None:
        options |= {"quantization_config": config.quantization_config, "device_map": {"": device}}
    try:
        model, info = _load_whole(config, options) if layers is None else _load_span(config, layers, options)
    except _LOADING_ERRORS as error:
        raise CheckpointError(f"model {config.model!r} could not be loaded: {error}") from error
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
    """The tokenizer of `config.tokenizer`, by default the model's. Raises CheckpointError and ConfigError."""
    option = "model" if config.tokenizer is None else "tokenizer"
    source = config.model if config.tokenizer is None else config.tokenizer
    check_source(source, option=option, revision=config.revision)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(f"tokenizer {source!r} could not be loaded: {error}") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # what some families make of a folder without its files
        raise CheckpointError(f"tokenizer {source!r} has no vocabulary: its files are missing; set option 'tokenizer'")
    return tokenizer


def _load_whole(config: EngineConfig, options: dict[str, Any]) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        config.model, revision=config.revision, trust_remote_code=config.trust_remote_code, **options
    )


def _load_span(config: EngineConfig, layers: range, options: dict[str, Any]) -> Any:
    """transformers' own loading, so with its key conversions and quantizers, of a model class that lacks the rest."""
    with torch.device("meta"):
        whole: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            load_config(config), trust_remote_code=config.trust_remote_code, attn_implementation="eager"
        )
    foreign = _foreign_modules(whole, layers)
    foreign_keys = _keys_of(foreign, whole.base_model_prefix)
    with TemporaryDirectory(prefix="rayspec-span-") as folder:
        _link_files(config, Path(folder), foreign_keys)
        span: Any = _span_class(type(whole), foreign, foreign_keys)
        model, info = span.from_pretrained(folder, config=whole.config, **options)
    model.config.name_or_path = model.name_or_path = config.model
    return model, info


def _foreign_modules(model: Any, layers: range) -> list[str]:
    """Names of the modules that a span leaves out.

    An end of the model whose matrix is tied keeps both modules that use it: they take no more memory than one.
    """
    trunk, all_layers = trunk_and_layers(model)
    assert layers.step == 1, f"layers of a span are contiguous: {layers}"
    assert 0 <= layers.start < layers.stop <= len(all_layers), f"of {len(all_layers)} layers: {layers}"
    holds_first, holds_last = layers.start == 0, layers.stop == len(all_layers)
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    modules = [layer for number, layer in enumerate(all_layers) if number not in layers]
    if not (holds_first or (tied and holds_last)):
        modules.append(model.get_input_embeddings())
    if not (holds_last or (tied and holds_first)):
        modules.append(model.get_output_embeddings())
    if not holds_last:
        modules.append(trunk.norm)
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(module)] for module in modules]


def _keys_of(modules: list[str], prefix: str) -> re.Pattern[str]:
    """What the tensors of these modules are called in a checkpoint: some were saved without their prefix."""
    names = "|".join(re.escape(name.removeprefix(f"{prefix}.")) for name in modules)
    return re.compile(rf"^({re.escape(prefix)}\.)?({names})\." if names else r"(?!)")


def _span_class(
    whole: type[PreTrainedModel], foreign: list[str], foreign_keys: re.Pattern[str]
) -> type[PreTrainedModel]:
    """The family's model class without the foreign modules. They go before any weight is read or asked for.

    That is what transformers' own pipeline parallelism does to a model, which needs a process group.
    """

    def build(self: Any, config: PretrainedConfig) -> None:
        whole.__init__(self, config)
        for name in foreign:
            self.set_submodule(name, nn.Identity())
        held = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        self.all_tied_weights_keys = {k: v for k, v in self.all_tied_weights_keys.items() if {k, v} <= held}
        self._keys_to_ignore_on_load_unexpected = {
            *(self._keys_to_ignore_on_load_unexpected or ()),
            foreign_keys.pattern,
        }

    # transformers looks up a family's key conversions by these names.
    return type(whole.__name__, (whole,), {"__init__": build, "__module__": whole.__module__})


def _link_files(config: EngineConfig, folder: Path, foreign_keys: re.Pattern[str]) -> None:
    """Make `folder` a checkpoint of links to the files that hold more than foreign tensors."""
    for name in _CONFIGS:
        described = _checkpoint_file(config, name)
        if described is not None:
            (folder / name).symlink_to(described)
    weights = _checkpoint_file(config, _WEIGHTS)
    if weights is not None:
        (folder / _WEIGHTS).symlink_to(weights)
        return
    index = _checkpoint_file(config, _INDEX)
    if index is None:
        raise CheckpointError(
            f"model {config.model!r} has neither {_WEIGHTS} nor {_INDEX}: a span of layers is loaded from "
            "safetensors only; convert the checkpoint"
        )
    content = json.loads(index.read_text())
    wanted = {file for key, file in content["weight_map"].items() if not foreign_keys.match(key)}
    # Links go by the last part of the name, so that no index can have them made outside of the folder.
    own = {key: Path(file).name for key, file in content["weight_map"].items() if file in wanted}
    (folder / _INDEX).write_text(json.dumps(content | {"weight_map": own}))
    for name in sorted(wanted):
        shard = _checkpoint_file(config, name)
        if shard is None:
            raise CheckpointError(f"model {config.model!r} lacks {name}, which {_INDEX} names: fetch it again")
        (folder / Path(name).name).symlink_to(shard)


def _checkpoint_file(config: EngineConfig, name: str) -> Path | None:
    """A file of the checkpoint, fetched from the hub if need be; None when the checkpoint has none of that name."""
    folder = Path(config.model)
    if folder.is_dir():
        return (folder / name).resolve() if (folder / name).is_file() else None
    try:
        return Path(hf_hub_download(config.model, name, revision=config.revision)).resolve()
    except EntryNotFoundError:
        return None
