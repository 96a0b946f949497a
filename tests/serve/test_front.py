"""The HTTP server under clients that are slow, strange or hostile, with a small application behind it."""

import asyncio
import itertools
import json
import resource
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from typing import ClassVar

import pytest
from ray.util.metrics import Counter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message

from rayspec.serve import front
from rayspec.serve.front import _in_pieces
from tests.serve.endpoint_process import served
from tests.waiting import wait_until

TIMEOUT_S = 0.4
POST = b"POST /echo HTTP/1.1\r\nhost: localhost\r\n"


async def echo(request: Request) -> JSONResponse:
    headers = {name: request.headers[header] for name, header in (("id", "x-request-id"), ("host", "host"))}
    return JSONResponse({"body": (await request.body()).decode(), **headers})


async def refuse(request: Request) -> JSONResponse:
    """Refuse a body after its first megabyte."""
    num_bytes = 0
    async for piece in request.stream():
        num_bytes += len(piece)
        if num_bytes > 2**20:
            break
    return JSONResponse({"error": "busy"}, status_code=429)


async def long(request: Request) -> Response:
    """Some megabytes, as a stream or at once."""
    if "whole" in request.query_params:
        return Response(b"x" * 2**25)

    async def pieces() -> AsyncIterator[bytes]:
        STREAMS.append("begun")
        try:
            for _ in range(2**9):
                yield b"x" * 2**16
        finally:
            STREAMS.append("ended")

    return StreamingResponse(pieces())


STREAMS: list[str] = []


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with started(write_timeout_s=2 * TIMEOUT_S) as address:
        yield address


def started(*, write_timeout_s: float, header_timeout_s: float = TIMEOUT_S) -> AbstractContextManager[tuple[str, int]]:
    routes = [Route("/echo", echo, methods=["GET", "POST"]), Route("/long", long)]
    app = Starlette(routes=[*routes, Route("/refuse", refuse, methods=["POST"])])
    return served(app, header_timeout_s=header_timeout_s, write_timeout_s=write_timeout_s)


def answer(connection: socket.socket) -> tuple[bytes, bytes, bytes]:
    """Status line, headers and body of the next response; empty where the connection was closed."""
    with connection.makefile("rb") as reader:
        status, *headers = iter(lambda: reader.readline().rstrip(), b"")
        lengths = [int(line.partition(b":")[2]) for line in headers if line.lower().startswith(b"content-length")]
        return status, b"\n".join(headers).lower(), reader.read(lengths[0] if lengths else -1)


