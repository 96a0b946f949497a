"""Checks of the source of a model or tokenizer: a local folder or the Hugging Face hub. A wrong name fails at once."""

from __future__ import annotations

import difflib
import json
from pathlib import Path, PurePath
from typing import Any

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.errors import HTTPError as _HTTPError  # type: ignore[attr-defined]  # of the client's own library
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from rayspec.types import CheckpointError, ConfigError

_BUNDLED = ("demo", "demo-plain", "smollm2")
_SIMILAR = 0.75  # difflib's ratio: one letter more, less or different in "demo"
_CACHED_FILES = ("config.json", "tokenizer_config.json")
_REMEDY = "name a folder that exists, a hub id such as Qwen/Qwen3-8B, or demo"
UNREACHED = "the hub was not reached: check the network, or fetch it elsewhere with hf download"
_GGUF_SUFFIX = ".gguf"
_ADAPTER_CONFIG = "adapter_config.json"


def gguf_of_hub(name: str) -> tuple[str, str] | None:
    """Return repository and file of `owner/repository:FILE.gguf`, or None for another name."""
    repository, colon, file = name.rpartition(":")
    is_one = colon and file.endswith(_GGUF_SUFFIX) and repository.count("/") == 1 and not _is_path(repository)
    return (repository, file) if is_one and not Path(name).exists() else None


