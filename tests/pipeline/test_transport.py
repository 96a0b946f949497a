"""Transports talk to each other in this process, to a process of their own, and to strangers who speak plain bytes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import msgspec
import pytest
import torch
import zmq
from zmq.utils import z85

from rayspec.errors import TransportError
from rayspec.pipeline import transport
from rayspec.pipeline.transport import LOOPBACK, Envelope, Secret, Transport
from rayspec.types import ConfigError
from tests.freezing import freeze

PATIENCE_S = 20.0
SECRET = Secret.generate()
NewTransport = Callable[..., Transport]


@pytest.fixture
def make_transport() -> Iterator[NewTransport]:
    """Makes transports that are closed after the test."""
    with ExitStack() as stack:

        def new(name: str, secret: Secret = SECRET) -> Transport:
            return stack.enter_context(closing(Transport(name, secret, host=LOOPBACK)))

        yield new


def receive(box: Transport) -> Envelope:
    envelope = box.receive(PATIENCE_S)
    assert envelope is not None
    return envelope


def number(value: int) -> bytes:
    return value.to_bytes(4, "little")


def host_and_port(box: Transport) -> tuple[str, int]:
    host, _, port = box.address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


# A peer in a process of its own


@dataclass(frozen=True, slots=True)
class Peer:
    process: BaseProcess
    address: str
    pipe: Connection


def echo(pipe: Connection, secret: Secret) -> None:
    """Sends back whatever comes, to the one it is told about first."""
    torch.set_num_threads(1)
    with closing(Transport("echo", secret, host=LOOPBACK)) as box:
        pipe.send(box.address)
        box.connect({"here": pipe.recv()})
        while (envelope := receive(box)).header != b"stop":
            box.send("here", envelope.header, envelope.tensors)


@contextmanager
def echoing(box: Transport) -> Iterator[Peer]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=echo, args=(there, SECRET))
    process.start()
    try:
        peer = Peer(process, here.recv(), here)
        here.send(box.address)
        yield peer
    finally:
        process.kill()
        process.join()


def test_a_peer_in_another_process_lives_freezes_dies_and_comes_back(make_transport: NewTransport) -> None:
    here, tensor = make_transport("here"), torch.arange(4096.0)
    with echoing(here) as peer, echoing(here) as restarted:
        here.connect({"echo": peer.address})

        # It lives: everything comes back, in order.
        received = []
        for index in range(2000):
            here.send("echo", number(index), [tensor[: index % 7]])
            while (envelope := here.receive(0)) is not None:
                received.append((envelope.header, len(envelope.tensors[0])))
        while len(received) < 2000:
            envelope = receive(here)
            received.append((envelope.header, len(envelope.tensors[0])))
        assert received == [(number(index), index % 7) for index in range(2000)]

        # It freezes: more than any buffer of the system holds is sent without waiting; then it catches up.
        assert peer.process.pid is not None
        freeze(peer.process.pid)
        slowest_s = 0.0
        for index in range(3000):
            started = time.perf_counter()
            here.send("echo", number(index), [tensor])
            slowest_s = max(slowest_s, time.perf_counter() - started)
        assert slowest_s < 1
        assert here.receive(0.1) is None
        os.kill(peer.process.pid, signal.SIGCONT)
        assert [receive(here).header for _ in range(3000)] == [number(index) for index in range(3000)]

        # It dies with messages waiting, which its replacement does not get.
        peer.process.kill()
        peer.process.join()
        for index in range(100):
            here.send("echo", number(index), [tensor])
        here.connect({"echo": restarted.address})
        here.send("echo", b"welcome")
        envelope = receive(here)
        assert envelope.header == b"welcome"
        here.send("echo", b"stop")
        restarted.process.join(PATIENCE_S)
        assert restarted.process.exitcode == 0


# Tensors


def test_tensors_arrive_bit_by_bit_and_belong_to_the_receiver(make_transport: NewTransport) -> None:
    here = make_transport("here")
    here.connect({"here": here.address})
    generator = torch.Generator().manual_seed(0)
    for dtype in transport._DTYPES.values():
        for shape in ((), (3, 0, 2), (2, 1, 7)):
            # Any bits at all, NaNs with a payload among them; but a bool is 0 or 1.
            raw = torch.randint(256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
            sent = (raw[..., 0] > 127) if dtype == torch.bool else raw.view(dtype)[..., 0]
            here.send("here", b"\x00header\xff", [sent, sent.T if len(shape) == 2 else sent])
            envelope = receive(here)
            assert envelope.header == b"\x00header\xff"
            for arrived in envelope.tensors:
                assert (arrived.dtype, arrived.shape) == (dtype, shape)
                assert arrived.reshape(-1).view(torch.uint8).tolist() == sent.reshape(-1).view(torch.uint8).tolist()
                assert arrived.is_contiguous()
                assert arrived.data_ptr() % 16 == 0
    numbers = torch.arange(12.0).reshape(3, 4)
    here.send("here", b"x", [numbers.T, numbers.requires_grad_()])
    with torch.no_grad():
        numbers.zero_()
    transposed, whole = receive(here).tensors
    assert transposed.T.tolist() == whole.add_(0).tolist() == torch.arange(12.0).reshape(3, 4).tolist()


def test_a_tensor_that_cannot_be_sent(make_transport: NewTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    here = make_transport("here")
    here.connect({"here": here.address})
    with pytest.raises(TransportError, match="complex64 cannot be sent; use one of float64, float32"):
        here.send("here", b"x", [torch.zeros(2, dtype=torch.complex64)])
    with pytest.raises(TransportError, match="no link"):
        here.send("here", b"x", [torch.zeros(2)], to_rank=1)
    monkeypatch.setattr(transport, "MAX_TENSOR_BYTES", 7)
    with pytest.raises(TransportError, match="8 bytes cannot be sent; cut it to 7"):
        here.send("here", b"x", [torch.zeros(2)])
    here.send("here", b"the next one")
    assert receive(here).header == b"the next one"


# Peers


def test_another_thread_wakes_whoever_waits(make_transport: NewTransport) -> None:
    here, there = make_transport("here"), make_transport("there")
    there.connect({"here": here.address})
    waker = threading.Timer(0.1, here.wake)
    waker.start()
    started = time.monotonic()
    assert here.receive(30.0) is None
    assert time.monotonic() - started < 20
    waker.join()
    for _ in range(100_000):  # more than are kept
        here.wake()
    there.send("here", number(7))
    while (envelope := here.receive(30.0)) is None:
        pass
    assert envelope.header == number(7)
    here.close()
    here.wake()


def test_connect_replaces_what_changed_and_nothing_else(make_transport: NewTransport) -> None:
    here, stays, old, new = (make_transport(name) for name in ("here", "stays", "moves", "moves"))
    here.connect({"stays": stays.address, "moves": old.address, "goes": old.address})
    for index in range(3):
        here.send("stays", number(index))
        here.send("moves", b"for the old one")
    here.connect({"stays": stays.address, "moves": new.address})
    here.send("stays", number(3))
    here.send("moves", b"for the new one")
    assert [receive(stays).header for _ in range(4)] == [number(index) for index in range(4)]
    assert receive(new).header == b"for the new one"
    with pytest.raises(TransportError, match=r"here knows no peer 'goes'; it knows \['moves', 'stays'\]"):
        here.send("goes", b"x")


def test_too_much_waits_for_a_dead_peer(make_transport: NewTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_WAITING_MESSAGES", 10)
    here, dead = make_transport("here"), make_transport("dead")
    dead.close()
    here.connect({"dead": dead.address})
    for _ in range(10):
        here.send("dead", b"x", [torch.zeros(9)])
    with pytest.raises(TransportError, match="10 messages are waiting for dead"):
        here.send("dead", b"x")


def test_threads_send_side_by_side(make_transport: NewTransport) -> None:
    here, hub = make_transport("here"), make_transport("hub")
    here.connect({"hub": hub.address})

    def beat(name: bytes) -> None:
        for index in range(500):
            here.send("hub", name + number(index), [torch.tensor(index)])

    threads = [threading.Thread(target=beat, args=(name,)) for name in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    envelopes = [receive(hub) for _ in range(1500)]
    for thread in threads:
        thread.join()
    for name in (b"a", b"b", b"c"):
        of_thread = [envelope for envelope in envelopes if envelope.header[:1] == name]
        assert [envelope.header[1:] for envelope in of_thread] == [number(index) for index in range(500)]
        assert [int(envelope.tensors[0]) for envelope in of_thread] == list(range(500))


# Who may not


@contextmanager
def stranger(address: str, secret: Secret | None) -> Iterator[zmq.Socket[bytes]]:
    """Speaks ZeroMQ, and CURVE with the keys of `secret`, but is no transport."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as outbox:
        outbox.linger = 0
        if secret is not None:
            outbox.curve_serverkey = secret.server_public
            outbox.curve_publickey, outbox.curve_secretkey = secret.client_public, secret.client_secret
        outbox.connect(address)
        yield outbox


