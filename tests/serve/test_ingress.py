"""What the application lets in and how it refuses, with a small model behind it and without Ray."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Generator, Mapping
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx2
import pytest
from fastapi import FastAPI
from ray.exceptions import RayError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from rayspec.openai.answer import end_tasks
from rayspec.openai.places import Places
from rayspec.openai.requests import CompletionRequest
from rayspec.openai.responses import ModelCard
from rayspec.serve import access
from rayspec.serve.access import ANY, BUSY, Admission, ApiKeys, Entry, Refused, allowed_host, network_of
from rayspec.serve.bodies import BodyReader
from rayspec.serve.calls import while_connected
from rayspec.serve.ingress import Ingress, build_app
from rayspec.serve.options import ServeOptions
from rayspec.serve.watch import Watch, WatchedReplica
from tests.serve.endpoint_process import head_of, served
from tests.waiting import wait_until

PAGE = "https://page.example"
BODY = {"model": "demo", "prompt": "a"}
JSON = {"content-type": "application/json"}
MUST_WAIT = Watch.must_wait


@pytest.fixture(autouse=True)
def _replicas_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """No router knows the replicas of these tests."""
    for name in ("is_absent", "must_wait"):
        monkeypatch.setattr(Watch, name, lambda _watch, _model: False)


class Model:
    """Has the interface of Serve's handle. Its calls answer at once or, if it `hangs`, end when they are cancelled."""

    app_name, deployment_name = "app", "model"
    is_initialized = True

    def __init__(self, *events: bytes | Exception, hangs: bool = False) -> None:
        self.hangs, self.begun, self.cancelled = hangs, threading.Semaphore(0), threading.Semaphore(0)
        self.clients: list[str] = []
        self._events = iter(events)
        self.respond = self.stream = self.tokenize = self

    def options(self, **_: Any) -> Model:
        return self

    def running_replicas_populated(self) -> bool:
        return False

    def remote(self, *given: Any) -> Model:
        self.clients.append(given[-1])
        self.begun.release()
        return self

    async def answer(self) -> bytes:
        await asyncio.sleep(600 * self.hangs)
        return b"{}"

    def __await__(self) -> Generator[Any, None, bytes]:
        return self.answer().__await__()

    async def __anext__(self) -> bytes:
        await self.answer()
        found = next(self._events, StopAsyncIteration())
        if isinstance(found, Exception):
            raise found
        return found

    def cancel(self) -> None:
        self.cancelled.release()


def ingress_of(model: Model | None = None, scaling: Mapping[str, int] | None = None, **options: Any) -> Ingress:
    deployment = {"max_ongoing_requests": 1, "max_queued_requests": 0, "autoscaling_config": scaling}
    config = {"model_loading_config": {"model_id": "demo"}, "deployment_config": deployment}
    chosen = ServeOptions(llm_configs=(config,), cors=(PAGE,), max_request_bytes=1024, **options)
    return Ingress(chosen, {"demo": model or Model()}, keys=ApiKeys.of(["a", "key"]), hosts=frozenset({"app.example"}))


@cache
def app_of(model: Model | None) -> FastAPI:
    return build_app(ingress_of(model))


