"""Counts of the draft tokens that a round has tested."""

from __future__ import annotations

from dataclasses import dataclass

from rayspec.decode.work import RoundResult
from rayspec.types import Plan, PlanRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """Draft tokens of a round, over the batch; a tree counts by its longest path. num_tested: tokens up to and with the
    first rejected token of each draft. reached_length: no draft ended before the plan's length.
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

    def add_to(self, record: PlanRecord, num_tokens: int, sequence_s: float) -> None:
        """Add the round to its plan's record. num_tokens: committed. sequence_s: seconds times sequences."""
        record.add_round(
            num_tokens=num_tokens,
            sequence_s=sequence_s,
            num_accepted=self.num_accepted,
            num_tested=self.num_tested,
        )
