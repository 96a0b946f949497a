"""GGUF files, the checkpoints of llama.cpp. transformers reads them and turns their blocks into plain matrices."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from transformers import PretrainedConfig
from transformers import modeling_gguf_pytorch_utils as of_gguf
from transformers.utils import logging as transformers_logging

from rayspec.errors import remedy_for
from rayspec.machine import bytes_available
from rayspec.model import gguf_fields
from rayspec.model.sources import UNREACHED, check_source, gguf_at, gguf_of_hub
from rayspec.types import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_LOCK = threading.RLock()
_GIB = 2**30
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def find_gguf(model: str, revision: str | None = None) -> Path | None:
    """Return the GGUF file that `model` names, fetched from the hub if needed, or None for another checkpoint.

    model: a file, a folder that holds one and no config.json, or `owner/repository:FILE.gguf` of the hub. Raises
    ConfigError for a folder with several GGUF files, for one part of several, and where the package gguf is missing;
    CheckpointError for a file that cannot be fetched.
    """
    file, of_hub = gguf_at(Path(model)), gguf_of_hub(model)
    if file is None and of_hub is None:
        return None
    if _PART.search(name := file.name if file else model):
        raise ConfigError(
            f"option 'model' is {model!r}, of which {name} is one part: join the parts (llama-gguf-split --merge)"
        )
    if find_spec("gguf") is None:
        raise ConfigError(
            f"option 'model' is {model!r}, a GGUF file, which needs the package gguf: {remedy_for('gguf')}"
        )
    if of_hub is None:
        return file
    repository, name = of_hub
    check_source(model, revision=revision)
    try:
        return Path(hf_hub_download(repository, name, revision=revision))
    except LocalEntryNotFoundError as error:
        raise CheckpointError(f"option 'model' is {model!r}: {name} is not here, and {UNREACHED}") from error
    except EntryNotFoundError as error:
        raise CheckpointError(f"option 'model' is {model!r}: {repository} has no file {name}: correct it") from error


@contextmanager
def located(
    model: str, revision: str | None = None, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the keywords by which transformers' `from_pretrained` finds a checkpoint, GGUF or not.

    Meanwhile its loader parses a GGUF file once, and sees only the tensors that are `wanted`, by their names in the
    file. By itself it parses the file anew for config and weights, 2 s each time for a vocabulary of 49k tokens, and
    turns every tensor into numbers, also those that a span of layers leaves out. It makes the map of names anew for
    every module. Raises the errors of `find_gguf`.
    """
    file = find_gguf(model, revision)
    if file is None:
        yield model, {}
        return
    library: Any = import_module("gguf")  # an optional package
    thread = threading.get_ident()

    def read(path: Any, *arguments: Any) -> Any:
        if threading.get_ident() != thread or Path(path) != file:  # somebody else's
            return own(path, *arguments)
        return SimpleNamespace(fields=parsed.fields, tensors=[each for each in parsed.tensors if wanted(each.name)])

    with _LOCK, _quiet():
        parsed, own, map_of = _parsed(file, file.stat().st_mtime_ns), library.GGUFReader, library.get_tensor_name_map
        library.GGUFReader, library.get_tensor_name_map = read, lru_cache(map_of)
        try:
            yield str(file.parent), {"gguf_file": file.name}
        finally:
            library.GGUFReader, library.get_tensor_name_map = own, map_of


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide transformers' progress bars, and its advice about blocks that stay packed, which they do not here."""
    setattr(of_gguf, "tqdm", transformers_logging.tqdm)  # noqa: B010 - its own bar cannot be hidden
    hook = transformers_logging.set_tqdm_hook(lambda make, args, keywords: make(*args, **keywords | {"disable": True}))
    advice = logging.getLogger("transformers.quantizers.quantizer_gguf")
    level = advice.level
    advice.setLevel(logging.ERROR)
    try:
        yield
    finally:
        advice.setLevel(level)
        transformers_logging.set_tqdm_hook(hook)


@lru_cache(maxsize=1)  # modified_ns: a file that was replaced is read again
def _parsed(file: Path, modified_ns: int) -> Any:
    try:
        return _reader()(file)
    except (ValueError, IndexError, KeyError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged, or no GGUF file ({error}): fetch it again") from error


def _reader() -> Any:
    """Return gguf's reader, which reads nothing after the end of the file: by itself it takes time and memory for as
    many numbers as a damaged file says that an array has."""
    library: Any = import_module("gguf.gguf_reader")

    class Reader(library.GGUFReader):  # type: ignore[misc]
        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **named: Any) -> Any:
            found = super()._get(offset, dtype, count, *order, **named)
            if len(found) < count:
                raise ValueError(f"it ends before the {count} numbers at byte {offset}")
            return found

    return Reader


_LONG = 10_000  # items of a list, such as the words of a tokenizer, of which each takes an object


def _value(file: Path, name: str) -> Any:
    """Return the value of a field; None for a field that the file does not have."""
    field = _parsed(file, file.stat().st_mtime_ns).fields.get(name)
    return None if field is None else field.contents()


def _values(file: Path, prefix: str) -> dict[str, Any]:
    """Return the fields whose names begin with `prefix`, by the rest of the name, without long lists."""
    fields = _parsed(file, file.stat().st_mtime_ns).fields
    wanted = (name for name, field in fields.items() if name.startswith(prefix) and len(field.data) < _LONG)
    return {name.removeprefix(prefix): _value(file, name) for name in wanted}


def forget_parsed() -> None:
    """Free what `located` keeps from one call to the next: several small objects for each token."""
    _parsed.cache_clear()


