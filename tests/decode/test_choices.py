"""Drafts that run sublayers by any choice: no token changes, whatever the batch, the cut, the replay and the shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from rayspec.choices import Choice
from rayspec.config import EngineConfig, SamplingParams
from rayspec.local_engine import load_engine
from rayspec.model.architecture import Decomposition
from rayspec.model.attention import _Attention
from rayspec.types import Plan, RequestOutput
from tests.engines import (
    ALL_CHOICES,
    GREEDY,
    complete,
    engine_with,
    tiny_budgets,
    tokens_of,
    ways_of,
)
from tests.exhaustive import few_of
from tests.families import FAMILIES, Cases, cases, checkpoint, parts_of
from tests.pipeline.loop import NUM_LAYERS, TravellingPlans, loop_engine

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


class Reads:
    """How many rows have read few keys."""

    num_rows = 0


@contextmanager
def counted_reads() -> Iterator[Reads]:
    reads, look = Reads(), _Attention._seen_in_few

    def counted(attention: _Attention, rows: Any, *others: Any) -> Any:
        reads.num_rows += len(rows)
        return look(attention, rows, *others)

    with patch.object(_Attention, "_seen_in_few", counted):
        yield reads


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


def _texts(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    assert all(output.error is None for output in outputs)
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]
