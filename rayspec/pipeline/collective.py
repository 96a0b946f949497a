"""Tensors from device to device, by torch.distributed point-to-point: NCCL between GPUs, gloo on the CPU.

The transport (`rayspec.pipeline.transport`) sends the headers. This link carries tensors that are too large to go
through the host, in one direction only. It knows nothing about messages.

NCCL, gloo and the store where ranks meet neither encrypt nor authenticate. On an untrusted network, use no link: the
transport then carries the tensors.
"""

from __future__ import annotations

import itertools
import socket
from collections import defaultdict, deque
from collections.abc import Sequence
from datetime import timedelta

import ray
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from rayspec.errors import TransportError

LOOPBACK = "127.0.0.1"

MAX_PENDING_TENSORS = 16  # per peer; a pipeline has few cohorts under way, so the oldest tensor arrived long ago


def node_address() -> str:
    """Return the IP address of this node for other nodes of the Ray cluster, and so for `Transport(host=...)`.

    It is the address that Ray itself uses. In a cluster on loopback, transports use loopback too, and so do those
    without Ray.
    """
    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else LOOPBACK  # type: ignore[no-untyped-call]


class Rendezvous:
    """Where the ranks of one link meet: on `host` only, at a port that the system chooses. Each link needs a new one,
    which stays open as long as the link lives. Pass `address` to `TensorLink.join`."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        port = listener.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        # Given only a port, the store would listen on every interface.
        self._store: TCPStore | None = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def close(self) -> None:
        self._store = None


class TensorLink:
    """One rank's end of the connections between `size` ranks. Tensors go from lower to higher ranks only, which
    excludes deadlocks, and between two ranks in the order in which they were sent.

    After an error the order no longer holds, so the link closes itself; join a new link with the remaining peers. With
    NCCL, `send` and `receive` only queue work for the GPU, and PyTorch's watchdog ends the process after the timeout:
    call `leave` as soon as a peer is known to be dead.
    """

    def __init__(self, group: ProcessGroup, *, device: torch.device) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self.device = device
        self._group: ProcessGroup | None = group
        self._pending: defaultdict[int, deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)

    @classmethod
    def join(
        cls, *, rank: int, size: int, address: str, host: str, timeout_s: float, device: torch.device
    ) -> TensorLink:
        """Meet the other ranks at `address` (of a `Rendezvous`). Return when all of them can exchange tensors. Raises
        TransportError if not all join in time, or for a GPU if torch lacks NCCL.

        host: IP address of this node that the other ranks can reach. timeout_s: the longest time of joining, of one
        send and of one receive. device: of the tensors. NCCL connects GPUs, and gloo connects CPUs.
        """
        by_nccl = device.type == "cuda"
        if by_nccl and not dist.is_nccl_available():
            raise TransportError(f"rank {rank} of {size} could not join: this version of torch has no NCCL")
        try:
            device = torch.empty(0, device=device).device  # with its number
            store = store_at(address, timeout_s)
            group = ProcessGroup(store, rank, size)
            if by_nccl:
                nccl = dist.ProcessGroupNCCL.Options()
                nccl._timeout = timedelta(seconds=timeout_s)
                connections = dist.ProcessGroupNCCL(store, rank, size, nccl)
                group._register_backend(device, ProcessGroup.BackendType.NCCL, connections)
            else:
                gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                gloo._timeout = timedelta(seconds=timeout_s)
                # By default, gloo listens at the address that the host's name resolves to.
                gloo._devices = [ProcessGroupGloo.create_device(hostname=host)]
                transport = ProcessGroupGloo(store, rank, size, gloo)
                group._register_backend(device, ProcessGroup.BackendType.GLOO, transport)
        except RuntimeError as error:
            raise TransportError(f"rank {rank} of {size} could not join at {address}: {error}") from error
        link = cls(group, device=device)
        # NCCL connects a pair of ranks at its first tensor and blocks both without a timeout. So do it now, when all
        # ranks are there. All ranks take the pairs in the same order, so they do not wait in a circle.
        for sender, receiver in itertools.combinations(range(size), 2):
            if rank == sender:
                link.send(torch.zeros(1, dtype=torch.uint8), receiver)
            elif rank == receiver:
                link.receive(torch.uint8, (1,), sender)
        return link

    def send(self, tensor: Tensor, to_rank: int) -> None:
        """Start to send and return. From now on nobody may write to the tensor. Waits, for the timeout at most, only if
        `MAX_PENDING_TENSORS` earlier tensors have not been received yet. Raises TransportError."""
        assert self.rank < to_rank < self.size, "tensors go to higher ranks only"
        ours = tensor.detach().to(self.device).contiguous()
        pending = self._pending[to_rank]
        try:
            if len(pending) >= MAX_PENDING_TENSORS:
                # With an argument, NCCL's `wait` would block this thread until the GPU has come to it.
                pending.popleft()[0].wait()
            pending.append((self._require_group().send([ours], to_rank, 0), ours))
        except RuntimeError as error:
            self.leave()
            raise TransportError(f"rank {self.rank} could not send to rank {to_rank}: {error}") from error

    def receive(self, dtype: torch.dtype, shape: Sequence[int], from_rank: int) -> Tensor:
        """Return the next tensor from `from_rank`, which must have this dtype and shape, on the link's device. With
        NCCL, the data is there once the current stream has reached the receive. Raises TransportError if nothing
        arrives within the timeout."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        try:
            self._require_group().recv([tensor], from_rank, 0).wait()
        except RuntimeError as error:
            self.leave()
            raise TransportError(f"rank {self.rank} received nothing from rank {from_rank}: {error}") from error
        return tensor

    def leave(self) -> None:
        """Close the connections at once; later sends and receives raise TransportError. May be called again."""
        if self._group is None:
            return
        self._group.abort()
        self._pending.clear()
        self._group = None

    def _require_group(self) -> ProcessGroup:
        if self._group is None:
            raise TransportError(f"the link of rank {self.rank} is closed; join a new one")
        return self._group


def store_at(address: str, timeout_s: float) -> TCPStore:
    """Return the store of a `Rendezvous` to a process that comes there. Raises RuntimeError if nobody listens."""
    host, _, port = address.rpartition(":")
    return TCPStore(
        host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
