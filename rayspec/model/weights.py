"""Loads a checkpoint: its config, its weights or a span of its layers, its tokenizer, and a fingerprint.

A model that cannot run is refused before any weight is loaded. A tensor that is not in the files is an error, not
random numbers.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import re
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_utils import get_state_dict_dtype, load_state_dict
from transformers.utils.import_utils import is_kernels_available

from rayspec.config import EngineConfig
from rayspec.machine import bytes_available, cpu_class
from rayspec.model import gguf
from rayspec.model.gguf import find_gguf, located
from rayspec.model.layer_bytes import decoder_layers
from rayspec.model.load_check import enough_memory
from rayspec.model.packed import can_unpack, for_unpacking
from rayspec.model.sources import UNREACHED, check_source, missing_files, read_index
from rayspec.types import CheckpointError, ConfigError, RayspecError, UnsupportedModelError


def read_config(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PretrainedConfig:
    """Read the config of a folder, a path to a config.json, or a hub id, without weights. Raises CheckpointError for a
    config that cannot be read, UnsupportedModelError for a model that is no decoder-only causal LM, and the errors of
    `check_source`."""
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
    except LOADING_ERRORS as error:  # also JSON with unexpected types and numbers
        remedy = "fetch its config.json again" if file is None else "use the checkpoint in safetensors"
        raise CheckpointError(
            f"config of model {source!r} could not be read: {in_one_line(error).rstrip('.')}: {remedy}, or name "
            "another model"
        ) from error
    become_plain(config)
    # A config may name a kernel of the hub, which transformers would fetch and run. The setter sets parts, too.
    config._attn_implementation = "eager"
    config = _text_part(config)
    if config.dtype is None:
        config.dtype = _dtype_of_files(source, revision)
    _require_causal_lm(source, config)
    text = config.get_text_config(decoder=True)
    if isinstance(text, dict):
        raise CheckpointError(
            f"config.json of {source!r} is not valid: type {config.model_type!r} has no part as a config of its own: "
            "remove that part, or fetch the file again"
        )
    varying = getattr(text, "per_layer_attributes", None) or ()
    for name, most in _COUNTS.items():
        value = None if name in varying else getattr(text, name, None)
        if isinstance(value, int) and not 1 <= value <= most:  # transformers would build for hours
            raise CheckpointError(
                f"config.json of {source!r} is not valid: {name} is {value} and must lie between 1 and {most}: correct "
                "that field, or fetch the file again"
            )
    return config


# Quantised formats whose weights become plain matrices at load, so that drafts can run them in part: those that
# transformers would make plain at the first pass, those for which it has no kernels on a CPU, and those for which it
# takes kernels of a package.
_PLAIN, _PLAIN_ON_CPU, _BY_PACKAGE = ("compressed-tensors",), ("fp8", "mxfp4"), ("mxfp4",)


def become_plain(config: PretrainedConfig, *, on_cpu: bool = False) -> None:
    """Let transformers make the weights of a checkpoint plain at load, if they are of a format that must be."""
    settings = getattr(config, "quantization_config", None)
    formats = _PLAIN + (_PLAIN_ON_CPU if on_cpu else ()) + (() if is_kernels_available() else _BY_PACKAGE)
    if isinstance(settings, dict) and (settings.get("quant_method") in formats or can_unpack(settings)):
        settings["dequantize"] = True


def quantiser_settings(config: EngineConfig, found: PretrainedConfig) -> dict[str, Any]:
    """Return the settings of the quantizer, of the options or else of the checkpoint; empty for plain weights."""
    settings: Any = config.quantization_config or getattr(found, "quantization_config", None) or {}
    return dict(settings) if isinstance(settings, dict) else settings.to_dict()


def format_of_weights(settings: Mapping[str, Any], *, on_cpu: bool) -> tuple[str, bool]:
    """Return the name of a quantised format, and whether its weights become plain matrices at load."""
    name = str(settings.get("quant_method", "quantised")).rpartition(".")[2].lower()
    return name, bool(settings.get("dequantize")) or (on_cpu and name in _PLAIN_ON_CPU)


def route_of_weights(config: EngineConfig, found: PretrainedConfig, *, on_cpu: bool) -> str:
    """Say what becomes of quantised weights at load; "" for a checkpoint without. found: of `load_config`. on_cpu:
    whether they are loaded to a CPU."""
    if find_gguf(config.model, config.revision) is not None:
        name, is_plain = "GGUF", True
    elif settings := quantiser_settings(config, found):
        name, is_plain = format_of_weights(settings, on_cpu=on_cpu)
    else:
        return ""
    if not is_plain:
        return f"{name}: stay quantised, in modules of transformers; drafts have no copies of fewer bits"
    own_bits = "; passes of few rows use the checkpoint's own 4 bits (own_bits)" if config.own_bits else ""
    return f"{name}: become plain matrices at load{own_bits}"


# Fields of every config.json that has them, and the most that any model may have.
_COUNTS = {"num_hidden_layers": 10_000, "hidden_size": 10**7, "vocab_size": 10**8}
_COUNTS |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 10**6)


# Types of several parts, of which the language model alone makes of a text what the whole model makes of it.
WITH_TEXT_PART = ("gemma3", "internvl", "llava", "llava_next", "mistral3")
# Where such a checkpoint has its language model, by versions of transformers, and its other parts.
_KEYS_OF_TEXT_PART = {r"^language_model\.lm_head\.": "lm_head.", r"^(model\.)?language_model\.(model\.)?": "model."}
_OTHER_PARTS = re.compile(r"^(model\.)?((audio|vision)_(encoder|model|tower)|multi_modal_projector|image_newline)\b")
# What no language model runs of a checkpoint. Early ones hold the masks of causal attention, which models make anew.
_MASKS = r"\.(attn|attention)\.(bias|masked_bias|causal_mask)$"
_UNUSED = re.compile(rf"{_OTHER_PARTS.pattern}|{_MASKS}")


def _text_part(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the language model, where that is all that texts need."""
    if config.model_type not in WITH_TEXT_PART:
        return config
    text = config.get_text_config(decoder=True)
    for name in ("quantization_config", "tie_word_embeddings", "eos_token_id", "dtype", "_commit_hash"):
        if (value := getattr(config, name, None)) is not None:
            setattr(text, name, value)
    text.is_part = True
    return text


