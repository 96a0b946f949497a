"""What one client with a key may try: others are answered all the while, no process dies, memory stays bounded."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typing_extensions import Self

from tests.exhaustive import few_of
from tests.serve.conftest import MAX_BYTES, MAX_FILE_BYTES
from tests.serve.endpoint_process import (
    EndpointProcess,
    begun,
    client_of,
    connected,
    ended,
    head_of,
    line_of,
    session_pids,
)
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ANSWER_S = 10.0  # on a busy machine; on a quiet one it is less than 1 s
MOST_GROWTH = 300 * 2**20
JSON = {"content-type": "application/json"}
REPLICAS = "ray::ServeReplica:"  # of the models and of the batches
BODY_BYTES = MAX_BYTES - 1000


class Others:
    """Other clients, who ask for a short text and for the health again and again."""

    def __init__(self, url: str) -> None:
        self.slowest_s, self.num_answered, self.statuses = 0.0, 0, set[int]()
        self._url, self._end = url, threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _ask(self) -> None:
        body = {"model": "demo", "prompt": "The", "max_tokens": 1}
        with httpx2.Client(base_url=self._url, timeout=60) as http:
            while not self._end.is_set():
                start_s = time.monotonic()
                self.statuses |= {http.post("/v1/completions", json=body).status_code, http.get("/health").status_code}
                self.slowest_s = max(self.slowest_s, time.monotonic() - start_s)
                self.num_answered += 1
                time.sleep(0.05)


def memory(endpoint: EndpointProcess) -> dict[int, int]:
    """The peak of each process since the last call, in bytes."""
    found = {}
    for pid in session_pids(endpoint.process.pid):
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
            found[pid] = next(int(one.split()[1]) * 1024 for one in lines if one.startswith("VmHWM"))
            Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
    return found


@contextmanager
def attacked(endpoint: EndpointProcess) -> Iterator[httpx2.Client]:
    """A client that may do what it likes."""
    pids = endpoint.pids(REPLICAS)
    memory(endpoint)
    before = memory(endpoint)
    with httpx2.Client(base_url=endpoint.url, timeout=120, headers=JSON) as http, Others(endpoint.url) as others:
        yield http
        time.sleep(0.3)
    assert endpoint.pids(REPLICAS) == pids, endpoint.errors.read_text("utf-8")
    growth = {pid: peak - before[pid] for pid, peak in memory(endpoint).items() if pid in before}
    print(f"slowest {others.slowest_s:.2f} s of {others.num_answered}; {max(growth.values()) / 2**20:.0f} MiB more")
    assert others.num_answered > 0
    assert others.slowest_s < ANSWER_S
    assert others.statuses <= {200, 429}
    assert max(growth.values()) < MOST_GROWTH


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "demo", "prompt": "a", "max_tokens": 1} | fields).encode()


def chat(messages: bytes) -> bytes:
    return b'{"model":"demo","max_tokens":1,"messages":[' + messages + b"]}"


EMPTY = b'{"role":"user","content":""}'
HUGE: dict[str, tuple[str, bytes]] = {
    "many prompts with some biases": (
        "completions",
        completion(prompt=["a"] * 1024, logit_bias={str(token): 1 for token in range(1024)}),
    ),
    "bad words of many prompts": (
        "completions",
        completion(prompt=["a"] * 1024, bad_words=[f"w{number}" for number in range(256)]),
    ),
    "many empty messages": ("chat/completions", chat(b",".join([EMPTY] * (BODY_BYTES // 29)))),
    "long texts": ("completions", completion(prompt=["a " * 3000] * (BODY_BYTES // 6010))),
    "many lists": ("completions", b'{"model":"demo","metadata":[' + b"[]," * (BODY_BYTES // 3 - 100) + b"1]}"),
    "a huge tool message": (
        "chat/completions",
        chat(b'{"role":"tool","tool_call_id":"t","content":"' + b"a " * (BODY_BYTES // 2 - 100) + b'"}'),
    ),
}


@pytest.mark.parametrize("name", few_of(HUGE, ("long texts", "a huge tool message")))
def test_huge_bodies(demo_endpoint: EndpointProcess, name: str) -> None:
    path, body = HUGE[name]
    with attacked(demo_endpoint) as http:
        for _ in range(2):
            answer = http.post(f"/v1/{path}", content=body)
            assert answer.status_code in {200, 400, 404, 413, 429}
            assert len(answer.content) < 10_000 or answer.status_code == 200


def at_once(work: Callable[[int], object], number: int) -> None:
    threads = [threading.Thread(target=work, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("kind", few_of(["ids", "messages"], ["ids"]))
def test_many_large_bodies_at_once(demo_endpoint: EndpointProcess, kind: str) -> None:
    """Their sum would be 800 MB in memory, or seconds of the event loop."""
    ids = b'{"model":"demo","max_tokens":1,"prompt":[' + b"300," * 1_900_000 + b"300]}"
    path, number, body = "/v1/completions", 12, ids
    if kind == "messages":
        messages = b",".join([b'{"role":"user","content":"%s"}' % (b"ab " * 160)] * 2000)
        path, number, body = "/v1/chat/completions", 150, chat(messages)

    def send(_: int) -> None:
        with suppress(OSError), connected(demo_endpoint.url) as connection:
            connection.sendall(head_of(path, len(body)) + body)
            connection.recv(1)

    with attacked(demo_endpoint):
        at_once(send, number)


def test_clients_that_leave(demo_endpoint: EndpointProcess) -> None:
    """Large bodies at once, streams, and connections that send nothing but headers; nobody waits for an answer."""
    large = completion(prompt=["a " * 3000] * 500)
    stream = completion(stream=True, max_tokens=100)

    def leave(index: int) -> None:
        body = large if index % 4 == 0 else stream
        with suppress(OSError), connected(demo_endpoint.url) as connection:
            connection.sendall(head_of("/v1/completions", len(body)) + body)
            time.sleep(0.2)

    def flood(_: int) -> None:
        with suppress(OSError), connected(demo_endpoint.url) as connection:
            for number in range(3000):
                connection.sendall(b"x-%d: %s\r\n" % (number, b"y" * 1000))

    with attacked(demo_endpoint):
        at_once(leave, 40)
        at_once(flood, 10)
    wait_until(demo_endpoint.is_idle, 60)


def test_streams_that_nobody_reads_do_not_make_another_client_wait(demo_endpoint: EndpointProcess) -> None:
    """In turn of arrival, all but the last eight streams would end before the other's first answer begins."""
    body, streams, ended = completion(stream=True, max_tokens=450, ignore_eos=True), list[Any](), 0
    other = httpx2.HTTPTransport(local_address="127.0.0.2")
    with ExitStack() as held, httpx2.Client(base_url=demo_endpoint.url, timeout=60, transport=other) as http:
        asked = {"url": "/v1/completions", "content": completion(), "headers": JSON}
        start_s = time.monotonic()
        assert [http.post(**asked).status_code for _ in range(5)] == [200] * 5
        idle_s = time.monotonic() - start_s
        for _ in range(60):
            streams.append(held.enter_context(connected(demo_endpoint.url)))
            streams[-1].sendall(head_of("/v1/completions", len(body)) + body)
        wait_until(lambda: demo_endpoint.status()[0]["num_waiting"] > 0, 60)
        start_s = time.monotonic()
        assert [http.post(**asked).status_code for _ in range(5)] == [200] * 5
        print(f"{time.monotonic() - start_s:.2f} s for five answers, {idle_s:.2f} s without the streams")
        for stream in streams:
            stream.setblocking(False)
            with suppress(BlockingIOError):
                while content := stream.recv(2**20):
                    ended += b"[DONE]" in content
        assert ended <= 8, "no more than those that ran first"
    wait_until(demo_endpoint.is_idle, 60)


@pytest.mark.parametrize(
    "content",
    [
        line_of("a", **{"a" * (MAX_FILE_BYTES - 300): 1}),
        line_of("a", prompt=["a"] * 1024, logit_bias={str(token): 1 for token in range(10_000)}),
    ],
)
def test_hostile_lines(demo_endpoint: EndpointProcess, content: bytes) -> None:
    with client_of(demo_endpoint) as client, attacked(demo_endpoint) as http:
        batch = ended(client, begun(client, [content]))
        assert batch.status == "completed"
        assert len(batch.model_dump_json()) < 100_000
        assert http.delete(f"/v1/batches/{batch.id}").json()["deleted"]
        assert http.get(f"/v1/batches/{batch.id}").status_code == 404
