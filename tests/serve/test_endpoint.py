"""Answers of a real endpoint: of `rayspec serve`, and behind Serve's proxy, as `serve deploy` starts it, with a model
that takes one request at a time."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx2
import msgspec
import openai
import pydantic
import pytest
import ray
from ray import serve

import rayspec
from rayspec import StructuredOutputsParams
from rayspec.config import SamplingParams
from rayspec.serve import build_openai_app
from rayspec.serve.description import ErrorBody
from rayspec.serve.run import Address
from rayspec.serve.watch import EndpointStatus
from tests.serve.conftest import PLAIN
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

APP, MODEL = "endpoint", "org/narrow"
KEY = "correct-horse"
MAX_BYTES = 20_000
TIMEOUT_S = 6.0
ENGINE = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 4, "kv_cache_tokens": 16384, "speculation": PLAIN}
MESSAGES: Any = [{"role": "user", "content": "Summarize: The agency spent 40 million dollars on roads."}]
GREEDY = {"temperature": 0.0, "max_tokens": 40}
ENDLESS = {"model": MODEL, "prompt": "The", "max_tokens": 8000, "ignore_eos": True, "temperature": 0.0}


class Report(pydantic.BaseModel):
    """What a client wants to know of a report."""

    model_config = pydantic.ConfigDict(extra="forbid")

    kind: Literal["audit", "survey"]
    year: Annotated[int, pydantic.Field(ge=1900, le=2100)]
    is_final: bool
    note: Annotated[str, pydantic.Field(max_length=20)] | None


@dataclass(frozen=True, slots=True)
class Endpoint:
    url: str
    http: httpx2.Client
    model: str = MODEL

    def post(self, path: str, body: Any, **more: Any) -> httpx2.Response:
        return self.http.post(path, json=body, **more)

    def status(self) -> dict[str, Any]:
        (status,) = self.http.get("/status").json()["models"]
        return status  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def deployed(ray_cluster: None) -> Iterator[Endpoint]:
    with Address(port=0).bound() as listener:
        address = Address(port=listener.getsockname()[1])
    serve.start(http_options={"host": address.host, "port": address.port}, logging_config={"log_level": "WARNING"})
    model = {
        "model_loading_config": {"model_id": MODEL, "model_source": "demo"},
        "engine_kwargs": ENGINE,
        "deployment_config": {"max_ongoing_requests": 1, "max_queued_requests": 1},
        "log_engine_metrics": False,
    }
    args = {
        "llm_configs": [model],
        "api_keys": ["another", KEY],
        "max_request_bytes": MAX_BYTES,
        "request_timeout_s": TIMEOUT_S,
    }
    serve.run(build_openai_app(args), name=APP, logging_config={"log_level": "ERROR", "enable_access_log": False})
    with httpx2.Client(base_url=address.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as http:
        yield Endpoint(address.url, http)  # Serve ends with Ray: it would wait for the replica that was lost last


@pytest.fixture(scope="module", params=["demo_endpoint", pytest.param("deployed", marks=pytest.mark.exhaustive)])
def endpoint(request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    found = request.getfixturevalue(request.param)
    if isinstance(found, Endpoint):
        yield found
    else:
        with httpx2.Client(base_url=found.url, timeout=60) as http:
            yield Endpoint(found.url, http, "demo")


@pytest.fixture(scope="module")
def client(endpoint: Endpoint) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key=KEY, max_retries=0, timeout=60)


def error_of(response: httpx2.Response) -> dict[str, Any]:
    """Checked to be OpenAI's, and to tell nothing of the inside."""
    assert response.headers["content-type"] == "application/json"
    error = ErrorBody.model_validate_json(response.content).error
    assert "Traceback" not in error.message
    assert ".py" not in error.message
    return error.model_dump()


def events(lines: Iterator[str]) -> list[Any]:
    """Of a stream that ends as it should."""
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data[-1] == "[DONE]"
    return [json.loads(one) for one in data[:-1]]


