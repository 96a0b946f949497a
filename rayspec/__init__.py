"""Lossless, training-free speed-up of Hugging Face causal LMs: the model drafts for itself, a knapsack picks how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rayspec.config import SamplingParams

if TYPE_CHECKING:
    from rayspec.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """`LLM` brings torch and transformers along, so it is imported when it is first asked for."""
    if name == "LLM":
        from rayspec.llm import LLM  # noqa: PLC0415

        return LLM
    raise AttributeError(f"module 'rayspec' has no attribute {name!r}")
