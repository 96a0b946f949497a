"""A replica on a real Ray whose engine gets stuck in a pass."""

import asyncio
import json
import threading
import time
from collections.abc import Awaitable
from typing import Any

import pytest

from rayspec.openai.requests import CompletionRequest
from rayspec.serve.model_server import ModelServer
from rayspec.serve.options import LLMConfig
from rayspec.serve.watch import ReplicaReport
from tests.serve.endpoint_process import ENGINE

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

ENGINE_TIMEOUT_S = 1.0
PATIENCE_S = 60.0


async def report_with(server: ModelServer, health: str) -> ReplicaReport:
    for _ in range(round(PATIENCE_S / 0.1)):
        report = await server.record_routing_stats()
        if report.status.health == health:
            return report
        await asyncio.sleep(0.1)
    raise AssertionError(f"never {health}")


def answer(server: ModelServer, num_tokens: int, name: str) -> Awaitable[Any]:
    body = json.dumps({"model": "demo", "prompt": "The", "max_tokens": num_tokens, "ignore_eos": True}).encode()
    return server.respond(CompletionRequest, body, name)


def test_a_pass_that_never_ends_is_told_and_one_that_ends_late_is_forgotten() -> None:
    config = LLMConfig(
        model_loading_config={"model_id": "demo"},
        engine_kwargs={**ENGINE, "speculation": {"strategy": "ar"}},
        log_engine_metrics=False,
    )

    async def scenario() -> None:
        server = ModelServer(config, engine_timeout_s=ENGINE_TIMEOUT_S)
        stages: Any = server._engine.llm.engine.stages  # type: ignore[union-attr]
        going_on, run_pass = threading.Event(), stages._run
        stages._run = lambda work: time.sleep(1.5 * ENGINE_TIMEOUT_S) or run_pass(work)
        first = asyncio.ensure_future(answer(server, 2, "first"))
        while not first.done():  # its passes are the first of their kinds, as if they compiled something
            assert (await server.record_routing_stats()).status.health == "ready"
            await asyncio.sleep(0.1)
        assert isinstance(first.result(), bytes)
        stages._run = run_pass
        for _ in range(6):
            assert isinstance(await answer(server, 8, "quick"), bytes)
        stages._run = lambda work: going_on.wait() and run_pass(work)
        late: asyncio.Future[Any] = asyncio.ensure_future(answer(server, 8, "late"))
        report = await report_with(server, "stuck")
        assert "has not finished a pass for" in report.problem
        assert "was expected to take 0." in report.problem, "half of the slow first pass is forgotten each time"
        going_on.set()
        assert isinstance(await late, bytes)
        report = await report_with(server, "ready")
        assert report.problem is None
        await server.check_health()
        server.__del__()

    asyncio.run(scenario())