def _dtype_of_files(source: str, revision: str | None) -> torch.dtype | None:
    """Return the data type that transformers takes where the config names none: that of the first file in safetensors.
    None if that file is not here."""

    def here(name: str) -> str | None:
        if (place := Path(source)).exists():
            file = (place if place.is_dir() else place.parent) / name
            return str(file) if file.is_file() else None
        cached = try_to_load_from_cache(source, name, revision=revision)
        return cached if isinstance(cached, str) else None

    with suppress(*LOADING_ERRORS):  # of damaged files, which the load names
        file, index = here(_WEIGHTS), here(_INDEX)
        if file is None and index is not None:
            file = here(min(read_index(Path(index))["weight_map"].values()))
        if file is not None:
            found: torch.dtype = get_state_dict_dtype(load_state_dict(file, map_location="meta"))  # type: ignore[no-untyped-call]
            return found
    return None


@lru_cache(maxsize=2)  # reading takes seconds, and a load asks several times; a file that was replaced is read again
def _of_gguf(file: Path, modified_ns: int) -> PretrainedConfig:
    with located(str(file)) as (place, keywords):
        config: PretrainedConfig = AutoConfig.from_pretrained(place, **keywords)
    gguf.complete(config, file)
    config.dtype = gguf.stored_dtype(file)
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


_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_OF_TORCH = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# While transformers loads a model, it ties no weights in the whole process: after two loads at a time, never again.
_LOADS = threading.Lock()
_UNPICKLING_ERRORS = (UnpicklingError, EOFError, IndexError, struct.error, AssertionError)  # of torch.load
# Numbers of a quantised checkpoint by which activations, keys and values are rounded: plain matrices need none.
_OF_ACTIVATIONS = re.compile(r"\.(input|output|activation|q|k|v)_(global_)?(scale|zero_point)$")
# Errors of transformers, huggingface_hub and safetensors for missing or damaged files, and unexpected types in them.
LOADING_ERRORS = (
    OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError, TypeError, AttributeError,
    ArithmeticError,
)  # fmt: skip


