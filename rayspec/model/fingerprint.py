"""A fingerprint of a checkpoint's weights that does not read all of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rayspec.config import EngineConfig
from rayspec.model.gguf import find_gguf
from rayspec.model.weights import load_config
from rayspec.types import CheckpointError

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
    folder, gguf = Path(config.model), find_gguf(config.model, config.revision)
    if gguf is None and not folder.is_dir():
        commit = getattr(load_config(config), "_commit_hash", None)
        if not commit:
            raise CheckpointError(f"model {config.model!r} is neither a folder nor of a known commit of the hub")
        return str(commit)[:16]
    files = [gguf] if gguf else next((found for kind in _KINDS if (found := sorted(folder.glob(kind)))), [])
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
