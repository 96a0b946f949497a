"""Drafts that run sublayers by any choice: no token changes, whatever the batch, the cut, the replay and the shape."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayspec import LLM, demo
from rayspec.choices import FULL, Choice, nearest
from rayspec.config import EngineConfig, SamplingParams
from rayspec.local_engine import load_engine
from rayspec.model.architecture import Decomposition
from rayspec.model.attention import _Attention
from rayspec.pipeline.stage_worker import stage_name
from rayspec.types import Plan, RequestOutput
from tests.decode.test_distribution import excess
from tests.demo_model import demo_prompts
from tests.engines import (
    ALL_CHOICES,
    GREEDY,
    RandomPlans,
    complete,
    engine_with,
    plant_trees,
    requests_for,
    tiny_budgets,
    tokens_of,
    varied,
    ways_of,
)
from tests.exhaustive import few_of
from tests.families import FAMILIES, MATRIX, Cases, cases, checkpoint, greedy, parts_of, ragged_prompts, reference
from tests.pipeline.loop import NUM_LAYERS, Chaos, TravellingPlans, loop_engine

# Most contexts grow beyond the tiny budgets of 48 and 64 tokens, some of them in the middle of the generation.
LENGTHS = (1, 300, 37, 3, 150, 44, 90)
MAX_TOKENS = 24
PARAMS = GREEDY.replace(max_tokens=MAX_TOKENS)
COPIES = ("int8", "int4")
WINDOWS_OF_A_PAGE = ("mistral", "mixtral", "phi3")
"""Families whose sliding windows leave nothing for few keys to save."""


def known_cases(family: str) -> Cases:
    return cases(checkpoint(family), LENGTHS, MAX_TOKENS)


def parts_with_copies(family: str) -> Decomposition:
    return parts_of(checkpoint(family), "float32", COPIES)


def random_choices(parts: Decomposition, seed: int, **options: Any) -> RandomPlans:
    return RandomPlans(seed, len(parts.sublayers), ways=ways_of(parts), **options)


class Reads:
    """How many rows have read few keys."""

    num_rows = 0


@contextmanager
def counted_reads() -> Iterator[Reads]:
    reads, look = Reads(), _Attention._seen_in_few

    def counted(attention: _Attention, few: Any) -> Any:
        reads.num_rows += len(few.rows)
        return look(attention, few)

    with patch.object(_Attention, "_seen_in_few", counted):
        yield reads


@pytest.mark.parametrize(
    ("family", "verification"),
    [
        *few_of([(family, "coupled") for family in FAMILIES], [("llama", "coupled"), ("gemma2", "coupled")]),
        *(pytest.param(*param.values, "rejection", marks=param.marks) for param in MATRIX),
    ],
)
def test_greedy_equals_generate_under_random_choices_every_round(family: str, verification: str) -> None:
    parts, known = parts_with_copies(family), known_cases(family)
    made: set[Choice] = set()
    num_accepted = 0
    with counted_reads() as reads:
        for batch in (1, 7):
            selector = random_choices(parts, batch)
            engine = engine_with(
                parts,
                selector,
                choices=ALL_CHOICES,
                verification=verification,
                max_num_seqs=batch,
                max_num_batched_tokens=64,
            )
            assert tokens_of(complete(engine, known.prompts[-batch:], PARAMS)) == known.expected[-batch:]
            made |= {choice for plan in selector.plans for choice in plan.choices}
            num_accepted += engine.stats.num_accepted_tokens
    assert made == {choice for ways in ways_of(parts) for choice in ways}
    assert num_accepted > 0
    assert (reads.num_rows > 0) == (family not in WINDOWS_OF_A_PAGE)


@pytest.mark.parametrize("family", few_of(FAMILIES, ["gemma2", "smollm3"]))
@pytest.mark.parametrize("seed", few_of(range(12), [0, 1]))
def test_greedy_equals_generate_under_one_pattern_throughout(family: str, seed: int) -> None:
    parts, known = parts_with_copies(family), known_cases(family)
    full = Plan(choices=(FULL,) * len(parts.sublayers), num_draft_tokens=5, source="one")
    plan = varied(random.Random(seed), full, ways_of(parts))
    engine = engine_with(parts, plan, choices=ALL_CHOICES, deterministic=seed % 3 == 1)
    assert tokens_of(complete(engine, known.prompts, PARAMS)) == known.expected
    assert 0 < engine.stats.num_accepted_tokens <= engine.stats.num_draft_tokens


@given(data=st.data(), num_draft_tokens=st.integers(1, 6), batch=st.integers(1, 4))
def test_any_pattern_at_all(data: st.DataObject, num_draft_tokens: int, batch: int) -> None:
    parts, known = parts_with_copies("qwen3"), known_cases("qwen3")
    choices = tuple(data.draw(st.sampled_from(ways)) for ways in ways_of(parts))
    plan = Plan(choices=choices, num_draft_tokens=num_draft_tokens, source="any")
    engine = engine_with(parts, plan, choices=ALL_CHOICES, max_num_seqs=batch)
    params = PARAMS.replace(max_tokens=10)
    expected = [tokens[:10] for tokens in known.expected[-batch:]]
    assert tokens_of(complete(engine, known.prompts[-batch:], params)) == expected


@pytest.mark.parametrize("family", MATRIX)
def test_preempted_and_replayed_while_drafting(family: str) -> None:
    parts, known = parts_with_copies(family), known_cases(family)
    short = [index for index, prompt in enumerate(known.prompts) if len(prompt) < 300]
    prompts, expected = ([each[index] for index in short] * 2 for each in (known.prompts, known.expected))
    engine = engine_with(
        parts,
        random_choices(parts, 9),
        choices=ALL_CHOICES,
        kv_cache_tokens=240,
        max_num_seqs=6,
        max_num_batched_tokens=16,
    )
    assert tokens_of(complete(engine, prompts, PARAMS)) == expected
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_cached_tokens > 0


@pytest.mark.parametrize("family", MATRIX)
@pytest.mark.parametrize("way", ["deterministic", "trees"])
def test_in_fixed_shapes_and_with_trees(family: str, way: str) -> None:
    parts, known = parts_with_copies(family), known_cases(family)
    selector = random_choices(parts, 5)
    engine = engine_with(
        parts,
        selector,
        choices=ALL_CHOICES,
        deterministic=way == "deterministic",
        num_beside=40 if way == "trees" else 0,
        max_num_batched_tokens=64,
    )
    if way == "trees":
        plant_trees(engine, {(str(index), 0): tokens for index, tokens in enumerate(known.expected)}, 3)
    assert tokens_of(complete(engine, known.prompts, PARAMS)) == known.expected
    if way == "trees":
        assert any(plan.tree_widths for plan in selector.plans)


@pytest.mark.parametrize("deterministic", [False, True])
def test_in_swifts_trees_the_branches_read_few_keys_too(deterministic: bool) -> None:
    parts, known = parts_with_copies("llama"), known_cases("llama")
    plan = Plan(
        choices=("int4+pages", "int8", "window", FULL) * 2, num_draft_tokens=4, source="swift", tree_widths=(2, 3, 3, 5)
    )
    with counted_reads() as reads:
        engine = engine_with(parts, plan, choices=ALL_CHOICES, num_beside=40, deterministic=deterministic)
        assert tokens_of(complete(engine, known.prompts, PARAMS)) == known.expected
    assert reads.num_rows > 0
    assert engine.stats.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("family", "num_stages", "verification"),
    few_of(
        [(family, *way) for family in FAMILIES for way in ((1, "coupled"), (2, "rejection"), (3, "coupled"))],
        [("llama", 1, "coupled"), ("gemma2", 2, "rejection"), ("qwen3_moe", 3, "coupled")],
    ),
)
def test_over_stages(family: str, num_stages: int, verification: str) -> None:
    parts, known = parts_with_copies(family), known_cases(family)
    selector = TravellingPlans(num_stages, 2 * NUM_LAYERS, ways=ways_of(parts))
    with (
        tiny_budgets(),
        counted_reads() as reads,
        loop_engine(
            checkpoint(family), num_stages, selector, quantised=COPIES, verification=verification, seed=num_stages
        ) as run,
    ):
        assert tokens_of(complete(run.engine, known.prompts, PARAMS)) == known.expected
        run.require_clean()
        assert 0 < run.engine.stats.num_accepted_tokens < run.engine.stats.num_draft_tokens
    assert (reads.num_rows > 0) == (family not in WINDOWS_OF_A_PAGE)
    assert selector.num_searches > 0


@pytest.mark.parametrize("family", few_of(["llama", "gemma2", "qwen3_moe"], ["llama", "qwen3_moe"]))
@pytest.mark.parametrize("choice", ["int4", "int4+pages"])
def test_offloaded_sublayers_draft_by_their_copies(family: str, choice: Choice, tmp_path: Path) -> None:
    """What has a copy fetches nothing in drafts."""
    known = known_cases(family)
    config = EngineConfig(
        model=checkpoint(family),
        dtype="float32",
        device="cpu",
        kv_cache_tokens=2048,
        offload={"to": "disk", "folder": str(tmp_path), "sublayers": (1, 2, 4, 7)},  # type: ignore[arg-type]
        speculation={"strategy": "static", "static_choice": choice, "skip": (3,), "max_draft_tokens": 4},  # type: ignore[arg-type]
    )
    with tiny_budgets(), counted_reads() as reads:
        engine = load_engine(config, with_tokenizer=False)
        assert tokens_of(complete(engine, known.prompts, PARAMS)) == known.expected
    assert engine.stats.num_draft_tokens > 0
    assert (reads.num_rows > 0) == (choice == "int4+pages")


SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "penalties": {"temperature": 0.9, "presence_penalty": 0.7, "repetition_penalty": 1.3, "top_p": 0.9},
    "many": {"temperature": 1.0, "n": 3},
}


@pytest.mark.parametrize("name", few_of(SAMPLING, ["many"]))
def test_with_a_seed_the_text_does_not_depend_on_the_choices(name: str) -> None:
    parts, prompts = parts_with_copies("qwen2"), known_cases("qwen2").prompts[-4:]
    params = [SamplingParams(max_tokens=20, seed=1000 + index, **SAMPLING[name]) for index in range(len(prompts))]
    plain = [[list(one.token_ids) for one in each.outputs] for each in complete(engine_with(parts), prompts, params)]
    for seed, options in enumerate(({}, {"kv_cache_tokens": 300, "max_num_batched_tokens": 16})):
        engine = engine_with(parts, random_choices(parts, seed), choices=ALL_CHOICES, **options)
        outputs = complete(engine, prompts, params)
        assert [[list(one.token_ids) for one in each.outputs] for each in outputs] == plain
        assert engine.stats.num_accepted_tokens > 0


def _joint(path: str, prompt: Sequence[int], params: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    """The target's probability of every text of the next `length` tokens, each one of the `top_k` most likely."""
    probabilities: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for text, probability in probabilities.items():
            with torch.no_grad():
                logits = reference(path)(torch.tensor([[*prompt, *text]])).logits[0, -1] / params.temperature
            best = logits.topk(params.top_k)
            for token, share in zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True):
                longer[(*text, token)] = probability * share
        probabilities = longer
    return probabilities


