"""What other clients send, against a real endpoint."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import openai
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


def test_what_comes_out_goes_back_in(demo_endpoint: EndpointProcess, llm: rayspec.LLM, answer: str) -> None:
    """A client sends its whole object back, with null fields of its own, and other clients with those of theirs."""
    question = {"role": "user", "content": "How many?"}
    others = dict.fromkeys(["reasoning_content", "reasoning", "provider_specific_fields", "thinking_blocks", "id"])
    expected = llm.chat([*MESSAGES, {"role": "assistant", "content": answer}, question], SamplingParams(**GREEDY))[0]
    nothing = {"prompt_logprobs": None, "bad_words": None, "logit_bias": {"5": None}}
    with openai.OpenAI(base_url=f"{demo_endpoint.url}/v1", api_key="none", max_retries=0) as client:
        first = client.chat.completions.create(model="demo", messages=MESSAGES, **GREEDY).choices[0].message
        for message in (first, first.model_dump(), first.model_dump() | others | {"annotations": []}):
            messages: Any = [*MESSAGES, message, question]
            again = client.chat.completions.create(model="demo", messages=messages, extra_body=nothing, **GREEDY)
            assert again.choices[0].message.content == expected.outputs[0].text
        spoken: Any = [*MESSAGES, first.model_dump() | {"audio": {"id": "x"}}]
        with pytest.raises(openai.BadRequestError, match=r"messages\.1\.audio: .* template has no such field") as told:
            client.chat.completions.create(model="demo", messages=spoken, **GREEDY)
        assert told.value.param == "messages.1.audio"


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