def preamble(**changed: object) -> bytes:
    fields = {"sender": "peer", "stream": 7, "number": 0, "rank": None, "tensors": []}
    return msgspec.msgpack.encode(list((fields | changed).values()))


OTHER = Secret.generate()
STRANGERS = {
    "of another replica": OTHER,
    "with an unknown key": replace(SECRET, client_public=OTHER.client_public, client_secret=OTHER.client_secret),
    "with half a key": replace(SECRET, client_secret=OTHER.client_secret),
    "without any key": None,
}


@pytest.mark.parametrize("secret", STRANGERS.values(), ids=STRANGERS)
def test_who_has_not_the_secret_gets_nowhere(make_transport: NewTransport, secret: Secret | None) -> None:
    here, friend = make_transport("here"), make_transport("friend")
    friend.connect({"here": here.address})
    with stranger(here.address, secret) as outbox:
        for _ in range(10):
            outbox.send_multipart([preamble(), b"let me in"])
        assert here.receive(0.5) is None
        friend.send("here", b"hello")
        assert receive(here).header == b"hello"
        assert here.receive(0.1) is None
    with stranger(here.address, SECRET) as outbox:
        outbox.send_multipart([preamble(), b"the same, with the secret"])
        assert receive(here).header == b"the same, with the secret"


