"""Communication of a shard or the coordinator: a transport for messages of the present epoch, and a heartbeat."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rayspec.decode.progress import Progress
from rayspec.errors import TransportError
from rayspec.pipeline.collective import TensorLink
from rayspec.pipeline.messages import AnyMessage, Beat, Connect, Connected, Follow, Message, Ping, decode, encode
from rayspec.pipeline.transport import Secret, Transport

ENGINE, COORDINATOR = "engine", "coordinator"

BEAT_EVERY_S = 0.5
# An idle process that gets no message for so long stops its heartbeats: an idle engine does not read them.
_QUIET_AFTER_S = 10.0
_LINK_TIMEOUT_S = 20.0


class NewEpoch(Exception):  # noqa: N818 - an event, not an error
    """A new epoch has begun; all work that was under way is void."""


@dataclass(frozen=True, slots=True)
class Received:
    sender: str
    message: AnyMessage
    tensors: list[Tensor]


def stage_name(stage: int) -> str:
    """Return the name under which peers know the (leading) shard of a stage."""
    return f"stage-{stage}"


class Endpoint:
    """Transport of a shard or the coordinator, for the thread that made it only. The heartbeat has its own thread.

    progress: the tasks of the thread, which the heartbeat judges. num_passes: how many of them were passes.
    """

    def __init__(self, name: str, secret: Secret, *, host: str, rank: tuple[int, int] | None = None) -> None:
        """rank: of a stage that sends tensors to later stages by torch.distributed, if Connect names a link: its number
        and the number of stages."""
        self.epoch = 0
        self.progress = Progress()
        self.num_passes = 0
        self._host = host
        self._rank = rank
        self._ranks_ahead = {stage_name(stage): stage for stage in range(rank[0] + 1, rank[1])} if rank else {}
        self._transport = Transport(name, secret, host=host)
        self._heard_at = time.monotonic()
        self._closed = threading.Event()
        self._heart = threading.Thread(target=self._beat, name=f"{name}-heartbeat", daemon=True)

    @property
    def address(self) -> str:
        return self._transport.address

    def send(self, peer: str, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message to a peer. Nobody may write to the tensors afterwards."""
        to_rank = self._ranks_ahead.get(peer) if self._transport.link and tensors else None
        self._transport.send(peer, encode(message), tensors, to_rank=to_rank)

    def receive(self, timeout_s: float | None = None) -> Received | None:
        """Return the next message of this epoch; None if none comes in time. Raises TransportError, and NewEpoch, which
        has been answered."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            envelope = self._transport.receive(left_s)
            if envelope is None:
                return None
            self._heard_at = time.monotonic()
            message = decode(envelope.header)
            if isinstance(message, Connect) and message.epoch >= self.epoch:
                self._transport.connect(message.peers)
                if message.epoch > self.epoch:
                    self._enter(message)
                    raise NewEpoch
            # A Follow is handled in any epoch, because the leader already waits in the operation that it announces.
            elif isinstance(message, Follow) or (message.epoch == self.epoch and not isinstance(message, Ping)):
                return Received(envelope.sender, message, envelope.tensors)

    def close(self) -> None:
        self._closed.set()
        if self._heart.is_alive():
            self._heart.join()
        self._transport.close()

    def _enter(self, message: Connect) -> None:
        self.epoch = message.epoch
        if not self._heart.is_alive():
            self._heart.start()
        link_error = ""
        if self._transport.link is not None:
            self._transport.link.leave()
            self._transport.link = None
        if message.link and self._rank is not None:
            rank, size = self._rank
            try:
                self._transport.link = TensorLink.join(
                    rank=rank, size=size, address=message.link, host=self._host, timeout_s=_LINK_TIMEOUT_S
                )
            except TransportError as error:
                link_error = str(error)
        self.send(ENGINE, Connected(epoch=message.epoch, link_error=link_error))

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_EVERY_S):
            problem = self.progress.problem() or ""
            if not self.progress.is_busy and time.monotonic() - self._heard_at > _QUIET_AFTER_S:
                continue
            beat = Beat(epoch=self.epoch, problem=problem, worked_s=self.progress.worked_s, num_passes=self.num_passes)
            try:
                self._transport.send(ENGINE, encode(beat))
            except TransportError:
                continue  # the connection is just being replaced, or the engine stopped reading long ago
