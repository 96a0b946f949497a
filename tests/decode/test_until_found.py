"""Drafts of the model that looked-up tokens go on: the text is that of plain decoding, and the statistics are told."""

from __future__ import annotations

from typing import Any

import msgspec

from rayspec.config import SamplingParams
from rayspec.decode.stages import LocalStages
from rayspec.decode.strategy import BatchState, RoundPlan
from rayspec.decode.work import Draft, RoundResult
from rayspec.planning.lookup import DraftUntilFound, LookupRecord
from rayspec.types import Request
from tests.engines import complete, engine_with, tokens_of
from tests.families import cases, checkpoint, parts_of
from tests.pipeline.loop import TravellingPlans, loop_engine
from tests.planning.test_lookup import WORTH

LENGTHS = (1, 37, 3, 61, 12)


class LookingUp(TravellingPlans):
    """Random plans whose drafts are gone on with wherever anything matches, most of the time."""

    def __init__(self, seed: int, num_sublayers: int, max_draft_tokens: int = 6) -> None:
        super().__init__(seed, num_sublayers, max_draft_tokens)
        self.continued: list[Draft] = []
        self.num_right = 0

    def rule(self) -> Any:
        draft_while = msgspec.structs.replace(WORTH, rate=self._rng.random(), step_s=0.1)
        if self._rng.random() < 0.2:
            return draft_while
        return DraftUntilFound(
            worth=draft_while,
            by_class=(1.0,) * len(LookupRecord().by_class),
            min_survival=0.3 * self._rng.random(),
            drafting_gain=1.0,
        )

    def observe(
        self, state: BatchState, chosen: RoundPlan, result: RoundResult, num_tokens: int, seconds: float
    ) -> None:
        super().observe(state, chosen, result, num_tokens, seconds)
        for one, num_accepted in zip(result.drafts, result.num_accepted, strict=True):
            if one.match_classes:
                self.continued.append(one)
                self.num_right += num_accepted > one.num_drafted

    def require_used(self) -> None:
        assert len(self.continued) > 5
        assert any(one.num_drafted > 1 for one in self.continued)


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
    assert engine.stages.head.lookup(sequence.sequence_id) is sequence.lookup


def test_in_two_stages_the_last_one_looks_up() -> None:
    path = checkpoint("llama")
    known, selector = cases(path, LENGTHS, 40), LookingUp(4, len(parts_of(path).sublayers))
    with loop_engine(path, 2, selector) as run:
        outputs = complete(run.engine, known.prompts, SamplingParams(temperature=0, max_tokens=40))
        assert tokens_of(outputs) == known.expected
        run.require_clean()
    selector.require_used()