NOISE = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(48) + b"\x04" + os.urandom(300),
    b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47) + b"\x06\x40" + bytes(7) + b"a frame of 2**62 bytes",
    b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48) + b"\x04\x19\x05READY" + bytes(99),
)


def test_noise_from_strangers_neither_stops_nor_slows_anybody(make_transport: NewTransport) -> None:
    here, friend = make_transport("here"), make_transport("friend")
    friend.connect({"here": here.address})
    with ExitStack() as stack:
        for noise in 10 * NOISE:
            connection = stack.enter_context(socket.create_connection(host_and_port(here)))
            with suppress(ConnectionError):
                connection.sendall(noise)
        times_s = []
        for index in range(200):
            started = time.perf_counter()
            friend.send("here", number(index), [torch.zeros(4096)])
            assert receive(here).header == number(index)
            times_s.append(time.perf_counter() - started)
        assert sorted(times_s)[100] < 0.01
        assert here.receive(0.1) is None


def relay(server: socket.socket, onward: socket.socket, seen: bytearray) -> None:
    """Passes on what one caller and `onward` say to each other, and remembers it."""
    caller, _ = server.accept()
    with caller:
        while True:
            for ready in select.select([caller, onward], [], [])[0]:
                data = ready.recv(65536)
                if not data:
                    return
                seen.extend(data)
                (onward if ready is caller else caller).sendall(data)


def test_nobody_can_read_along(make_transport: NewTransport) -> None:
    here, friend, seen = make_transport("here"), make_transport("friend"), bytearray()
    with (
        socket.create_server((LOOPBACK, 0)) as server,
        socket.create_connection(host_and_port(here)) as onward,
    ):
        relaying = threading.Thread(target=relay, args=(server, onward, seen))
        relaying.start()
        friend.connect({"here": f"tcp://{LOOPBACK}:{server.getsockname()[1]}"})
        friend.send("here", b"a confidential header", [torch.full((64,), 65, dtype=torch.uint8)])
        assert receive(here).header == b"a confidential header"
        friend.close()
        relaying.join(PATIENCE_S)
    assert b"CURVE" in seen
    for secret in (b"confidential", b"A" * 8, z85.decode(SECRET.server_public), z85.decode(SECRET.client_public)):
        assert secret not in seen


