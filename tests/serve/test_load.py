"""Many clients at once, and such as are slow or leave: texts stay right, others are not held up, places become free."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import httpx2
import pytest

import rayspec
from benchmarks.serve import ServeBenchOptions, run_serve_bench, succeeded
from benchmarks.serve_mix import Mix
from tests.serve.endpoint_process import PAGE, EndpointProcess, connected, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
REQUEST = {"model": "demo", "prompt": "The", "temperature": 0.0, "ignore_eos": True}


def mixed(endpoint: EndpointProcess, num_requests: int, **shares: Any) -> ServeBenchOptions:
    mix = Mix(model="demo", num_requests=num_requests, max_tokens=32, **shares)
    return ServeBenchOptions(url=endpoint.url, api_key=None, mix=mix, concurrency=100)


def run(options: ServeBenchOptions, llm: rayspec.LLM) -> dict[str, Any]:
    return run_serve_bench(options, llm, lambda _: None)


@pytest.mark.parametrize("num_requests", [30, pytest.param(400, marks=pytest.mark.exhaustive)])
def test_a_mixture_of_which_some_leave(demo_endpoint: EndpointProcess, llm: rayspec.LLM, num_requests: int) -> None:
    result = run(mixed(demo_endpoint, num_requests, cut_share=0.35, longest_wait_s=0.5), llm)
    found = result["results"]
    assert succeeded(result), (found["errors"], found["differing"])
    assert found["endings"]["cut"] > num_requests / 20
    assert found["identical"] == found["endings"]["finished"] > num_requests / 2
    wait_until(demo_endpoint.is_idle, 10)


def test_a_body_that_never_ends_is_given_up(demo_endpoint: EndpointProcess) -> None:
    with ExitStack() as stack:
        connections = [stack.enter_context(connected(demo_endpoint.url, 30)) for _ in range(2)]
        for connection, rest in zip(
            connections, (b"content-length: 100\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"), strict=True
        ):
            connection.sendall(HEAD + rest)
        for connection in connections:
            assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")
    with connected(demo_endpoint.url) as connection:
        connection.sendall(HEAD + b"content-length: 100\r\n\r\n{")
    time.sleep(0.5)
    assert httpx2.post(f"{demo_endpoint.url}/v1/completions", json={**REQUEST, "max_tokens": 20}).status_code == 200
    assert "ClientDisconnect" not in demo_endpoint.errors.read_text(encoding="utf-8")


class TestWebPages:
    """What browsers may send for pages of other origins."""

    @pytest.mark.parametrize(
        ("headers", "status", "code"),
        [
            ({"content-type": "text/plain"}, 415, "unsupported_media_type"),
            ({"content-type": ""}, 415, "unsupported_media_type"),
            ({"content-encoding": "gzip"}, 415, "unsupported_encoding"),
            ({"origin": "https://other.example"}, 403, "origin_not_allowed"),
            ({"origin": "null"}, 403, "origin_not_allowed"),
            ({"host": "other.example"}, 403, "host_not_allowed"),
        ],
    )
    def test_spend_nothing(
        self, demo_endpoint: EndpointProcess, headers: Mapping[str, str], status: int, code: str
    ) -> None:
        content = json.dumps({**REQUEST, "max_tokens": 1})
        sent = {"content-type": "application/json", **headers}
        response = httpx2.post(f"{demo_endpoint.url}/v1/completions", content=content, headers=sent, timeout=60)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)

    def test_of_an_allowed_origin_are_served(self, demo_endpoint: EndpointProcess) -> None:
        url, origin = f"{demo_endpoint.url}/v1/completions", {"origin": PAGE}
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
        preflight = httpx2.options(url, headers=origin | asks)
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, PAGE)
        refused = httpx2.options(url, headers={"origin": "https://other.example"} | asks)
        assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (400, False)
        response = httpx2.post(url, json={**REQUEST, "max_tokens": 1}, headers=origin, timeout=60)
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, PAGE)
