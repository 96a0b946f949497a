"""Posts and an engine's mailbox, in this process; each is used by one thread at a time."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass

import pytest
import torch

from rayspec.decode.progress import Progress
from rayspec.errors import TransportError
from rayspec.pipeline import post as post_module
from rayspec.pipeline.collective import Rendezvous
from rayspec.pipeline.messages import (
    AnyMessage,
    Beat,
    Connect,
    Connected,
    Follow,
    Lap,
    Message,
    Moves,
    Peers,
    Ping,
    Stop,
    Usage,
    decode,
    encode,
)
from rayspec.pipeline.post import ENGINE, Letter, NewEpoch, Post, Ranks, Stopped
from rayspec.pipeline.transport import LOOPBACK, Mailbox, Secret

SECRET = Secret.generate()
PATIENCE_S = 10.0


@dataclass
class Office:
    """An engine's mailbox and two posts, in epoch 1."""

    engine: Mailbox
    a: Post
    b: Post

    @property
    def peers(self) -> dict[str, str]:
        return {"a": self.a.address, "b": self.b.address, ENGINE: self.engine.address}

    def send(self, peer: str, message: Message) -> None:
        self.engine.send(peer, encode(message))

    def connect(self, epoch: int) -> None:
        for name, post in (("a", self.a), ("b", self.b)):
            self.send(name, Connect(epoch=epoch, peers=self.peers))
            with pytest.raises(NewEpoch):
                post.receive(PATIENCE_S)

    def heard(self, kind: type[Message], timeout_s: float = PATIENCE_S) -> tuple[str, AnyMessage] | None:
        """The next message of a kind, and its sender."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            envelope = self.engine.receive(left_s)
            if envelope is not None and isinstance(message := decode(envelope.header), kind):
                return envelope.sender, message
        return None


@pytest.fixture
def office(monkeypatch: pytest.MonkeyPatch) -> Iterator[Office]:
    monkeypatch.setattr(post_module, "BEAT_EVERY_S", 0.02)
    monkeypatch.setattr(post_module, "_QUIET_AFTER_S", 0.2)
    with ExitStack() as stack:
        engine, a, b = (
            stack.enter_context(closing(make(name, SECRET, host=LOOPBACK)))
            for make, name in ((Mailbox, ENGINE), (Post, "a"), (Post, "b"))
        )
        office = Office(engine, a, b)
        engine.connect({"a": a.address, "b": b.address})
        office.connect(1)
        assert {office.heard(Connected)[0] for _ in range(2)} == {"a", "b"}
        yield office


def receive(post: Post) -> Letter:
    letter = post.receive(PATIENCE_S)
    assert letter is not None
    return letter


def test_a_new_epoch_is_answered_and_told(office: Office) -> None:
    office.connect(2)
    assert office.a.epoch == office.b.epoch == 2
    assert {office.heard(Connected) for _ in range(2)} == {("a", Connected(epoch=2)), ("b", Connected(epoch=2))}


def test_a_link_that_cannot_be_joined_is_told_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post_module, "_LINK_TIMEOUT_S", 0.2)
    rendezvous = Rendezvous(LOOPBACK)
    ranks = Ranks(rank=0, size=2, ahead={"b": 1})
    with (
        closing(Mailbox(ENGINE, SECRET, host=LOOPBACK)) as engine,
        closing(Post("a", SECRET, host=LOOPBACK, ranks=ranks)) as post,
    ):
        engine.connect({"a": post.address})
        engine.send("a", encode(Connect(epoch=1, peers={ENGINE: engine.address}, link=rendezvous.address)))
        with pytest.raises(NewEpoch):
            post.receive(PATIENCE_S)
        answers = []
        while not answers or not isinstance(answers[-1], Connected):
            envelope = engine.receive(PATIENCE_S)
            assert envelope is not None
            answers.append(decode(envelope.header))
        assert "rank 0 of 2 could not join" in answers[-1].link_error
    rendezvous.close()


def test_letters_of_the_epoch_arrive_with_their_tensors(office: Office) -> None:
    office.a.send("b", Lap(epoch=1, route=["x"]), [torch.arange(3.0)])
    letter = receive(office.b)
    assert letter.sender == "a"
    assert encode(letter.message) == encode(Lap(epoch=1, route=["x"]))
    assert torch.equal(letter.tensors[0], torch.arange(3.0))
    assert office.b.receive(0.0) is None


def test_what_is_left_of_an_older_epoch_is_dropped(office: Office) -> None:
    office.a.send("b", Usage(epoch=1))
    office.a.send("b", Lap(epoch=1, route=[]))
    time.sleep(0.1)  # they are on the way before the new epoch is
    office.send("b", Connect(epoch=2, peers=office.peers))
    received = []
    with pytest.raises(NewEpoch):
        while True:
            received.append(receive(office.b))
    office.a.send("b", Lap(epoch=1, route=[]))  # a has not heard yet
    office.send("b", Usage(epoch=2))
    assert receive(office.b).message == Usage(epoch=2)
    assert all(letter.message.epoch == 1 for letter in received)


def test_what_a_leader_announced_is_followed_in_any_epoch(office: Office) -> None:
    """The leader waits in the middle of it, and will only then look what is new."""
    office.send("b", Connect(epoch=2, peers=office.peers))
    with pytest.raises(NewEpoch):
        office.b.receive(PATIENCE_S)
    office.a.send("b", Moves(epoch=1, moves=[]))
    office.a.send("b", Follow(epoch=1, shape=(1, 2, 3)))
    assert isinstance(receive(office.b).message, Follow)


def test_peers_change_within_an_epoch(office: Office) -> None:
    with closing(Mailbox("c", SECRET, host=LOOPBACK)) as new:
        with pytest.raises(TransportError, match="knows no peer 'c'"):
            office.a.send("c", Usage(epoch=1))
        office.send("a", Peers(epoch=1, peers=office.peers | {"c": new.address}))
        assert office.a.receive(0.2) is None
        office.a.send("c", Usage(epoch=1))
        assert new.receive(PATIENCE_S) is not None
        assert office.a.epoch == 1


def test_it_is_told_to_stop(office: Office) -> None:
    office.send("a", Stop(epoch=0))
    with pytest.raises(Stopped):
        office.a.receive(PATIENCE_S)


def test_deferred_letters_come_in_order_and_not_in_another_epoch(office: Office) -> None:
    for number in range(3):
        office.send("a", Lap(epoch=1, route=[str(number)]))
    first, second, third = (receive(office.a) for _ in range(3))
    office.a.defer(first)
    office.a.defer(second)
    assert office.a.take_deferred() is first
    office.connect(2)
    assert office.a.take_deferred() is None
    office.a.defer(third)
    assert office.a.take_deferred() is third


def test_it_beats_while_the_engine_listens(office: Office) -> None:
    assert office.heard(Beat) is not None
    until = time.monotonic() + 0.6  # three times the time after which it would be quiet
    while time.monotonic() < until:
        ping(office)
    while office.engine.receive(0.0) is not None:
        pass
    deadline = time.monotonic() + PATIENCE_S
    while office.heard(Beat, 0.02) is None:
        assert time.monotonic() < deadline
        ping(office)


def ping(office: Office) -> None:
    for name, post in (("a", office.a), ("b", office.b)):
        office.send(name, Ping(epoch=1))
        assert post.receive(0.02) is None


def test_it_keeps_quiet_when_nobody_listens(office: Office) -> None:
    time.sleep(0.4)
    while office.engine.receive(0.0) is not None:
        pass
    assert office.heard(Beat, 0.2) is None
    office.send("a", Ping(epoch=1))
    assert office.a.receive(0.1) is None
    assert office.heard(Beat)[0] == "a"


def test_who_is_busy_beats_though_it_hears_nothing(office: Office) -> None:
    with office.a.progress.of("Forward", 1):
        time.sleep(0.4)
        while office.engine.receive(0.0) is not None:
            pass
        sender, beat = office.heard(Beat)
    assert (sender, beat.problem) == ("a", "")
    assert beat.worked_s >= 0.4
    time.sleep(0.1)
    while office.engine.receive(0.0) is not None:
        pass
    assert office.heard(Beat, 0.1) is None


def test_who_is_stuck_says_so_until_it_goes_on(office: Office) -> None:
    office.a.progress = Progress(clock=lambda: 60 * time.monotonic())
    with office.a.progress.of("Forward", 1):
        pass
    with office.a.progress.of("Forward", 1):
        deadline = time.monotonic() + PATIENCE_S
        while (heard := office.heard(Beat)) is None or not heard[1].problem:
            assert time.monotonic() < deadline
    assert re.match(r"has not finished a pass for \d+ s, and the pass was expected to take ", heard[1].problem)
    while office.heard(Beat, 0.1) is not None:
        pass
    office.send("a", Ping(epoch=1))
    assert office.a.receive(0.1) is None
    sender, beat = office.heard(Beat)
    assert (sender, beat.problem) == ("a", "")


def test_closing_ends_the_heartbeat(office: Office) -> None:
    office.a.close()
    assert not office.a._heart.is_alive()
