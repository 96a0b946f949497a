"""Metrics of several nodes as one text."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rayspec.serve.scrape import UNREACHABLE_NODES, merged, scrape_agents

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def node_text(node: str, tokens: float) -> str:
    """What an agent exports, ours and more, with all that makes text hard to read."""
    registry = CollectorRegistry()
    counter = Counter(
        "ray_rayspec_generation_tokens", 'Tokens "made" \\ by\nthe model.', ["node", "model"], registry=registry
    )
    counter.labels(node, 'a "model" \\ {x="1"} # TYPE\u2028y').inc(tokens)
    histogram = Histogram("ray_rayspec_wait_seconds", "Waited.", ["node"], buckets=(0.1, 1.0), registry=registry)
    histogram.labels(node).observe(0.5)
    Gauge("ray_serve_queue", "Of Serve.", ["node"], registry=registry).labels(node).set(2)
    Gauge("ray_node_mem_used", "Of no interest.", ["node"], registry=registry).labels(node).set(5)
    Gauge("rayspec_impostor", "Not exported by Ray.", registry=registry).set(5)
    return generate_latest(registry).decode()


def values(text: str) -> dict[str, dict[str, float]]:
    """By family: the value of each series, named by its node and bucket."""
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families), "a family stands twice"
    return {
        family.name: {
            ":".join((sample.name, sample.labels.get("node", ""), sample.labels.get("le", ""))): sample.value
            for sample in family.samples
        }
        for family in families
    }


def test_families_of_two_nodes_become_one() -> None:
    first = node_text("n1", 3)
    text = merged([first, node_text("n2", 4)], num_unreachable=1)
    found = values(text)
    assert {name: len(series) for name, series in found.items() if not name.endswith("_created")} == {
        "ray_rayspec_generation_tokens": 2,
        "ray_rayspec_wait_seconds": 10,
        "ray_serve_queue": 2,
        UNREACHABLE_NODES: 1,
    }
    assert found["ray_rayspec_generation_tokens"] == {
        "ray_rayspec_generation_tokens_total:n1:": 3,
        "ray_rayspec_generation_tokens_total:n2:": 4,
    }
    assert found["ray_rayspec_wait_seconds"]["ray_rayspec_wait_seconds_bucket:n2:1.0"] == 1
    assert found["ray_rayspec_wait_seconds"]["ray_rayspec_wait_seconds_bucket:n2:0.1"] == 0
    assert found[UNREACHABLE_NODES] == {f"{UNREACHABLE_NODES}::": 1}
    ours = [line for line in first.split("\n") if "ray_rayspec_" in line or "ray_serve_" in line]
    assert set(ours) <= set(text.split("\n"))


@asynccontextmanager
async def agent(handler: Handler) -> AsyncIterator[str]:
    """The address of a node's agent that answers like that."""
    app = web.Application()
    app.router.add_get("/metrics", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"{host}:{port}"
    finally:
        await runner.cleanup()


async def healthy(request: web.Request) -> web.StreamResponse:
    return web.Response(text=node_text("n1", 3))


async def silent(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


def test_nodes_that_do_not_answer_are_left_out_in_time() -> None:
    async def scraped() -> str:
        async with AsyncExitStack() as stack:
            handlers = (silent, healthy, healthy)  # of the same series of two nodes, the first counts
            addresses = [await stack.enter_async_context(agent(handler)) for handler in handlers]
            with socket.socket() as closed:
                closed.bind(("127.0.0.1", 0))  # and does not listen
                addresses.append(f"127.0.0.1:{closed.getsockname()[1]}")
                return await scrape_agents(addresses, timeout_s=0.5)

    found = values(asyncio.run(asyncio.wait_for(scraped(), 10.0)))
    assert found["ray_rayspec_generation_tokens"] == {"ray_rayspec_generation_tokens_total:n1:": 3}
    assert found[UNREACHABLE_NODES] == {f"{UNREACHABLE_NODES}::": 2}