@pytest.mark.exhaustive
@pytest.mark.parametrize("choice", ["int4+window", "int8+pages"])
def test_sampled_text_has_the_targets_distribution_under_rejection(choice: Choice) -> None:
    """Drafts by int4 and a window of three pages, in a context of seven; the joint of four tokens. The bound is that of
    `test_distribution`."""
    parts, path, length = parts_with_copies("llama"), checkpoint("llama"), 4
    (prompt,) = ragged_prompts([100], seed=4)
    params = SamplingParams(temperature=1.5, top_k=3, n=300, max_tokens=length, seed=11)
    ways = ways_of(parts)
    choices = tuple(nearest(choice, each) if index > 1 else FULL for index, each in enumerate(ways))
    engine = engine_with(
        parts,
        Plan(choices=choices, num_draft_tokens=3, source="one"),
        choices=ALL_CHOICES,
        verification="rejection",
        max_num_seqs=64,
        kv_cache_tokens=16384,
    )
    with counted_reads() as reads:
        outputs = complete(engine, [prompt] * 3, [params.replace(seed=seed) for seed in range(3)])
    counts = Counter(tuple(one.token_ids) for output in outputs for one in output.outputs)
    expected = _joint(path, prompt, params, length)
    assert counts.total() == 900
    assert set(counts) <= set(expected)
    observed = torch.tensor([counts[text] for text in expected])
    assert excess(observed, torch.tensor(list(expected.values()))) < 1
    assert engine.stats.acceptance_rate is not None
    assert 0.05 < engine.stats.acceptance_rate < 0.95
    assert reads.num_rows > 1000


