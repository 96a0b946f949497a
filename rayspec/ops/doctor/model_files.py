"""Checks that the files of a model are present and complete, by their headers."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from rayspec import demo
from rayspec.ops.doctor.findings import Finding, ok, problem, warning

_GIB = 2**30
_INDEX = "*.index.json"
_WEIGHTS = ("*.safetensors", "*.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """State of a model's files. folder: None where a hub id is not in the cache. bytes_free: on the disk of the folder,
    or of the cache. errors: problems that prevent loading. notes: problems that may prevent loading."""

    model: str
    folder: str | None
    num_bytes: int
    bytes_free: int
    errors: tuple[str, ...]
    notes: tuple[str, ...] = ()


def look_at_model(model: str) -> ModelFiles:
    """Inspect the files of a model. model: a folder, a GGUF file, a hub id, or "demo"."""
    place = Path(demo.local_path(model))
    if place.suffix == ".gguf" and place.is_file():
        return ModelFiles(
            model=model,
            folder=str(place),
            num_bytes=place.stat().st_size,
            bytes_free=shutil.disk_usage(place.parent).free,
            errors=tuple(filter(None, [_damage(place)])),
        )
    if not place.is_dir():
        cache = Path(HF_HUB_CACHE)
        while not cache.exists():
            cache = cache.parent
        absent = ModelFiles(model=model, folder=None, num_bytes=0, bytes_free=shutil.disk_usage(cache).free, errors=())
        if model.startswith((".", "/", "~")):
            return replace(absent, errors=("no such folder",))
        try:
            place = Path(snapshot_download(model, local_files_only=True))
        except LocalEntryNotFoundError:
            return absent
        except HFValidationError as error:
            return replace(absent, errors=(f"neither a folder nor a hub id: {error}",))
    weights: list[Path] = next((found for kind in _WEIGHTS if (found := sorted(place.glob(kind)))), [])
    errors = [*_index_errors(place), *filter(None, map(_damage, weights))]
    errors += [] if weights else [f"no weights ({' or '.join(_WEIGHTS)})"]
    try:
        json.loads((place / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        errors.insert(0, "no config.json")
    except (OSError, ValueError) as error:
        errors.insert(0, f"config.json cannot be read: {error}")
    return ModelFiles(
        model=model,
        folder=str(place),
        num_bytes=sum(path.stat().st_size for path in weights if path.exists()),
        bytes_free=shutil.disk_usage(place).free,
        errors=tuple(errors),
        notes=() if any((place / name).exists() for name in _TOKENIZERS) else ("no tokenizer",),
    )


def check_model(files: ModelFiles) -> Finding:
    if files.errors:
        found = f"{files.folder or files.model}: {'; '.join(files.errors)}"
        return problem("model files", found, "fetch the model again")
    if files.folder is None:
        return warning(
            "model files",
            f"{files.model} is neither a folder here nor in the hub's cache; {files.bytes_free / _GIB:.1f} GiB free",
            f"nothing, if the hub can be reached when it is first loaded; otherwise: hf download {files.model}",
        )
    found = f"{files.folder}, {files.num_bytes / _GIB:.2f} GiB of weights"
    if files.notes:
        return warning("model files", f"{found}; {'; '.join(files.notes)}", "name one with the option 'tokenizer'")
    return ok("model files", found)


def _index_errors(folder: Path) -> list[str]:
    """Return errors for missing files that an index of the weights names, and for unreadable indexes."""
    errors = []
    for index in sorted(folder.glob(_INDEX)):
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            errors.append(f"{index.name} cannot be read: {error!r}")
            continue
        errors += [f"{name} is missing" for name in sorted(names) if not (folder / name).exists()]
    return errors


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
