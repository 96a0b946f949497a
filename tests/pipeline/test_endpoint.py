"""Endpoints and an engine's transport, in this process; each is used by one thread at a time."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass

import pytest

from rayspec.decode.progress import Progress
from rayspec.errors import TransportError
from rayspec.pipeline import endpoint as endpoint_module
from rayspec.pipeline.collective import LOOPBACK, Rendezvous
from rayspec.pipeline.endpoint import ENGINE, Endpoint, NewEpoch
from rayspec.pipeline.messages import (
    AnyMessage,
    Connect,
    Connected,
    Follow,
    Lap,
    Measure,
    Message,
    Moves,
)
from rayspec.pipeline.transport import Received, Secret, Transport

SECRET = Secret.generate()
PATIENCE_S = 10.0


@dataclass
class Network:
    """An engine's transport and two endpoints, in epoch 1."""

    engine: Transport
    a: Endpoint
    b: Endpoint

    @property
    def peers(self) -> dict[str, str]:
        return {"a": self.a.address, "b": self.b.address, ENGINE: self.engine.address}

    def send(self, peer: str, message: Message) -> None:
        self.engine.send(peer, message)

    def connect(self, epoch: int) -> None:
        for name, endpoint in (("a", self.a), ("b", self.b)):
            self.send(name, Connect(epoch=epoch, peers=self.peers))
            with pytest.raises(NewEpoch):
                endpoint.receive(PATIENCE_S)

    def heard(self, kind: type[Message], timeout_s: float = PATIENCE_S) -> tuple[str, AnyMessage] | None:
        """The next message of a kind, and its sender."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            received = self.engine.receive(left_s)
            if received is not None and isinstance(received.message, kind):
                return received.sender, received.message
        return None


@pytest.fixture
def network() -> Iterator[Network]:
    with ExitStack() as stack:
        engine, a, b = (
            stack.enter_context(closing(make(name, SECRET, host=LOOPBACK)))
            for make, name in ((Transport, ENGINE), (Endpoint, "a"), (Endpoint, "b"))
        )
        network = Network(engine, a, b)
        engine.connect({"a": a.address, "b": b.address})
        network.connect(1)
        assert {network.heard(Connected)[0] for _ in range(2)} == {"a", "b"}
        yield network


def receive(endpoint: Endpoint) -> Received:
    received = endpoint.receive(PATIENCE_S)
    assert received is not None
    return received


def test_a_link_that_cannot_be_joined_is_told_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "_LINK_TIMEOUT_S", 0.2)
    rendezvous = Rendezvous(LOOPBACK)
    with (
        closing(Transport(ENGINE, SECRET, host=LOOPBACK)) as engine,
        closing(Endpoint("a", SECRET, host=LOOPBACK, rank=(0, 2))) as endpoint,
    ):
        engine.connect({"a": endpoint.address})
        engine.send("a", Connect(epoch=1, peers={ENGINE: engine.address}, link=rendezvous.address))
        with pytest.raises(NewEpoch):
            endpoint.receive(PATIENCE_S)
        answers = []
        while not answers or not isinstance(answers[-1], Connected):
            received = engine.receive(PATIENCE_S)
            assert received is not None
            answers.append(received.message)
        assert "rank 0 of 2 could not join" in answers[-1].link_error
    rendezvous.close()


def test_what_is_left_of_an_older_epoch_is_dropped(network: Network) -> None:
    network.a.send("b", Measure(epoch=1))
    network.a.send("b", Lap(epoch=1, route=[]))
    time.sleep(0.1)  # they are on the way before the new epoch is
    network.send("b", Connect(epoch=2, peers=network.peers))
    received = []
    with pytest.raises(NewEpoch):
        while True:
            received.append(receive(network.b))
    network.a.send("b", Lap(epoch=1, route=[]))  # a has not heard yet
    network.send("b", Measure(epoch=2))
    assert receive(network.b).message == Measure(epoch=2)
    assert all(one.message.epoch == 1 for one in received)


def test_what_a_leader_announced_is_followed_in_any_epoch(network: Network) -> None:
    """The leader waits in the middle of it, and will only then look what is new."""
    network.send("b", Connect(epoch=2, peers=network.peers))
    with pytest.raises(NewEpoch):
        network.b.receive(PATIENCE_S)
    network.a.send("b", Moves(epoch=1, moves=[]))
    network.a.send("b", Follow(epoch=1, shape=(1, 2, 3)))
    assert isinstance(receive(network.b).message, Follow)


def test_peers_change_within_an_epoch(network: Network) -> None:
    with closing(Transport("c", SECRET, host=LOOPBACK)) as new:
        with pytest.raises(TransportError, match="knows no peer 'c'"):
            network.a.send("c", Measure(epoch=1))
        network.send("a", Connect(epoch=1, peers=network.peers | {"c": new.address}))
        assert network.a.receive(0.2) is None
        network.a.send("c", Measure(epoch=1))
        assert new.receive(PATIENCE_S) is not None
        assert network.a.epoch == 1


def test_who_is_stuck_says_so_until_it_goes_on(network: Network) -> None:
    endpoint = network.a
    endpoint.progress = Progress(clock=lambda: 60 * time.monotonic())
    with endpoint.progress.of("Forward", 1):
        pass
    endpoint.num_passes = 3
    with endpoint.progress.of("Forward", 1):
        deadline = time.monotonic() + PATIENCE_S
        while not (status := endpoint.status()).problem:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert re.match(r"has not finished a pass for \d+ s, and the pass was expected to take ", status.problem)
    assert status.num_passes == 3
    assert endpoint.status().problem == ""
