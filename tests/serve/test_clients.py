"""Clients that others wrote, against a real endpoint: curl, and OpenAI's for Node. (Its Python client is in
test_endpoint.)"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

import rayspec
from rayspec.config import SamplingParams
from tests.serve.endpoint_process import ENGINE, EndpointProcess

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MESSAGES: Any = [{"role": "user", "content": "Summarize: The agency spent 40 million dollars on roads."}]
GREEDY: Any = {"temperature": 0.0, "max_tokens": 30}
NODE_CLIENT = "openai@7.57.0"
NPM_TIMEOUT_S = 60
SCRIPT = """
import OpenAI, { BadRequestError, NotFoundError } from "openai";
const [url, messages, options] = [process.argv[2], JSON.parse(process.argv[3]), JSON.parse(process.argv[4])];
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const found = { models: [], pieces: [], errors: [] };
for await (const model of await client.models.list()) found.models.push(model.id);
found.whole = await client.chat.completions.create({ model: "demo", messages, logprobs: true, ...options });
const stream = await client.chat.completions.create({
  model: "demo", messages, stream: true, stream_options: { include_usage: true }, ...options,
});
for await (const chunk of stream) {
  found.pieces.push(chunk.choices[0]?.delta.content ?? "");
  found.usage = chunk.usage ?? found.usage;
}
found.helper = await client.chat.completions.stream({ model: "demo", messages, ...options }).finalContent();
found.completion = (await client.completions.create({ model: "demo", prompt: "The", ...options })).choices[0].text;
for (const body of [{ model: "demo", messages, top_p: 7 }, { model: "absent", messages }]) {
  try {
    await client.chat.completions.create(body);
  } catch (error) {
    found.errors.push([error instanceof BadRequestError, error instanceof NotFoundError, error.code, error.param]);
  }
}
const cut = await client.chat.completions.create({
  model: "demo", messages, stream: true, max_tokens: 2000, temperature: 0, ignore_eos: true,
});
for await (const chunk of cut) break;
console.log(JSON.stringify(found));
"""


@pytest.fixture(scope="module")
def llm() -> Iterator[rayspec.LLM]:
    with rayspec.LLM("demo", **ENGINE) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def answer(llm: rayspec.LLM) -> str:
    return llm.chat(MESSAGES, SamplingParams(**GREEDY))[0].outputs[0].text


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With OpenAI's client for Node."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("no Node here")
    folder = tmp_path_factory.mktemp("node")
    command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(folder), NODE_CLIENT]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=NPM_TIMEOUT_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"npm cannot install {NODE_CLIENT}: {error}")
    (folder / "client.mjs").write_text(SCRIPT, encoding="utf-8")
    return folder


@pytest.mark.exhaustive
def test_node(demo_endpoint: EndpointProcess, node_folder: Path, llm: rayspec.LLM, answer: str) -> None:
    command = ["node", "client.mjs", demo_endpoint.url, json.dumps(MESSAGES), json.dumps(GREEDY)]
    run = subprocess.run(command, cwd=node_folder, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["models"] == ["demo", "short"]
    assert found["whole"]["choices"][0]["message"]["content"] == answer
    assert len(found["whole"]["choices"][0]["logprobs"]["content"]) == found["whole"]["usage"]["completion_tokens"]
    assert "".join(found["pieces"]) == found["helper"] == answer
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")  # without those of the prompt that are cached
    assert [found["usage"][name] for name in counts] == [found["whole"]["usage"][name] for name in counts]
    assert found["completion"] == llm.generate("The", SamplingParams(**GREEDY))[0].outputs[0].text
    assert found["errors"] == [[True, False, "invalid_value", "top_p"], [False, True, "model_not_found", "model"]]


def test_python_helpers(demo_endpoint: EndpointProcess, answer: str) -> None:
    """What its client puts chunks together with, which checks each of them."""
    with openai.OpenAI(base_url=f"{demo_endpoint.url}/v1", api_key="none", max_retries=0) as client:
        with client.chat.completions.stream(model="demo", messages=MESSAGES, **GREEDY) as stream:
            pieces = [event.delta for event in stream if event.type == "content.delta"]
            snapshot = stream.current_completion_snapshot
        assert "".join(pieces) == snapshot.choices[0].message.content == answer
        assert snapshot.choices[0].finish_reason == "length"
        raw = client.chat.completions.with_raw_response.create(model="demo", messages=MESSAGES, **GREEDY)
        assert raw.parse().choices[0].message.content == answer
        assert raw.headers["content-type"] == "application/json"


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


def test_a_zipped_body(demo_endpoint: EndpointProcess, answer: str) -> None:
    body = gzip.compress(json.dumps({"model": "demo", "messages": MESSAGES, **GREEDY}).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    found = httpx2.post(f"{demo_endpoint.url}/v1/chat/completions", content=body, headers=headers, timeout=60)
    assert found.json()["choices"][0]["message"]["content"] == answer


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


def test_curl_that_asks_for_http2_is_answered_in_http_1(demo_endpoint: EndpointProcess, answer: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    whole = json.loads(_curl(demo_endpoint, "--http2", {"model": "demo", "messages": MESSAGES, **GREEDY}))
    assert whole["choices"][0]["message"]["content"] == answer


def _curl(endpoint: EndpointProcess, version: str, body: dict[str, Any]) -> str:
    url = f"{endpoint.url}/v1/chat/completions"
    command = ["curl", "--fail-with-body", "-sS", "-N", version, url, "--json", json.dumps(body)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
