"""What the endpoint costs in addition to an engine that computes nothing: CPU seconds per token of each process.

    python -m benchmarks.endpoint_cost --way front --num-streams 64 --seconds 20

way: "engine" is the engine alone, its streams read in one process; "front" is `rayspec serve`; "serve" is a Serve
application behind Serve's proxy, with `--num-ingresses` ingress replicas. Clients are a process of their own that is
not counted. The engine's pace is 40 tokens per second of each stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import aiohttp
import psutil  # type: ignore[import-untyped]

from benchmarks.paced_engine import PacedModelServer, paced_llm
from benchmarks.serve_client import Ask, send
from rayspec.config import SamplingParams
from rayspec.llm import AsyncEngine

_WARM_S = 3.0
_MODEL = "paced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """cpu_s: of each kind of process, while `num_tokens` tokens came. num_events: of server-sent events that brought
    them."""

    cpu_s: Mapping[str, float]
    num_tokens: int
    seconds: float
    num_events: int = 0
    first_text_s: float | None = None

    def __str__(self) -> str:
        parts = [f"{name} {1e6 * used / self.num_tokens:.0f}" for name, used in sorted(self.cpu_s.items())]
        total_s = sum(self.cpu_s.values())
        tokens_per_s = self.num_tokens / self.seconds
        first = "" if self.first_text_s is None else f"; first text after {self.first_text_s:.3f} s at the median"
        return (
            f"{tokens_per_s:.0f} tokens/s in {self.num_events / self.seconds:.0f} events/s; microseconds of CPU a "
            f"token: {', '.join(parts)}; together {1e6 * total_s / self.num_tokens:.0f}, "
            f"{total_s / self.seconds:.2f} cores{first}"
        )


def engine_alone(num_streams: int, seconds: float) -> Cost:
    """The streams of an AsyncEngine, read in this process."""
    return asyncio.run(_engine_alone(num_streams, seconds))


async def _engine_alone(num_streams: int, seconds: float) -> Cost:
    counts: Counter[str] = Counter()
    with paced_llm() as llm:
        engine = AsyncEngine(llm)
        tasks = [asyncio.create_task(_read_pieces(engine, counts)) for _ in range(num_streams)]
        await asyncio.sleep(_WARM_S)
        cpu_s, num_tokens, start_s = time.process_time(), counts["tokens"], time.monotonic()
        await asyncio.sleep(seconds)
        used, elapsed_s = time.process_time() - cpu_s, time.monotonic() - start_s
        found = Cost(cpu_s={"engine": used}, num_tokens=counts["tokens"] - num_tokens, seconds=elapsed_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return found


async def _read_pieces(engine: AsyncEngine, counts: Counter[str]) -> None:
    async for piece in engine.stream([1, 2, 3], SamplingParams(max_tokens=4000)):
        counts["tokens"] += sum(len(one.token_ids) for one in piece.outputs)


def through_endpoint(
    way: str, num_streams: int, seconds: float, options: Mapping[str, Any], num_repeats: int
) -> Iterator[Cost]:
    """Of all processes of an endpoint, while clients in this process read its streams; several times."""
    with _endpoint(way, options) as (url, session):
        for _ in range(num_repeats):
            yield asyncio.run(_load(url, session, num_streams, seconds))


@contextmanager
def _endpoint(way: str, options: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Its URL and the session of its processes."""
    command = [sys.executable, "-m", "benchmarks.endpoint_cost", "--server", way, "--options", json.dumps(options)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)  # noqa: S603
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://"), url
        yield url, process.pid
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)


