"""How many short requests the endpoint answers beside the engine offline, with the bundled model.

python -m tests.serve.endpoint_requests --num-clients 12 --max-tokens 8 --seconds 20 --repeats 3
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

import rayspec
from rayspec import SamplingParams
from tests.serve.endpoint_process import ENGINE, serving

_PROMPT = "The agency spent 40 million dollars on roads. Summary {}:"


async def endpoint_rate(url: str, num_clients: int, body: dict[str, Any], seconds: float) -> float:
    """Requests per second that are answered."""
    end_s, num_answered = time.monotonic() + seconds, 0

    async def ask(client: int) -> None:
        nonlocal num_answered
        number = 0
        while time.monotonic() < end_s:
            prompt = _PROMPT.format(f"{client} {number}")
            async with session.post("/v1/completions", json=body | {"prompt": prompt}) as response:
                response.raise_for_status()
                await response.read()
            number += 1
            num_answered += 1

    async with aiohttp.ClientSession(url) as session:
        start_s = time.monotonic()
        await asyncio.gather(*map(ask, range(num_clients)))
        return num_answered / (time.monotonic() - start_s)


def offline_rate(llm: rayspec.LLM, max_tokens: int, num_requests: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    start_s = time.monotonic()
    llm.generate([_PROMPT.format(number) for number in range(num_requests)], params)
    return num_requests / (time.monotonic() - start_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-clients", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    body: dict[str, Any] = {"model": "demo", "max_tokens": asked.max_tokens, "temperature": 0.0}
    with (
        tempfile.TemporaryDirectory() as folder,
        rayspec.LLM("demo", **ENGINE) as llm,
        serving(Path(folder), os.environ) as endpoint,
    ):
        asyncio.run(endpoint_rate(endpoint.url, asked.num_clients, body, 3.0))
        for _ in range(asked.repeats):
            whole = asyncio.run(endpoint_rate(endpoint.url, asked.num_clients, body, asked.seconds))
            streamed = {"stream": True} | body
            stream = asyncio.run(endpoint_rate(endpoint.url, asked.num_clients, streamed, asked.seconds))
            offline = offline_rate(llm, asked.max_tokens, 200)
            print(
                f"requests/s: offline {offline:.1f}; endpoint {whole:.1f}, streamed {stream:.1f}; "
                f"load {os.getloadavg()[0]:.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
