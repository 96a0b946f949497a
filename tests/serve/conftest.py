"""An endpoint that several files of tests use."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

import rayspec
from tests.serve.endpoint_process import ENGINE, PAGE, EndpointProcess, serving
from tests.tool_templates import HERMES, tokenizer_with

PLAIN = {"strategy": "ar"}  # such a replica does not measure the machine when it starts
MAX_BYTES = 8 * 2**20
MAX_QUEUED = 200
MAX_FILE_BYTES, MAX_LINES = 200_000, 250


@pytest.fixture(scope="session")
def llm() -> Iterator[rayspec.LLM]:
    """The model of the endpoints, in this process."""
    with rayspec.LLM("demo", **ENGINE) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def demo_endpoint(ray_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EndpointProcess]:
    """With the demo model: as "demo", and as "tools", with a chat template that describes tools."""
    folder = tmp_path_factory.mktemp("endpoint")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    own = {"model_source": "demo", "tokenizer_source": tokenizer_with(HERMES, folder / "own")}
    models = [
        {"model_loading_config": {"model_id": "demo"}, "engine_kwargs": dict(ENGINE)},
        {"model_loading_config": {"model_id": "tools", **own}, "engine_kwargs": {**ENGINE, "speculation": PLAIN}},
    ]
    for model in models:
        share = {"num_cpus": 0.3}  # of the test machine's, which may have two
        model["deployment_config"] = {"max_queued_requests": MAX_QUEUED, "ray_actor_options": share}
    limits: dict[str, Any] = {"cors": [PAGE]}
    limits |= {"batches": str(folder / "kept"), "max_batch_file_bytes": MAX_FILE_BYTES, "max_batch_lines": MAX_LINES}
    limits |= {"max_request_bytes": MAX_BYTES, "engine_timeout_s": 30.0, "body_timeout_s": 5.0, "header_timeout_s": 5.0}
    with serving(folder, environment, llm_configs=models, **limits) as endpoint:
        yield endpoint
