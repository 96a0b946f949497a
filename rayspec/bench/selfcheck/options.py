"""Options of a self-check: device, data type and extent."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from rayspec.config import DType
from rayspec.model.weights import resolve_device


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfcheckOptions:
    """device: auto, cpu, cuda, cuda:1, ... dtype: of timed work. is_quick: fewer models, sizes and repeats."""

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

    @property
    def parity_dtypes(self) -> list[torch.dtype]:
        return list(dict.fromkeys([torch.float32, self.torch_dtype]))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