def asked(
    method: str = "POST",
    path: str = "/v1/completions",
    *,
    headers: Mapping[str, Any] = JSON,
    content: Any = BODY,
    model: Model | None = None,
    ingress: Ingress | None = None,
) -> httpx2.Response:
    app = build_app(ingress) if ingress else app_of(model)
    given = {"authorization": "Bearer key"} | JSON | dict(headers)
    body = content if isinstance(content, bytes) else json.dumps(content).encode()

    async def send() -> httpx2.Response:
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost:8000") as http:
            return await http.request(method, path, headers=given, content=body if content else b"")

    return asyncio.run(asyncio.wait_for(send(), 60))


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 200, None),
        ({"authorization": "bearer  a "}, 200, None),
        ({"authorization": ""}, 401, "invalid_api_key"),
        ({"authorization": "Bearer "}, 401, "invalid_api_key"),
        ({"authorization": "Bearer key2"}, 401, "invalid_api_key"),
        ({"authorization": "Basic key"}, 401, "invalid_api_key"),
        ({"authorization": b"Bearer \xe4"}, 401, "invalid_api_key"),
        ({"authorization": "key"}, 401, "invalid_api_key"),
        ({"host": "App.Example:443"}, 200, None),
        ({"host": "other.example"}, 403, "host_not_allowed"),
        ({"origin": PAGE}, 200, None),
        ({"origin": "http://localhost:8000"}, 200, None),
        ({"origin": "https://localhost:8000"}, 200, None),
        ({"origin": "https://app.example", "sec-fetch-site": "same-origin"}, 200, None),
        ({"origin": "https://other.example", "sec-fetch-site": "cross-site"}, 403, "origin_not_allowed"),
        ({"origin": "http://other.example"}, 403, "origin_not_allowed"),
        ({"origin": "http://page.example"}, 403, "origin_not_allowed"),
        ({"origin": "http://localhost"}, 403, "origin_not_allowed"),
        ({"origin": "localhost:8000"}, 403, "origin_not_allowed"),
        ({"origin": "null"}, 403, "origin_not_allowed"),
        ({"content-type": "text/plain"}, 415, "unsupported_media_type"),
        ({"content-encoding": "gzip"}, 415, "unsupported_encoding"),
        ({"connection": "Upgrade", "upgrade": "h2c"}, 200, None),
    ],
)
def test_who_may_make_a_model_work(headers: Mapping[str, Any], status: int, code: str | None) -> None:
    response = asked(headers=headers)
    assert response.status_code == status, response.text
    assert code is None or response.json()["error"]["code"] == code


@pytest.mark.parametrize(
    ("last", "code"), [(StopAsyncIteration(), None), (RayError(), "engine_dead"), (asyncio.TimeoutError(), "timeout")]
)
def test_a_stream_is_passed_on_once_and_its_last_event_is_the_error(last: Exception, code: str | None) -> None:
    model = Model(b"data: 1\n\n", b"data: 2\n\n", last)
    text = asked(content=BODY | {"stream": True}, model=model).text
    told = text.removeprefix("data: 1\n\ndata: 2\n\n")
    if code is None:
        assert (told, text.count("data")) == ("", 2)
    else:
        assert told.endswith("\n\ndata: [DONE]\n\n")
        assert json.loads(told.split("\n\n")[0].removeprefix("data: "))["error"]["code"] == code


def test_requests_for_metrics_share_what_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    num_gathered = 0

    async def scrape() -> str:
        nonlocal num_gathered
        num_gathered += 1
        await asyncio.sleep(0.05)
        return str(num_gathered)

    monkeypatch.setattr("rayspec.serve.ingress.scrape", scrape)

    async def run() -> list[str]:
        ingress = ingress_of()
        left = asyncio.create_task(ingress.scraped())
        others = [asyncio.create_task(ingress.scraped()) for _ in range(20)]
        await asyncio.sleep(0.01)
        left.cancel()
        return [*await asyncio.gather(*others), await ingress.scraped()]

    assert asyncio.run(run()) == ["1"] * 20 + ["2"]


def test_a_model_that_cannot_answer_is_not_listed_if_another_can(monkeypatch: pytest.MonkeyPatch) -> None:
    starting = {"demo"}

    async def card(ingress: Ingress, model: str) -> ModelCard:
        if model in starting:
            raise Refused(access.STARTING)
        return ModelCard(id=model, created=0, max_model_len=1)

    monkeypatch.setattr(Ingress, "card", card)
    configs = [{"model_loading_config": {"model_id": name}} for name in ("demo", "other")]
    ingress = Ingress(
        ServeOptions(llm_configs=configs), {"demo": Model(), "other": Model()}, keys=ApiKeys.of([]), hosts={ANY}
    )
    with served(build_app(ingress)) as (_, port):
        url = f"http://localhost:{port}/v1/models"
        assert [one["id"] for one in httpx2.get(url).json()["data"]] == ["other"]
        starting.add("other")
        assert httpx2.get(url).json()["error"]["code"] == "starting"


