"""Each API key has its own corpus of outputs."""

import asyncio
import json
from typing import Any

from rayspec.openai.requests import CompletionRequest
from rayspec.serve.access import ApiKeys
from rayspec.serve.model_server import ModelServer
from rayspec.serve.options import LLMConfig
from tests.serve.endpoint_process import ENGINE


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