@pytest.mark.parametrize("seed", few_of(range(6), [1]))
def test_replayed_when_stages_die_in_the_middle_of_drafts(seed: int) -> None:
    parts, known = parts_with_copies("llama"), known_cases("llama")
    num_stages = 1 + seed % 3
    selector = TravellingPlans(seed, 2 * NUM_LAYERS, ways=ways_of(parts))
    with (
        tiny_budgets(),
        loop_engine(checkpoint("llama"), num_stages, selector, quantised=COPIES, seed=seed, kv_cache_tokens=800) as run,
    ):
        run.loop.chaos = Chaos(run, seed, [stage_name(stage) for stage in range(num_stages)], most=4, every=20)
        assert tokens_of(complete(run.engine, known.prompts, PARAMS)) == known.expected
        assert run.engine.stats.num_replays > 0
        run.loop.chaos = None
        run.require_clean()


def test_completions_that_share_pages_have_notes_of_their_own() -> None:
    """All begin with the same seven pages, and write to the same places of other ones."""
    parts = parts_with_copies("llama")
    prompts = [known_cases("llama").prompts[-1], known_cases("llama").prompts[-1][:80]]
    params = [SamplingParams(temperature=1.0, n=5, seed=seed, max_tokens=30) for seed in (3, 4)]
    plan = Plan(choices=("int4+pages", "int4") * 4, num_draft_tokens=5, source="pages")
    plain = complete(engine_with(parts, enable_prefix_caching=False), prompts, params)
    with counted_reads() as reads:
        engine = engine_with(parts, plan, choices=ALL_CHOICES, max_num_seqs=7)
        outputs = complete(engine, prompts, params)
    assert _texts(outputs) == _texts(plain)
    assert reads.num_rows > 0
    assert engine.stats.num_cached_tokens > 300
    assert engine.stats.num_accepted_tokens > 0


