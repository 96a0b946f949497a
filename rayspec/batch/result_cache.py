"""Results that jobs share in a folder: a request with the same text is computed once.

ab/ab12...json      a result, after its checksum; named by the hash of all that decides its text
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import msgspec
from huggingface_hub import try_to_load_from_cache

from rayspec import __version__, demo
from rayspec.batch.rows import Row
from rayspec.command.locations import FILE_ERRORS, Location
from rayspec.model.sources import base_model, gguf_of_hub
from rayspec.types import UnfinishedFormError

_KEPT: Final = (
    *("text", "finish_reason", "num_prompt_tokens", "num_output_tokens", "tree", "reasoning", "logprobs"),
    *("error_kind", "error"),
)

_logger = logging.getLogger(__name__)


class ResultCache:
    """The results in a folder for one set of options. identity: the options that decide the text.

    Several jobs may use the folder. A broken result is named in a warning, and computed again. Nothing is found or kept
    while the model is not on this machine, because the state of its files is a part of the key. Raises ConfigError.
    """

    def __init__(self, folder: str, identity: Mapping[str, Any]) -> None:
        self._folder, self._identity = Location.parse(folder), identity
        self._key = ""

    def find(self, input_hash: str) -> Row | None:
        """Return a row with the result of a request, but without an id; None if there is none."""
        try:
            if (place := self._place(input_hash)) is None:
                return None
            checksum, _, content = place.read().partition(b"\n")
        except FILE_ERRORS:
            return None
        try:
            return replace(_row(checksum, content), input_hash=input_hash)
        except (ValueError, TypeError, RecursionError, msgspec.MsgspecError) as error:
            _logger.warning("the result %s of option 'cache' is broken (%s): its row is computed again", place, error)
            return None

    def keep(self, row: Row) -> None:
        """Keep the result of a row that succeeded, or whose output has no end within max_tokens. Raises OSError."""
        is_whole = row.error_kind in (None, UnfinishedFormError.kind) and row.finish_reason != "abort"
        if is_whole and row.input_hash is not None and (place := self._place(row.input_hash)):
            content = json.dumps({name: getattr(row, name) for name in _KEPT}).encode()
            place.write(_digest(content).encode() + b"\n" + content)

    def _place(self, input_hash: str) -> Location | None:
        if not self._key:
            engine = self._identity["engine"]
            if not (files := files_of(engine)):
                return None
            versions = [__version__, *map(metadata.version, ("torch", "transformers"))]
            machine = platform.node() if engine["dtype"] == "auto" else ""  # which then chooses it
            self._key = json.dumps([self._identity, files, versions, machine], sort_keys=True)
        digest = _digest(f"{self._key} {input_hash}".encode())
        return self._folder.join(digest[:2], f"{digest}.json")


def files_of(engine: Mapping[str, Any]) -> str:
    """Return a hash that tells the content of the files of the model and its parts; empty while the model is not on
    this machine. engine: options of the engine."""
    base, revision = base_model(engine["model"], is_elsewhere=True) or (None, None)  # of an adapter's folder
    names = [engine["model"], engine.get("tokenizer"), *engine["lora_modules"].values(), base]
    files = {name: found for name in names if name and (found := _state(name, engine["revision"] or revision))}
    return _digest(json.dumps(files).encode()) if engine["model"] in files else ""


def _row(checksum: bytes, content: bytes) -> Row:
    """Return a row with a kept result. Raises ValueError, TypeError, RecursionError or MsgspecError for other bytes."""
    if checksum != _digest(content).encode():
        raise ValueError("its checksum is wrong")
    if set(found := json.loads(content)) != set(_KEPT):
        raise ValueError("its fields are not those of a result")
    return msgspec.convert({"id": "", **found}, Row)


def _state(name: str, revision: str | None) -> Any:
    """Return what tells the content of a model: its files or its commit; None if it is not on this machine."""
    path = Path(demo.local_path(name))
    if not path.exists():
        repository, file = gguf_of_hub(name) or (name, "config.json")
        try:
            found = try_to_load_from_cache(repository, file, revision=revision)
        except ValueError:  # a path of other machines
            return None
        return Path(found).parents[file.count("/")].name if isinstance(found, str) else None
    files = [file for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else [path]
    return [(str(file.relative_to(path)), (at := file.stat()).st_size, at.st_mtime_ns) for file in files]


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()
