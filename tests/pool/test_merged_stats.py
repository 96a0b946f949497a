from __future__ import annotations

from rayspec.pool.merged_stats import merged_stats
from rayspec.types import EngineStats, PlanRecord, no_draft


def test_stats_are_summed() -> None:
    def record(elapsed_s: float) -> PlanRecord:
        return PlanRecord(
            elapsed_s=elapsed_s, context=1, batch=1, plan=no_draft(2, "t"), reason="", estimated_acceptance=0.0,
            predicted_tpt=1.0, plain_tpt=1.0, optimise_s=0.0,
        )  # fmt: skip

    one = EngineStats(num_rounds=3, total_s=1.5, accepted_lengths={0: 1, 2: 5}, plans=[record(1.0), record(3.0)])
    two = EngineStats(num_rounds=4, total_s=2.0, accepted_lengths={2: 1}, plans=[record(2.0)], gate_reason="why")
    total = merged_stats([one, two])
    assert (total.num_rounds, total.total_s, total.gate_reason) == (7, 3.5, "why")
    assert total.accepted_lengths == {0: 1, 2: 6}
    assert [plan.elapsed_s for plan in total.plans] == [1.0, 2.0, 3.0]
    assert one.accepted_lengths == {0: 1, 2: 5}