def test_a_model_that_scales_to_zero_is_listed_without_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call would start a replica. What its last replica said of it is kept."""
    model, absent = Model(), iter([True, False, True])
    monkeypatch.setattr(
        model,
        "card",
        Mock(remote=AsyncMock(return_value=ModelCard(id="demo", created=5, max_model_len=9))),
        raising=False,
    )
    monkeypatch.setattr(Watch, "is_absent", lambda _watch, _model: next(absent))
    ingress = ingress_of(model, scaling={"min_replicas": 0, "max_replicas": 8})
    cards = [asyncio.run(ingress.card("demo")) for _ in range(3)]
    assert [(card.id, card.max_model_len) for card in cards] == [("demo", None), ("demo", 9), ("demo", 9)]
    model.card.remote.assert_called_once_with()  # type: ignore[attr-defined]


def test_without_a_key_nothing_opens_but_health_and_the_page() -> None:
    document = asked("GET", "/openapi.json", content=b"").json()
    assert {"ChatRequest", "ChatCompletion", "Batch", "ErrorBody"} <= document["components"]["schemas"].keys()
    paths = document["paths"]
    opened = {"/health", "/ping"}
    operations = [(method, path) for path, methods in paths.items() for method in methods if path not in opened]
    assert len(operations) > 12
    for method, path in [*operations, ("GET", "/openapi.json"), ("GET", "/nothing"), ("GET", "//v1/models")]:
        response = asked(method.upper(), path, headers={"authorization": ""}, content=b"")
        assert (response.status_code, response.headers.get("www-authenticate")) == (401, "Bearer"), path
    page = asked("GET", "/", headers={"authorization": ""}, content=b"")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")


def test_an_application_with_a_prefix_opens_the_same() -> None:
    """Of several applications, Serve gives each the whole path, and its prefix as the root."""

    async def status(path: str) -> int:
        transport = httpx2.ASGITransport(app_of(None), root_path="/small")
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return (await http.get(path)).status_code

    paths = ("/small/docs", "/small/", "/small/v1/models", "/small/small/docs", "/small/nothing")
    assert [asyncio.run(status(path)) for path in paths] == [200, 200, 401, 401, 401]


def test_the_page_of_the_api_needs_no_key_and_no_network() -> None:
    page = asked("GET", "/docs", headers={"authorization": ""}, content=b"")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    text = page.text
    links = re.findall(r'(?:href|src)="([^"]*)"', text)
    assert links
    assert all(link.startswith("#") and f'id="{link[1:]}"' in text for link in links)
    for known in ("POST /v1/responses", "<code>max_output_tokens</code>", "<code>temperature</code>", "required"):
        assert known in text


def test_pages_of_an_allowed_origin_may_ask_first() -> None:
    """Also OpenAI's client for JavaScript, which sends headers of its own."""
    headers = "authorization,content-type,x-stainless-arch,x-stainless-retry-count,openai-organization"
    asks = {"access-control-request-method": "POST", "access-control-request-headers": headers}
    allowed = asked("OPTIONS", headers=asks | {"origin": PAGE}, content=b"")
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, PAGE)
    refused = asked("OPTIONS", headers=asks | {"origin": "https://other.example"}, content=b"")
    assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (400, False)


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("POST", "/v1/completions", b"{", 400, "invalid_json"),
        ("POST", "/v1/completions", BODY | {"max_token": 3}, 400, "unknown_parameter"),
        ("POST", "/v1/completions", BODY | {"model": "gpt"}, 404, "model_not_found"),
        ("POST", "/v1/completions", BODY | {"prompt": "a" * 1024}, 413, "request_too_large"),
        ("GET", "/v1/completions", b"", 405, "method_not_allowed"),
        ("GET", "/v1/nothing", b"", 404, "not_found"),
        ("GET", "/v1/files", b"", 404, "batches_disabled"),
        ("GET", "/health", b"", 503, "unhealthy"),
    ],
)
def test_errors_have_openais_form(method: str, path: str, content: Any, status: int, code: str) -> None:
    response = asked(method, path, content=content)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert ("retry-after" in response.headers) == (status == 503)


def test_head_is_answered_where_get_is() -> None:
    statuses = [asked("HEAD", path, content=b"").status_code for path in ("/", "/docs", "/version", "/v1/completions")]
    assert statuses == [200, 200, 200, 405]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "stream"])
