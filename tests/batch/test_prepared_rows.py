"""The task of the processor, with the bundled model and without Ray."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rayspec import LLM, SamplingParams
from rayspec.batch.processor import ERROR_COLUMN, PreparedRowTask, plain_values
from rayspec.config import Settings
from rayspec.llm import AsyncEngine

GREEDY = SamplingParams(temperature=0, max_tokens=3)
USER = {"role": "user", "content": "The pump failed."}


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1, "max_model_len": 128}
    with LLM("demo", speculation={"strategy": "ar"}, **options) as llm:
        yield AsyncEngine(llm)


def completed(engine: AsyncEngine, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    complete = PreparedRowTask(settings=Settings(engine=engine.llm.config, sampling=GREEDY)).handler(engine)

    async def all_of_them() -> list[dict[str, Any]]:
        return [await complete(plain_values(row)) for row in rows]

    return asyncio.run(all_of_them())


def test_what_arrow_fills_with_null_is_left_out_at_every_depth(engine: AsyncEngine, tmp_path: Path) -> None:
    parameters = [{"max_tokens": 2}, {"top_p": 0.5, "logit_bias": {"5": 1.0}}, {"logit_bias": {"7": -1.0}}, None]
    parts = [{"type": "text", "text": "The pump failed."}, {"type": "text", "text": "Twice.", "other": []}]
    messages = [[{"role": "user", "content": [part]}] for part in parts] * 2
    table = pa.table({"messages": messages, "sampling_params": parameters})
    pq.write_table(table, tmp_path / "a.parquet")
    rows = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert rows[0]["sampling_params"] == {"max_tokens": 2, "top_p": None, "logit_bias": None}
    assert rows[1]["sampling_params"]["logit_bias"] == {"5": 1.0, "7": None}
    done = completed(engine, *rows)
    assert [row[ERROR_COLUMN] for row in done] == [""] * 4
    assert [row["num_generated_tokens"] for row in done] == [2, 3, 3, 3]
    assert done[0]["params"] == GREEDY.replace(max_tokens=2).model_dump_json(exclude_defaults=True)


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"prompt": 5.0}, "request: the prompt is 5.0: give a text, or {'prompt_token_ids': [...]}"),
        (dict.fromkeys(["prompt", "messages"], float("nan")), "request: the row has none of 'messages'"),
        ({"prompt": ""}, "empty_prompt: the prompt has zero tokens"),
        ({"prompt": None, "messages": None}, "request: the row has none of 'messages', 'prompt', 'tokenized_prompt'"),
        ({"messages": np.array([])}, "invalid_messages: the conversation has no message"),
        ({"messages": "hi"}, "invalid_messages: the conversation is 'hi', no JSON of a list of messages"),
        ({"messages": [USER | {"image": "x"}]}, "invalid_messages: messages.0.image: the model's chat template has no"),
        ({"tokenized_prompt": np.array([5.0, np.inf])}, "invalid_token: prompt token 5.0 is not an integer"),
        ({"tokenized_prompt": 5}, "request: column 'tokenized_prompt' is 5: give a list"),
        ({"prompt": "Hi", "sampling_params": "x"}, "config: column 'sampling_params' is 'x': give a dict"),
        ({"prompt": "Hi", "sampling_params": {"top_p": 5}}, "config: option 'top_p' is 5"),
        ({"prompt": "Hi", "sampling_params": {5: 5}}, "config: unknown option '5'"),
    ],
)
def test_a_bad_row_has_a_clear_error_of_its_own(engine: AsyncEngine, row: dict[str, Any], error: str) -> None:
    bad, good = completed(engine, row, {"prompt": "The pump"})
    assert bad[ERROR_COLUMN].startswith(error)
    assert good[ERROR_COLUMN] == ""


def test_messages_may_be_json_text_and_tokens_a_tensor(engine: AsyncEngine) -> None:
    one, same = completed(engine, {"messages": [USER]}, {"messages": json.dumps([USER])})
    nulls = dict.fromkeys(["messages", "sampling_params"], float("nan"))  # of pandas
    (tensor,) = completed(engine, nulls | {"tokenized_prompt": torch.tensor(one["prompt_token_ids"])})
    assert one["prompt_token_ids"] == same["prompt_token_ids"] == tensor["prompt_token_ids"]


def test_a_template_that_raises_is_an_error_of_its_row(engine: AsyncEngine) -> None:
    before = engine.tokenizer.chat_template
    try:
        engine.tokenizer.chat_template = "{{ 1 / (messages | length - 1) }}"
        (bad,) = completed(engine, {"messages": [USER]})
    finally:
        engine.tokenizer.chat_template = before
    assert bad[ERROR_COLUMN] == (
        "invalid_messages: the messages cannot be made a prompt: ZeroDivisionError: division by zero"
    )
