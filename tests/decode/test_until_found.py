"""Drafts of the model that looked-up tokens go on: the text is that of plain decoding, and the statistics are told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rayspec import demo
from rayspec.config import SamplingParams
from rayspec.decode.stages import LocalStages
from rayspec.decode.strategy import BatchState, RoundPlan
from rayspec.decode.work import Draft, RoundResult
from rayspec.planning.lookup import DraftUntilFound, LookupRecord
from rayspec.types import Request
from tests.demo_model import EOS, demo_parts, demo_prompts
from tests.engines import complete, engine_with, tokens_of
from tests.exhaustive import few_of
from tests.families import cases, checkpoint, greedy, parts_of
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


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("batch", [3])
def test_greedy_equals_generate(family: str, verification: str, batch: int) -> None:
    parts, known = parts_of(checkpoint(family)), cases(checkpoint(family), LENGTHS, 40)
    selector = LookingUp(4, len(parts.sublayers))
    engine = engine_with(parts, selector, verification=verification, max_num_seqs=batch, max_num_batched_tokens=32)
    assert tokens_of(complete(engine, known.prompts, SamplingParams(temperature=0, max_tokens=40))) == known.expected
    selector.require_used()


@pytest.mark.parametrize("options", [{"kv_cache_tokens": 170}, {"deterministic": True}])
def test_greedy_equals_generate_when_preempted_and_in_fixed_shapes(options: dict[str, Any]) -> None:
    parts, known = parts_of(checkpoint("llama")), cases(checkpoint("llama"), LENGTHS, 40)
    selector = LookingUp(3, len(parts.sublayers))
    engine = engine_with(parts, selector, max_num_seqs=5, **options)
    assert tokens_of(complete(engine, known.prompts, SamplingParams(temperature=0, max_tokens=40))) == known.expected
    selector.require_used()


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


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.4, "logprobs": 2},
        {"temperature": 0.5, "presence_penalty": -0.5, "frequency_penalty": 0.1, "min_tokens": 9},
        {"temperature": 0.4, "top_p": 0.9, "n": 2},
    ],
)
def test_with_a_seed_the_text_is_that_of_plain_decoding(sampling: dict[str, Any]) -> None:
    parts, prompts = parts_of(checkpoint("qwen2")), cases(checkpoint("qwen2"), LENGTHS, 16).prompts
    params = [SamplingParams(max_tokens=40, seed=index, **sampling) for index in range(len(prompts))]
    selector = LookingUp(7, len(parts.sublayers))
    plain = complete(engine_with(parts), prompts, params)
    looked_up = complete(engine_with(parts, selector, max_num_seqs=5), prompts, params)
    for one, other in zip(plain, looked_up, strict=True):
        assert [each.token_ids for each in other.outputs] == [each.token_ids for each in one.outputs]
        assert [each.logprobs is None for each in other.outputs] == [each.logprobs is None for each in one.outputs]
    selector.require_used()


@pytest.mark.parametrize("verification", few_of(["coupled", "rejection"], ["coupled"]))
def test_text_that_is_copied_is_right(verification: str) -> None:
    parts, prompts = demo_parts(), demo_prompts(4, 8)
    selector = LookingUp(2, 32, max_draft_tokens=12)
    engine = engine_with(
        parts, selector, verification=verification, eos=(EOS,), max_num_seqs=4, max_draft_tokens=12
    )  # fmt: skip
    outputs = complete(engine, prompts, SamplingParams(temperature=0, max_tokens=100))
    assert tokens_of(outputs) == greedy(demo.model_path(), prompts, 100, eos=(EOS,))
    assert selector.num_right > 10
