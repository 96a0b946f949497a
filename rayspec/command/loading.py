"""Loads an LLM for a command or an actor."""

from __future__ import annotations

import rayspec
from rayspec.config import EngineConfig


def load_llm(config: EngineConfig) -> rayspec.LLM:
    """Load a model. Raises ConfigError and CheckpointError. Slow: torch and transformers are imported here."""
    hide_progress_bars()
    return rayspec.LLM(**config.model_dump())


def hide_progress_bars() -> None:
    """Hide the progress bars of transformers, which share the terminal with our own progress and errors."""
    from transformers.utils import logging  # noqa: PLC0415 - `--help` does not wait for it

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
