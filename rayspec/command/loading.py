"""An LLM for a command or an actor."""

from __future__ import annotations

import rayspec
from rayspec.config import EngineConfig


def load_llm(config: EngineConfig) -> rayspec.LLM:
    """Raises ConfigError and CheckpointError. Heavy: torch and transformers are imported here, not before."""
    hide_progress_bars()
    return rayspec.LLM(**config.model_dump(exclude_unset=True))


def hide_progress_bars() -> None:
    """Those of transformers, which go to the terminal that our own progress and errors are on."""
    from transformers.utils import logging  # noqa: PLC0415 - so that `--help` does not wait for it

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
