"""A rank in the middle of three, in a process of its own that dies. It imports what it needs and no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rayspec.pipeline.collective import LOOPBACK, TensorLink

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

TIMEOUT_S = 120.0


def join(rank: int, size: int, address: str, timeout_s: float = TIMEOUT_S) -> TensorLink:
    cpu = torch.device("cpu")
    return TensorLink.join(rank=rank, size=size, address=address, host=LOOPBACK, timeout_s=timeout_s, device=cpu)


def double(link: TensorLink) -> None:
    """What rank 1 of 3 does: it passes on what it gets, doubled."""
    link.send(link.receive(torch.float32, (8,), 0) * 2, 2)


def middle(pipe: Connection) -> None:
    torch.set_num_threads(1)
    pipe.send("ready")
    link = join(1, 3, pipe.recv())
    while True:
        double(link)
