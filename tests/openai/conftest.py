"""An engine that several files of tests use."""

from collections.abc import Iterator
from typing import Any

import pytest

from rayspec import LLM
from rayspec.llm import AsyncEngine
from tests.demo_model import shallow_demo
from tests.tool_templates import HERMES, tokenizer_with

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1, "max_model_len": 512}


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    """With a chat template that describes tools."""
    tokenizer = tokenizer_with(HERMES, tmp_path_factory.mktemp("hermes"))
    engine = AsyncEngine(LLM(shallow_demo(), tokenizer=tokenizer, **OPTIONS))
    yield engine
    engine.llm.shutdown()
