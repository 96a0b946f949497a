"""Answers that their clients hardly read, from the ingress through the front."""

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from starlette.responses import Response

from rayspec.serve.ingress import Ingress, build_app
from rayspec.serve.unread import Unread
from rayspec.serve.watch import Watch, WatchedReplica
from tests.serve.endpoint_process import head_of, served
from tests.serve.test_ingress import Model, ingress_of
from tests.waiting import wait_until

MEBIBYTE = 2**20
EVENT = b"data: " + b"x" * (MEBIBYTE - 8) + b"\n\n"
"""Of so many bytes that the system's buffers of a connection hold few."""


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, model: Model, most: int) -> Iterator[tuple[Ingress, tuple[str, int]]]:
    monkeypatch.setattr(Watch, "must_wait", lambda _watch, _model: False)
    ingress = ingress_of(model)
    ingress.unread = Unread(most)
    ingress.watch.replicas["demo"] = {"a": WatchedReplica(actor=None)}
    with served(build_app(ingress)) as address:
        yield ingress, address


def begun(address: tuple[str, int], key: str, *, stream: bool = True) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
    connection.settimeout(60)
    connection.connect(address)
    body = json.dumps({"model": "demo", "prompt": "a", "stream": stream}).encode()
    connection.sendall(head_of("/v1/completions", len(body), key) + body)
    return connection


def num_read(connection: socket.socket) -> int:
    num_bytes = 0
    try:
        while piece := connection.recv(MEBIBYTE):
            num_bytes += len(piece)
            if piece.endswith(b"0\r\n\r\n"):
                break
    except ConnectionResetError:
        pass
    return num_bytes


def test_a_stream_that_is_not_read_holds_no_place_once_the_model_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(*[EVENT] * 32)
    with serving(monkeypatch, model, most=64 * MEBIBYTE) as (ingress, address), begun(address, "a") as unread:
        assert model.begun.acquire(timeout=60)
        wait_until(lambda: ingress._admissions["demo"].under_way == 0, 60)
        assert ingress.entry.num_under_way == 1
        assert num_read(unread) > 32 * MEBIBYTE, "nothing is lost"


@pytest.mark.parametrize("stream", [True, False])
def test_of_answers_that_are_not_read_the_largest_is_broken_off(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    model = Model(*[EVENT] * 48)

    async def large(_: Model) -> bytes:
        return b"x" * (24 * MEBIBYTE) if not stream else b""

    monkeypatch.setattr(Model, "answer", large)
    with serving(monkeypatch, model, most=32 * MEBIBYTE) as (ingress, address), ExitStack() as stack:
        first = stack.enter_context(begun(address, "a", stream=stream))
        if not stream:
            wait_until(lambda: ingress.entry.num_under_way == 1, 60)
            wait_until(lambda: ingress._admissions["demo"].under_way == 0, 60)
            stack.enter_context(begun(address, "key", stream=stream))
        wait_until(lambda: ingress.entry.num_under_way == (0 if stream else 1), 60)
        assert num_read(first) < 24 * MEBIBYTE
        assert ingress.unread._num_bytes.total() <= 32 * MEBIBYTE


def test_an_event_that_comes_after_the_end_of_its_answer_does_not_count() -> None:
    """A cancelled wait may still return one. It would count for ever, and end the streams of others."""
    unread, ended, other = Unread(most=10), Response(), Response()

    async def run() -> None:
        unread.add(ended, 9)
        under_way = asyncio.create_task(unread.send(other, asyncio.sleep(60), ""))
        await asyncio.sleep(0)
        unread.add(other, 5)
        await asyncio.sleep(0)
        assert not under_way.done()
        under_way.cancel()

    asyncio.run(run())
    assert unread._num_bytes.total() == 0


def test_of_the_client_that_has_most_unread_the_largest_is_broken_off() -> None:
    """Many small answers of one client must not end the larger one of another."""
    unread, other = Unread(most=100), Response()
    many = [Response() for _ in range(4)]

    async def run() -> None:
        sizes = {other: 40} | dict(zip(many, (15, 25, 15, 15), strict=True))
        tasks = {
            one: asyncio.create_task(unread.send(one, asyncio.sleep(60), "b" if one is other else "a", num_bytes))
            for one, num_bytes in sizes.items()
        }
        await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED, timeout=10)
        assert [one for one, task in tasks.items() if task.done()] == [many[1]]
        for task in tasks.values():
            task.cancel()

    asyncio.run(run())