def test_who_hangs_up_before_the_answer_begins_frees_the_place(path: str) -> None:
    more = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    body = json.dumps({"model": "demo", **more} | ({"stream": True} if path == "stream" else {})).encode()
    head = head_of("/v1/completions" if path == "stream" else path, len(body), "a")
    model = Model(hangs=True)
    ingress = ingress_of(model)
    ingress.watch.replicas["demo"] = {"a": WatchedReplica(actor=None)}
    with served(build_app(ingress)) as address:
        for _ in range(2):  # the model admits one at a time
            with socket.create_connection(address, timeout=10) as connection:
                connection.sendall(head + body)
                assert model.begun.acquire(timeout=10)
                assert ingress.entry.num_under_way == 1
            assert model.cancelled.acquire(timeout=60)
            wait_until(lambda: ingress.entry.num_under_way == 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("has_place", [True, False])
def test_an_answer_that_takes_too_long_is_given_up(
    monkeypatch: pytest.MonkeyPatch, has_place: bool, stream: bool
) -> None:
    """The wait for a place included."""
    if not has_place:
        monkeypatch.setattr(Places, "ask", lambda *_: asyncio.get_running_loop().create_future())
    model = Model(hangs=has_place)
    ingress = ingress_of(model, request_timeout_s=0.3)
    ingress.watch.replicas["demo"] = {"a": WatchedReplica(actor=None)}
    with served(build_app(ingress)) as (_, port):
        url, headers = f"http://localhost:{port}/v1/completions", {"authorization": "Bearer a"}
        answer = httpx2.post(url, json=BODY | {"stream": stream}, headers=headers, timeout=10)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    assert model.cancelled.acquire(timeout=60) if has_place else not model.begun.acquire(blocking=False)
    assert ingress.entry.num_under_way == 0


@pytest.mark.parametrize(
    ("rest", "status"),
    [
        (b"content-length: 100\r\n\r\n{", b"408"),
        (b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n", b"408"),
        (b"transfer-encoding: chunked\r\n\r\n800\r\n" + b"a" * 2048 + b"\r\n", b"413"),
    ],
)
def test_a_body_that_never_ends_is_given_up(rest: bytes, status: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer a\r\n"
    app = build_app(ingress_of(body_timeout_s=0.3))
    with served(app) as address, socket.create_connection(address, timeout=10) as connection:
        connection.sendall(head + b"content-type: application/json\r\n" + rest)
        assert connection.recv(4096).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize(("patience_s", "statuses"), [(0.0, (b"429", b"200")), (1000.0, (None, b"429"))])
def test_slow_bodies_keep_no_places_that_others_need(
    monkeypatch: pytest.MonkeyPatch, patience_s: float, statuses: tuple[bytes | None, bytes]
) -> None:
    monkeypatch.setattr(access, "_PATIENCE_S", patience_s)
    ingress = ingress_of(ingress_deployment_config={"max_ongoing_requests": 2})
    ingress.watch.replicas["demo"] = {"a": WatchedReplica(actor=None)}
    body = json.dumps(BODY).encode()
    head = head_of("/v1/completions", len(body), "a")
    with served(build_app(ingress)) as address, ExitStack() as held:
        slow = []
        for count in (1, 2):
            slow.append(held.enter_context(socket.create_connection(address, timeout=60)))
            slow[-1].sendall(head + body[:-1])
            wait_until(lambda count=count: len(ingress.entry._arriving) == count, 60.0)
        other = held.enter_context(socket.create_connection(address, timeout=60))
        other.sendall(head + body)
        assert other.recv(4096)[9:12] == statuses[1]
        if statuses[0] is not None:
            assert slow[0].recv(4096)[9:12] == statuses[0], "the body that has been arriving for longest"
        slow[1].sendall(body[-1:])
        assert slow[1].recv(4096)[9:12] == b"200"


def test_a_body_that_serves_proxy_has_lost_is_told() -> None:
    response = asked(headers={"connection": "Upgrade", "upgrade": "h2c"}, content=b"")
    assert (response.status_code, response.json()["error"]["code"]) == (400, "upgrade_unsupported")


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        (None, True), ("LOCALHOST:8000", True), ("a.localhost:1", True), ("127.0.0.1:8000", True), ("[::1]", True),
        ("", False), ("127.0.0.1.app.example", False), ("[::1].app.example", False), ("[::1", False), ("::1", False),
        ("user@localhost", False), ("localhost:app.example", False), ("192.0.2.7", False),
    ],
)  # fmt: skip
def test_on_loopback_only_its_own_names_are_allowed(header: str | None, allowed: bool) -> None:
    assert allowed_host(header, ()) is allowed
    assert allowed_host(header, {ANY})


def test_an_endpoint_that_shuts_down_takes_no_more_requests() -> None:
    ingress = ingress_of()
    ingress.entry.draining = True
    answer = asked(ingress=ingress)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert int(answer.headers["retry-after"]) > 0


def test_each_client_has_a_share_of_what_is_admitted() -> None:
    admission = Admission(4, refusal=BUSY)
    with ExitStack() as under_way:
        under_way.enter_context(admission.admit(100, "greedy"))
        for client in ("other", "other", "third"):
            under_way.enter_context(admission.admit(1, client))
        for client in ("greedy", "other"):
            with pytest.raises(Refused), admission.admit(1, client):
                pass
    under_way.enter_context(admission.admit(1, "greedy"))
    assert admission.under_way == 1
    with ExitStack() as under_way:
        under_way.enter_context(admission.admit(4, "other"))
        under_way.enter_context(admission.admit(1, "greedy"))  # whose first requests are over
    with ExitStack() as under_way:
        for number in range(4):
            under_way.enter_context(admission.admit(1, f"client {number}"))
        with pytest.raises(Refused), admission.admit(1, "one of many clients"):
            pass


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_client_that_keeps_many_answers_leaves_places_to_others(method: str) -> None:
    """As one that downloads large files slowly, or has many texts tokenized."""
    posts, gets = (Admission(2, refusal=BUSY) for _ in range(2))
    entry = Entry(keys=ApiKeys.of(["a", "b"]), hosts=(), origins=(), posts=posts, gets=gets)

    async def scenario() -> None:
        end = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await end.wait()
            await Response()(scope, receive, send)

        async with httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app=entry.guarded(app, open_paths=())), base_url="http://localhost"
        ) as http:
            asked = []
            for key in ("a", "a", "a", "b"):
                asked.append(asyncio.create_task(http.request(method, "/", headers={"authorization": f"Bearer {key}"})))
                await asyncio.sleep(0.01)
            end.set()
            assert [(await one).status_code for one in asked] == [200, 200, 429, 200]

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_client_ends_no_slow_body_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_PATIENCE_S", 0.0)
    entry = Entry(keys=ApiKeys.of([]), hosts=(), origins=(), posts=Admission(2), gets=Admission())

    async def scenario() -> None:
        never = asyncio.Event()

        async def receive() -> Any:
            await never.wait()

        with ExitStack() as held:
            slow, own = (
                asyncio.ensure_future(held.enter_context(entry.admitted(receive, client))())
                for client in ("slow", "greedy")
            )
            await asyncio.sleep(0)
            held.enter_context(entry.admitted(receive, "greedy"))
            with pytest.raises(Refused):
                await own
            held.enter_context(entry.admitted(receive, "new"))  # within its share
            assert not slow.done()
            slow.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_large_bodies_of_one_client_are_no_reason_to_refuse_others() -> None:
    """They may be announced, and never come."""
    config = {"model_loading_config": {"model_id": "demo"}}
    reader = BodyReader(ServeOptions(llm_configs=(config,), max_request_bytes=2**17))
    body = json.dumps(BODY | {"user": "x" * 70_000}).encode()

    def request(*, ends: bool) -> Any:
        async def stream() -> AsyncIterator[bytes]:
            yield body
            if not ends:
                await asyncio.Event().wait()

        headers = {"content-type": "application/json", "content-length": str(2**17)}
        return SimpleNamespace(headers=headers, stream=stream)

    async def scenario() -> None:
        with ExitStack() as held:
            read = partial(reader.read, kind=CompletionRequest, held=held)
            slow = [asyncio.create_task(read(request(ends=False), client="slow")) for _ in range(8)]
            while reader._large.under_way < 6 * 2**17:
                await asyncio.sleep(0.01)
            with pytest.raises(Refused):
                await read(request(ends=True), client="slow")
            asked, content = await read(request(ends=True), client="other")
            assert (asked.model, content) == ("demo", body)
            many = [asyncio.create_task(read(request(ends=False), client=f"client {number}")) for number in range(60)]
            for _ in range(1000):
                await asyncio.sleep(0)
            assert reader._large.under_way <= 12 * 2**17, "many clients together have no more than twice as much"
            await end_tasks([*slow, *many])

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_clients_take_turns_with_the_pieces_of_large_bodies() -> None:
    reader = BodyReader(ServeOptions(llm_configs=({"model_loading_config": {"model_id": "demo"}},)))
    piece, pieces = b"x" * 2**13, list[str]()

    def request(client: str) -> Any:
        async def stream() -> AsyncIterator[bytes]:
            yield b"x" * 2**16
            for _ in range(20):
                pieces.append(client)
                yield piece

        return SimpleNamespace(headers={"content-type": "application/json"}, stream=stream)

    async def scenario() -> None:
        with ExitStack() as held:
            clients = [*["greedy"] * 30, "other"]
            read = (reader.read(request(client), CompletionRequest, client, held) for client in clients)
            await asyncio.gather(*read, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    last = max(at for at, client in enumerate(pieces) if client == "other")
    assert last < 150, "of 620"


FILE = "file-" + "0" * 32
FORM = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n1\r\n--b--\r\n'


@pytest.mark.parametrize(
    ("method", "path", "broken"),
    [
        ("GET", "/v1/files", "files"),
        ("GET", "/v1/files", f"files/{FILE}/file.json/folder"),
        ("GET", "/v1/batches", "batches"),
        *((method, f"/v1/files/{FILE}", f"files/{FILE}/file.json/folder") for method in ("GET", "DELETE")),
        ("GET", f"/v1/files/{FILE}/content", f"files/{FILE}/file.json/folder"),
        ("POST", "/v1/batches", f"files/{FILE}/file.json/folder"),
        ("POST", "/v1/files", "files"),
    ],
)
def test_a_store_that_fails_is_no_fault_of_the_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str, path: str, broken: str
) -> None:
    """A file is in the place of a folder, or the other way round."""
    (tmp_path / ".lock").touch()
    place = tmp_path / broken
    place.parent.mkdir(parents=True, exist_ok=True)
    place.touch()
    is_upload = (method, path) == ("POST", "/v1/files")
    headers = {"content-type": "multipart/form-data; boundary=b"} if is_upload else JSON
    body = {"input_file_id": FILE, "endpoint": "/v1/completions", "completion_window": "24h"}
    content: Any = FORM if is_upload else body if method == "POST" else b""
    answer = asked(method, path, headers=headers, content=content, ingress=ingress_of(batches=str(tmp_path)))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
    assert str(tmp_path) not in answer.text
    (record,) = (one for one in caplog.records if one.name == "rayspec.serve.batch_routes")
    assert record.exc_info is None


