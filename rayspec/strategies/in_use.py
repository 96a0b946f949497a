"""What rounds say of the plan they drafted by: told to its record, which reports show."""

from __future__ import annotations

from dataclasses import dataclass

from rayspec.decode.rounds import RoundResult
from rayspec.decode.selection.base import BatchState
from rayspec.types import Plan, PlanRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """Draft tokens of a round, over the batch; of trees their longest paths. num_tested: up to and with the first
    rejected one of each draft. reached_length: no draft ended before its plan's length.
    """

    num_accepted: int
    num_tested: int
    num_drafted: int
    reached_length: bool

    @classmethod
    def of(cls, plan: Plan, result: RoundResult) -> Tested:
        lengths = [one.length for one in result.drafts]
        return cls(
            num_accepted=sum(result.num_accepted),
            num_tested=sum(
                min(accepted + 1, length) for accepted, length in zip(result.num_accepted, lengths, strict=True)
            ),
            num_drafted=sum(lengths),
            reached_length=all(length == plan.num_draft_tokens for length in lengths if length),
        )


def tell(record: PlanRecord, state: BatchState, tested: Tested, *, num_tokens: int, seconds: float) -> None:
    """Add a round under the record's plan."""
    record.num_tokens += num_tokens
    record.sequence_s += seconds * state.batch
    record.num_accepted_tokens += tested.num_accepted
    record.num_tested_tokens += tested.num_tested
