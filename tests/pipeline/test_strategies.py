"""Strategies that choose plans while they run, over stages: questions, plans and rules travel, no token changes."""

from __future__ import annotations

import pytest

from rayspec.config import SamplingParams
from rayspec.decode.work import Round
from rayspec.pipeline.messages import Begin, Searched
from rayspec.planning.learning import DraftWhileSure
from tests.engines import complete, tokens_of
from tests.families import cases, checkpoint
from tests.pipeline.loop import loop_engine
from tests.strategies.test_by_name import LENGTHS, NUM_TOKENS, STRATEGIES, make


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_stages_have_the_tokens_of_plain_decoding(strategy: str) -> None:
    known = cases(checkpoint("granite"), LENGTHS, NUM_TOKENS)
    with loop_engine(checkpoint("granite"), 2, make(strategy), max_num_seqs=5) as run:
        outputs = complete(run.engine, known.prompts, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
        assert tokens_of(outputs) == known.expected
        assert run.engine.stats.num_draft_tokens > 20
        assert run.engine.stats.optimise_s > 0
        answers = [message for _, message in run.loop.delivered if isinstance(message, Searched)]
        assert any(message.answer is not None for message in answers)
        begins = [message for _, message in run.loop.delivered if isinstance(message, Begin)]
        rules = [begin.work.keep_drafting for begin in begins if isinstance(begin.work, Round)]
        assert any(isinstance(rule, DraftWhileSure) for rule in rules)
        run.require_clean()
