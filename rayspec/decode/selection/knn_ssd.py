"""KNN-SSD: each domain of text has its plan, and what is being generated says which (Song et al., 2025).

As published: anchors that stand for domains, the nearest by cosine, drafts that end at a fixed confidence. Ours: what
is compared is the mean of the last states of the batch's newest tokens, not of the prompt; it is looked at again now
and then; and text that is far from every anchor gets the plan of the domain "", or none.
"""

from __future__ import annotations

from collections.abc import Sequence

from rayspec.config import KnnSSDOptions, SpeculationOptions
from rayspec.decode.drafting.skip_draft import KeepDrafting
from rayspec.decode.questions import Feature, Features
from rayspec.decode.rounds import RoundResult
from rayspec.decode.selection.anchors import Nearest, nearest
from rayspec.decode.selection.base import Search, Situation
from rayspec.decode.selection.current_plan import CurrentPlan
from rayspec.decode.selection.inquiry import Inquiry
from rayspec.decode.selection.saved_plans import SavedPlan, SavedPlans
from rayspec.planning.latency import LatencyModel
from rayspec.planning.stopping import DraftWhileSure
from rayspec.types import ConfigError, Plan, PlanRecord

ANY_DOMAIN = ""


class Domains:
    """Which saved plan a feature calls for. Raises ConfigError where no saved plan has anchors."""

    def __init__(self, saved: SavedPlans, options: KnnSSDOptions) -> None:
        self._saved = saved
        self._options = options
        self._anchors = {plan.domain: plan.anchors for plan in saved.plans if plan.anchors}
        if not self._anchors:
            raise ConfigError(
                "strategy 'knn-ssd' tells domains by anchors, and none of the plans in option 'warm_start' has any: "
                "tune the model by domains"
            )

    def nearest(self, feature: Sequence[float]) -> Nearest:
        """Raises ValueError for a feature of another size than the anchors'."""
        found = nearest(self._anchors, feature)
        assert found is not None
        return found

    def plan_of(self, domain: str) -> SavedPlan:
        """The plan of a domain that has one."""
        plan = self._saved.of_domain(domain)
        assert plan is not None
        return plan

    def plan_for(self, found: Nearest) -> SavedPlan | None:
        """Of the nearest domain; where that is too far, the plan for any text, if there is one."""
        plan = self.plan_of(found.domain)
        limit = plan.radius if self._options.reject_distance is None else self._options.reject_distance
        return plan if found.distance <= limit else self._saved.of_domain(ANY_DOMAIN)


class KnnSSD:
    """Selector by `Domains`. Until the first tokens have been looked at, and where they are of no domain and there is
    no plan for any text, it does not draft."""

    gate_reason = "the gate is off"

    def __init__(self, saved: SavedPlans, options: SpeculationOptions, latency: LatencyModel) -> None:
        self._options = options.knn_ssd
        self._max_draft_tokens = options.max_draft_tokens
        self._num_sublayers = len(latency.sublayers)
        self._domains = Domains(saved, options.knn_ssd)
        self._current = CurrentPlan("knn-ssd", latency)
        self._saved: SavedPlan | None = None
        self._looked = False
        self._inquiry = Inquiry(self._options.interval_tokens)

    @property
    def wants_taps(self) -> bool:
        return self._inquiry.wants_taps

    def plan(self, situation: Situation) -> Plan:
        return self._current.plan

    def keep_drafting(self, situation: Situation) -> KeepDrafting | None:
        return DraftWhileSure(threshold=self._options.threshold)

    def observe(self, situation: Situation, plan: Plan, result: RoundResult, num_tokens: int, seconds: float) -> None:
        self._current.observe(situation, plan, result, num_tokens, seconds)
        self._inquiry.observe(num_tokens / situation.batch)

    def improve(self, situation: Situation, search: Search) -> PlanRecord | None:
        """Look at new tokens when it is time; a record when another plan follows from them."""
        answer = self._inquiry.advance(situation, search, Feature(num_tokens=self._options.num_tokens))
        return self._take(situation, answer) if isinstance(answer, Features) else None

    def _take(self, situation: Situation, features: Features) -> PlanRecord | None:
        found = self._domains.nearest(features.vector)
        saved = self._domains.plan_for(found)
        if self._looked and saved is self._saved:
            return None
        self._saved, self._looked = saved, True
        where = f"{found.distance:.3f} from {found.domain!r}"
        if saved is None:
            everything = (True,) * self._num_sublayers
            return self._current.take(
                situation, everything, 0, acceptance=0.0, reason=f"too far: {where}", optimise_s=features.seconds
            )
        return self._current.take(
            situation,
            saved.keep(self._num_sublayers),
            min(saved.num_draft_tokens, self._max_draft_tokens),
            acceptance=saved.acceptance,
            reason=f"the plan for {saved.domain!r}: {where}",
            optimise_s=features.seconds,
        )
