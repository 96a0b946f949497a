"""Log-probabilities of prompts are those of transformers, wherever the prompt is computed and however often."""

from collections.abc import Sequence
from itertools import product

import pytest
import torch

from rayspec.config import EngineConfig, SamplingParams
from rayspec.local_engine import load_engine
from rayspec.types import RequestOutput
from tests.engines import RandomPlans, complete, engine_with
from tests.exhaustive import few_of
from tests.families import checkpoint, parts_of, ragged_prompts, reference
from tests.pipeline.loop import loop_engine

PROMPTS = ragged_prompts((1, 90, 2, 64, 33))
PARAMS = [SamplingParams(temperature=0, max_tokens=40, prompt_logprobs=k, ignore_eos=True) for k in (2, 2, None, 0, 4)]


def _require(path: str, outputs: Sequence[RequestOutput]) -> None:
    for prompt, params, output in zip(PROMPTS, PARAMS, outputs, strict=True):
        assert output.error is None
        if params.prompt_logprobs is None:
            assert output.prompt_logprobs is None
            continue
        with torch.inference_mode():
            table = reference(path)(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for row, token, expected in zip(output.prompt_logprobs[1:], prompt[1:], table, strict=False):
            assert row is not None
            best = {int(one) for one in expected.topk(params.prompt_logprobs).indices}
            assert set(row) == {token, *best}
            assert {one: row[one].logprob for one in row} == pytest.approx(
                {one: float(expected[one]) for one in row}, abs=1e-4
            )


@pytest.mark.parametrize(
    ("family", "is_static"),
    few_of(list(product(["llama", "gemma2"], [False, True])), [("llama", True), ("gemma2", False)]),
)
def test_after_preemptions_and_beside_drafts(family: str, is_static: bool) -> None:
    path = checkpoint(family)
    engine = engine_with(
        parts_of(path),
        RandomPlans(3, len(parts_of(path).sublayers)),
        is_static=is_static,
        kv_cache_tokens=144,
        max_num_batched_tokens=16,
        max_num_seqs=4,
    )
    _require(path, complete(engine, PROMPTS, PARAMS))
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_accepted_tokens > 0


def test_over_two_stages() -> None:
    path = checkpoint("llama")
    with loop_engine(path, 2, max_num_batched_tokens=40) as run:
        _require(path, complete(run.engine, PROMPTS, PARAMS))


def test_of_a_model_that_does_not_split() -> None:
    path = checkpoint("gpt2")
    config = EngineConfig(model=path, dtype="float32", device="cpu", max_model_len=300, max_num_batched_tokens=32)
    _require(path, complete(load_engine(config, with_tokenizer=False), PROMPTS, PARAMS))