def test_a_form_of_many_parts_is_refused_at_the_second_of_a_name(tmp_path: Path) -> None:
    """Millions of small parts would take minutes of the event loop."""
    (tmp_path / ".lock").touch()
    part = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    headers = {"content-type": "multipart/form-data; boundary=b"}
    answer = asked(
        path="/v1/files", headers=headers, content=2 * part + FORM, ingress=ingress_of(batches=str(tmp_path))
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "purpose")


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/files"), ("GET", f"/v1/files/{FILE}"), ("GET", "/v1/batches"), ("POST", "/v1/files")],
)
def test_a_store_that_is_gone_has_not_lost_its_files(tmp_path: Path, method: str, path: str) -> None:
    """A client would believe an empty list. And what is uploaded would be lost when the disk is back."""
    headers = {"content-type": "multipart/form-data; boundary=b"}
    ingress = ingress_of(batches=str(tmp_path / "disk"))
    answer = asked(method, path, headers=headers, content=FORM if method == "POST" else b"", ingress=ingress)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
    assert not (tmp_path / "disk").exists()


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("testclient", "testclient"),
        (None, ""),
    ],
)
def test_a_client_without_a_key_is_its_network(host: str | None, network: str) -> None:
    assert network_of(host) == network


def test_requests_that_need_no_key_take_no_places_of_others() -> None:
    """Nobody checks the keys that they name, of which each would have its share."""
    entry = Entry(keys=ApiKeys.of(["a"]), hosts=(), origins=(), posts=Admission(2, refusal=BUSY), gets=Admission())

    async def scenario() -> None:
        end = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await end.wait()
            await Response()(scope, receive, send)

        guarded = entry.guarded(app, open_paths={"/ping"})
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=guarded), base_url="http://localhost") as http:
            asked = []
            for path, key in (("/ping", "x"), ("/ping", "y"), ("/ping", "z"), ("/", "a")):
                asked.append(asyncio.create_task(http.post(path, headers={"authorization": f"Bearer {key}"})))
                await asyncio.sleep(0.01)
            end.set()
            assert [(await one).status_code for one in asked] == [200] * 4

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_places_are_those_of_the_replicas_that_run_now() -> None:
    """The others of `max_replicas` may never come, and Serve's queue knows no clients."""
    model = Model(hangs=True)
    ingress = ingress_of(model, scaling={"min_replicas": 0, "max_replicas": 8})
    body = json.dumps(BODY).encode()
    replicas = {"a": WatchedReplica(actor=None), "b": WatchedReplica(actor=None, has_ended=True)}
    ingress.watch.replicas["demo"] = replicas
    with served(build_app(ingress)) as address, ExitStack() as held:

        def ask(key: str) -> None:
            num_before = ingress.entry.num_under_way
            head = head_of("/v1/completions", len(body), key)
            held.enter_context(socket.create_connection(address, timeout=60)).sendall(head + body)
            wait_until(lambda: ingress.entry.num_under_way > num_before, 60)

        for _ in range(3):
            ask("a")
        assert model.begun.acquire(timeout=60)
        assert not model.begun.acquire(timeout=0.5), "as many as one replica takes"
        replicas["b"] = WatchedReplica(actor=None)
        httpx2.get(f"http://localhost:{address[1]}/health")  # looks at once
        assert model.begun.acquire(timeout=60)
        assert not model.begun.acquire(timeout=0.5)
        ask("key")
        assert model.begun.acquire(timeout=60), "a key does not wait for another's requests"
        assert model.clients[-1] == ingress.entry.keys.owner("Bearer key")


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
@pytest.mark.parametrize("starts", [True, False])
def test_requests_wait_for_a_replaced_replica_and_no_longer_than_one_may_start(
    monkeypatch: pytest.MonkeyPatch, path: str, starts: bool
) -> None:
    """In Serve's own queue they would wait for ever if the new version fails to start."""
    model, looks = Model(), iter([set(), set()] + [{"a"} if starts else set()] * 99)
    monkeypatch.setattr("rayspec.serve.watch.replicas_of", lambda _app, _deployment: next(looks))
    ingress = ingress_of(model)
    can_serve = iter([True] * 3)
    monkeypatch.setattr(Watch, "must_wait", MUST_WAIT)
    monkeypatch.setattr("rayspec.serve.ingress.PERIOD_S", 0.01)
    monkeypatch.setattr(ingress.watch, "can_serve", lambda _model: next(can_serve, starts))
    answer = asked(path=path, ingress=ingress)
    assert (answer.status_code, len(model.clients)) == ((200, 1) if starts else (503, 0))


def test_a_call_that_fails_after_its_client_has_left_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Serve's calls do so when they are cancelled: each client that hung up cost a traceback in the log."""

    async def call() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise Refused(access.GONE) from None

    async def left() -> dict[str, str]:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def ask() -> None:
        with pytest.raises(ClientDisconnect):
            await while_connected(Request({"type": "http"}, left), call())
        await asyncio.sleep(0.01)

    asyncio.run(ask())
    gc.collect()
    assert not caplog.records
