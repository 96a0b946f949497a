"""What a shard and the coordinator share: an actor that exchanges messages of the present epoch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import torch
from torch import Tensor

from rayspec.decode.stages import Progress
from rayspec.errors import TransportError
from rayspec.pipeline.collective import TensorLink
from rayspec.pipeline.messages import Broken, Connect, Connected, Follow, Message
from rayspec.pipeline.recovery import Status
from rayspec.pipeline.transport import Received, Secret, Transport

ENGINE, COORDINATOR = "engine", "coordinator"

_CPU = torch.device("cpu")


class NewEpoch(Exception):  # noqa: N818 - an event, not an error
    """A new epoch has begun; all work that was under way is void."""


def stage_name(stage: int) -> str:
    """Return the name under which peers know the (leading) shard of a stage."""
    return f"stage-{stage}"


class Server:
    """The actor of a shard or the coordinator: exchanges messages of the present epoch until it fails or is killed. One
    thread serves; any thread may call `process_id`, `address` and `status`. progress: the tasks of the serving thread.
    num_passes: how many of them were passes."""

    transport: Transport

    def __init__(self, name: str, secret: Secret) -> None:
        self.name = name
        self.progress = Progress()
        self.num_passes = 0
        self._secret = secret
        self._address: Future[str] = Future()

    def process_id(self) -> int:
        return os.getpid()

    def address(self) -> str:
        """Wait until the process serves, and return its address."""
        return self._address.result()

    def status(self) -> Status:
        return Status(self.progress.problem() or "", self.progress.worked_s, self.num_passes)

    def listen(self, host: str, *, rank: tuple[int, int] | None = None, device: torch.device = _CPU) -> None:
        """rank: of a stage that sends tensors to later stages by torch.distributed, if Connect names a link: its number
        and the number of stages. device: of these tensors. Raises TransportError, as `address` then does."""
        self._host, self._link_rank, self._device = host, rank, device
        self._ranks_ahead = {stage_name(stage): stage for stage in range(rank[0] + 1, rank[1])} if rank else {}
        try:
            self.transport = Transport(self.name, self._secret, host=host)
        except TransportError as error:
            self._address.set_exception(error)
            raise

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Report any error of a block to the engine, then raise it. Close the transport at the end."""
        try:
            yield
        except Exception as error:
            if not self._address.done():
                self._address.set_exception(error)
            if self.transport.epoch:
                self.send(ENGINE, Broken(reason=f"{type(error).__name__}: {error}"))
                time.sleep(0.2)  # for the message to leave
            raise
        finally:
            self.transport.close()

    def send(self, peer: str, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message to a peer. Nobody may write to the tensors afterwards."""
        to_rank = self._ranks_ahead.get(peer) if self.transport.link and tensors else None
        self.transport.send(peer, message, tensors, to_rank=to_rank)

    def receive(self, timeout_s: float | None = None) -> Received | None:
        """Return the next message of this epoch; None if none comes in time. Raises TransportError, and NewEpoch, which
        has been answered."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            received = self.transport.receive(left_s)
            if received is None:
                return None
            message, epoch = received.message, received.epoch
            if isinstance(message, Connect) and epoch >= self.transport.epoch:
                self.transport.connect(message.peers)
                if epoch > self.transport.epoch:
                    self.transport.epoch = epoch
                    self._enter_epoch(message)
                    raise NewEpoch
            # A Follow is handled in any epoch, because the leader already waits in the operation that it announces.
            elif isinstance(message, Follow) or epoch == self.transport.epoch:
                return received

    def _enter_epoch(self, message: Connect) -> None:
        link_error = ""
        if self.transport.link is not None:
            self.transport.link.leave()
            self.transport.link = None
        if message.link and self._link_rank is not None:
            rank, size = self._link_rank
            try:
                self.transport.link = TensorLink.join(
                    rank=rank, size=size, address=message.link, host=self._host, timeout_s=20.0, device=self._device
                )
            except TransportError as error:
                link_error = str(error)
        self.send(ENGINE, Connected(link_error=link_error))