def _tensors(file: Path) -> list[Any]:
    return list(_parsed(file, file.stat().st_mtime_ns).tensors)


def stored_dtype(file: Path) -> torch.dtype:
    """Return the data type of the file's matrices; bfloat16 for blocks of quantised numbers."""
    types = {tensor.tensor_type.name for tensor in _tensors(file) if len(tensor.shape) > 1}
    return _FLOATS[types.pop()] if len(types) == 1 and types <= _FLOATS.keys() else torch.bfloat16


def complete(config: PretrainedConfig, file: Path) -> None:
    """Give the config what the file says and transformers does not read, also the tokens that end an answer of a chat.
    Raises CheckpointError for a file with a field that changes the text, and that is not read."""
    text: Any = config.get_text_config(decoder=True)
    scaling = (tensor for tensor in _tensors(file) if tensor.name.startswith(("rope_freqs.", "rope_factors_")))
    factors = {tensor.name.partition(".")[0]: tensor.data.tolist() for tensor in scaling}
    prefix = f"{_value(file, 'general.architecture')}."
    unread = gguf_fields.complete(text, _values(file, prefix), factors)
    if unread:
        name, value = next(iter(unread.items()))
        raise CheckpointError(
            f"{file.name} has {prefix}{name} = {value!s:.80}, which is not read from GGUF files: use the checkpoint in "
            "safetensors"
        )
    tokens = _value(file, "tokenizer.ggml.tokens") or []
    if ends := gguf_fields.ends_of_turns(_values(file, "tokenizer.ggml."), tokens):
        eos = getattr(text, "eos_token_id", None)
        known = eos if isinstance(eos, list) else [] if eos is None else [eos]
        text.eos_token_id = list(dict.fromkeys((*known, *ends)))


def fit_tokenizer(tokenizer: Any, file: Path) -> None:
    """Let the tokenizer make the tokens of the model's own. Raises CheckpointError for a file that names an unknown way
    to split texts."""
    stated = _values(file, "tokenizer.ggml.")
    tokens, kinds = (_value(file, f"tokenizer.ggml.{name}") or [] for name in ("tokens", "token_type"))
    architecture = str(_value(file, "general.architecture"))
    is_known = gguf_fields.fit_tokenizer(tokenizer, architecture, stated, tokens, kinds)
    remedy = "set option 'tokenizer' to the model's own, a folder or a hub id"
    if not is_known:
        raise CheckpointError(f"{file.name} splits texts by tokenizer.ggml.pre = {stated['pre']!r}, unknown: {remedy}")
    if stated.get("model") == "gpt2" and stated.get("pre", "default") == "default":
        logger.warning("%s does not say how it splits texts, so they may become other tokens: %s", file.name, remedy)


def check_used(model: str, file: Path, wanted: Callable[[str], bool], loaded: Any) -> None:
    """Raise CheckpointError for a file with more numbers than the model: transformers leaves tensors out that its class
    of the architecture has not, such as biases."""
    held = {tensor.data_ptr(): tensor.numel() for tensor in loaded.state_dict().values()}
    read = {tensor.name: int(tensor.n_elements) for tensor in _tensors(file) if wanted(tensor.name)}
    last = loaded.config.get_text_config(decoder=True).num_hidden_layers  # later blocks predict several tokens at once
    others = ("rope_", "v.", "mm.", "cls.")  # positions, see `complete`; what sees images or scores texts
    read = {name: each for name, each in read.items() if not name.startswith(others) and _block_of(name) < last}
    if loaded.config.tie_word_embeddings:
        read.pop("output.weight", None)
    if sum(read.values()) > sum(held.values()):
        raise CheckpointError(
            f"model {model!r} has tensors, such as biases, that transformers does not read from GGUF files of type "
            f"{loaded.config.model_type!r}: use the checkpoint in safetensors"
        )


def check_memory(model: str, file: Path, wanted: Callable[[str], bool], dtype: torch.dtype) -> None:
    """Say how much memory the wanted tensors take in `dtype`. Raises CheckpointError if so much is not free."""
    tensors = [tensor for tensor in _tensors(file) if wanted(tensor.name)]
    read, needed = sum(int(each.n_bytes) for each in tensors), sum(int(each.n_elements) for each in tensors)
    needed *= dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    if needed > (free := bytes_available()):
        raise CheckpointError(
            f"model {model!r} takes {needed / _GIB:.1f} GiB in {name}, and {free / _GIB:.1f} GiB of memory are free: "
            "choose a smaller data type with option 'dtype', or more stages with option 'parallel'"
        )
    logger.warning("loading %s: %.2f GiB become %.2f GiB in %s", file.name, read / _GIB, needed / _GIB, name)


def as_dense(model: Any) -> None:
    """Let nothing treat the model as quantised: its blocks have become plain matrices. Changes it in place."""
    model.hf_quantizer, model.is_quantized = None, False
    for config in (model.config, model.config.get_text_config(decoder=True)):
        if hasattr(config, "quantization_config"):
            del config.quantization_config


def is_in_span(name: str, layers: range, num_layers: int, *, tied: bool) -> bool:
    """Return whether a span of layers holds the tensor of this name in a GGUF file."""
    is_first, is_last = layers.start == 0, layers.stop == num_layers
    if (block := _block_of(name)) >= 0:
        return block in layers
    if name.startswith("token_embd."):
        return is_first or (tied and is_last)
    return is_last or not name.startswith(("output.", "output_norm."))


def _block_of(name: str) -> int:
    """Return the number of a tensor's block; -1 for a tensor outside the blocks."""
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1