def resolve_device(name: str) -> torch.device:
    """Return the device of an option. Raises ConfigError for one that is not here, or is no CPU and no CUDA GPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"option 'device' is {name!r}: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"option 'device' is {name!r} but torch sees no CUDA device: use cpu")
    if device.type == "cuda" and (device.index or 0) >= (number := torch.cuda.device_count()):
        raise ConfigError(f"option 'device' is {name!r} but torch sees no more than cuda:{number - 1}: use that")
    return device


def load_config(config: EngineConfig) -> PretrainedConfig:
    """Load the config of a local folder or hub id, without weights. Raises the errors of `read_config`."""
    found = read_config(config.model, revision=config.revision, trust_remote_code=config.trust_remote_code)
    _require_rows_apart(config, found)
    return found


def _require_rows_apart(config: EngineConfig, found: PretrainedConfig) -> None:
    """Raise UnsupportedModelError for LLM.int8() of bitsandbytes, which rounds a row by all rows of a pass."""
    settings = quantiser_settings(config, found)
    if settings.get("load_in_8bit") and settings.get("llm_int8_threshold", 6.0) > 0:
        raise UnsupportedModelError(
            f"model {config.model!r}: with load_in_8bit, bitsandbytes rounds a row by the other rows of its pass, so "
            "texts would depend on what runs with them: set llm_int8_threshold to 0, or load 4 bits"
        )


def dtype_of_plain_weights(config: PretrainedConfig) -> torch.dtype:
    """Return the data type of a checkpoint's plain weights. If neither its config nor a file here says it, that is
    bfloat16 for a quantised checkpoint, and else float32: the configs of such checkpoints are older than the field."""
    known: Any = config.dtype
    return known or (torch.bfloat16 if getattr(config, "quantization_config", None) else torch.float32)


def num_layers(config: PretrainedConfig) -> int:
    """Return the number of decoder layers of the model that `config` describes, or of its language model."""
    return int(config.get_text_config(decoder=True).num_hidden_layers)


def vocab_size(config: PretrainedConfig) -> int:
    """Return the number of logits per token: the rows of the LM head, padding rows included."""
    return int(config.get_text_config(decoder=True).vocab_size)


def load_model(config: EngineConfig, *, layers: range | None = None, with_embedding: bool = False) -> PreTrainedModel:
    """Load the causal LM of a local folder or hub id, in evaluation mode on its device.

    layers: load these decoder layers only, with the embedding if they are the first and with final norm and LM head if
        they are the last. Modules that are not loaded are `Absent`. The others keep their names and numbers, and have
        the same tensors as in the whole model. A tied matrix is loaded at both ends, and a final norm that is not named
        `norm` always. Only files with some of these tensors are opened, or fetched from the hub.
    with_embedding: load the embedding with any layers.

    Raises CheckpointError for too little memory, unreadable files, missing shards, and missing, unexpected or misshaped
    tensors of `layers`: transformers would fill such tensors with random numbers and continue. Raises
    UnsupportedModelError for `layers` of a model without a list of decoder layers, and the errors of `read_config`.
    """
    described = load_config(config)
    device = resolve_device(config.device)
    become_plain(described, on_cpu=device.type == "cpu")
    settings = getattr(described, "quantization_config", None)
    if isinstance(settings, dict) and can_unpack(settings):
        described.quantization_config = for_unpacking(settings)
    options: dict[str, Any] = {
        "dtype": config.dtype if config.dtype == "auto" else getattr(torch, config.dtype),
        "attn_implementation": None,  # the family's default, whatever config.json says
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # so that they are reported by name, below
    }
    if getattr(described, "is_part", False):
        options["key_mapping"] = _KEYS_OF_TEXT_PART
    if config.quantization_config is not None:
        options |= {"quantization_config": config.quantization_config, "device_map": {"": device}}
    try:
        with _LOADS, enough_memory():
            model, info = _load(config, described, layers, with_embedding, options)
    except LOADING_ERRORS as error:
        _require_shards(config, error)
        lacks = error.name if isinstance(error, ModuleNotFoundError) and error.name else None
        remedy = "" if lacks is None else f": pip install {lacks.partition('.')[0]}"
        raise CheckpointError(f"model {config.model!r} could not be loaded: {in_one_line(error)}{remedy}") from error
    except _UNPICKLING_ERRORS as error:
        reason = f"{in_one_line(error)} (see its config.json)"
        if not any(Path(config.model).glob("*.safetensors")):  # torch's message recommends to run the files' code
            reason = "its .bin files are damaged or hold more than tensors; use a checkpoint in safetensors"
        raise CheckpointError(f"model {config.model!r} could not be loaded: {reason}") from error
    plain = settings if isinstance(settings, dict) and settings.get("dequantize") else None
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        found = map(str, info.get(problem) or ())
        unused = [_UNUSED] * (problem == "unexpected_keys") + [_OF_ACTIVATIONS] * bool(plain)
        names = sorted(name for name in found if not any(one.search(name) for one in unused))
        if names:
            raise CheckpointError(
                f"model {config.model!r} has {len(names)} {problem.replace('_', ' ')}, such as {names[0]}: "
                "the checkpoint does not belong to its config.json, or is incomplete; fetch it again"
            )
    if plain:
        name = str(model.dtype).removeprefix("torch.")
        logger.warning("the %s weights of %s became plain matrices in %s", plain["quant_method"], config.model, name)
    if config.quantization_config is None:
        with enough_memory():
            model = model.to(device)
    return model.eval()  # type: ignore[no-any-return]


def _require_shards(config: EngineConfig, error: Exception) -> None:
    """Raise CheckpointError, in place of an error of the system, if a file that the index names is gone."""
    used = (Path(config.model) / name for name in (_WEIGHTS, _INDEX, *_OF_TORCH))  # the first that exists
    index = next((file for file in used if file.exists()), None)
    if isinstance(error, OSError) and index is not None and index.suffix == ".json":
        for name in missing_files(index):
            raise _incomplete(config, name, index.name) from error


def _incomplete(config: EngineConfig, name: str, index: str) -> CheckpointError:
    return CheckpointError(f"model {config.model!r} lacks {name}, which {index} names: fetch it again")


def load_tokenizer(config: EngineConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `config.tokenizer`, by default the model's. Raises CheckpointError and ConfigError."""
    option = "model" if config.tokenizer is None else "tokenizer"
    source = config.model if config.tokenizer is None else config.tokenizer
    check_source(source, option=option, revision=config.revision)
    try:
        with located(source, config.revision) as (place, keywords):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                place, revision=config.revision, trust_remote_code=config.trust_remote_code, **keywords
            )
            if type(tokenizer).__name__ == "MistralCommonBackend":  # of mistral-common, with few of the usual methods
                converting: Any = import_module("transformers.integrations.mistral")  # no public name
                converted = converting.convert_tekken_tokenizer(str(vars(tokenizer)["_tokenizer_path"]))
                converted.add_bos_token = True
                tokenizer = converted
            if (file := find_gguf(source, config.revision)) is not None:
                gguf.fit_tokenizer(tokenizer, file)
    except StrictDataclassError as error:
        raise invalid_config(source, error) from error
    except RayspecError:
        raise
    except Exception as error:  # the library tokenizers raises errors of no other type
        raise CheckpointError(f"tokenizer {source!r} could not be loaded: {in_one_line(error)}") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # some families accept a folder without files
        raise CheckpointError(f"tokenizer {source!r} has no vocabulary: its files are missing; set option 'tokenizer'")
    return tokenizer


