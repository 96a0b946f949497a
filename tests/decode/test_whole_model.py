from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from rayspec.config import EngineConfig, SamplingParams
from rayspec.decode.whole_model import WholeModelStages
from rayspec.local_engine import load_engine
from rayspec.types import CheckpointError, ConfigError
from tests.engines import complete, tokens_of
from tests.families import WHOLE_FAMILIES, build, cases, checkpoint

LENGTHS = (1, 40, 7, 150)


def _config(family: str, **options: object) -> EngineConfig:
    values: dict[str, object] = {"dtype": "float32", "device": "cpu", "max_model_len": 300, "max_num_seqs": 3}
    return EngineConfig(model=checkpoint(family), **(values | options))


@pytest.mark.parametrize("family", WHOLE_FAMILIES)
def test_a_family_that_does_not_split_decodes_plainly_and_says_so(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    known = cases(checkpoint(family), LENGTHS, 20)
    with caplog.at_level(logging.WARNING):
        engine = load_engine(_config(family, kv_cache_tokens=200, max_num_batched_tokens=32), with_tokenizer=False)
    assert isinstance(engine.stages, WholeModelStages)
    assert "speculation is off" in caplog.text
    assert family in caplog.text
    outputs = complete(engine, known.prompts, SamplingParams(temperature=0, max_tokens=20))
    assert tokens_of(outputs) == known.expected
    assert engine.stats.num_draft_tokens == 0
    assert not engine.stages._states


@pytest.mark.parametrize("family", ["gpt2", "bert"])  # tokens of a prompt to bert see later ones: no chunks
def test_preempted_sequences_start_again(family: str) -> None:
    known = cases(checkpoint(family), (30, 30, 30), 20)
    engine = load_engine(_config(family, kv_cache_tokens=150, max_num_batched_tokens=40), with_tokenizer=False)
    outputs = complete(engine, known.prompts, SamplingParams(temperature=0, max_tokens=20))
    assert tokens_of(outputs) == known.expected
    assert engine.stats.num_preemptions > 0


def test_sampling_with_a_seed_does_not_depend_on_the_batch() -> None:
    prompts = cases(checkpoint("gpt2"), LENGTHS, 20).prompts
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=12, logprobs=2, repetition_penalty=1.2)
    engine = load_engine(_config("gpt2"), with_tokenizer=False)
    together = complete(engine, prompts, params)
    for prompt, output in zip(prompts, together, strict=True):
        alone = complete(engine, [prompt], params)[0].outputs[0]
        assert alone.token_ids == output.outputs[0].token_ids
        assert alone.logprobs is not None
        assert len(alone.logprobs) == 12


def test_weights_that_compute_nan_are_refused_at_load(tmp_path: Path) -> None:
    model = build("gpt2")
    model.get_input_embeddings().weight.data.fill_(torch.nan)
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="computes NaN or infinity"):
        load_engine(EngineConfig(model=str(tmp_path), device="cpu"), with_tokenizer=False)


def test_deterministic_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"deterministic.*gpt2"):
        load_engine(_config("gpt2", deterministic=True), with_tokenizer=False)
