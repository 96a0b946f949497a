"""Transports talk to each other in this process, and to strangers who speak plain bytes."""

import gc
import os
import pickle
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import zmq
from zmq.utils import z85

from rayspec.errors import TransportError
from rayspec.pipeline import transport
from rayspec.pipeline.collective import LOOPBACK
from rayspec.pipeline.messages import Connect, Envelope, Failed, Message, encode
from rayspec.pipeline.transport import Received, Secret, Transport

PATIENCE_S = 60.0
SECRET = Secret()
NewTransport = Callable[..., Transport]


@pytest.fixture
def make_transport() -> Iterator[NewTransport]:
    """Makes transports that are closed after the test."""
    with ExitStack() as stack:

        def new(name: str, secret: Secret = SECRET) -> Transport:
            return stack.enter_context(closing(Transport(name, secret, host=LOOPBACK)))

        yield new


def take(box: Transport) -> Received:
    received = box.receive(PATIENCE_S)
    assert received is not None
    return received


def receive(box: Transport) -> int:
    """The number of the next message."""
    message = take(box).message
    assert isinstance(message, Failed)
    return message.work_id


def number(value: int) -> Message:
    return Failed(work_id=value, reason="")


def host_and_port(box: Transport) -> tuple[str, int]:
    host, _, port = box.address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


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
            here.send("here", number(3), [sent, sent.T if len(shape) == 2 else sent])
            for arrived in take(here).tensors:
                assert (arrived.dtype, arrived.shape) == (dtype, shape)
                assert arrived.reshape(-1).view(torch.uint8).tolist() == sent.reshape(-1).view(torch.uint8).tolist()
                assert arrived.is_contiguous()
                assert arrived.data_ptr() % 16 == 0
    numbers = torch.arange(12.0).reshape(3, 4)
    here.send("here", number(4), [numbers.T, numbers.requires_grad_()])
    with torch.no_grad():
        numbers.zero_()
    transposed, whole = take(here).tensors
    assert transposed.T.tolist() == whole.add_(0).tolist() == torch.arange(12.0).reshape(3, 4).tolist()


def test_tensors_larger_than_a_frame_arrive_in_one_piece(
    make_transport: NewTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "MAX_FRAME_BYTES", 10)
    here = make_transport("here")
    here.connect({"here": here.address})
    sent = [torch.arange(5.0), torch.zeros(3, 0), torch.arange(5, dtype=torch.int16), torch.tensor(7.0)]
    here.send("here", number(0), sent)
    assert [tensor.tolist() for tensor in take(here).tensors] == [tensor.tolist() for tensor in sent]


def test_a_tensor_that_cannot_be_sent(make_transport: NewTransport) -> None:
    here = make_transport("here")
    here.connect({"here": here.address})
    with pytest.raises(TransportError, match="complex64 cannot be sent; use one of float64, float32"):
        here.send("here", number(0), [torch.zeros(2, dtype=torch.complex64)])
    with pytest.raises(TransportError, match="no link"):
        here.send("here", number(0), [torch.zeros(2)], to_rank=1)
    here.send("here", number(9))
    assert receive(here) == 9


# Peers


def test_another_thread_wakes_whoever_waits(make_transport: NewTransport) -> None:
    here, there = make_transport("here"), make_transport("there")
    there.connect({"here": here.address})
    waker = threading.Timer(0.1, here.wake)
    waker.start()
    started = time.monotonic()
    assert here.receive(120.0) is None
    assert time.monotonic() - started < 60
    waker.join()
    for _ in range(100_000):  # more than are kept
        here.wake()
    there.send("here", number(7))
    while (received := here.receive(PATIENCE_S)) is None:
        pass
    assert received.message == number(7)
    here.close()
    here.wake()


def test_connect_replaces_what_changed_and_nothing_else(make_transport: NewTransport) -> None:
    here, stays, old, new = (make_transport(name) for name in ("here", "stays", "moves", "moves"))
    here.connect({"stays": stays.address, "moves": old.address, "goes": old.address})
    for index in range(3):
        here.send("stays", number(index))
        here.send("moves", number(10))
    here.connect({"stays": stays.address, "moves": new.address})
    here.send("stays", number(3))
    here.send("moves", number(11))
    assert [receive(stays) for _ in range(4)] == [0, 1, 2, 3]
    assert receive(new) == 11
    with pytest.raises(TransportError, match=r"here knows no peer 'goes'; it knows \['moves', 'stays'\]"):
        here.send("goes", number(0))


