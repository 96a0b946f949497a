"""Ranks are threads of this process, where one is not to die; the backend is gloo."""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest
import torch

from rayspec.errors import TransportError
from rayspec.pipeline.collective import LOOPBACK, MAX_PENDING_TENSORS, Rendezvous, TensorLink
from rayspec.pipeline.messages import Failed
from rayspec.pipeline.transport import Secret, Transport
from tests.listening import listening_hosts
from tests.pipeline.middle_rank import TIMEOUT_S, double, join, middle

SHORT_S = 0.5
Joined = Callable[..., Sequence[TensorLink]]


@pytest.fixture
def joined() -> Iterator[Joined]:
    """Makes the links of all ranks, which are left after the test."""
    with ExitStack() as stack:

        def join_all(size: int, timeout_s: float = TIMEOUT_S) -> Sequence[TensorLink]:
            rendezvous = stack.enter_context(closing(Rendezvous(LOOPBACK)))
            with ThreadPoolExecutor(size) as pool:
                links = list(pool.map(lambda rank: join(rank, size, rendezvous.address, timeout_s), range(size)))
            for link in links:
                stack.callback(link.leave)
            return links

        yield join_all


def files_and_threads() -> tuple[int, int]:
    """How many this process has, once that no longer changes: they end in the background."""
    before = None
    while before != (now := (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))):
        before = now
        time.sleep(0.2)
    return now


# Peers that do not answer


def test_the_others_notice_a_dead_rank_and_join_again_with_its_replacement(joined: Joined) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = multiprocessing.Pipe()
    process = context.Process(target=middle, args=(there,))
    process.start()
    try:
        assert here.recv() == "ready"
        with closing(Rendezvous(LOOPBACK)) as rendezvous, ThreadPoolExecutor(2) as pool:
            here.send(rendezvous.address)
            started = time.monotonic()
            first, last = pool.map(lambda rank: join(rank, 3, rendezvous.address), (0, 2))
            assert time.monotonic() - started < TIMEOUT_S / 2
            for index in range(20):
                first.send(torch.full((8,), float(index)), 1)
                assert last.receive(torch.float32, (8,), 1).tolist() == [2.0 * index] * 8
            process.kill()
            started = time.monotonic()
            with pytest.raises(TransportError, match="rank 2 received nothing from rank 1"):
                last.receive(torch.float32, (8,), 1)
            with pytest.raises(TransportError, match="rank 0 could not send to rank 1"):
                for _ in range(2 * MAX_PENDING_TENSORS):
                    first.send(torch.zeros(8), 1)
            assert time.monotonic() - started < TIMEOUT_S / 2
    finally:
        process.kill()
        process.join()
    first, replacement, last = joined(3)
    for index in range(20):
        first.send(torch.full((8,), float(index)), 1)
        double(replacement)
        assert last.receive(torch.float32, (8,), 1).tolist() == [2.0 * index] * 8


# Joining and leaving


def test_it_listens_at_its_host_only_and_leaves_nothing(joined: Joined) -> None:
    for link in joined(2):
        link.leave()
    before, hosts_before = files_and_threads(), listening_hosts()
    with closing(Rendezvous(LOOPBACK)) as rendezvous, ThreadPoolExecutor(2) as pool:
        links = list(pool.map(lambda rank: join(rank, 2, rendezvous.address), range(2)))
        hosts = listening_hosts() - (hosts_before - {"0100007F"})
        assert hosts
        assert hosts <= {"0100007F", "0000000000000000FFFF00000100007F"}
        for link in links:
            link.leave()
            link.leave()
    assert files_and_threads() == before


# With transports


@pytest.fixture
def transports(joined: Joined) -> Iterator[tuple[Transport, Transport]]:
    secret, links = Secret(), joined(2, SHORT_S)
    with (
        closing(Transport("first", secret, host=LOOPBACK, link=links[0])) as first,
        closing(Transport("second", secret, host=LOOPBACK, link=links[1])) as second,
    ):
        first.connect({"second": second.address})
        second.connect({"first": first.address})
        yield first, second


def test_headers_go_by_frames_and_tensors_by_the_link(
    transports: tuple[Transport, Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = transports
    assert first.link is not None
    by_link: list[int] = []
    send = first.link.send
    monkeypatch.setattr(first.link, "send", lambda tensor, rank: (by_link.append(tensor.numel()), send(tensor, rank)))
    for index in range(1, 50):
        to_rank = 1 if index % 3 else None
        first.send(
            "second",
            Failed(work_id=index, reason=""),
            [torch.full((index, 2), index), torch.tensor(True)],
            to_rank=to_rank,
        )
        if index % 7 == 0:
            for late in range(index - 6, index + 1):
                received = second.receive(TIMEOUT_S)
                assert received is not None
                numbers, flag = received.tensors
                assert (received.sender, received.message) == ("first", Failed(work_id=late, reason=""))
                assert torch.equal(numbers, torch.full((late, 2), late))
                assert (flag.dtype, flag.item()) == (torch.bool, True)
    assert by_link == [size for index in range(1, 50) if index % 3 for size in (2 * index, 1)]


def test_tensors_that_do_not_follow_their_header(transports: tuple[Transport, Transport]) -> None:
    first, second = transports
    assert first.link is not None
    first.link.send = lambda tensor, to_rank: None
    first.send("second", Failed(work_id=1, reason=""), [torch.zeros(1)], to_rank=1)
    with pytest.raises(TransportError, match="rank 1 received nothing from rank 0"):
        second.receive(TIMEOUT_S)
    first.send("second", Failed(work_id=2, reason=""))
    received = second.receive(TIMEOUT_S)
    assert received is not None
    assert received.message == Failed(work_id=2, reason="")


def test_a_lost_header_closes_the_link(transports: tuple[Transport, Transport]) -> None:
    """Its tensors would otherwise be taken for those of the next message."""
    first, second = transports
    first._connections["second"].num_sent = 1
    first.send("second", Failed(work_id=1, reason=""), [torch.zeros(1)], to_rank=1)
    with pytest.raises(TransportError, match="messages are lost"):
        second.receive(TIMEOUT_S)
    assert second.link is not None
    with pytest.raises(TransportError, match="is closed"):
        second.link.receive(torch.float32, (1,), 0)
