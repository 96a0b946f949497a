"""Many clients at once, and such as are slow or leave: texts stay right, others are not held up, places become free."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

import rayspec
from benchmarks.serve import ServeBenchOptions, run_serve_bench, succeeded
from benchmarks.serve_mix import Mix
from tests.serve.endpoint_process import PAGE, EndpointProcess, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

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


class TestWebPages:
    """What browsers may send for pages of other origins."""

    def test_of_an_allowed_origin_are_served(self, demo_endpoint: EndpointProcess) -> None:
        url, origin = f"{demo_endpoint.url}/v1/completions", {"origin": PAGE}
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
        preflight = httpx2.options(url, headers=origin | asks)
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, PAGE)
        refused = httpx2.options(url, headers={"origin": "https://other.example"} | asks)
        assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (400, False)
        response = httpx2.post(url, json={**REQUEST, "max_tokens": 1}, headers=origin, timeout=60)
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, PAGE)