class TestAnswers:
    def test_completions(self, endpoint: Endpoint, client: openai.OpenAI, llm: rayspec.LLM) -> None:
        prompts = ["The report found that", "In 2011 the department"]
        expected = [output.outputs[0].text for output in llm.generate(prompts, SamplingParams(**GREEDY))]
        whole = client.completions.create(model=endpoint.model, prompt=prompts, **GREEDY)
        assert [choice.text for choice in whole.choices] == expected
        assert whole.model == endpoint.model
        texts = ["", ""]
        with client.completions.create(model=endpoint.model, prompt=prompts, stream=True, **GREEDY) as stream:
            for chunk in stream:
                texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == expected

    def test_a_parsed_answer_has_its_schema(self, endpoint: Endpoint, client: openai.OpenAI, llm: rayspec.LLM) -> None:
        form = StructuredOutputsParams(json=Report)
        expected = llm.chat(MESSAGES, SamplingParams(temperature=0.0, max_tokens=500, structured_outputs=form))[0]
        asked: Any = {"model": endpoint.model, "messages": MESSAGES, "temperature": 0.0, "max_tokens": 500}
        answer = client.chat.completions.parse(response_format=Report, **asked)
        assert isinstance(answer.choices[0].message.parsed, Report)
        with client.chat.completions.stream(response_format=Report, **asked) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed
        text = answer.choices[0].message.content
        assert (text, answer.choices[0].finish_reason) == (expected.outputs[0].text, "stop")
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)
        assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)

    def test_models(self, endpoint: Endpoint, client: openai.OpenAI) -> None:
        assert endpoint.model in [model.id for model in client.models.list()]
        assert client.models.retrieve(endpoint.model).id == endpoint.model
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("org/other")

    def test_tokens_and_back(self, endpoint: Endpoint, llm: rayspec.LLM) -> None:
        text = "The agency spent"
        found = endpoint.post("/tokenize", {"model": endpoint.model, "prompt": text}).json()
        assert found["tokens"] == list(llm.tokenizer(text)["input_ids"])
        assert (
            endpoint.post("/detokenize", {"model": endpoint.model, "tokens": found["tokens"]})
            .json()["prompt"]
            .endswith(text)
        )
        assert endpoint.post("/tokenize", {"model": endpoint.model, "messages": MESSAGES}).json()["count"] > 10
        assert endpoint.post("/detokenize", {"model": endpoint.model, "tokens": [10**9]}).status_code == 400

    def test_the_example_of_a_client_runs(self, endpoint: Endpoint) -> None:
        script = Path(rayspec.__file__).parents[1] / "examples" / "endpoint.py"
        environment = os.environ | {"OPENAI_API_KEY": KEY}
        done = subprocess.run(
            [sys.executable, script, endpoint.url], capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr
        answer, scored = done.stdout.splitlines()[-2:]
        assert answer
        assert re.fullmatch(r"-\d+\.\d\d in \d+ tokens", scored)

    def test_version_and_ping(self, endpoint: Endpoint) -> None:
        assert endpoint.http.get("/version").json() == {"version": rayspec.__version__}
        for method in ("GET", "POST"):
            assert endpoint.http.request(method, "/ping").status_code == 200


@pytest.mark.exhaustive
class TestLimits:
    def test_who_leaves_frees_the_place_at_once(self, deployed: Endpoint) -> None:
        with deployed.http.stream("POST", "/v1/completions", json=ENDLESS | {"stream": True}) as response:
            lines = response.iter_lines()
            for _ in range(10):
                next(lines)
            assert deployed.status()["num_running"] == 1
        assert wait_until(lambda: deployed.status()["num_running"] == 0) < TIMEOUT_S - 1.5, "before its time is over"
        with pytest.raises(httpx2.TimeoutException):
            deployed.post("/v1/completions", ENDLESS, timeout=1.0)
        assert wait_until(lambda: deployed.status()["num_running"] == 0) < TIMEOUT_S - 1.5

    def test_who_comes_when_all_places_are_taken_is_sent_away(self, deployed: Endpoint) -> None:
        body = ENDLESS | {"max_tokens": 120}
        with ThreadPoolExecutor(6) as pool:
            running = [pool.submit(deployed.post, "/v1/completions", body)]
            wait_until(lambda: deployed.status()["num_running"] == 1)
            running += [pool.submit(deployed.post, "/v1/completions", body | {"stream": n % 2 == 0}) for n in range(4)]
            # A busy model is not a sick one, and tells how it is.
            assert deployed.http.get("/health").status_code == 200
            assert deployed.status()["num_running"] == 1
            responses = [future.result() for future in running]
        refused = [response for response in responses if response.status_code == 429]
        assert len(refused) == 3
        taken = {response.status_code for response in responses if response not in refused}
        assert taken <= {200, 504}, "a busy machine may need more than the limit of time for one of them"
        for response in refused:
            assert error_of(response)["code"] == "rate_limit_exceeded"
            assert int(response.headers["retry-after"]) > 0


@pytest.mark.exhaustive
def test_status(deployed: Endpoint) -> None:
    deployed.post("/v1/completions", {"model": MODEL, "prompt": "The"} | GREEDY)
    (status,) = msgspec.convert(deployed.http.get("/status").json(), EndpointStatus).models
    assert (status.model, status.version, status.num_sublayers) == (MODEL, rayspec.__version__, 32)
    assert status.num_generated_tokens >= 40
    assert (status.kv_used_tokens, status.kv_total_tokens) == (0, 16384)
    wait_until(lambda: deployed.status()["tokens_per_s"] > 1)
    if status.plan is not None:
        assert len(status.plan.choices) == 32


@pytest.mark.exhaustive
def test_a_model_that_is_lost_on_the_way(deployed: Endpoint) -> None:
    """The last test: the model comes back only later."""
    body = ENDLESS | {"stream": True}
    with deployed.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
        (replica,) = [name for name in names if name.startswith(f"SERVE_REPLICA::{APP}#Model:org--narrow#")]
        ray.kill(ray.get_actor(replica, namespace="serve"))
        assert events(lines)[-1]["error"]["code"] == "engine_dead"
    health = deployed.http.get("/health")
    assert health.status_code == 503
    assert error_of(health)["message"] == f"{MODEL}: starting"
    assert int(health.headers["retry-after"]) > 0
