"""Servers and an engine's transport, in this process. Tests of whole replicas show the rest."""

import re
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch

from rayspec.decode.stages import Progress
from rayspec.errors import TransportError
from rayspec.pipeline.collective import LOOPBACK, TensorLink
from rayspec.pipeline.messages import Broken, Connect, Connected, Follow, Moves
from rayspec.pipeline.server import ENGINE, NewEpoch, Server
from rayspec.pipeline.transport import Secret, Transport

SECRET = Secret()
PATIENCE_S = 60.0


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server("a", SECRET)
    server.listen(LOOPBACK)
    with closing(server.transport):
        yield server


@contextmanager
def _announced(server: Server, epoch: int) -> Iterator[Transport]:
    """A leader whose epoch the server has heard of."""
    with closing(Transport(ENGINE, SECRET, host=LOOPBACK)) as engine:
        engine.connect({"a": server.transport.address})
        engine.epoch = epoch
        engine.send("a", Connect(peers={ENGINE: engine.address}))
        with pytest.raises(NewEpoch):
            server.receive(PATIENCE_S)
        yield engine


def test_what_a_leader_announced_is_followed_in_any_epoch(server: Server) -> None:
    """The leader waits in the middle of it, and will only then look what is new."""
    with _announced(server, 2) as engine:
        engine.send("a", Connect(peers={ENGINE: engine.address}))  # in the same epoch it only names the peers anew
        engine.epoch = 1
        engine.send("a", Moves(moves=[]))
        engine.send("a", Follow(shape=(1, 2, 3)))
        received = server.receive(PATIENCE_S)
        assert received is not None
        assert isinstance(received.message, Follow)


def test_who_fails_tells_the_engine_why(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with _announced(server, 1) as engine:
        received = [engine.receive(PATIENCE_S)]
        monkeypatch.setattr(time, "sleep", lambda _: received.append(engine.receive(PATIENCE_S)))  # before it closes
        with pytest.raises(ValueError, match="a bug"), server.serving():
            raise ValueError("a bug")
        assert [one and one.message for one in received] == [Connected(), Broken(reason="ValueError: a bug")]


def test_who_cannot_listen_has_an_error_for_an_address() -> None:
    server = Server("a", SECRET)
    with pytest.raises(TransportError, match=r"a cannot listen at 203.0.113.1: "):
        server.listen("203.0.113.1")  # an address of no machine
    with pytest.raises(TransportError, match="cannot listen"):
        server._address.result(0.0)


def test_who_is_stuck_says_so_until_it_goes_on(server: Server) -> None:
    server.progress = Progress(clock=lambda: 60 * time.monotonic())
    with server.progress.of("Forward", 1):
        pass
    server.num_passes = 3
    with server.progress.of("Forward", 1):
        deadline = time.monotonic() + PATIENCE_S
        while not (status := server.status()).problem:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert re.match(r"has not finished a pass for \d+ s, and the pass was expected to take ", status.problem)
    assert status.num_passes == 3
    assert server.status().problem == ""


def test_a_stage_links_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the GPU that is current in the thread that joins, nor any GPU for a stage on the CPU."""
    asked = list[torch.device]()

    def join(*, device: torch.device, **others: Any) -> TensorLink:
        asked.append(device)
        raise TransportError("no GPU is here")

    monkeypatch.setattr(TensorLink, "join", join)
    for device in (torch.device("cuda", 1), torch.device("cpu")):
        stage = Server("stage-0", SECRET)
        stage.listen(LOOPBACK, rank=(0, 2), device=device)
        with closing(stage.transport), closing(Transport(ENGINE, SECRET, host=LOOPBACK)) as engine:
            engine.connect({"stage-0": stage.transport.address})
            engine.epoch = 1
            engine.send("stage-0", Connect(peers={ENGINE: engine.address}, link="127.0.0.1:1"))
            with pytest.raises(NewEpoch):
                stage.receive(PATIENCE_S)
            received = engine.receive(PATIENCE_S)
            assert received is not None
            assert received.message == Connected(link_error="no GPU is here")
    assert asked == [torch.device("cuda", 1), torch.device("cpu")]


def test_a_link_of_gpus_needs_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    gpu = torch.device("cuda", 0)
    with pytest.raises(TransportError, match="no NCCL"):
        TensorLink.join(rank=0, size=2, address="127.0.0.1:1", host=LOOPBACK, timeout_s=1, device=gpu)