def test_too_much_waits_for_a_dead_peer(make_transport: NewTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_WAITING_MESSAGES", 10)
    here, dead = make_transport("here"), make_transport("dead")
    dead.close()
    here.connect({"dead": dead.address})
    for _ in range(10):
        here.send("dead", number(0), [torch.zeros(9)])
    with pytest.raises(TransportError, match="10 messages are waiting for dead"):
        here.send("dead", number(0))


# Who may not


@contextmanager
def stranger(address: str, secret: Secret | None) -> Iterator[zmq.Socket[bytes]]:
    """Speaks ZeroMQ, and CURVE with the keys of `secret`, but is no transport."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as outbox:
        outbox.linger = 0
        if secret is not None:
            outbox.curve_serverkey = secret.server[0]
            outbox.curve_publickey, outbox.curve_secretkey = secret.client
        outbox.connect(address)
        yield outbox


def envelope(value: int, *, stream: int = 7, at: int = 0) -> bytes:
    return encode(Envelope("peer", stream, at, None, (), number(value)))


OTHER = Secret()
STRANGERS = {
    "of another replica": OTHER,
    "with an unknown key": replace(SECRET, client=OTHER.client),
    "with half a key": replace(SECRET, client=(SECRET.client[0], OTHER.client[1])),
    "without any key": None,
}


@pytest.mark.parametrize("secret", STRANGERS.values(), ids=STRANGERS)
def test_who_has_not_the_secret_gets_nowhere(make_transport: NewTransport, secret: Secret | None) -> None:
    here, friend = make_transport("here"), make_transport("friend")
    friend.connect({"here": here.address})
    with stranger(here.address, secret) as outbox:
        for _ in range(10):
            outbox.send_multipart([envelope(1)])
        assert here.receive(0.5) is None
        friend.send("here", number(2))
        assert receive(here) == 2
        assert here.receive(0.1) is None
    with stranger(here.address, SECRET) as outbox:
        outbox.send_multipart([envelope(3)])
        assert receive(here) == 3, "the same, with the secret"


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
            assert receive(here) == index
            times_s.append(time.perf_counter() - started)
        assert sorted(times_s)[100] < 1
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
    with socket.create_server((LOOPBACK, 0)) as server, socket.create_connection(host_and_port(here)) as onward:
        relaying = threading.Thread(target=relay, args=(server, onward, seen))
        relaying.start()
        friend.connect({"here": f"tcp://{LOOPBACK}:{server.getsockname()[1]}"})
        friend.send("here", Connect(peers={"confidential": "x"}), [torch.full((64,), 65, dtype=torch.uint8)])
        assert isinstance(take(here).message, Connect)
        friend.close()
        relaying.join(PATIENCE_S)
    assert b"CURVE" in seen
    for secret in (b"confidential", b"A" * 8, z85.decode(SECRET.server[0]), z85.decode(SECRET.client[0])):
        assert secret not in seen


def test_it_listens_at_one_address_of_this_node_only(make_transport: NewTransport) -> None:
    _, port = host_and_port(make_transport("here"))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))


def test_the_secret_travels_but_does_not_show() -> None:
    assert pickle.loads(pickle.dumps(SECRET)) == SECRET
    assert repr(SECRET) == "Secret()"


# Malformed and missing


def test_a_malformed_message_is_an_error_and_the_next_is_not(make_transport: NewTransport) -> None:
    here = make_transport("here")
    with stranger(here.address, SECRET) as outbox:
        outbox.send_multipart([b"\xc1"])
        outbox.send_multipart([envelope(5, stream=8)])
        with pytest.raises(TransportError, match="malformed"):
            here.receive(PATIENCE_S)
        assert receive(here) == 5


def test_a_lost_message_is_noticed(make_transport: NewTransport) -> None:
    here = make_transport("here")
    with stranger(here.address, SECRET) as outbox:
        for index in (0, 1, 3, 4):
            outbox.send_multipart([envelope(index, at=index)])
        assert [receive(here) for _ in range(2)] == [0, 1]
        with pytest.raises(TransportError, match="here got message 3 of peer where 2 was next"):
            here.receive(PATIENCE_S)
        assert receive(here) == 4


# The end


def test_close_leaves_nothing(make_transport: NewTransport) -> None:
    make_transport("warm-up").close()
    before = num_files(), num_threads()
    here, there = make_transport("here"), make_transport("there")
    here.connect({"there": there.address, "dead": "tcp://127.0.0.1:9"})
    here.send("there", number(1))
    assert receive(there) == 1
    for _ in range(100):
        here.send("dead", number(0), [torch.zeros(1 << 16)])
    address = host_and_port(here)
    for box in (here, there, here):
        box.close()
    assert (num_files(), num_threads()) == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    for use in (lambda: here.send("there", number(1)), lambda: here.receive(0), lambda: here.connect({})):
        with pytest.raises(TransportError, match="the transport of here is closed"):
            use()


def test_a_transport_that_is_garbage_with_its_sockets_holds_up_nobody() -> None:
    here: Any = Transport("here", Secret(), host="127.0.0.1")
    here.connect({"here": here.address})
    here.itself, gone = here, weakref.ref(here)
    del here
    gc.collect()
    assert gone() is None