def _load(
    config: EngineConfig,
    described: PretrainedConfig,
    layers: range | None,
    with_embedding: bool,
    options: dict[str, Any],
) -> Any:
    """Load the whole model, or some layers with a model class that has no other modules. transformers itself loads
    them, so its key conversions and quantizers apply."""
    file = find_gguf(config.model, config.revision)

    def is_wanted(name: str) -> bool:  # of the tensors of a GGUF file
        tied = bool(getattr(described, "tie_word_embeddings", False))
        is_embedding = with_embedding and name.startswith("token_embd.")
        return layers is None or is_embedding or gguf.is_in_span(name, layers, num_layers(described), tied=tied)

    if file is not None:
        if options["dtype"] == "auto":
            options["dtype"] = gguf.stored_dtype(file)
        gguf.check_memory(config.model, file, is_wanted, options["dtype"])
    own_code = {"trust_remote_code": config.trust_remote_code}
    for index in sorted(Path(config.model).glob("*.index.json")) if file is None else ():
        read_index(index)
    with located(config.model, config.revision, is_wanted) as (place, keywords):
        if layers is None:
            options |= {"revision": config.revision, **own_code, **keywords}
            model_class: Any = AutoModelForCausalLM
            if "key_mapping" in options:
                text_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(described)]
                model_class = _span_class(text_class, [], _OTHER_PARTS)
            model, info = model_class.from_pretrained(place, config=described, **options)
        else:
            with torch.device("meta"):
                whole: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                    described, attn_implementation="eager", **own_code
                )
            foreign = _foreign_modules(whole, layers, with_embedding)
            prefix = whole.base_model_prefix  # some checkpoints were saved without it
            names = "|".join(re.escape(name.removeprefix(f"{prefix}.")) for name in foreign)
            foreign_keys = re.compile(rf"^({re.escape(prefix)}\.)?({names})\." if names else r"(?!)")
            span: Any = _span_class(type(whole), foreign, foreign_keys)
            with TemporaryDirectory(prefix="rayspec-span-") as folder:
                if not keywords:
                    _link_files(config, Path(folder), foreign_keys)
                source = place if keywords else folder
                model, info = span.from_pretrained(source, config=whole.config, **options, **keywords)
    model.config.name_or_path = model.name_or_path = config.model
    if file is not None:
        gguf.check_used(config.model, file, is_wanted, model)
        gguf.as_dense(model)
        gguf.forget_parsed()
    return model, info


