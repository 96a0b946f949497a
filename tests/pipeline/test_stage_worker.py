"""The pipeline without Ray: whatever the cut, the plan and the order of messages, tokens are those of one process."""

from __future__ import annotations

import random

import pytest

from tests.engines import complete, require_idle, tokens_of
from tests.families import FAMILIES, Cases, cases, checkpoint
from tests.pipeline.loop import TravellingPlans, loop_engine

LENGTHS = (1, 60, 37, 3, 25, 12, 70)
MAX_TOKENS = 24


def _cases(family: str) -> Cases:
    return cases(checkpoint(family), LENGTHS, MAX_TOKENS)


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_greedy_equals_generate(family: str, num_stages: int, verification: str) -> None:
    known = _cases(family)
    selector = TravellingPlans(num_stages, 8)
    with loop_engine(checkpoint(family), num_stages, selector, verification=verification) as run:
        assert tokens_of(complete(run.engine, known.prompts)) == known.expected
        run.require_clean()
        assert 0 < run.engine.stats.num_accepted_tokens < run.engine.stats.num_draft_tokens
