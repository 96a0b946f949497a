"""The processor on a real Ray, with the bundled model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import ray.data

from rayspec import LLM, SamplingParams, demo
from rayspec.data import Processor, ProcessorConfig, build_processor
from rayspec.service.processor import ERROR_COLUMN
from rayspec.types import ConfigError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "max_model_len": 512,
    "speculation": {"strategy": "ar"},
}
PARAMS = {"temperature": 0.0, "max_tokens": 6}


def _preprocess(row: dict[str, Any]) -> dict[str, Any]:
    if row["text"] == "fails":
        raise KeyError("a bug of the user's")
    if row["text"] == "bare":
        return {}
    if row["text"] == "wrong":
        return {"prompt": "word", "sampling_params": {"temprature": 1}}
    return {"messages": [{"role": "user", "content": row["text"]}], "sampling_params": PARAMS}


def _postprocess(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": row["id"],
        "summary": row["generated_text"],
        "num_tokens": row["num_generated_tokens"],
        "prompt_tokens": row["num_input_tokens"],
        "latency_s": row["metrics"]["latency_s"],
        ERROR_COLUMN: row[ERROR_COLUMN],
    }


@pytest.fixture(scope="module")
def processor(ray_cluster: None) -> Iterator[Processor]:
    config = ProcessorConfig(model_source="demo", engine_kwargs=ENGINE, batch_size=4)
    with build_processor(config, preprocess=_preprocess, postprocess=_postprocess) as built:
        yield built


def test_rows_are_completed_as_by_an_llm_and_a_bad_row_is_one_bad_row(processor: Processor) -> None:
    samples = demo.sample_documents(10, num_sentences=6)
    bad = [{"id": text, "text": text} for text in ("fails", "bare", "wrong", "word " * 3000)]
    dataset = ray.data.from_items([{"id": one.id, "text": one.text} for one in samples] + bad)
    rows = {row["id"]: row for row in processor(dataset).iter_rows()}
    assert len(rows) == 14
    with LLM("demo", **ENGINE) as llm:
        chats = [[{"role": "user", "content": one.text}] for one in samples]
        expected = llm.chat(chats, SamplingParams(**PARAMS))
    for one, output in zip(samples, expected, strict=True):
        row = rows[one.id]
        assert (row["summary"], row[ERROR_COLUMN]) == (output.outputs[0].text, "")
        assert (row["num_tokens"], row["prompt_tokens"]) == (6, len(output.prompt_token_ids))
        assert row["latency_s"] > 0
    assert "KeyError" in rows["fails"][ERROR_COLUMN]
    assert "none of 'messages'" in rows["bare"][ERROR_COLUMN]
    assert "did you mean 'temperature'" in rows["wrong"][ERROR_COLUMN]
    assert rows["word " * 3000][ERROR_COLUMN].startswith("prompt_too_long")


def test_the_engine_outlives_a_dataset_and_nothing_is_placed_by_ray_data(processor: Processor) -> None:
    before = ray.available_resources()
    for _ in range(2):
        dataset = ray.data.from_items([{"id": "one", "text": "The pump failed."}])
        assert [row["num_tokens"] for row in processor(dataset).iter_rows()] == [6]
    assert ray.available_resources().get("CPU", 0) >= before.get("CPU", 0) - 0.2
    assert not [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]


def test_without_continuing_a_bad_row_fails_the_job(processor: Processor) -> None:
    strict = build_processor(
        ProcessorConfig(model_source="demo", engine_kwargs=ENGINE, should_continue_on_error=False), _preprocess
    )
    strict._engine = processor._engine  # no second engine for this
    with pytest.raises(Exception, match="none of 'messages'"):
        strict(ray.data.from_items([{"id": "bare", "text": "bare"}])).take_all()


def test_a_wrong_option_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match="unknown option 'batchsize'; did you mean 'batch_size'"):
        ProcessorConfig(model_source="demo", batchsize=3)
    with pytest.raises(ConfigError, match="max_num_seqs"):
        build_processor(ProcessorConfig(model_source="demo", engine_kwargs={"max_num_seq": 3}))


def test_concurrency_is_replicas() -> None:
    config = ProcessorConfig(model_source="demo", concurrency=3, engine_kwargs={"parallel": {"stages": 2}})
    assert config.engine.parallel is not None
    assert (config.engine.parallel.replicas, config.engine.parallel.stages) == (3, 2)
