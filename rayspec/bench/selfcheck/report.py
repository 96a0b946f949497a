"""Options and outcomes of a self-check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from rayspec.config import DType
from rayspec.model.weights import resolve_device


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfcheckOptions:
    """device: auto, cpu, cuda, cuda:1, ... dtype: compared in addition to float32. is_quick: fewer models."""

    device: str = "auto"
    dtype: DType = "bfloat16"
    num_threads: int | None = None
    is_quick: bool = False

    @property
    def torch_device(self) -> torch.device:
        """The device. Raises ConfigError if the device does not exist."""
        return resolve_device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, "bfloat16" if self.dtype == "auto" else self.dtype)
        return dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a check. found: one or two sentences. numbers: JSON values for programs."""

    status: Literal["passed", "failed", "not here"]
    found: str
    numbers: Any = None


def not_here(why: str) -> Outcome:
    return Outcome(status="not here", found=why)
