"""A replica of a model: what it says of an engine that gets stuck in a pass, and whose outputs it copies from."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Awaitable
from typing import Any
from unittest.mock import Mock

import pytest
from ray import serve
from ray.exceptions import ObjectStoreFullError
from ray.serve.exceptions import RayServeException

from rayspec.openai.requests import CompletionRequest
from rayspec.serve import model_server
from rayspec.serve.access import ApiKeys
from rayspec.serve.app import model_deployment
from rayspec.serve.model_server import ModelServer
from rayspec.serve.options import LLMConfig
from rayspec.serve.watch import ReplicaReport
from rayspec.types import RayspecError
from tests.serve.endpoint_process import ENGINE
from tests.waiting import wait_until

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


def server_of(**engine: Any) -> ModelServer:
    kwargs = {**ENGINE, **engine}
    config = LLMConfig(model_loading_config={"model_id": "demo"}, engine_kwargs=kwargs, log_engine_metrics=False)
    return ModelServer(config, engine_timeout_s=ENGINE_TIMEOUT_S)


def answer(server: ModelServer, num_tokens: int, owner: str = "", **more: Any) -> Awaitable[Any]:
    body = {"model": "demo", "prompt": "The", "max_tokens": num_tokens, "ignore_eos": True} | more
    return server.respond(CompletionRequest, json.dumps(body).encode(), "name", owner)


def test_a_pass_that_never_ends_is_told_and_one_that_ends_late_is_forgotten() -> None:
    async def scenario() -> None:
        server = server_of(speculation={"strategy": "ar"})
        stages: Any = server._engine.llm.engine.stages  # type: ignore[union-attr]
        going_on, run_pass = threading.Event(), stages._run
        stages._run = lambda work: time.sleep(1.5 * ENGINE_TIMEOUT_S) or run_pass(work)
        first = asyncio.ensure_future(answer(server, 2))
        while not first.done():  # its passes are the first of their kinds, as if they compiled something
            assert (await server.record_routing_stats()).status.health == "ready"
            await asyncio.sleep(0.1)
        assert isinstance(first.result(), bytes)
        stages._run = run_pass
        for _ in range(6):
            assert isinstance(await answer(server, 8), bytes)
        stages._run = lambda work: going_on.wait() and run_pass(work)
        late: asyncio.Future[Any] = asyncio.ensure_future(answer(server, 8))
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


def test_a_key_has_a_name_that_does_not_show_it() -> None:
    keys = ApiKeys.of(["secret-a", "secret-b"])
    names = [keys.owner(f"Bearer {key}") for key in ("secret-a", "secret-b", " secret-a")]
    assert names[0] == names[2] != names[1]
    assert not any("secret" in name for name in names)
    assert ApiKeys.of([]).owner("Bearer secret-a") == ""


def test_outputs_are_copied_by_requests_of_the_same_key_only() -> None:
    async def scenario() -> None:
        server, texts, copied = server_of(), [], []
        for owner in ("a", "b", "a"):
            body = await answer(server, 48, owner, prompt="The meeting", temperature=3, seed=5)
            texts.append(json.loads(body)["choices"][0]["text"])
            copied.append(server._engine.client.stats.accepted_by_source.get("corpus", 0))
        assert texts[0] == texts[1] == texts[2]
        assert copied[:2] == [0, 0]
        assert copied[2] >= 16
        engine: Any = server._engine.client.engine
        ((_, tokens), *_) = engine.finished_texts(1)
        await server.remember("another replica", engine.model.vocab_size + 1, [("c", tokens)])
        await answer(server, 48, "c", prompt="The meeting", temperature=3, seed=5, use_drafts=False)
        await server.remember("another replica", engine.model.vocab_size, [("d", tokens)])
        for owner, least, most in (("c", 0, 0), ("d", 16, 48)):
            before = engine.stats.accepted_by_source["corpus"]
            await answer(server, 48, owner, prompt="The meeting", temperature=3, seed=5)
            assert least <= engine.stats.accepted_by_source["corpus"] - before <= most
        server.__del__()

    asyncio.run(scenario())


class _Peers:
    """Has the interface of Serve's handle. Each call ends with the next of some errors."""

    def __init__(self, *errors: Exception) -> None:
        self.num_calls, self._errors = 0, iter(errors)

    def options(self) -> None:
        pass

    def broadcast(self, *_: Any) -> "_Peers":
        self.num_calls += 1
        return self

    async def results_async(self, **_: Any) -> None:
        raise next(self._errors, asyncio.CancelledError)


def test_copies_go_on_after_replicas_that_cannot_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = _Peers(TimeoutError(), ObjectStoreFullError(), RayServeException())
    monkeypatch.setattr(model_server, "_PASS_ON_S", 0.0)
    monkeypatch.setattr(model_server, "replicas_of", lambda *_: {"a", "b"})
    monkeypatch.setattr(model_server, "_own_id", lambda: "a")
    monkeypatch.setattr(serve, "get_replica_context", Mock)
    monkeypatch.setattr(serve, "get_deployment_handle", lambda *_: peers)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(ModelServer._pass_on(Mock(), Mock()))
    assert peers.num_calls == 4


class _Told(ModelServer):
    """Says its process, how many tokens it generated and copied from its corpus, and how many texts it has received."""

    async def told(self) -> tuple[int, int, int, int]:
        engine: Any = self._engine.client.engine
        stats, received = engine.stats, engine._planner.proposer.received
        return os.getpid(), stats.num_generated_tokens, stats.accepted_by_source.get("corpus", 0), len(received)


@pytest.mark.exhaustive
def test_replicas_copy_from_each_other() -> None:
    config = LLMConfig(
        model_loading_config={"model_id": "demo"},
        engine_kwargs=dict(ENGINE),
        deployment_config={"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.5}},
    )
    make = model_deployment(config, replica_timeout_s=60.0, name="Two", num_gpus=0)
    handle: Any = serve.run(make(_Told).bind(config, engine_timeout_s=60.0), name="two", route_prefix=None)
    try:
        body = {
            "model": "demo",
            "prompt": "The meeting",
            "max_tokens": 48,
            "ignore_eos": True,
            "temperature": 3,
            "seed": 5,
        }

        def told() -> dict[int, list[int]]:
            return {process: numbers for process, *numbers in handle.broadcast("told").results()}

        def ask() -> bytes:
            answered: bytes = handle.respond.remote(CompletionRequest, json.dumps(body).encode(), "name").result()
            return answered

        ask()
        (other,) = (process for process, (num_generated, *_) in told().items() if num_generated == 0)
        wait_until(lambda: told()[other] == [0, 0, 1], PATIENCE_S)
        wait_until(lambda: ask() and told()[other][0] > 0, PATIENCE_S)
        num_generated, num_copied, _ = told()[other]
        assert num_generated == 48
        assert num_copied >= 16, "of its first request"
    finally:
        serve.shutdown()


def test_a_replica_that_cannot_load_its_model_says_why(caplog: pytest.LogCaptureFixture) -> None:
    loading = {"model_id": "mine", "model_source": "/no/such/model"}

    async def scenario() -> None:
        ModelServer(LLMConfig(model_loading_config=loading), engine_timeout_s=ENGINE_TIMEOUT_S)

    with pytest.raises(RayspecError):
        asyncio.run(scenario())
    assert "model 'mine' cannot be loaded: option 'model' is '/no/such/model'" in caplog.text
