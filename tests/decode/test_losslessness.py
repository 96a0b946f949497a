"""Promise 1: greedy tokens are those of transformers' generate, whatever is drafted, batched, cut or preempted."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest

from rayspec import demo
from rayspec.choices import FULL
from rayspec.config import SamplingParams
from rayspec.types import Plan
from tests.demo_model import EOS, demo_parts, demo_prompts, demo_tokenizer
from tests.engines import GREEDY, RandomPlans, complete, engine_with, random_plan, requests_for, tokens_of
from tests.exhaustive import few_of
from tests.families import (
    FAMILIES,
    HARD_FAMILIES,
    IN_EVERY_SCENARIO,
    MATRIX,
    Cases,
    cases,
    checkpoint,
    greedy,
    parts_of,
)

LENGTHS = (1, 300, 37, 3, 150, 12, 70)
MAX_TOKENS = 16
BATCHES = (1, 4, 7)


def _cases(family: str) -> Cases:
    return cases(checkpoint(family), LENGTHS, MAX_TOKENS)


# Of the other families, only the largest batch runs in every `make test`: it has prompts of all lengths.
SCENARIOS = few_of(
    [
        (family, verification, batches)
        for family in FAMILIES
        for verification in ("coupled", "rejection")
        for batches in ((BATCHES,) if family in IN_EVERY_SCENARIO else (BATCHES[:-1], BATCHES[-1:]))
    ]
    + [(family, "coupled", BATCHES[1:]) for family in HARD_FAMILIES],
    [
        *product(IN_EVERY_SCENARIO, ("coupled", "rejection"), (BATCHES,)),
        *((family, "coupled", BATCHES[-1:]) for family in FAMILIES),
        *((family, "coupled", BATCHES[1:]) for family in HARD_FAMILIES),
    ],
)


@pytest.mark.parametrize(("family", "verification", "batches"), SCENARIOS)
def test_greedy_equals_generate_under_a_random_plan_every_round(
    family: str, verification: str, batches: tuple[int, ...]
) -> None:
    parts, known = parts_of(checkpoint(family)), _cases(family)
    plans, num_drafted, num_accepted = set(), 0, 0
    for batch in batches:
        selector = RandomPlans(batch, len(parts.sublayers))
        engine = engine_with(parts, selector, verification=verification, max_num_seqs=batch, max_num_batched_tokens=64)
        outputs = complete(engine, known.prompts[-batch:])
        assert tokens_of(outputs) == known.expected[-batch:]
        plans |= {(plan.choices, plan.num_draft_tokens) for plan in selector.plans}
        num_drafted += engine.stats.num_draft_tokens
        num_accepted += engine.stats.num_accepted_tokens
    assert len(plans) >= 6 * len(batches)
    assert 0 < num_accepted < num_drafted


@pytest.mark.parametrize("family", MATRIX)
def test_greedy_equals_generate_when_preempted_and_prefilled_in_small_pieces(family: str) -> None:
    parts, known = parts_of(checkpoint(family)), _cases(family)
    short = [index for index, prompt in enumerate(known.prompts) if len(prompt) < 300]
    selector = RandomPlans(99, len(parts.sublayers))
    options = {"kv_cache_tokens": 300, "max_num_seqs": 6, "max_num_batched_tokens": 16}
    engine = engine_with(parts, selector, has_windowed_store=True, **options)
    outputs = complete(engine, [known.prompts[index] for index in short] * 2)
    assert tokens_of(outputs) == [known.expected[index] for index in short] * 2
    assert engine.stats.num_cached_tokens > 0
    assert engine.stats.num_preemptions > 0
    assert sum(output.metrics.num_preemptions for output in outputs) == engine.stats.num_preemptions


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("seed", few_of(range(10), range(4)))
def test_greedy_equals_generate_under_one_plan_throughout(family: str, seed: int) -> None:
    parts, known = parts_of(checkpoint(family)), _cases(family)
    plan = random_plan(random.Random(seed), len(parts.sublayers), 6)
    outputs = complete(engine_with(parts, plan), known.prompts[-4:])
    assert tokens_of(outputs) == known.expected[-4:]


def test_a_draft_that_skips_nothing_is_always_accepted() -> None:
    parts, known = parts_of(checkpoint("llama")), _cases("llama")
    plan = Plan(choices=(FULL,) * len(parts.sublayers), num_draft_tokens=5, source="all")
    engine = engine_with(parts, plan)
    outputs = complete(engine, known.prompts)
    assert tokens_of(outputs) == known.expected
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 0
    assert outputs[0].metrics.num_rounds == 3  # 1 token from the prefill, then rounds of 6, 6 and 3


@pytest.mark.parametrize("family", MATRIX)
def test_greedy_ends_where_generate_ends_at_eos(family: str) -> None:
    parts, known = parts_of(checkpoint(family)), _cases(family)
    eos = (known.expected[1][MAX_TOKENS // 2], known.expected[3][MAX_TOKENS // 3])
    expected = [tokens[: _first(tokens, eos)] for tokens in known.expected]
    engine = engine_with(parts, RandomPlans(5, len(parts.sublayers)), eos=eos)
    outputs = complete(engine, known.prompts)
    assert tokens_of(outputs) == expected
    assert [output.outputs[0].finish_reason for output in outputs] == [
        "stop" if tokens[-1] in eos else "length" for tokens in expected
    ]
    assert any(len(tokens) < MAX_TOKENS for tokens in expected)


def _first(tokens: tuple[int, ...], eos: tuple[int, ...]) -> int:
    """How many tokens there are up to and with the first EOS."""
    return next((at + 1 for at, token in enumerate(tokens) if token in eos), len(tokens))


SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "truncation": {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "penalties": {
        "temperature": 0.9,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.3,
    },
    "bias": {"temperature": 1.0, "logit_bias": {5: 4.0, 17: -100.0, 40: 2.5}},
    "held back": {"temperature": 1.0, "min_tokens": 10, "stop_token_ids": tuple(range(30, 90))},
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
    "many": {"temperature": 1.0, "n": 3, "logprobs": 4},
}


@pytest.mark.parametrize("name", few_of(SAMPLING, SAMPLING.keys() - {"temperature"}))  # "many" has one too
@pytest.mark.parametrize("family", few_of(["qwen2", "mixtral"], ["qwen2"]))
def test_with_a_seed_the_text_does_not_depend_on_speculation(family: str, name: str) -> None:
    parts = parts_of(checkpoint(family))
    prompts = _cases(family).prompts[-4:]
    params = [SamplingParams(max_tokens=16, seed=1000 + index, **SAMPLING[name]) for index in range(len(prompts))]
    plain = complete(engine_with(parts), prompts, params)
    num_accepted = 0
    for seed, options in enumerate(({}, {"kv_cache_tokens": 180, "max_num_batched_tokens": 16}, {"max_num_seqs": 1})):
        engine = engine_with(parts, RandomPlans(seed, len(parts.sublayers)), **options)
        outputs = complete(engine, prompts, params)
        for one, other in zip(plain, outputs, strict=True):
            assert other.error is None
            assert [o.token_ids for o in other.outputs] == [o.token_ids for o in one.outputs]
            assert [o.finish_reason for o in other.outputs] == [o.finish_reason for o in one.outputs]
            _require_same_logprobs(one, other)
        num_accepted += engine.stats.num_accepted_tokens
    assert num_accepted > 0


def _require_same_logprobs(one: Any, other: Any) -> None:
    for expected, actual in zip(one.outputs, other.outputs, strict=True):
        if expected.logprobs is None:
            assert actual.logprobs is None
            continue
        assert len(expected.logprobs) == len(actual.logprobs) == len(expected.token_ids)
        for token_id, these, those in zip(expected.token_ids, expected.logprobs, actual.logprobs, strict=True):
            assert token_id in those
            assert those.keys() == these.keys()
            for key, value in these.items():
                assert those[key].logprob == pytest.approx(value.logprob, abs=1e-4)
                assert those[key].rank == value.rank
        assert actual.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-3)


def test_samples_of_one_request_differ_and_neighbours_do_not_matter() -> None:
    parts = parts_of(checkpoint("qwen2"))
    prompts = _cases("qwen2").prompts[-4:]
    params = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=12)
    together = complete(engine_with(parts, RandomPlans(0, len(parts.sublayers))), prompts, params)
    for index, prompt in enumerate(prompts):
        alone = complete(engine_with(parts), [prompt], params)[0]
        assert [o.token_ids for o in alone.outputs] == [o.token_ids for o in together[index].outputs]
        assert len({tuple(o.token_ids) for o in alone.outputs}) == 3


def test_rejection_with_a_seed_repeats_itself() -> None:
    parts = parts_of(checkpoint("qwen2"))
    prompts = _cases("qwen2").prompts[-4:]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20)
    runs = [
        tokens_of(
            complete(
                engine_with(parts, RandomPlans(1, len(parts.sublayers)), verification="rejection"), prompts, params
            )
        )
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_requests_that_come_late_do_not_change_those_that_run() -> None:
    parts, known = parts_of(checkpoint("mistral")), _cases("mistral")
    engine = engine_with(parts, RandomPlans(11, len(parts.sublayers)), max_num_seqs=3, max_num_batched_tokens=32)
    waiting = requests_for(known.prompts, GREEDY)
    outputs = {}
    while waiting or engine.has_unfinished:
        if waiting:
            engine.add(waiting.pop(0))
        outputs |= {output.request_id: output for output in engine.step()}
    assert tokens_of(outputs[str(index)] for index in range(len(LENGTHS))) == known.expected


DEMO_MODES = [
    pytest.param({}, SamplingParams(temperature=0, max_tokens=40), id="greedy"),
    pytest.param({"kv_cache_tokens": 640}, SamplingParams(temperature=0, max_tokens=40), id="preempted"),
    pytest.param({}, SamplingParams(temperature=0.7, top_p=0.9, seed=4, max_tokens=40, logprobs=1), id="sampled"),
]


@pytest.mark.parametrize("verification", few_of(["coupled", "rejection"], ["coupled"]))
@pytest.mark.parametrize(("options", "params"), DEMO_MODES)
def test_the_demo_model_in_every_mode(options: dict[str, Any], params: SamplingParams, verification: str) -> None:
    parts, prompts = demo_parts(), demo_prompts(4, 8)
    selector = RandomPlans(2, 32, max_draft_tokens=8)
    engine = engine_with(
        parts, selector, verification=verification, eos=(EOS,), max_num_seqs=4, max_draft_tokens=8, **options
    )
    outputs = complete(engine, prompts, params)
    assert (engine.stats.num_preemptions > 0) == ("kv_cache_tokens" in options)
    assert engine.stats.num_accepted_tokens > 0
    if params.temperature == 0:
        assert tokens_of(outputs) == greedy(demo.model_path(), prompts, 40, eos=(EOS,))
    elif verification == "coupled":
        assert tokens_of(outputs) == tokens_of(complete(engine_with(parts, eos=(EOS,)), prompts, params))
    else:
        assert all(output.error is None for output in outputs)
        assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 4


def test_stop_strings_cut_the_same_text_with_and_without_drafts() -> None:
    parts, prompts = demo_parts(), demo_prompts(3, 8)
    params = SamplingParams(temperature=0, max_tokens=50)
    plain = complete(engine_with(parts, eos=(EOS,), tokenizer=demo_tokenizer()), prompts, params)
    for index, output in enumerate(plain):
        text = output.outputs[0].text
        stop = text[len(text) // 2 - 3 : len(text) // 2 + 3]
        params = SamplingParams(temperature=0, max_tokens=50, stop=[stop])
        for selector in (None, RandomPlans(index, 32)):
            engine = engine_with(parts, selector, eos=(EOS,), tokenizer=demo_tokenizer())
            cut = complete(engine, [prompts[index]], params)[0].outputs[0]
            assert cut.text == text[: text.index(stop)]
            assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
            assert tuple(cut.token_ids) == tuple(output.outputs[0].token_ids)[: len(cut.token_ids)]
            assert engine.stats.num_generated_tokens == len(cut.token_ids)
