"""Endpoints and an engine's transport, in this process. Tests of whole replicas show the rest."""

import re
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from rayspec.decode.stages import Progress
from rayspec.pipeline.collective import LOOPBACK
from rayspec.pipeline.endpoint import ENGINE, Endpoint, NewEpoch
from rayspec.pipeline.messages import Connect, Follow, Moves
from rayspec.pipeline.transport import Secret, Transport

SECRET = Secret()
PATIENCE_S = 60.0


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with closing(Endpoint("a", SECRET, host=LOOPBACK)) as endpoint:
        yield endpoint


def test_what_a_leader_announced_is_followed_in_any_epoch(endpoint: Endpoint) -> None:
    """The leader waits in the middle of it, and will only then look what is new."""
    with closing(Transport(ENGINE, SECRET, host=LOOPBACK)) as engine:
        engine.connect({"a": endpoint.transport.address})
        engine.epoch = 2
        engine.send("a", Connect(peers={ENGINE: engine.address}))
        with pytest.raises(NewEpoch):
            endpoint.receive(PATIENCE_S)
        engine.epoch = 1
        engine.send("a", Moves(moves=[]))
        engine.send("a", Follow(shape=(1, 2, 3)))
        received = endpoint.receive(PATIENCE_S)
        assert received is not None
        assert isinstance(received.message, Follow)


def test_who_is_stuck_says_so_until_it_goes_on(endpoint: Endpoint) -> None:
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
