"""Communication of a shard or the coordinator: a transport for messages of the present epoch, and a heartbeat."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from rayspec.decode.progress import Progress
from rayspec.errors import TransportError
from rayspec.pipeline.collective import TensorLink
from rayspec.pipeline.messages import (
    AnyMessage,
    Beat,
    Connect,
    Connected,
    Follow,
    Message,
    Peers,
    Ping,
    Stop,
    decode,
    encode,
)
from rayspec.pipeline.transport import Secret, Transport

ENGINE, COORDINATOR = "engine", "coordinator"

BEAT_EVERY_S = 0.5
# An idle process that gets no message for so long stops its heartbeats: an idle engine does not read them.
_QUIET_AFTER_S = 10.0
_LINK_TIMEOUT_S = 20.0


class NewEpoch(Exception):  # noqa: N818 - an event, not an error
    """A new epoch has begun; all work that was under way is void."""


class Stopped(Exception):  # noqa: N818 - an event, not an error
    """The engine wants this process to end."""


@dataclass(frozen=True, slots=True)
class Received:
    sender: str
    message: AnyMessage
    tensors: list[Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Rank of a stage among the stages that exchange tensors. ahead: ranks of the later stages, by name."""

    rank: int
    size: int
    ahead: Mapping[str, int]


class Endpoint:
    """Transport of a shard or the coordinator, for the thread that made it only. The heartbeat has its own thread.

    progress: the tasks of the thread, which the heartbeat judges.
    """

    def __init__(self, name: str, secret: Secret, *, host: str, ranks: Ranks | None = None) -> None:
        """ranks: of a stage that sends tensors to later stages by torch.distributed, if Connect names a link."""
        self.epoch = 0
        self.progress = Progress()
        self._host = host
        self._ranks = ranks
        self._transport = Transport(name, secret, host=host)
        self._heard_at = time.monotonic()
        self._addresses: Mapping[str, str] = {}
        self._deferred: deque[Received] = deque()
        self._closed = threading.Event()
        self._heart = threading.Thread(target=self._beat, name=f"{name}-heartbeat", daemon=True)

    @property
    def address(self) -> str:
        return self._transport.address

    def host_of(self, peer: str) -> str:
        """Return the host of a peer's address."""
        return self._addresses[peer].rpartition(":")[0]

    def send(self, peer: str, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message to a peer. Nobody may write to the tensors afterwards."""
        to_rank = self._ranks.ahead.get(peer) if self._ranks and self._transport.link and tensors else None
        self._transport.send(peer, encode(message), tensors, to_rank=to_rank)

    def receive(self, timeout_s: float | None = None) -> Received | None:
        """Return the next message of this epoch; None if none comes in time. Raises Stopped, TransportError, and
        NewEpoch, which has been answered."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            envelope = self._transport.receive(left_s)
            if envelope is None:
                return None
            self._heard_at = time.monotonic()
            message = decode(envelope.header)
            if isinstance(message, Stop):
                raise Stopped
            if isinstance(message, Connect) and message.epoch > self.epoch:
                self._enter(message)
                raise NewEpoch
            if isinstance(message, Peers):
                self._connect(message.peers)
            # A Follow is handled in any epoch, because the leader already waits in the operation that it announces.
            elif isinstance(message, Follow) or (message.epoch == self.epoch and not isinstance(message, Ping)):
                return Received(envelope.sender, message, envelope.tensors)

    def defer(self, received: Received) -> None:
        """Keep a message of this epoch for later."""
        self._deferred.append(received)

    def take_deferred(self) -> Received | None:
        """Remove and return the message that was deferred first; None if there is none."""
        return self._deferred.popleft() if self._deferred else None

    def close(self) -> None:
        self._closed.set()
        if self._heart.is_alive():
            self._heart.join()
        self._transport.close()

    def _enter(self, message: Connect) -> None:
        self.epoch = message.epoch
        self._deferred.clear()
        self._connect(message.peers)
        if not self._heart.is_alive():
            self._heart.start()
        link_error = ""
        try:
            self._join(message.link)
        except TransportError as error:
            link_error = str(error)
        self.send(ENGINE, Connected(epoch=message.epoch, link_error=link_error))

    def _connect(self, peers: Mapping[str, str]) -> None:
        self._addresses = peers
        self._transport.connect(peers)

    def _join(self, address: str) -> None:
        if self._transport.link is not None:
            self._transport.link.leave()
            self._transport.link = None
        if address and self._ranks is not None:
            self._transport.link = TensorLink.join(
                rank=self._ranks.rank,
                size=self._ranks.size,
                address=address,
                host=self._host,
                timeout_s=_LINK_TIMEOUT_S,
            )

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_EVERY_S):
            problem = self.progress.problem() or ""
            if not self.progress.is_busy and time.monotonic() - self._heard_at > _QUIET_AFTER_S:
                continue
            beat = Beat(epoch=self.epoch, problem=problem, worked_s=self.progress.worked_s)
            try:
                self._transport.sender(ENGINE).send(encode(beat))
            except TransportError:
                continue  # the connection is just being replaced, or the engine stopped reading long ago
