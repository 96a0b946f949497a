"""Checks that the files of a model are present and complete, by their headers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from rayspec import demo
from rayspec.model.sources import read_index
from rayspec.ops.doctor.machine import Finding, ok, problem, warning
from rayspec.types import CheckpointError

_GIB = 2**30
_NAME, _FETCH = "model files", "fetch the model again"
_INDEX = "*.index.json"
_WEIGHTS = ("*.safetensors", "*.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def check_model(model: str) -> tuple[Finding, str | None]:
    """Check the files of a model: a folder, a GGUF file, a hub id, or "demo". Return also where it can be loaded from,
    None if its files are absent or damaged."""
    place = Path(demo.local_path(model))
    is_gguf = place.suffix == ".gguf" and place.is_file()
    if not place.is_dir() and not is_gguf:
        if model.startswith((".", "/", "~")):
            return problem(_NAME, f"{model}: no such folder", _FETCH), None
        try:
            place = Path(snapshot_download(model, local_files_only=True))
        except HFValidationError as error:
            return problem(_NAME, f"{model}: neither a folder nor a hub id: {error}", _FETCH), None
        except LocalEntryNotFoundError:
            cache = Path(HF_HUB_CACHE)
            free = shutil.disk_usage(next(one for one in (cache, *cache.parents) if one.exists())).free / _GIB
            found = f"{model} is neither a folder here nor in the hub's cache; {free:.1f} GiB free"
            remedy = f"nothing, if the hub can be reached when it is first loaded; otherwise: hf download {model}"
            return warning(_NAME, found, remedy), None
    weights = [place] if is_gguf else next(filter(None, (sorted(place.glob(kind)) for kind in _WEIGHTS)), [])
    errors = [] if is_gguf else _json_errors(place)
    errors += [error for error in map(_damage, weights) if error is not None]
    errors += [] if weights else [f"no weights ({' or '.join(_WEIGHTS)})"]
    if errors:
        return problem(_NAME, f"{place}: {'; '.join(errors)}", _FETCH), None
    found = f"{place}, {sum(path.stat().st_size for path in weights) / _GIB:.2f} GiB of weights"
    if not is_gguf and not any((place / name).exists() for name in _TOKENIZERS):
        return warning(_NAME, f"{found}; no tokenizer", "name one with the option 'tokenizer'"), str(place)
    return ok(_NAME, found), str(place)


def _json_errors(folder: Path) -> list[str]:
    """Return errors of an absent or unreadable config, of indexes of the weights, and of files that an index names."""
    errors = [] if (folder / "config.json").exists() else ["no config.json"]
    for file in sorted([*folder.glob("config.json"), *folder.glob(_INDEX)]):
        errors += _errors_of(file)
    return errors


def _errors_of(file: Path) -> list[str]:
    try:
        if file.name == "config.json":
            json.loads(file.read_text(encoding="utf-8"))
            return []
        names = sorted(set(read_index(file)["weight_map"].values()))
        return [f"{name} is missing" for name in names if not (file.parent / name).exists()]
    except (OSError, ValueError, RecursionError) as error:
        return [f"{file.name} cannot be read: {error!r}"]
    except CheckpointError as error:
        return [str(error)]


def _damage(path: Path) -> str | None:
    """Return an error for a damaged file of weights, or None. The header of safetensors gives the file's length."""
    try:
        if path.suffix == ".gguf":
            with path.open("rb") as file:
                return None if file.read(4) == b"GGUF" else f"{path.name} is no GGUF file"
        if path.suffix != ".safetensors":
            return None if path.stat().st_size else f"{path.name} is empty"
        with safe_open(path, framework="numpy"):
            return None
    except (OSError, SafetensorError) as error:
        return f"{path.name} cannot be read: {error}"