class Absent(nn.Identity):
    """In place of a module that is not loaded. Other attributes are those of the module, which stays without weights on
    the meta device: the code of a family may read or initialise them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        vars(self)["module"] = module  # not a part, so that nobody loads or runs it

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["module"], name)


def _foreign_modules(model: Any, layers: range, with_embedding: bool) -> list[str]:
    """Return the names of the modules that a span leaves out. Tied embedding and head stay together at either end."""
    all_layers, norm = decoder_layers(model, model.config), getattr(model.base_model, "norm", None)
    assert layers.step == 1, f"layers of a span are contiguous: {layers}"
    assert 0 <= layers.start < layers.stop <= len(all_layers), f"of {len(all_layers)} layers: {layers}"
    holds_first, holds_last = layers.start == 0, layers.stop == len(all_layers)
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    modules = [layer for number, layer in enumerate(all_layers) if number not in layers]
    if not (holds_first or with_embedding or (tied and holds_last)):
        modules.append(model.get_input_embeddings())
    if not (holds_last or (tied and holds_first)):
        modules.append(model.get_output_embeddings())
    if not holds_last and norm is not None:
        modules.append(norm)
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(module)] for module in modules]


def _span_class(
    whole: type[PreTrainedModel], foreign: list[str], foreign_keys: re.Pattern[str]
) -> type[PreTrainedModel]:
    """Return the family's model class without the foreign modules, which are removed before any weight is read. So does
    transformers' own pipeline parallelism, but it needs a process group."""

    def build(self: Any, config: PretrainedConfig) -> None:
        whole.__init__(self, config)
        for name in foreign:
            self.set_submodule(name, Absent(self.get_submodule(name)))
        held = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        self.all_tied_weights_keys = {k: v for k, v in self.all_tied_weights_keys.items() if {k, v} <= held}
        self._keys_to_ignore_on_load_unexpected = {
            *(self._keys_to_ignore_on_load_unexpected or ()),
            foreign_keys.pattern,
            _UNUSED.pattern,
        }

    # transformers finds a family's key conversions by these names.
    return type(whole.__name__, (whole,), {"__init__": build, "__module__": whole.__module__})


