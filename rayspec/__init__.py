"""Lossless, training-free speed-up of Hugging Face causal LMs: the model drafts for itself, a knapsack chooses how."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from rayspec.config import SamplingParams
from rayspec.structured import StructuredOutputsParams
from rayspec.types import CompletionOutput, LoRARequest, RequestOutput, TextPrompt, TokensPrompt

if TYPE_CHECKING:
    from rayspec.llm import LLM

# How often an idle thread of OpenMP looks for work before it sleeps. libgomp reads the number when torch loads it. Its
# default takes a core from other programs for milliseconds, and from our own threads where the cores are few.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

__version__ = "0.2.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


if not TYPE_CHECKING:  # else type checkers would take any name for one of ours

    def __getattr__(name: str) -> Any:
        """Import `LLM` at its first use, because it imports torch and transformers."""
        if name == "LLM":
            from rayspec.llm import LLM  # noqa: PLC0415

            return LLM
        raise AttributeError(f"module 'rayspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
