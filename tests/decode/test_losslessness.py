"""Promise 1: greedy tokens are those of transformers' generate, whatever is drafted, batched, cut or preempted; with a
seed, sampled text does not depend on it either."""

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from rayspec.choices import FULL, choices_of
from rayspec.config import SamplingParams
from rayspec.decode.drafting.lookup import LookupRecord
from rayspec.decode.engine import Engine
from rayspec.decode.stages import LocalStages
from rayspec.decode.strategy import BatchState, RoundPlan
from rayspec.decode.work import RoundResult
from rayspec.model.attention import _Attention
from rayspec.planning.acceptance import DraftUntilFound
from rayspec.types import Plan, Request, RequestOutput
from tests.demo_model import EOS, demo_prompts, demo_tokenizer, shallow_demo
from tests.engines import (
    ALL_CHOICES,
    GREEDY,
    RandomPlans,
    complete,
    engine_with,
    plant_trees,
    tiny_budgets,
    tokens_of,
    ways_of,
)
from tests.exhaustive import few_of
from tests.families import (
    FAMILIES,
    HARD_FAMILIES,
    MATRIX,
    Cases,
    cases,
    checkpoint,
    operator_parts_of,
    parts_of,
)
from tests.pipeline.loop import NUM_LAYERS, TravellingPlans, loop_engine
from tests.planning.test_lookup import WORTH

# Contexts that drafts read in part grow beyond the tiny budgets of 48 and 64 tokens, some in the middle of generation.
LENGTHS = (1, 300, 37, 3, 150, 44, 90)
MAX_TOKENS = 24
PARAMS = GREEDY.replace(max_tokens=MAX_TOKENS)
KINDS = ("plans", "choices", "lookups")
WAYS: dict[str, dict[str, Any]] = {
    "one by one": {"max_num_seqs": 1},
    "rejection": {"verification": "rejection", "max_num_batched_tokens": 64},
    "preempted": {"kv_cache_tokens": 240, "max_num_seqs": 6, "max_num_batched_tokens": 16, "has_windowed_store": True},
    "deterministic": {"deterministic": True, "max_num_batched_tokens": 64},
    "trees": {"num_beside": 40, "max_num_seqs": 5},
    "trees, rejection": {"num_beside": 40, "verification": "rejection"},
    "static": {"is_static": True, "max_num_seqs": 4},
}


class LookingUp(TravellingPlans):
    """Random plans whose drafts are gone on with wherever anything matches, most of the time."""

    num_continued = 0

    def rule(self) -> Any:
        draft_while = msgspec.structs.replace(WORTH, rate=self._rng.random(), step_s=0.1)
        if self._rng.random() < 0.2:
            return draft_while
        by_class = (1.0,) * len(LookupRecord().by_class)
        return DraftUntilFound(
            worth=draft_while, by_class=by_class, min_survival=0.3 * self._rng.random(), drafting_gain=1.0
        )

    def observe(self, state: BatchState, chosen: RoundPlan, result: RoundResult, *others: Any) -> None:
        super().observe(state, chosen, result, *others)
        self.num_continued += sum(bool(one.match_classes) for one in result.drafts)


def _cases(family: str) -> Cases:
    return cases(checkpoint(family), LENGTHS, MAX_TOKENS)


def _engine(family: str, kind: str, seed: int, **options: Any) -> Engine:
    """Another random plan every round: sublayers skipped, run by any choice, or drafts that lookups go on."""
    path = checkpoint(family)
    parts = operator_parts_of(path) if "is_static" in options else parts_of(path)
    num_sublayers = len(parts.sublayers)
    if kind == "choices":
        parts = parts_of(path, "float32", ("int8", "int4"))
        return engine_with(parts, RandomPlans(seed, num_sublayers, ways=ways_of(parts)), choices=ALL_CHOICES, **options)
    strategy = RandomPlans(seed, num_sublayers) if kind == "plans" else LookingUp(seed, num_sublayers)
    return engine_with(parts, strategy, **options)


