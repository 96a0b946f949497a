"""CLaSp: the whole layers that the newest token could best do without, found again every so many tokens (Chen et al.).

As published: the recurrence over layers and numbers of skipped ones, exactly; the draft that skips the wanted number;
searches at a fixed interval; drafts that end at a fixed confidence. Ours: in a batch the newest token of one sequence
speaks for all, and the search is timed, but not rationed by `optimise_share`.
"""

from __future__ import annotations

from rayspec.config import SpeculationOptions
from rayspec.decode.drafting.skip_draft import KeepDrafting
from rayspec.decode.questions import Found, LayerKnapsack
from rayspec.decode.rounds import RoundResult
from rayspec.decode.selection.base import Search, Situation
from rayspec.decode.selection.current_plan import CurrentPlan, estimated_acceptance
from rayspec.decode.selection.inquiry import Inquiry
from rayspec.planning.latency import LatencyModel
from rayspec.planning.stopping import DraftWhileSure
from rayspec.types import ConfigError, Plan, PlanRecord


class CLaSp:
    """Selector. No draft until the first search has ended.

    Raises ConfigError when there are fewer layers than are to be skipped.
    """

    gate_reason = "the gate is off"

    def __init__(self, options: SpeculationOptions, latency: LatencyModel) -> None:
        num_layers = len(latency.sublayers) // 2
        self._options = options.clasp
        self._num_skipped = options.clasp.num_skipped_layers or max(1, num_layers // 2)
        if self._num_skipped > num_layers:
            raise ConfigError(
                f"option 'num_skipped_layers' is {self._num_skipped}, the model has {num_layers} layers: lower it"
            )
        self._max_draft_tokens = options.max_draft_tokens
        self._current = CurrentPlan("clasp", latency)
        self._inquiry = Inquiry(options.clasp.interval)

    @property
    def wants_taps(self) -> bool:
        return self._inquiry.wants_taps

    def plan(self, situation: Situation) -> Plan:
        return self._current.plan

    def keep_drafting(self, situation: Situation) -> KeepDrafting | None:
        return DraftWhileSure(threshold=self._options.exit_threshold)

    def observe(self, situation: Situation, plan: Plan, result: RoundResult, num_tokens: int, seconds: float) -> None:
        self._current.observe(situation, plan, result, num_tokens, seconds)
        self._inquiry.observe(num_tokens / situation.batch)

    def improve(self, situation: Situation, search: Search) -> PlanRecord | None:
        answer = self._inquiry.advance(situation, search, LayerKnapsack(num_tokens=1, num_skipped=self._num_skipped))
        if not isinstance(answer, Found):
            return None
        chosen = min(answer.drafts, key=lambda draft: sum(draft.keep))
        return self._current.take(
            situation,
            chosen.keep,
            self._max_draft_tokens,
            acceptance=estimated_acceptance(chosen, answer.num_tokens),
            reason="its interval is over",
            optimise_s=answer.seconds,
        )