def gguf_at(path: Path) -> Path | None:
    """Return the GGUF file that this is, or the only one of a folder without config.json; None for others. Raises
    ConfigError for a folder with several."""
    if not path.is_dir():
        return path if path.is_file() and path.suffix == _GGUF_SUFFIX else None
    files = [] if (path / "config.json").exists() else sorted(path.glob(f"*{_GGUF_SUFFIX}"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        raise ConfigError(f"option 'model' is {str(path)!r}, a folder with several GGUF files ({names}): name one")
    return files[0] if files else None


def check_name(name: str, *, option: str = "model", is_elsewhere: bool = False) -> None:
    """Refuse a name that is neither a folder here nor a possible hub id. Does not use the network. is_elsewhere: other
    machines load the model, so a folder may exist only on those. Raises ConfigError."""
    path = Path(name)
    if name and (path.is_dir() or gguf_at(path)):
        return
    asked = f"option {option!r} is {name!r}"
    if path.is_file():
        raise ConfigError(f"{asked}, which is a file: name the folder of a whole checkpoint, or a GGUF file")
    if (of_hub := gguf_of_hub(name)) is not None:
        _check_hub_id(of_hub[0], asked)
        return
    meant = difflib.get_close_matches(name.lower(), _BUNDLED, n=1, cutoff=_SIMILAR)
    if meant and name not in _BUNDLED:
        raise ConfigError(f"{asked}, and there is no such folder; did you mean {meant[0]!r}?")
    if _is_path(name):
        if not is_elsewhere:
            raise ConfigError(f"{asked}, and there is no such folder: {_REMEDY}")
    elif name not in _BUNDLED:
        _check_hub_id(name, asked)


def check_source(name: str, *, option: str = "model", revision: str | None = None) -> None:
    """Refuse a model or tokenizer that this machine cannot load, without the hub client's long retries. A model in the
    hub's local cache is accepted without a request to the hub. Raises ConfigError as `check_name` does, and
    CheckpointError for a model folder without a config and for a hub id that cannot be fetched."""
    check_name(name, option=option)
    folder = Path(name)
    if folder.is_file():
        return
    if not folder.is_dir():
        repository, *file = gguf_of_hub(name) or (name,)
        files = (try_to_load_from_cache(repository, each, revision=revision) for each in (*file, *_CACHED_FILES))
        if not any(isinstance(each, str) for each in files):
            _ask_hub(repository, option, revision)
    elif option == "model" and not (folder / "config.json").exists() and gguf_at(folder) is None:
        if (folder / _ADAPTER_CONFIG).exists():
            raise CheckpointError(
                f"option 'model' is {name!r}, the folder of a PEFT adapter: merge it into its base model "
                "(merge_and_unload, then save_pretrained), and name the merged checkpoint"
            )
        raise CheckpointError(f"option 'model' is {name!r}: the folder has no config.json; name that of a checkpoint")


def adapter_config(folder: str) -> dict[str, Any]:
    """Return the config of an adapter. Raises CheckpointError if the folder has none that can be read."""
    try:
        content = json.loads((Path(folder) / _ADAPTER_CONFIG).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the adapter {folder!r} has no readable {_ADAPTER_CONFIG}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"the adapter {folder!r} has a {_ADAPTER_CONFIG} that is no JSON object")
    return content


def base_model(folder: str, *, is_elsewhere: bool = False) -> tuple[str, str | None] | None:
    """Return the base model that an adapter's folder names, and its revision; None for other folders and names. Raises
    CheckpointError if it names no model. is_elsewhere: as in `check_name`."""
    place = Path(folder)
    if not (place / _ADAPTER_CONFIG).is_file() or (place / "config.json").exists():
        return None
    config = adapter_config(folder)
    base = config.get("base_model_name_or_path")
    remedy = "give the base as 'model', and the folder in 'lora_modules'"
    if not isinstance(base, str) or not base:
        raise CheckpointError(f"the adapter {folder!r} names no base model: {remedy}")
    try:
        check_name(base, is_elsewhere=is_elsewhere)
    except ConfigError as error:
        raise CheckpointError(
            f"the adapter {folder!r} names {base!r} as its base, which is neither a folder here nor a hub id: {remedy}"
        ) from error
    return base, config.get("revision")


def read_index(index: Path) -> dict[str, Any]:
    """Return the content of an index of a checkpoint's weights. Its "weight_map" has, for each name of a tensor, the
    path of a file in the index's folder. Raises CheckpointError for an index that cannot be read, or names anything
    else."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        files = {**content["weight_map"]}.values()
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index.name} cannot be read: {error!r}: fetch it again") from error
    for file in files:
        if not isinstance(file, str) or not file or ".." in (path := PurePath(file)).parts or path.is_absolute():
            raise CheckpointError(
                f"{index.name} names {str(file)[:80]!r}, which is no file of the model's folder: fetch the model again"
            )
    return dict(content)


def missing_files(index: Path) -> list[str]:
    """Return the names of files that an index of weights names and that are gone. Raises the errors of `read_index`."""
    return [name for name in sorted({*read_index(index)["weight_map"].values()}) if not (index.parent / name).exists()]


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/")


def _check_hub_id(name: str, asked: str) -> None:
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise ConfigError(f"{asked}, which is neither a folder nor a hub id: {_REMEDY}") from None


def _ask_hub(name: str, option: str, revision: str | None) -> None:
    """Ask the hub for a file that most repositories have. Raises CheckpointError if the repository is missing,
    restricted or unreachable. Other errors, such as an overload, are ignored: the loader retries."""
    asked = f"{option} {name!r} is not a local folder, and"
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision))
    except GatedRepoError as error:
        raise CheckpointError(
            f"{asked} access to it is restricted: accept its terms on the hub, and run hf auth login"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"{asked} the hub has no revision {revision!r} of it: correct option 'revision'"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{asked} the hub has none of that name: correct it, or run hf auth login if it is private"
        ) from error
    except (EntryNotFoundError, HfHubHTTPError):
        return
    except OfflineModeIsEnabled as error:
        raise CheckpointError(
            f"{asked} not in the hub's cache, while HF_HUB_OFFLINE forbids to fetch it: unset that, or name a folder"
        ) from error
    except (_HTTPError, OSError) as error:
        raise CheckpointError(
            f"{asked} not in the hub's cache, and the hub cannot be reached ({error}): "
            f"check name and network, or fetch it elsewhere with hf download {name}"
        ) from error