SCENARIOS = few_of(
    [case for case in product(FAMILIES, KINDS, WAYS) if case[1:] not in {(one, "static") for one in KINDS[1:]}]
    + [(family, "plans", "rejection") for family in HARD_FAMILIES],
    [
        # `test_static_step.py` has the passes in static buffers, and graphs of them.
        ("llama", "plans", "one by one"),
        *product(["llama"], ["plans"], set(WAYS) - {"static", "one by one"}),
        *product(["qwen3_moe"], ["plans"], ["deterministic", "trees, rejection"]),
        *product(["gemma2"], ["choices"], set(WAYS) - {"one by one", "rejection"}),
        *product(["llama"], ["lookups"], ["rejection", "preempted", "deterministic"]),
        # `test_fused.py` compares the logits of all families with those of transformers.
        *((family, "plans", "rejection") for family in ("granite", "deepseek_v3")),
    ],
)


@pytest.mark.parametrize(("family", "kind", "way"), SCENARIOS)
def test_greedy_equals_generate_under_another_plan_every_round(family: str, kind: str, way: str) -> None:
    known, is_preempted = _cases(family), way == "preempted"
    engine = _engine(family, kind, 7, **WAYS[way])
    chosen = [index for index, prompt in enumerate(known.prompts) if len(prompt) < 300 or not is_preempted]
    chosen = chosen * 2 if is_preempted else chosen
    if "trees" in way:
        plant_trees(engine, {(str(at), 0): known.expected[index] for at, index in enumerate(chosen)}, 3)
    outputs = complete(engine, [known.prompts[index] for index in chosen], PARAMS)
    assert tokens_of(outputs) == [known.expected[index] for index in chosen]
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens
    assert "trees" not in way or max(engine.stats.accepted_lengths) > 2
    assert (engine.stats.num_preemptions > 0) == is_preempted
    assert sum(output.metrics.num_preemptions for output in outputs) == engine.stats.num_preemptions
    assert not is_preempted or engine.stats.num_cached_tokens > 0


def test_a_draft_that_skips_nothing_is_always_accepted() -> None:
    parts, known = parts_of(checkpoint("llama")), _cases("llama")
    plan = Plan(choices=(FULL,) * len(parts.sublayers), num_draft_tokens=5, source="all")
    engine = engine_with(parts, plan)
    outputs = complete(engine, known.prompts, PARAMS)
    assert tokens_of(outputs) == known.expected
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 0
    assert outputs[0].metrics.num_rounds == 4  # 1 token from the prefill, then rounds of 6, 6, 6 and 5


