"""Each API key has its own corpus of outputs, and its share of the endpoint."""

import asyncio
import json
import os
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from rayspec.openai.requests import CompletionRequest
from rayspec.serve.access import ApiKeys
from rayspec.serve.model_server import ModelServer
from rayspec.serve.options import LLMConfig
from tests.serve.endpoint_process import ENGINE, serving
from tests.waiting import wait_until


def test_a_key_has_a_name_that_does_not_show_it() -> None:
    keys = ApiKeys.of(["secret-a", "secret-b"])
    names = [keys.owner(f"Bearer {key}") for key in ("secret-a", "secret-b", " secret-a")]
    assert names[0] == names[2] != names[1]
    assert not any("secret" in name for name in names)
    assert ApiKeys.of([]).owner("Bearer secret-a") == ""


def test_outputs_are_copied_by_requests_of_the_same_key_only() -> None:
    config = LLMConfig(model_loading_config={"model_id": "demo"}, engine_kwargs=ENGINE, log_engine_metrics=False)
    asked = {
        "model": "demo",
        "prompt": "The meeting",
        "max_tokens": 48,
        "temperature": 3,
        "seed": 5,
        "ignore_eos": True,
    }

    async def scenario() -> None:
        server = ModelServer(config, engine_timeout_s=60)
        stats = server._engine.client.stats
        texts = []
        copied = []
        for owner in ("a", "b", "a"):
            body: Any = await server.respond(CompletionRequest, json.dumps(asked).encode(), "name", owner)
            texts.append(json.loads(body)["choices"][0]["text"])
            copied.append(stats.accepted_by_source.get("corpus", 0))
        assert texts[0] == texts[1] == texts[2]
        assert copied[:2] == [0, 0]
        assert copied[2] >= 16
        server.__del__()

    asyncio.run(scenario())


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_key_that_floods_makes_another_wait_for_few_of_its_answers(ray_environment: None, tmp_path: Path) -> None:
    """Of eight replicas one runs, as where a cluster has no room for more. In Serve's queue, where all stand in one
    line, the other key would wait for more than half of the answers."""
    scaling = {"min_replicas": 1, "max_replicas": 8, "upscale_delay_s": 3600}
    most, num_ended = 64, 0
    flood = {"model": "demo", "prompt": "The", "max_tokens": 100, "ignore_eos": True}
    options: dict[str, Any] = {"deployment": {"autoscaling_config": scaling}, "api_keys": ["flood", "other"]}

    def http_of(key: str) -> httpx2.Client:
        limits = httpx2.Limits(max_connections=None)
        headers = {"authorization": f"Bearer {key}"}
        return httpx2.Client(base_url=endpoint.url, timeout=300, headers=headers, limits=limits)

    def ask_much() -> None:
        nonlocal num_ended
        if http.post("/v1/completions", json=flood).status_code == 200:
            num_ended += 1

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with ExitStack() as held:
        endpoint = held.enter_context(serving(tmp_path, environment, engine_timeout_s=60.0, **options))
        http, other = (held.enter_context(http_of(key)) for key in ("flood", "other"))

        def is_busy() -> bool:
            return bool(other.get("/status").json()["models"][0]["num_running"] == ENGINE["max_num_seqs"])

        threads = [threading.Thread(target=ask_much) for _ in range(most)]
        for thread in threads:
            thread.start()
        wait_until(is_busy, 120)
        waits = []
        for _ in range(3):
            before = num_ended
            answer = other.post("/v1/completions", json=flood | {"max_tokens": 1})
            assert answer.status_code == 200
            waits.append(num_ended - before)
        for thread in threads:
            thread.join()
    print(f"waited for {waits} of {most} answers")
    assert num_ended == most
    assert max(waits) <= 2 * ENGINE["max_num_seqs"]