def _link_files(config: EngineConfig, folder: Path, foreign_keys: re.Pattern[str]) -> None:
    """Make `folder` a checkpoint of links to the files with at least one tensor that is not foreign."""
    if (described := _checkpoint_file(config, "config.json")) is not None:
        (folder / "config.json").symlink_to(described)
    weights = _checkpoint_file(config, _WEIGHTS)
    if weights is not None:
        (folder / _WEIGHTS).symlink_to(weights)
        return
    index = _checkpoint_file(config, _INDEX, is_needed=True)
    if index is None:
        raise CheckpointError(
            f"model {config.model!r} has neither {_WEIGHTS} nor {_INDEX}: a span of layers is loaded from "
            "safetensors only; convert the checkpoint"
        )
    content = read_index(index)
    wanted = {file for key, file in content["weight_map"].items() if not _is_foreign(key, foreign_keys)}
    links = {file: f"{number}{Path(file).suffix}" for number, file in enumerate(sorted(wanted))}
    own = {key: links[file] for key, file in content["weight_map"].items() if file in wanted}
    (folder / _INDEX).write_text(json.dumps(content | {"weight_map": own}))
    for name, link in links.items():
        shard = _checkpoint_file(config, name, is_needed=True)
        if shard is None:
            raise _incomplete(config, name, _INDEX)
        (folder / link).symlink_to(shard)


def _is_foreign(key: str, foreign_keys: re.Pattern[str]) -> bool:
    for pattern, own in _KEYS_OF_TEXT_PART.items():
        key = re.sub(pattern, own, key)
    return bool(foreign_keys.match(key) or _OTHER_PARTS.match(key))


def _checkpoint_file(config: EngineConfig, name: str, *, is_needed: bool = False) -> Path | None:
    """Return the path of a checkpoint's file, fetched from the hub if needed, or None if there is no such file. Raises
    CheckpointError for one that is needed while the hub cannot be reached."""
    folder = Path(config.model)
    if folder.is_dir():
        return (folder / name).resolve() if (folder / name).is_file() else None
    try:
        return Path(hf_hub_download(config.model, name, revision=config.revision)).resolve()
    except EntryNotFoundError as error:
        if is_needed and isinstance(error, LocalEntryNotFoundError):
            raise CheckpointError(f"model {config.model!r}: {name} is not here, and {UNREACHED}") from error
        return None


_NUM_BLOCKS = 32  # of each file
_BLOCK_BYTES = 4096
_KINDS = ("*.safetensors", "*.bin")


