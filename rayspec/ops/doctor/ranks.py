"""Processes on the nodes of a cluster that compute together."""

from __future__ import annotations

import torch
from torch import distributed

from rayspec.pipeline.tensor_parallel import RankGroup, free_address
from rayspec.pipeline.transport import node_address


class Rank:
    """One of the processes, one per node, that compute a sum together."""

    def meeting_place(self) -> str:
        return free_address(node_address())

    def add_up(self, rank: int, size: int, address: str, device: str, timeout_s: float) -> float:
        """Return the sum of 1, 2, ... over all ranks, from an all-reduce by NCCL on "cuda" or by gloo on "cpu". Raises
        torch's errors."""
        RankGroup(rank=rank, size=size, address=address, device=device).join(timeout_s)
        try:
            number = torch.full((1024,), float(rank + 1), device=device)
            distributed.all_reduce(number)
            return float(number.mean().item())
        finally:
            distributed.destroy_process_group()
