"""Tools at a real endpoint, by OpenAI's client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import rayspec
from tests.serve.endpoint_process import ENGINE, EndpointProcess, serving
from tests.tool_templates import HERMES, tokenizer_with

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PARAMETERS = {
    "type": "object",
    "properties": {
        "agency": {"enum": ["Parks Council", "Water Board"]},
        "year": {"type": "integer", "minimum": 2000, "maximum": 2030},
    },
    "required": ["agency", "year"],
}
ASKED: Any = {
    "model": "demo",
    "tools": [{"type": "function", "function": {"name": "budget", "strict": True, "parameters": PARAMETERS}}],
    "temperature": 0.0,
    "max_tokens": 150,
}
MESSAGES: Any = [{"role": "user", "content": "What did the Parks Council spend in 2021?"}]
NAMED: Any = {"type": "function", "function": {"name": "budget"}}


@pytest.fixture(scope="module")
def endpoint(ray_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EndpointProcess]:
    folder = tmp_path_factory.mktemp("endpoint")
    loading = {"model_id": "demo", "model_source": "demo", "tokenizer_source": tokenizer_with(HERMES, folder / "own")}
    model = {"model_loading_config": loading, "engine_kwargs": dict(ENGINE)}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with serving(folder, environment, llm_configs=[model], engine_timeout_s=30.0) as running:
        yield running


def test_a_loop_with_tools(endpoint: EndpointProcess) -> None:
    client = openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="none", timeout=60)
    first = client.chat.completions.create(messages=MESSAGES, tool_choice=NAMED, **ASKED)
    (call,) = first.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert first.choices[0].finish_reason == "tool_calls"
    assert json.loads(call.function.arguments).keys() == {"agency", "year"}
    with client.chat.completions.stream(messages=MESSAGES, tool_choice=NAMED, **ASKED) as events:
        names = [event.type for event in events]
        streamed = events.get_final_completion()
    assert "tool_calls.function.arguments.delta" in names
    (same,) = streamed.choices[0].message.tool_calls or ()
    assert same.function.parsed_arguments == json.loads(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 million dollars"}
    last = client.chat.completions.create(messages=[*MESSAGES, first.choices[0].message, result], **ASKED)
    assert last.choices[0].finish_reason in ("stop", "length")
    with pytest.raises(openai.BadRequestError, match="two functions are called 'budget'") as caught:
        client.chat.completions.create(messages=MESSAGES, **{**ASKED, "tools": ASKED["tools"] * 2})
    assert caught.value.param == "tools"


def test_the_example_runs(endpoint: EndpointProcess) -> None:
    script = Path(rayspec.__file__).parents[1] / "examples" / "tools.py"
    done = subprocess.run([sys.executable, script, endpoint.url], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('budget({"agency": "')
    assert "million dollars in" in done.stdout.splitlines()[0]
