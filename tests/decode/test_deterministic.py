"""bfloat16: with fixed shapes the same tokens, whatever the plan and the batch; without, only near-ties may flip."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product

import pytest
import torch

from rayspec import demo
from rayspec.choices import choices_of
from rayspec.config import EngineConfig, SamplingParams
from rayspec.local_engine import load_engine
from rayspec.types import Plan
from tests.demo_model import demo_parts, demo_prompts
from tests.engines import RandomPlans, complete, engine_with, tokens_of
from tests.exhaustive import few_of
from tests.families import checkpoint, ragged_prompts, reference

NUM_PROMPTS, NUM_FIXED = 40, 10
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LONGER = PARAMS.replace(max_tokens=48)
STATIC = Plan(
    choices=choices_of([index not in (13, 14, 17, 18, 20) for index in range(32)]), num_draft_tokens=5, source="static"
)
Tokens = list[tuple[int, ...]]


def _prompts() -> list[list[int]]:
    return demo_prompts(NUM_PROMPTS, 1, seed=11)


@cache
def _deterministic(drafts: bool, batch: int) -> Tokens:
    engine = engine_with(
        demo_parts("bfloat16"),
        STATIC if drafts else None,
        deterministic=True,
        max_num_seqs=batch,
        max_num_batched_tokens=64,
    )
    tokens = tokens_of(complete(engine, _prompts()[:NUM_FIXED], PARAMS))
    assert (engine.stats.num_accepted_tokens > 0) == drafts
    return tokens


@pytest.mark.parametrize("batch", few_of([1, 8], [8]))
def test_the_same_tokens_with_and_without_speculation_and_in_every_batch(batch: int) -> None:
    assert _deterministic(True, batch) == _deterministic(False, 1)
    assert _deterministic(False, batch) == _deterministic(False, 1)


def test_the_same_tokens_under_random_plans_and_preemption() -> None:
    for seed, kv_cache_tokens in enumerate((4096, 150)):
        engine = engine_with(
            demo_parts("bfloat16"),
            RandomPlans(seed, 32),
            deterministic=True,
            max_num_seqs=6,
            max_num_batched_tokens=64,
            kv_cache_tokens=kv_cache_tokens,
        )
        assert tokens_of(complete(engine, _prompts()[:NUM_FIXED], PARAMS)) == _deterministic(False, 1)
        assert (engine.stats.num_preemptions > 0) == (kv_cache_tokens < 4096)


@pytest.mark.parametrize(
    ("family", "dtype"),
    few_of(
        list(product(["llama", "gemma2", "qwen3_moe", "mixtral"], ["float32", "bfloat16"])),
        [("llama", "bfloat16"), ("mixtral", "float32")],
    ),
)
def test_a_loaded_engine_is_deterministic_to_the_bit(family: str, dtype: str) -> None:
    """A mixture of experts too: how many rows an expert sees depends on the company, unless rows run alone."""
    prompts = ragged_prompts([30, 5, 61, 17, 9], seed=2)
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=3)
    runs = []
    static = {"strategy": "static", "skip": [2], "max_draft_tokens": 4}
    for speculation, batch in (({"strategy": "ar"}, 1), (static, 5)):
        config = EngineConfig(
            model=checkpoint(family),
            dtype=dtype,
            device="cpu",
            deterministic=True,
            max_num_seqs=batch,
            kv_cache_tokens=1024,
            speculation=speculation,  # type: ignore[arg-type]
        )
        runs.append(complete(load_engine(config, with_tokenizer=False), prompts, params))
    for one, other in zip(*runs, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


@pytest.mark.exhaustive
def test_without_it_only_near_ties_flip(record_property: pytest.RecordProperty) -> None:
    """The tokens may part only where the target's two candidates are within rounding of each other."""
    parts, prompts = demo_parts("bfloat16"), _prompts()
    plain = tokens_of(complete(engine_with(parts, max_num_seqs=8), prompts, LONGER))
    drafted = tokens_of(complete(engine_with(parts, STATIC, max_num_seqs=8), prompts, LONGER))
    partings = [_first_difference(one, other) for one, other in zip(plain, drafted, strict=True)]
    parted = [index for index, at in enumerate(partings) if at is not None]
    record_property("divergence_rate", len(parted) / NUM_PROMPTS)
    margins = []
    for index in parted:
        at = partings[index]
        assert at is not None
        context = [*prompts[index], *plain[index][:at]]
        margins.append(_margin_ulps(context, plain[index][at], drafted[index][at]))
    record_property("margins_in_ulps", margins)
    assert len(parted) <= NUM_PROMPTS / 4
    assert all(margin <= 4 for margin in margins), margins


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


@torch.no_grad()
def _margin_ulps(context: Sequence[int], one: int, other: int) -> float:
    """How far apart the float32 target sees two tokens, in units of bfloat16's rounding at the larger logit."""
    logits = reference(demo.model_path())(torch.tensor([list(context)]), use_cache=False).logits[0, -1]
    ulp = 2.0 ** (torch.floor(torch.log2(logits[[one, other]].abs().max())) - 7)
    return float((logits[one] - logits[other]).abs() / ulp)
