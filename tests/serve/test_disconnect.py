"""Clients that hang up in the middle of a request, at the HTTP server of `rayspec serve`: real sockets, without Serve's
proxy."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from rayspec.serve.access import ApiKeys
from rayspec.serve.ingress import Ingress, build_app
from rayspec.serve.options import ServeOptions
from tests.serve.endpoint_process import EndpointProcess, connected, head_of, served, wait_until

FREE_S = 1.0
LONG = {"model": "demo", "prompt": "The", "max_tokens": 2000, "ignore_eos": True}


def raw(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    return head_of(path, len(content)) + content


class EndlessModel:
    """Has the interface of Serve's handle. Its calls never answer, and end when they are cancelled."""

    app_name, deployment_name = "app", "model"
    is_initialized = True

    def __init__(self) -> None:
        self.begun, self.cancelled = threading.Semaphore(0), threading.Semaphore(0)
        self.respond = self.stream = self.tokenize = self

    def options(self, **_: Any) -> EndlessModel:
        return self

    def running_replicas_populated(self) -> bool:
        return False

    def remote(self, *_: Any) -> EndlessCall:
        self.begun.release()
        return EndlessCall(self)


class EndlessCall:
    """The response of a call of EndlessModel."""

    def __init__(self, model: EndlessModel) -> None:
        self._model = model

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.Event().wait().__await__()

    async def __anext__(self) -> Any:
        await self

    def cancel(self) -> None:
        self._model.cancelled.release()


@pytest.fixture
def endless() -> Iterator[tuple[Ingress, EndlessModel, tuple[str, int]]]:
    model = EndlessModel()
    deployment = {"max_ongoing_requests": 1, "max_queued_requests": 0, "autoscaling_config": {"min_replicas": 0}}
    config = {"model_loading_config": {"model_id": "demo"}, "deployment_config": deployment}
    ingress = Ingress(ServeOptions(llm_configs=(config,)), {"demo": model}, keys=ApiKeys.of(()), hosts=frozenset())
    with served(build_app(ingress), header_timeout_s=9, write_timeout_s=9) as address:
        yield ingress, model, address


@pytest.mark.parametrize(
    "request_bytes",
    [
        raw("/v1/completions", LONG),
        raw("/v1/completions", LONG | {"stream": True}),
        raw("/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "a"}]}),
        raw("/tokenize", {"model": "demo", "prompt": "The"}),
    ],
    ids=["whole", "stream", "chat", "tokenize"],
)
def test_who_hangs_up_before_the_answer_begins_frees_the_place(
    endless: tuple[Ingress, EndlessModel, tuple[str, int]], request_bytes: bytes
) -> None:
    ingress, model, address = endless
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(request_bytes)
        assert model.begun.acquire(timeout=10)
        assert ingress.entry.num_under_way == 1
    assert model.cancelled.acquire(timeout=5)
    wait_until(lambda: ingress.entry.num_under_way == 0, FREE_S)
    with socket.create_connection(address, timeout=10) as connection:  # the model admits one at a time
        connection.sendall(request_bytes)
        assert model.begun.acquire(timeout=10)


@pytest.mark.ray
@pytest.mark.slow
def test_nothing_is_decoded_for_a_client_that_has_left(demo_endpoint: EndpointProcess) -> None:
    with connected(demo_endpoint.url) as connection:
        connection.sendall(raw("/v1/completions", LONG))
        wait_until(lambda: not demo_endpoint.is_idle(), 30)
    before = demo_endpoint.num_generated()
    assert wait_until(demo_endpoint.is_idle, 30) < 2 * FREE_S  # with the time of the questions
    assert demo_endpoint.num_generated() - before < LONG["max_tokens"] / 2