@pytest.mark.parametrize("host", ["0.0.0.0", "localhost", "198.51.100.7"])
def test_it_listens_at_one_address_of_this_node_only(make_transport: NewTransport, host: str) -> None:
    _, port = host_and_port(make_transport("here"))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))
    with pytest.raises(ConfigError, match=f"host is {re.escape(repr(host))}.*node_address"):
        Transport("here", SECRET, host=host)


def test_the_secret_travels_but_does_not_show() -> None:
    assert pickle.loads(pickle.dumps(SECRET)) == SECRET
    assert repr(SECRET) == "Secret()"


# Malformed and missing


MALFORMED = {
    "one frame": ([preamble()], "1 frame"),
    "no msgpack": ([b"\xc1", b"header"], "malformed preamble"),
    "text that is none": ([preamble().replace(b"peer", b"p\xff\xffr"), b"header"], "malformed preamble"),
    "a field too many": ([msgspec.msgpack.encode(["peer", 7, 0, None, [], 1]), b"header"], "malformed preamble"),
    "a negative shape": ([preamble(tensors=[["int8", [-1]]]), b"header", b"x"], "malformed preamble"),
    "an unknown dtype": ([preamble(tensors=[["object", [1]]]), b"header", b"x"], "unknown dtype 'object'"),
    "too few bytes": ([preamble(tensors=[["float32", [2]]]), b"header", b"1234567"], "came with 7 bytes"),
    "a huge shape": ([preamble(tensors=[["int8", [1 << 60, 1 << 60]]]), b"header", b"x"], "more than"),
    "a tensor too few": ([preamble(tensors=[["int8", [1]]]), b"header"], "has 2 frames"),
    "by a link that is not there": ([preamble(rank=0, tensors=[["int8", [1]]]), b"header"], "no link"),
}


@pytest.mark.parametrize(("frames", "message"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_message_is_an_error_and_the_next_is_not(
    make_transport: NewTransport, frames: list[bytes], message: str
) -> None:
    here = make_transport("here")
    with stranger(here.address, SECRET) as outbox:
        outbox.send_multipart(frames)
        outbox.send_multipart([preamble(stream=8), b"the next one"])
        with pytest.raises(TransportError, match=message) as caught:
            here.receive(PATIENCE_S)
        assert caught.value.kind == "transport"
        assert receive(here).header == b"the next one"


def test_a_lost_message_is_noticed(make_transport: NewTransport) -> None:
    here = make_transport("here")
    with stranger(here.address, SECRET) as outbox:
        for index in (0, 1, 3, 4):
            outbox.send_multipart([preamble(number=index), number(index)])
        assert [receive(here).header for _ in range(2)] == [number(0), number(1)]
        with pytest.raises(TransportError, match="here got message 3 of peer where 2 was next"):
            here.receive(PATIENCE_S)
        assert receive(here).header == number(4)


# The end


def test_close_leaves_nothing(make_transport: NewTransport) -> None:
    make_transport("warm-up").close()
    before = num_files(), num_threads()
    here, there = make_transport("here"), make_transport("there")
    here.connect({"there": there.address, "dead": "tcp://127.0.0.1:9"})
    here.send("there", b"x")
    assert receive(there).header == b"x"
    for _ in range(100):
        here.send("dead", b"x", [torch.zeros(1 << 16)])
    address = host_and_port(here)
    started = time.perf_counter()
    for box in (here, there, here):
        box.close()
    assert time.perf_counter() - started < 1
    assert (num_files(), num_threads()) == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    for use in (lambda: here.send("there", b"x"), lambda: here.receive(0), lambda: here.connect({})):
        with pytest.raises(TransportError, match="the transport of here is closed"):
            use()
