"""What other clients send, against a real endpoint."""

import json
import shutil
import subprocess
from typing import Any

import pytest

import rayspec
from rayspec.config import SamplingParams
from tests.serve.endpoint_process import EndpointProcess

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MESSAGES: Any = [{"role": "user", "content": "Summarize: The agency spent 40 million dollars on roads."}]
GREEDY: Any = {"temperature": 0.0, "max_tokens": 30}


@pytest.fixture(scope="module")
def answer(llm: rayspec.LLM) -> str:
    return llm.chat(MESSAGES, SamplingParams(**GREEDY))[0].outputs[0].text


@pytest.mark.parametrize("version", ["--http1.0", "--http1.1"])
def test_curl(demo_endpoint: EndpointProcess, answer: str, version: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    body = {"model": "demo", "messages": MESSAGES, **GREEDY}
    whole = json.loads(_curl(demo_endpoint, version, body))
    assert whole["choices"][0]["message"]["content"] == answer
    lines = [
        line.removeprefix("data: ") for line in _curl(demo_endpoint, version, body | {"stream": True}).split("\n\n")
    ]
    assert lines[-2:] == ["[DONE]", ""]
    chunks = [json.loads(line) for line in lines[:-2]]
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == answer


def _curl(endpoint: EndpointProcess, version: str, body: dict[str, Any]) -> str:
    url = f"{endpoint.url}/v1/chat/completions"
    command = ["curl", "--fail-with-body", "-sS", "-N", version, url, "--json", json.dumps(body)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