async def _load(url: str, session: int, num_streams: int, seconds: float) -> Cost:
    counts: Counter[str] = Counter()
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as client:
        tasks = [asyncio.create_task(_read_events(client, counts)) for _ in range(num_streams)]
        await asyncio.sleep(_WARM_S)
        counts["tokens"] = await _num_generated(client)
        before, cpu_s, start_s = counts.copy(), _cpu_s(session), time.monotonic()
        await asyncio.sleep(seconds)
        after_s, elapsed_s = _cpu_s(session), time.monotonic() - start_s
        counts["tokens"] = await _num_generated(client)
        grown = counts - before
        asks = [Ask(path="/v1/completions", body=_body(2), cut_after_events=1) for _ in range(20)]
        firsts = sorted([(await send(client, ask)).event_times_s[0] for ask in asks])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    used = {name: after_s[name] - cpu_s.get(name, 0.0) for name in after_s}
    return Cost(
        cpu_s={name: one for name, one in used.items() if one > 0},
        num_tokens=grown["tokens"],
        seconds=elapsed_s,
        num_events=grown["events"],
        first_text_s=firsts[len(firsts) // 2],
    )


def _body(max_tokens: int) -> dict[str, Any]:
    return {"model": _MODEL, "prompt": [1, 2, 3], "max_tokens": max_tokens, "stream": True, "ignore_eos": True}


async def _read_events(client: aiohttp.ClientSession, counts: Counter[str]) -> None:
    async with client.post("/v1/completions", json=_body(4000)) as response:
        response.raise_for_status()
        async for piece in response.content.iter_any():
            counts["events"] += piece.count(b"data: ")


async def _num_generated(client: aiohttp.ClientSession) -> int:
    async with client.get("/status") as response:
        return sum(one["num_generated_tokens"] for one in (await response.json())["models"])


def _cpu_s(session: int) -> dict[str, float]:
    """Of the processes of a session, by what they are."""
    used: Counter[str] = Counter()
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == session:
                times = process.cpu_times()
                used[_kind(process, session)] += times.user + times.system
    return dict(used)


def _kind(process: psutil.Process, session: int) -> str:
    if process.pid == session:
        return "command"
    title = " ".join(process.cmdline())
    for part, kind in (("Ingress", "ingress"), ("Model", "replica"), ("ProxyActor", "proxy")):
        if title.startswith("ray::") and part in title:
            return kind
    return "rest of Ray"


def _serve(way: str, options: Mapping[str, Any]) -> None:
    """The endpoint, until SIGTERM."""
    from ray import serve  # noqa: PLC0415

    from rayspec.ray_session import ray_session  # noqa: PLC0415
    from rayspec.serve.app import build_openai_app  # noqa: PLC0415
    from rayspec.serve.options import serve_options  # noqa: PLC0415
    from rayspec.serve.run import Address, run_endpoint  # noqa: PLC0415

    model = {
        "model_loading_config": {"model_id": _MODEL, "model_source": "demo"},
        "engine_kwargs": {"max_num_seqs": 64},
    }
    args = {"llm_configs": [model], **options}
    with patch("rayspec.serve.app._MODEL_SERVER", PacedModelServer):
        if way == "front":
            run_endpoint(serve_options(args, environment={}), Address(port=0), lambda url: print(url, flush=True))
            return
        with Address(port=0).bound() as listener:
            address = Address(port=listener.getsockname()[1])
        with ray_session():
            serve.start(http_options={"port": address.port}, logging_config={"enable_access_log": False})
            serve.run(
                build_openai_app(args),
                name="rayspec",
                logging_config={"log_level": "ERROR", "enable_access_log": False},
            )
            print(address.url, flush=True)
            try:
                while True:
                    time.sleep(1)
            finally:
                serve.shutdown()  # type: ignore[no-untyped-call]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=("engine", "front", "serve"), default="front")
    parser.add_argument("--server", choices=("front", "serve"))
    parser.add_argument("--num-streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--options", type=json.loads, default={}, help="more of ServeOptions, as JSON")
    asked = parser.parse_args()
    if asked.server:
        _serve(asked.server, asked.options)
        return
    if asked.way == "engine":
        costs = iter([engine_alone(asked.num_streams, asked.seconds) for _ in range(asked.repeats)])
    else:
        costs = through_endpoint(asked.way, asked.num_streams, asked.seconds, asked.options, asked.repeats)
    for cost in costs:
        print(cost, flush=True)


if __name__ == "__main__":
    main()
