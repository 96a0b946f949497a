"""Messages and tensors between the processes of a replica, from one transport to another.

ZeroMQ over TCP, encrypted and authenticated by libzmq's CURVE (RFC 26). A message is the frames [envelope, tensor,
tensor, ...]. The envelope is msgpack, tensors are their raw bytes; a large tensor takes several frames. Nothing is ever
unpickled.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import math
import secrets
import socket
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import zmq
from torch import Tensor
from zmq.utils import z85

from rayspec.errors import TransportError
from rayspec.pipeline.collective import TensorLink
from rayspec.pipeline.messages import AnyMessage, Envelope, Message, TensorForm, decode, encode

MAX_FRAME_BYTES = 1 << 30
MAX_WAITING_MESSAGES = 1 << 16

_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """Keys that only the processes of one replica share: a CURVE key pair (public, secret) of each end, in Z85."""

    server: tuple[bytes, bytes] = field(repr=False, default_factory=zmq.curve_keypair)
    client: tuple[bytes, bytes] = field(repr=False, default_factory=zmq.curve_keypair)


@dataclass(frozen=True, slots=True)
class Received:
    """A message of the transport with the name `sender`. tensors: the receiver's own, contiguous and writable; on the
    CPU, or on the link's device if they came by the link."""

    sender: str
    message: AnyMessage
    tensors: list[Tensor]
    epoch: int = 0


@dataclass(slots=True)
class _Connection:
    """To one peer. stream: distinguishes this connection from earlier ones."""

    socket: zmq.Socket[bytes]
    address: str
    stream: int = field(default_factory=lambda: secrets.randbits(63))
    num_sent: int = 0


class Transport:
    """Receives from anybody who has the secret, and sends to named peers.

    Messages between two transports arrive in the order they were sent, each once, as long as both processes live. If a
    message is lost nevertheless (a connection broke), the receiver gets a TransportError. Only one thread at a time may
    use a transport, but any thread may `wake` it.

    host: IP address of this node to listen on, at a port that the system chooses; see `node_address`. Raises
    TransportError if that is impossible. link: carries tensors sent with `to_rank`; it may be replaced at any time.
    epoch: of all messages that are sent from now on.
    """

    def __init__(self, name: str, secret: Secret, *, host: str, link: TensorLink | None = None) -> None:
        self.name = name
        self.epoch = 0
        self.link = link
        self._secret = secret
        self._connections: dict[str, _Connection] = {}
        self._next_numbers: dict[int, int] = {}
        # A context of its own, because a context can have only one gate. It costs one thread in libzmq.
        self._context = zmq.Context()
        self._context.linger = 0
        self._gate = _Gate(self._context, secret)
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.curve_server = True
        self._inbox.curve_secretkey = secret.server[1]
        self._inbox.zap_domain = b"rayspec"
        self._inbox.zap_enforce_domain = True  # without an answer from the gate, a connection is refused
        # Larger frames are refused before memory is allocated for them. CURVE adds some bytes to each frame.
        self._inbox.maxmsgsize = MAX_FRAME_BYTES + 1024
        _set_tcp_options(self._inbox, ipv6=":" in host)
        try:
            self._inbox.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise TransportError(f"{name} cannot listen at {host}: {error}") from error
        self.address = self._inbox.get_string(zmq.LAST_ENDPOINT)
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._gate.socket, zmq.POLLIN)
        # It refers to the sockets until it is called: a context whose sockets are garbage too does not find them, and
        # waits for their end for ever. At the end of the program, a thread may still use them.
        self._end = weakref.finalize(self, _destroy, self._context, self._inbox, self._gate, self._connections)
        self._end.atexit = False
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._poller.register(self._woken.fileno(), zmq.POLLIN)

    def connect(self, peers: Mapping[str, str]) -> None:
        """Replace all peers by `peers` (name -> address). A peer whose address did not change keeps its connection.
        Messages that wait for others are dropped, because those processes have ended."""
        self._require_open()
        for name in [name for name, known in self._connections.items() if peers.get(name) != known.address]:
            self._connections.pop(name).socket.close(linger=0)
        for name in [name for name in peers if name not in self._connections]:
            socket = self._context.socket(zmq.PUSH)
            socket.curve_serverkey = self._secret.server[0]
            socket.curve_publickey, socket.curve_secretkey = self._secret.client
            socket.sndhwm = MAX_WAITING_MESSAGES
            _set_tcp_options(socket, ipv6="[" in peers[name])
            socket.connect(peers[name])
            self._connections[name] = _Connection(socket, peers[name])

    def send(self, peer: str, message: Message, tensors: Sequence[Tensor] = (), *, to_rank: int | None = None) -> None:
        """Queue a message and return, even if the peer does not run any more. Tensors are copied; with `to_rank`, the
        peer's rank on the link, they go by the link, nobody may write to them afterwards, and a peer that does not
        receive them can block the caller for the link's timeout. Raises TransportError."""
        self._require_open()
        link = None if to_rank is None else self._require_link()
        forms = tuple(_form(tensor) for tensor in tensors)
        frames = [frame for tensor in tensors for frame in _frames(tensor)] if link is None else []
        connection = self._connections.get(peer)
        if connection is None:
            raise TransportError(f"{self.name} knows no peer {peer!r}; it knows {sorted(self._connections)}")
        rank = None if link is None else link.rank
        envelope = Envelope(self.name, connection.stream, connection.num_sent, rank, forms, message, self.epoch)  # type: ignore[arg-type]
        try:
            connection.socket.send_multipart([encode(envelope), *frames], zmq.NOBLOCK)
        except zmq.Again as error:
            raise TransportError(
                f"{MAX_WAITING_MESSAGES} messages are waiting for {peer}, which takes none; "
                f"replace it with Transport.connect"
            ) from error
        except zmq.ZMQError as error:
            raise TransportError(f"{self.name} cannot send to {peer}: {error}") from error
        connection.num_sent += 1
        if link is not None and to_rank is not None:
            # After the envelope: the peer receives tensors only when it has read it, and `link.send` may wait for that.
            for tensor in tensors:
                link.send(tensor, to_rank)

    def receive(self, timeout_s: float | None = None) -> Received | None:
        """Return the next message; None if none comes within `timeout_s` seconds (None: wait for ever), or if `wake` is
        called. New peers can connect only during this call, so call it regularly.

        Raises TransportError for a message that is malformed, that follows lost messages, or whose tensors did not come
        by the link. The next call goes on with the next message; a link has to be joined again.
        """
        self._require_open()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            # Rounded up, so that a poll does not return early over and over.
            wait_ms = None if deadline is None else math.ceil(max(0.0, deadline - time.monotonic()) * 1000)
            ready = [socket for socket, _ in self._poller.poll(wait_ms)]
            if not ready:
                return None
            if self._gate.socket in ready:
                self._gate.answer()
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
            if self._inbox in ready:
                return self._take()
            if self._woken.fileno() in ready:
                return None

    def wake(self) -> None:
        """Let `receive` return, now or at its next call. Any thread may call this."""
        with contextlib.suppress(OSError):  # it is closed, or was woken very often
            self._waker.send(b"\0")

    def close(self) -> None:
        """Close the transport at once; messages that have not been sent yet are dropped. May be called again."""
        self._end()
        self._waker.close()
        self._woken.close()

    def _take(self) -> Received:
        try:
            return self._opened(self._inbox.recv_multipart(copy=False))
        except TransportError:
            # The message's tensors may still be on the link, where a later message would take them for its own.
            if self.link is not None:
                self.link.leave()
            raise

    def _opened(self, frames: list[zmq.Frame]) -> Received:
        envelope = decode(frames[0].buffer)
        expected = self._next_numbers.get(envelope.stream, 0)
        self._next_numbers[envelope.stream] = envelope.number + 1
        if envelope.number != expected:
            raise TransportError(
                f"{self.name} got message {envelope.number} of {envelope.sender} where {expected} was next: the "
                f"connection broke and messages are lost"
            )
        forms = [(_DTYPES[form.dtype], form.shape) for form in envelope.tensors]
        if envelope.rank is None:
            left = iter(frames[1:])
            tensors = [_tensor(*form, left) for form in forms]
        else:
            link = self._require_link()
            tensors = [link.receive(*form, envelope.rank) for form in forms]
        return Received(envelope.sender, envelope.message, tensors, envelope.epoch)

    def _require_link(self) -> TensorLink:
        if self.link is None:
            raise TransportError(f"{self.name} has no link for tensors; assign one to Transport.link")
        return self.link

    def _require_open(self) -> None:
        if self._context.closed:
            raise TransportError(f"the transport of {self.name} is closed")


