"""Sequences for tests of the scheduler, and what the engine does with their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from rayspec.decode.scheduler import Scheduler
from rayspec.decode.sequence import SequenceState
from rayspec.generation import DecodingParams


def sequence_of(number: int, prompt: Sequence[int], max_tokens: int) -> SequenceState:
    return SequenceState(
        sequence_id=str(number),
        index=0,
        params=DecodingParams(max_tokens=max_tokens),
        seed=0,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        max_total_tokens=len(prompt) + max_tokens,
        eos_token_ids=(),
        detokenizer=None,
    )


def commit(scheduler: Scheduler, sequence: SequenceState, token_ids: Sequence[int]) -> None:
    if token_ids:
        sequence.commit(token_ids[: sequence.num_remaining])
        sequence.num_computed = sequence.num_tokens - 1
    if sequence.finished:
        scheduler.remove(sequence)