def weights_fingerprint(config: EngineConfig) -> str:
    """Return 16 hexadecimal digits that identify the weights.

    For a hub id they are the start of its commit. For a folder they are a hash over the size and evenly spaced blocks
    of each weight file. Training changes nearly every number, so no two checkpoints share all blocks. The hash does not
    protect against a manipulated file.

    Raises CheckpointError if there are no weight files, they cannot be read, or the hub's commit is unknown.
    """
    folder, single = Path(config.model), find_gguf(config.model, config.revision)
    if single is None and not folder.is_dir():
        commit = getattr(load_config(config), "_commit_hash", None)
        if not commit:
            raise CheckpointError(f"model {config.model!r} is neither a folder nor of a known commit of the hub")
        return str(commit)[:16]
    files = [single] if single else next((found for kind in _KINDS if (found := sorted(folder.glob(kind)))), [])
    if not files:
        raise CheckpointError(f"model {config.model!r} has no weight files ({' or '.join(_KINDS)}): fetch it again")
    digest = hashlib.sha256()
    try:
        for file in files:
            size = file.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            last = max(0, size - _BLOCK_BYTES)
            with file.open("rb") as content:
                for index in range(_NUM_BLOCKS):
                    content.seek(last * index // (_NUM_BLOCKS - 1))
                    digest.update(content.read(_BLOCK_BYTES))
    except OSError as error:
        raise CheckpointError(f"model {config.model!r}: its weights cannot be read: {error}") from error
    return digest.hexdigest()[:16]


_NUM_SAMPLES = 64  # of each tensor


def tensors_fingerprint(tensors: Iterable[Tensor]) -> str:
    """Return 16 hexadecimal digits that identify tensors: a hash over evenly spaced numbers of each. Tensors on the
    meta device, and those of other classes, are left out."""
    digest = hashlib.sha256()
    for tensor in tensors:
        if type(tensor) is Tensor and tensor.device.type != "meta" and tensor.numel():
            flat = tensor.flatten()
            some = flat[:: -(-len(flat) // _NUM_SAMPLES)].contiguous().cpu()
            digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


logger = logging.getLogger(__name__)

# Rows of a chunk of a prompt, and columns of a matrix that fits the caches.
_ROWS, _COLUMNS = 128, 512
_NUM_REPEATS = 4
# Times as fast must float32 be. Processors with AVX2 only are above 3, those with AVX-512 below 1.3.
CLEARLY_FASTER = 1.5


def in_fast_dtype(model: PreTrainedModel, config: EngineConfig) -> PreTrainedModel:
    """Convert a model in half precision to float32, in place, if that makes it clearly faster on this CPU: if matrix
    products are, with `dtype: auto` and enough memory. Say so. Values do not change. On a GPU, convert a model in
    bfloat16 to float16 if the GPU has no bfloat16, and warn if float32 is rounded.

    Shards do not call this: all stages of a model need the same data type, wherever they run.
    """
    dtype = model.dtype
    is_quantised = getattr(model, "hf_quantizer", None) is not None
    device, may_change = resolve_device(config.device), config.dtype == "auto" and not is_quantised
    if device.type == "cuda":
        if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
            logger.warning(
                "matrix products in float32 are rounded to TF32, so texts may differ from those of exact products: "
                "unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, or call torch.set_float32_matmul_precision('highest')"
            )
        if not (may_change and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0)):
            return model
        logger.warning("%s emulates bfloat16, slowly: the model runs in float16; dtype bfloat16 keeps bfloat16", device)
        model.config.dtype = torch.float16
        return model.half()  # type: ignore[no-any-return, no-untyped-call]
    if not may_change or config.offload is not None:
        return model
    if dtype not in (torch.bfloat16, torch.float16) or (gain := gain_of_float32(dtype)) < CLEARLY_FASTER:
        return model
    name = str(dtype).removeprefix("torch.")
    found = f"this CPU ({cpu_class()}) multiplies matrices {gain:.1f} times as fast in float32 as in {name}"
    more_bytes = sum(parameter.nbytes for parameter in model.parameters() if parameter.dtype == dtype)
    if 2 * more_bytes > bytes_available():
        logger.warning("%s, but the memory is too small for that: the model runs in %s", found, name)
        return model
    logger.warning("%s: the model runs in float32; dtype %s keeps the checkpoint's data type", found, name)
    model.config.dtype = torch.float32
    return model.float()  # type: ignore[no-any-return, no-untyped-call]


@cache
def gain_of_float32(dtype: torch.dtype) -> float:
    """Return how many times as fast this CPU multiplies matrices in float32 as in `dtype`, by a product of a prompt's
    shape. The thread's own CPU time counts, so other programs have little effect."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _product_s(dtype) / _product_s(torch.float32)
    finally:
        torch.set_num_threads(num_threads)


@torch.inference_mode()
def _product_s(dtype: torch.dtype) -> float:
    rows = torch.ones(_ROWS, _COLUMNS, dtype=dtype)
    weight = torch.ones(4 * _COLUMNS, _COLUMNS, dtype=dtype)
    times = []
    for _ in range(1 + _NUM_REPEATS):
        started = time.thread_time()
        linear(rows, weight)
        times.append(time.thread_time() - started)
    return min(times[1:])