class _Gate:
    """Decides for libzmq which peers may connect: those that have proved to own the client key, by ZAP (RFC 27).
    zmq.auth would need another thread, or asyncio, for the same."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], secret: Secret) -> None:
        self._key = z85.decode(secret.client[0])
        self.socket = context.socket(zmq.REP)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        version, request, _domain, _address, _identity, _mechanism, *credentials = self.socket.recv_multipart()
        known = hmac.compare_digest(b"".join(credentials), self._key)
        verdict = (b"200", b"OK") if known else (b"400", b"unknown key")
        self.socket.send_multipart([version, request, *verdict, b"", b""])


def _destroy(context: zmq.Context[zmq.Socket[bytes]], *_sockets: object) -> None:
    context.destroy(linger=0)


def _set_tcp_options(socket: zmq.Socket[bytes], *, ipv6: bool) -> None:
    socket.ipv6 = ipv6
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = 60  # firewalls forget silent connections after some minutes


def _form(tensor: Tensor) -> TensorForm:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise TransportError(f"a tensor of {tensor.dtype} cannot be sent; use one of {', '.join(_DTYPES)}")
    return TensorForm(dtype=name, shape=tuple(tensor.shape))


def _frames(tensor: Tensor) -> list[memoryview]:
    """Return a tensor's bytes in frames of at most `MAX_FRAME_BYTES`, at least one."""
    # Through uint8, because NumPy has no bfloat16.
    raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return [raw[at : at + MAX_FRAME_BYTES] for at in range(0, max(1, len(raw)), MAX_FRAME_BYTES)]


def _tensor(dtype: torch.dtype, shape: Sequence[int], left: Iterator[zmq.Frame]) -> Tensor:
    """Take the tensor's frames from those that are left."""
    num_bytes = math.prod(shape) * dtype.itemsize
    frames = list(itertools.islice(left, max(1, -(-num_bytes // MAX_FRAME_BYTES))))
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    # `cat` copies, which aligns the data: libzmq puts frames at any address.
    raw = torch.cat([torch.frombuffer(frame.buffer, dtype=torch.uint8) for frame in frames])
    return raw.view(dtype).reshape(shape)