def test_a_context_that_crosses_the_budget_within_a_draft() -> None:
    """From two pages to five; drafts of 16 tokens begin with all keys and end with few."""
    parts = parts_with_copies("qwen2")
    (prompt,) = ragged_prompts([35], seed=5)
    params = PARAMS.replace(max_tokens=40)
    (expected,) = tokens_of(complete(engine_with(parts), [prompt], params))
    for choices in (("int8+pages", "int8") * 4, ("window", FULL) * 4):
        with counted_reads() as reads:
            plan = Plan(choices=choices, num_draft_tokens=16, source="long")
            engine = engine_with(parts, plan, choices=ALL_CHOICES, max_draft_tokens=16)
            assert tokens_of(complete(engine, [prompt], params)) == [expected]
        assert reads.num_rows > 0
        assert engine.stats.num_accepted_tokens > 0


def test_engines_side_by_side_do_not_disturb_each_other() -> None:
    """Over the same weights and the same copies, in step."""
    parts, known = parts_with_copies("llama"), known_cases("llama")
    engines = [
        engine_with(parts, random_choices(parts, seed), choices=ALL_CHOICES, deterministic=seed == 1)
        for seed in range(2)
    ]
    outputs: list[dict[str, Any]] = [{} for _ in engines]
    for engine in engines:
        for request in requests_for(known.prompts, PARAMS):
            engine.add(request)
    while any(engine.has_unfinished for engine in engines):
        for engine, own in zip(engines, outputs, strict=True):
            own |= {output.request_id: output for output in engine.step()}
    for own in outputs:
        assert tokens_of(own[str(index)] for index in range(len(known.prompts))) == known.expected


@pytest.mark.parametrize(
    "speculation",
    [
        pytest.param(
            {"strategy": "static", "static_choice": "int4+pages", "max_draft_tokens": 5},
            id="static",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            {"strategy": "knapspec", "gate": False, "optimise_share": 1.0, "num_search_tokens": 4},
            id="knapspec",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_calls_from_eight_threads_get_their_own_outputs(speculation: dict[str, Any], tmp_path: Path) -> None:
    prompts = demo_prompts(4, 2)
    params = [PARAMS.replace(max_tokens=16), PARAMS.replace(max_tokens=16, temperature=1.0, seed=3, n=2)]
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 256, "num_threads": 1}
    with tiny_budgets(), LLM("demo", speculation=speculation, profile_cache=str(tmp_path), **options) as llm:

        def written(work: tuple[int, SamplingParams]) -> list[list[list[int]]]:
            first, one = work
            return _texts(llm.generate([{"prompt_token_ids": prompt} for prompt in prompts[first : first + 2]], one))

        works = [(first, one) for first in range(4) for one in params]
        expected = [written(work) for work in works]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(written, works)) == expected
        assert llm.stats.num_draft_tokens > 0
    assert [tuple(texts[0]) for texts in expected[0]] == greedy(demo.model_path(), prompts[:2], 16)


def _texts(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    assert all(output.error is None for output in outputs)
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]