@pytest.mark.parametrize("family", MATRIX)
def test_greedy_ends_where_generate_ends_at_eos(family: str) -> None:
    known = _cases(family)
    eos = (known.expected[1][MAX_TOKENS // 2], known.expected[3][MAX_TOKENS // 3])
    expected = [tokens[: _first(tokens, eos)] for tokens in known.expected]
    outputs = complete(_engine(family, "plans", 5, eos=eos), known.prompts, PARAMS)
    assert tokens_of(outputs) == expected
    assert [output.outputs[0].finish_reason for output in outputs] == [
        "stop" if tokens[-1] in eos else "length" for tokens in expected
    ]
    assert any(len(tokens) < MAX_TOKENS for tokens in expected)


def _first(tokens: tuple[int, ...], eos: tuple[int, ...]) -> int:
    """How many tokens there are up to and with the first EOS."""
    return next((at + 1 for at, token in enumerate(tokens) if token in eos), len(tokens))


SAMPLING: dict[str, dict[str, Any]] = {
    "truncation": {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "penalties": {
        "temperature": 0.9,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.3,
        "logit_bias": {5: 4.0, 17: -100.0, 40: 2.5},
    },
    "held back": {"temperature": 1.0, "min_tokens": 10, "stop_token_ids": tuple(range(30, 90))},
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
    "many": {"temperature": 1.0, "n": 3, "logprobs": 4},
}


BATCHES: tuple[dict[str, Any], ...] = ({}, {"kv_cache_tokens": 210, "max_num_batched_tokens": 16}, {"max_num_seqs": 1})
DRAFTS = (*KINDS, "trees")
SAMPLED = list(product(["qwen2", "mixtral"], SAMPLING, DRAFTS, range(len(BATCHES))))
# Each way to sample with every second kind of draft, in another kind of batch each time.
FEW_SAMPLED = [
    ("qwen2", name, DRAFTS[kind], (at + kind) % len(BATCHES))
    for at, name in enumerate(SAMPLING)
    for kind in (at % 2, at % 2 + 2)
]


@cache
def _sampled_plainly(family: str, name: str) -> tuple[list[list[int]], list[SamplingParams], list[RequestOutput]]:
    prompts = _cases(family).prompts[-4:]
    params = [SamplingParams(max_tokens=16, seed=1000 + index, **SAMPLING[name]) for index in range(len(prompts))]
    return prompts, params, complete(engine_with(parts_of(checkpoint(family))), prompts, params)


@pytest.mark.parametrize(("family", "name", "kind", "batch"), few_of(SAMPLED, FEW_SAMPLED))
def test_with_a_seed_the_text_does_not_depend_on_speculation(family: str, name: str, kind: str, batch: int) -> None:
    prompts, params, plain = _sampled_plainly(family, name)
    has_trees = kind == "trees"
    engine = _engine(family, "plans" if has_trees else kind, batch, num_beside=30 * has_trees, **BATCHES[batch])
    if has_trees:
        plant_trees(engine, {(one.request_id, o.index): o.token_ids for one in plain for o in one.outputs}, batch)
    for one, other in zip(plain, complete(engine, prompts, params), strict=True):
        assert other.error is None
        assert [o.token_ids for o in other.outputs] == [o.token_ids for o in one.outputs]
        assert [o.finish_reason for o in other.outputs] == [o.finish_reason for o in one.outputs]
        _require_same_logprobs(one, other)
    assert engine.stats.num_accepted_tokens > 0


def _require_same_logprobs(one: RequestOutput, other: RequestOutput) -> None:
    for expected, actual in zip(one.outputs, other.outputs, strict=True):
        if expected.logprobs is None:
            assert actual.logprobs is None
            continue
        assert len(expected.logprobs) == len(actual.logprobs) == len(expected.token_ids)
        for token_id, these, those in zip(expected.token_ids, expected.logprobs, actual.logprobs, strict=True):
            assert token_id in those
            assert those.keys() == these.keys()
            for key, value in these.items():
                assert those[key].logprob == pytest.approx(value.logprob, abs=3e-4)  # mixtral on a Xeon: 1.04e-4
                assert those[key].rank == value.rank
        assert actual.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-3)


def test_stop_strings_cut_the_same_text_with_and_without_drafts() -> None:
    parts, prompts = parts_of(shallow_demo()), demo_prompts(3, 8)
    params = SamplingParams(temperature=0, max_tokens=50)
    plain = complete(engine_with(parts, eos=(EOS,), tokenizer=demo_tokenizer()), prompts, params)
    for index, output in enumerate(plain):
        text = output.outputs[0].text
        stop = text[len(text) // 2 - 3 : len(text) // 2 + 3]
        params = SamplingParams(temperature=0, max_tokens=50, stop=[stop])
        for selector in (None, RandomPlans(index, len(parts.sublayers))):
            engine = engine_with(parts, selector, eos=(EOS,), tokenizer=demo_tokenizer())
            cut = complete(engine, [prompts[index]], params)[0].outputs[0]
            assert cut.text == text[: text.index(stop)]
            assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
            assert tuple(cut.token_ids) == tuple(output.outputs[0].token_ids)[: len(cut.token_ids)]
            assert engine.stats.num_generated_tokens == len(cut.token_ids)


COPIES = ("int8", "int4")
WINDOWS_OF_A_PAGE = ("mistral", "mixtral", "phi3")
"""Families whose sliding windows leave nothing for few keys to save."""


def noted_reads() -> Any:
    """Notes whether rows read few keys."""
    return patch.object(_Attention, "_seen_in_few", autospec=True, side_effect=_Attention._seen_in_few)


@pytest.mark.parametrize(
    ("family", "num_stages", "verification"),
    few_of(
        [(family, *way) for family in FAMILIES for way in ((1, "coupled"), (2, "rejection"), (3, "coupled"))],
        [("llama", 1, "coupled"), ("gemma2", 2, "rejection"), ("qwen3_moe", 3, "coupled")],
    ),
)
def test_drafts_by_any_choice_over_stages(family: str, num_stages: int, verification: str) -> None:
    parts, known = parts_of(checkpoint(family), "float32", COPIES), _cases(family)
    selector = TravellingPlans(num_stages, 2 * NUM_LAYERS, ways=ways_of(parts))
    with (
        tiny_budgets(),
        noted_reads() as reads,
        loop_engine(
            checkpoint(family), num_stages, selector, quantised=COPIES, verification=verification, seed=num_stages
        ) as run,
    ):
        assert tokens_of(complete(run.engine, known.prompts, PARAMS)) == known.expected
        run.require_clean()
        assert 0 < run.engine.stats.num_accepted_tokens < run.engine.stats.num_draft_tokens
    assert reads.called == (family not in WINDOWS_OF_A_PAGE)
    assert selector.num_searches > 0


def test_completions_that_share_pages_have_notes_of_their_own() -> None:
    """All begin with the same seven pages, and write to the same places of other ones."""
    parts = parts_of(checkpoint("llama"), "float32", COPIES)
    prompts = [_cases("llama").prompts[-1], _cases("llama").prompts[-1][:80]]
    params = [SamplingParams(temperature=1.0, n=5, seed=seed, max_tokens=30) for seed in (3, 4)]
    plan = Plan(choices=("int4+pages", "int4") * 4, num_draft_tokens=5, source="pages")
    plain = complete(engine_with(parts, enable_prefix_caching=False), prompts, params)
    with noted_reads() as reads:
        engine = engine_with(parts, plan, choices=ALL_CHOICES, max_num_seqs=7)
        outputs = complete(engine, prompts, params)
    assert _texts(outputs) == _texts(plain)
    assert reads.called
    assert engine.stats.num_cached_tokens > 300
    assert engine.stats.num_accepted_tokens > 0


def _texts(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    assert all(output.error is None for output in outputs)
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]


def _swift(widths: tuple[int, ...], **options: Any) -> Engine:
    parts = parts_of(checkpoint("llama"))
    choices = choices_of([index not in (2, 5) for index in range(len(parts.sublayers))])
    plan = Plan(choices=choices, num_draft_tokens=4, source="swift", tree_widths=widths)
    return engine_with(parts, plan, **({"num_beside": 64} | options))


def test_siblings_are_accepted_where_the_main_chain_is_not() -> None:
    known = _cases("llama")
    chain, tree = _swift(()), _swift((10, 10, 10, 10))
    for engine in (chain, tree):
        assert tokens_of(complete(engine, known.prompts, PARAMS)) == known.expected
    assert tree.stats.num_rounds < chain.stats.num_rounds
    assert tree.stats.num_draft_tokens > 3 * chain.stats.num_draft_tokens


def test_under_the_rejection_rule_only_greedy_drafts_have_siblings() -> None:
    prompts = _cases("llama").prompts
    params = [SamplingParams(temperature=index % 2, seed=index, max_tokens=12) for index in range(len(prompts))]
    engine = _swift((4, 4, 4, 4), verification="rejection")
    outputs = complete(engine, prompts, params)
    for index, output in enumerate(outputs):
        per_round = output.metrics.num_draft_tokens / output.metrics.num_rounds
        assert (per_round > 4) == (index % 2 == 0)


def test_engine_and_head_share_an_index_made_while_the_prompt_is_read() -> None:
    parts, prompt = parts_of(checkpoint("llama")), [index % 50 + 3 for index in range(100)]
    engine = engine_with(parts, LookingUp(4, len(parts.sublayers)), max_num_batched_tokens=32)
    engine.add(Request(request_id="a", prompt_token_ids=prompt, params=SamplingParams(temperature=0, max_tokens=40)))
    (sequence,) = engine._scheduler.waiting
    assert sequence.lookup is not None
    assert isinstance(engine.stages, LocalStages)
    num_indexed = []
    for _ in range(4):
        engine.step()
        num_indexed.append(sequence.lookup.num_tokens)
    assert num_indexed == [32, 64, 96, 100]
    assert engine.stages.head.samplers[sequence.sequence_id].lookup is sequence.lookup


def test_in_two_stages_the_last_one_looks_up() -> None:
    path = checkpoint("llama")
    known, selector = _cases("llama"), LookingUp(4, len(parts_of(path).sublayers))
    with loop_engine(path, 2, selector) as run:
        assert tokens_of(complete(run.engine, known.prompts, PARAMS)) == known.expected
        run.require_clean()
    assert selector.num_continued > 5