def exchange(address: tuple[str, int], *parts: bytes, pause_s: float = 0.0) -> tuple[bytes, bytes, bytes]:
    with socket.create_connection(address, timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(pause_s)
        return answer(connection)


def code_of(body: bytes) -> str:
    code: str = json.loads(body)["error"]["code"]
    return code


@pytest.mark.parametrize(
    "headers",
    [
        b"",
        b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n",
        b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: YQ==\r\n",
        b"x-strange: \xff\xfe\r\n",
        b"x-long: " + b"a" * 16_000 + b"\r\n",
        b"".join(b"x-%d: a\r\n" % number for number in range(100)),
    ],
)
def test_a_body_is_read_whatever_stands_before_it(address: tuple[str, int], headers: bytes) -> None:
    status, _, body = exchange(address, POST + headers + b"content-length: 4\r\n\r\nbody")
    assert (status, json.loads(body)["body"]) == (b"HTTP/1.1 200 OK", "body")


@pytest.mark.parametrize(
    "request_head",
    [
        b"\x16\x03\x01\x02\x00\x01" * 40,
        b"GET /echo HTTP/1.1\r\n\r\n",
        POST + b"host: other\r\n\r\n",
        POST + b"content-length: " + b"9" * 5000 + b"\r\n\r\n",
        POST + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n",
        *(POST + b"x-long: " + b"a" * num_bytes + b"\r\n\r\n" for num_bytes in (2**14, 2**15, 2**17)),
        POST + b"a:\r\n" * 600 + b"\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 2000,
        POST + b"transfer-encoding: chunked\r\n\r\n" + (b"20\r\n" + b"a" * 32 + b"\r\n") * 1100,
    ],
)
def test_what_is_no_request_is_told_as_openai_tells_it(address: tuple[str, int], request_head: bytes) -> None:
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(request_head)
        status, _, body = answer(connection)
        assert (status, code_of(body)) == (b"HTTP/1.1 400 Bad Request", "invalid_http")
        with suppress(ConnectionResetError):  # where a part of the request was not read
            assert connection.recv(1) == b"", "what comes next on the connection cannot be told apart"


def test_answers_that_nobody_reads_are_given_up(address: tuple[str, int]) -> None:
    """As streams and whole, on connections that are to stay and that are to end."""
    STREAMS.clear()
    with ExitStack() as stack:
        unread = []
        for path, header in itertools.product((b"/long", b"/long?whole"), (b"", b"connection: close\r\n")):
            unread.append(stack.enter_context(socket.create_connection(address, timeout=60)))
            unread[-1].sendall(b"GET " + path + b" HTTP/1.1\r\nhost: localhost\r\n" + header + b"\r\n")
        wait_until(lambda: STREAMS.count("ended") == 2)
        time.sleep(3 * TIMEOUT_S)  # the whole answers began at the same time
        for connection in unread:
            with suppress(ConnectionResetError), connection.makefile("rb") as reader:
                assert len(reader.read()) < 2**25
    assert STREAMS.count("begun") == 2


@pytest.mark.parametrize("path", [b"/long", b"/long?whole"])
def test_an_answer_that_is_read_slowly_comes_whole(address: tuple[str, int], path: bytes) -> None:
    num_bytes = 0
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(b"GET " + path + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        while piece := connection.recv(2**20):
            num_bytes += len(piece)
            time.sleep(TIMEOUT_S / 10)
    assert num_bytes > 2**25


def test_a_client_that_leaves_in_a_large_answer_is_noticed_before_the_next_piece() -> None:
    """The event loop learns of it. Until then each write was a line in the log: 910 for an answer of 60 MB."""
    written: list[Message] = []

    async def run() -> None:
        lost = asyncio.Event()

        async def send(message: Message) -> None:
            if not lost.is_set():
                written.append(message)
                asyncio.get_running_loop().call_soon(lost.set)

        await _in_pieces(send)({"type": "http.response.body", "body": b"x" * 2**20})

    asyncio.run(run())
    assert len(written) == 1


def test_a_client_that_ends_its_side_early_is_told(address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(POST + b"content-length: 4\r\n\r\nbod")
        connection.shutdown(socket.SHUT_WR)
        status, _, body = answer(connection)
    assert (status, code_of(body)) == (b"HTTP/1.1 400 Bad Request", "half_closed")


class TestSlowHeaders:
    def test_headers_that_come_bit_by_bit_are_given_up(self, address: tuple[str, int]) -> None:
        start_s = time.monotonic()
        parts = (POST, b"a: b\r\n", b"c: d\r\n")
        status, _, body = exchange(address, *parts, pause_s=TIMEOUT_S / 4)
        assert (status, code_of(body)) == (b"HTTP/1.1 408 Request Timeout", "request_timeout")
        assert time.monotonic() - start_s >= TIMEOUT_S

    def test_those_of_a_second_request_too(self, address: tuple[str, int]) -> None:
        with socket.create_connection(address, timeout=60) as connection:
            connection.sendall(b"GET /echo HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert answer(connection)[0] == b"HTTP/1.1 200 OK"
            time.sleep(2 * TIMEOUT_S)  # an idle connection may stay
            connection.sendall(POST)
            assert answer(connection)[0] == b"HTTP/1.1 408 Request Timeout"

    def test_connections_that_send_nothing_are_closed_and_hold_up_nobody(self, address: tuple[str, int]) -> None:
        idle = [socket.create_connection(address, timeout=60) for _ in range(100)]
        status, _, _ = exchange(address, b"GET /echo HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert status == b"HTTP/1.1 200 OK"
        assert [connection.recv(1) for connection in idle] == [b""] * 100
        for connection in idle:
            connection.close()

    def test_a_slow_body_is_not_their_business(self, address: tuple[str, int]) -> None:
        status, _, body = exchange(address, POST + b"content-length: 4\r\n\r\nbo", b"d", b"y", pause_s=TIMEOUT_S)
        assert (status, json.loads(body)["body"]) == (b"HTTP/1.1 200 OK", "body")


class TestRestOfABodyThatNobodyNeeds:
    @pytest.mark.parametrize(
        ("head", "length"),
        [(b"1.1\r\nhost: a\r\n", b"transfer-encoding: chunked\r\n"), (b"1.0\r\n", b"content-length: 8388608\r\n")],
    )
    def test_is_dropped_so_that_the_client_reads_why(self, head: bytes, length: bytes) -> None:
        piece = b"x" * 2**19
        if length.startswith(b"transfer-encoding"):
            piece = b"80000\r\n" + piece + b"\r\n"
        parts = [b"POST /refuse HTTP/" + head + length + b"\r\n", *[piece] * 16]
        with started(write_timeout_s=30) as address:
            status, headers, body = exchange(address, *parts, pause_s=TIMEOUT_S / 8)
        assert (status, body) == (b"HTTP/1.1 429 Too Many Requests", b'{"error":"busy"}')
        assert b"connection: close" in headers

    @pytest.mark.parametrize("rest", [b"", b"x"])
    def test_is_dropped_for_a_limited_time(self, address: tuple[str, int], rest: bytes) -> None:
        with socket.create_connection(address, timeout=60) as connection:
            connection.sendall(b"GET /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n")
            assert answer(connection)[0] == b"HTTP/1.1 404 Not Found"
            start_s, is_open = time.monotonic(), True
            connection.settimeout(TIMEOUT_S / 4)
            while is_open and time.monotonic() - start_s < 20:
                with suppress(ConnectionError):
                    connection.sendall(rest)
                try:
                    is_open = connection.recv(1) != b""
                except TimeoutError:
                    continue
                except ConnectionError:
                    is_open = False
            assert not is_open

    def test_is_not_waited_for_when_the_client_sends_no_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(front, "_LONGEST_PAUSE_S", TIMEOUT_S)
        with started(write_timeout_s=60) as address, socket.create_connection(address, timeout=20) as connection:
            connection.sendall(b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n")
            assert answer(connection)[0] == b"HTTP/1.1 404 Not Found"
            for _ in range(4):
                connection.sendall(b"x")
                time.sleep(TIMEOUT_S / 2)
            assert not is_closed(connection), "it goes on to send"
            assert connection.recv(1) == b""


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed it; reads what came before."""
    connection.setblocking(False)
    with suppress(ConnectionError):
        try:
            while connection.recv(2**20):
                pass
        except BlockingIOError:
            return False
        finally:
            connection.settimeout(60)
    return True


class TestManyConnections:
    """At a limit of eight."""

    GET = b"GET /echo HTTP/1.1\r\nhost: localhost\r\n\r\n"
    KINDS: ClassVar = {
        "new": (b"", b""),
        "headers": (POST, b""),
        "next request": (GET, b"HTTP/1.1 200"),
        "rest of a body": (b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n", b"HTTP/1.1 404"),
    }

    @pytest.fixture
    def address(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
        monkeypatch.setattr(front, "_MOST_IDLE", 8)
        with started(write_timeout_s=60, header_timeout_s=60) as address:
            yield address

    @staticmethod
    def connected(
        address: tuple[str, int], sent: bytes, expected: bytes = b"", source: str = "127.0.0.1"
    ) -> socket.socket:
        connection = socket.create_connection(address, timeout=60, source_address=(source, 0))
        connection.sendall(sent)
        if expected:
            assert connection.recv(2**16).startswith(expected)
        return connection

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_new_one_ends_the_one_that_waits_for_longest(self, address: tuple[str, int], kind: str) -> None:
        with ExitStack() as stack:
            waiting = [stack.enter_context(self.connected(address, *self.KINDS[kind])) for _ in range(8)]
            for one in waiting[:3]:
                stack.enter_context(self.connected(address, *self.KINDS[kind]))
                wait_until(partial(is_closed, one), 10)
            assert exchange(address, self.GET)[0] == b"HTTP/1.1 200 OK"
            assert not any(map(is_closed, waiting[4:]))

    def test_of_the_address_of_which_most_wait(self, address: tuple[str, int]) -> None:
        with ExitStack() as stack:
            few = [stack.enter_context(self.connected(address, b"", source="127.0.0.2")) for _ in range(2)]
            many = [stack.enter_context(self.connected(address, POST)) for _ in range(50)]
            assert exchange(address, self.GET)[0] == b"HTTP/1.1 200 OK"
            assert not any(map(is_closed, few))
            assert sum(map(is_closed, many)) >= 44

    def test_requests_under_way_go_on_and_do_not_count(self, address: tuple[str, int]) -> None:
        begun = POST + b"content-length: 4\r\nexpect: 100-continue\r\n\r\n", b"HTTP/1.1 100"
        with ExitStack() as stack:
            under_way = [stack.enter_context(self.connected(address, *begun)) for _ in range(20)]
            for _ in range(50):
                stack.enter_context(self.connected(address, b""))
            for connection in under_way:
                connection.sendall(b"body")
                assert answer(connection)[0] == b"HTTP/1.1 200 OK"

    @pytest.mark.parametrize("is_unread", [True, False])
    def test_fewer_than_the_files_that_the_process_may_open(
        self, monkeypatch: pytest.MonkeyPatch, is_unread: bool
    ) -> None:
        """Those of which an answer is not read end, too; requests under way do not, and a new one is refused."""
        monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 16))
        request = b"GET /long HTTP/1.1\r\nhost: localhost\r\n\r\n" if is_unread else POST + b"content-length: 4\r\n\r\n"
        with started(write_timeout_s=60, header_timeout_s=60) as address, ExitStack() as stack:
            connections = []
            for _ in range(8):
                connections.append(stack.enter_context(self.connected(address, request)))
                time.sleep(TIMEOUT_S / 8)
            time.sleep(TIMEOUT_S)
            new = stack.enter_context(self.connected(address, self.GET if is_unread else b""))
            status, _, body = answer(new)
            if is_unread:
                assert status == b"HTTP/1.1 200 OK"
                wait_until(partial(is_closed, connections[0]), 10)
            else:
                assert (status.split()[1], code_of(body)) == (b"429", "rate_limit_exceeded")


@pytest.mark.parametrize("target", [b"http://App.example:80/echo?a=b", b"HTTPS://App.example:80/echo"])
def test_the_target_may_be_a_whole_uri(address: tuple[str, int], target: bytes) -> None:
    status, _, body = exchange(address, b"GET " + target + b" HTTP/1.1\r\nhost: other\r\nconnection: close\r\n\r\n")
    assert (status, json.loads(body)["host"]) == (b"HTTP/1.1 200 OK", "App.example:80")
    assert exchange(address, b"GET http://localhost HTTP/1.1\r\nhost: localhost\r\n\r\n")[0].split()[1] == b"404"
    assert exchange(address, b"GET http:///echo HTTP/1.1\r\nhost: localhost\r\n\r\n")[0].split()[1] == b"404"


def test_invented_methods_make_no_series(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    methods = set()
    monkeypatch.setattr(Counter, "inc", lambda *_, tags: methods.add(tags["method"]))
    for method in (b"DELETE", *(b"M%d" % number for number in range(20))):
        status, _, _ = exchange(address, method + b" /echo HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert status == b"HTTP/1.1 405 Method Not Allowed"
    assert methods == {"DELETE", "other"}


def test_each_request_has_an_id(address: tuple[str, int]) -> None:
    ids = []
    for header in (b"x-request-id: mine\r\n", b"", b""):
        _, headers, body = exchange(address, b"GET /echo HTTP/1.1\r\nhost: localhost\r\n" + header + b"\r\n")
        ids.append(json.loads(body)["id"])
        assert headers.count(b"x-request-id: " + ids[-1].encode()) == 1
    assert ids[0] == "mine"
    assert len(set(ids)) == 3


def test_a_body_does_not_wait_until_its_headers_are_acknowledged(address: tuple[str, int]) -> None:
    took_s = []
    with socket.create_connection(address, timeout=20) as connection:
        for _ in range(30):
            begun_s, answer = time.perf_counter(), b""
            connection.sendall(POST + b"content-length: 2\r\n\r\nHi")
            while not answer.endswith(b"}"):
                answer += connection.recv(2**16)
            took_s.append(time.perf_counter() - begun_s)
    assert min(took_s[20:]) < 0.03, "Linux acknowledges after 0.04 s, and at once on new connections only"
