"""KNN-SSD: each domain of text has its plan, and the beginning of an answer says which (Song et al., 2025).

As published: anchors that stand for domains, the nearest by cosine, drafts that end at a fixed confidence. Ours: what
is compared is the last state of the answer's first token, where the paper has the prompt's last token: the first round
can tell it, and it told the demo model's domains better; text that is far from every anchor gets the plan of the domain
"", or none; and each domain has a gate of its own. In a batch the plan is that of the domain most of it belongs to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future

from rayspec.config import KnnSSDOptions, SpeculationOptions
from rayspec.decode.drafting.skip_draft import KeepDrafting
from rayspec.decode.questions import Answer, Feature, Features
from rayspec.decode.rounds import RoundResult
from rayspec.decode.selection.base import BatchState, FixedPlan, Search, Selector
from rayspec.planning.latency import LatencyModel
from rayspec.strategies.anchors import Nearest, nearest
from rayspec.strategies.only_if_faster import OnlyIfFaster
from rayspec.strategies.saved_plans import SavedPlan, SavedPlans
from rayspec.strategies.self_sd import DraftThreshold, SelfSD
from rayspec.types import ConfigError, Plan, PlanRecord, no_draft

ANY_DOMAIN = ""

# Sequences whose domain is remembered. They are not told when they end; there are never so many at once.
_MAX_SEQUENCES = 4096


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

    @property
    def plans(self) -> Sequence[SavedPlan]:
        """All that may be called for."""
        return [plan for plan in self._saved.plans if plan.anchors or plan.domain == ANY_DOMAIN]

    def nearest(self, feature: Sequence[float]) -> Nearest:
        """Raises ValueError for a feature of another size than the anchors'."""
        found = nearest(self._anchors, feature)
        assert found is not None
        return found

    def plan_for(self, found: Nearest) -> SavedPlan | None:
        """Of the nearest domain; where that is too far, the plan for any text, if there is one."""
        plan = self._saved.of_domain(found.domain)
        assert plan is not None
        limit = plan.radius if self._options.reject_distance is None else self._options.reject_distance
        return plan if found.distance <= limit else self._saved.of_domain(ANY_DOMAIN)


class KnnSSD:
    """Selector by `Domains`: of each sequence the first round is tapped and asked what it is about.

    The rounds of a batch are those of the drafter of its domain: Self-SD with the domain's plan and a fixed threshold.
    Sequences not yet looked at have no say; those of no domain speak for not drafting.
    """

    def __init__(self, saved: SavedPlans, options: SpeculationOptions, latency: LatencyModel) -> None:
        num_sublayers = len(latency.sublayers)
        self._domains = Domains(saved, options.knn_ssd)
        self._strangers: Selector = FixedPlan(no_draft(num_sublayers, "knn-ssd: of no domain"))
        self._drafters: dict[str, Selector] = {}
        for plan in self._domains.plans:
            drafter = _drafter(plan, options, num_sublayers)
            self._drafters[plan.domain] = OnlyIfFaster(drafter, latency) if options.gate else drafter
        self._told: dict[str, Selector] = {}  # the drafter of each sequence
        self._looks: dict[str, Future[Answer]] = {}  # under way, by sequence
        self._begins = False  # whether the round planned last has a sequence to look at
        self._last_look = "nothing was looked at"
        self._last_drafter: Selector = self._strangers

    @property
    def wants_taps(self) -> bool:
        return self._begins

    @property
    def gate_reason(self) -> str:
        """Of the text that was looked at last."""
        drafter = self._last_drafter
        return f"{self._last_look}; {'not drafting' if drafter is self._strangers else drafter.gate_reason}"

    def plan(self, state: BatchState) -> Plan:
        self._begins = any(name not in self._told and name not in self._looks for name in state.sequence_ids)
        return self._drafter_of(state).plan(state)

    def keep_drafting(self, state: BatchState) -> KeepDrafting | None:
        return self._drafter_of(state).keep_drafting(state)

    def observe(self, state: BatchState, plan: Plan, result: RoundResult, num_tokens: int, seconds: float) -> None:
        self._drafter_of(state).observe(state, plan, result, num_tokens, seconds)

    def improve(self, state: BatchState, search: Search) -> PlanRecord | None:
        """Look at what has begun; a record when a domain's plan is in use for the first time.

        Only sequences that are at rest hear of their domain, so that a round ends by whom it was planned.
        """
        record = self._drafter_of(state).improve(state, search)
        for name in state.sequence_ids:
            if name not in self._told:
                self._look(name, search)
        return record

    def _drafter_of(self, state: BatchState) -> Selector:
        votes = Counter(self._told[name] for name in state.sequence_ids if name in self._told)
        return votes.most_common(1)[0][0] if votes else self._strangers

    def _look(self, name: str, search: Search) -> None:
        """Begin one, or take what came of it. A sequence whose tapped token is gone, or could not be asked, is of no
        domain; one that had to move meanwhile is looked at again where it is."""
        look = self._looks.pop(name, None) or search(Feature(num_tokens=1), name)
        if look is None or (look.done() and not look.cancelled() and look.exception() is not None):
            self._tell(name, self._strangers)
        elif not look.done():
            self._looks[name] = look
        elif not look.cancelled():
            features = look.result()
            assert isinstance(features, Features)
            self._tell(name, self._drafter_for(self._domains.nearest(features.vector)))

    def _drafter_for(self, found: Nearest) -> Selector:
        plan = self._domains.plan_for(found)
        drafter = self._strangers if plan is None else self._drafters[plan.domain]
        far = "" if plan is not None and plan.domain == found.domain else ", too far"
        self._last_look = f"the last text began {found.distance:.3f} from {found.domain!r}{far}"
        self._last_drafter = drafter
        return drafter

    def _tell(self, name: str, drafter: Selector) -> None:
        self._told[name] = drafter
        if len(self._told) > _MAX_SEQUENCES:
            del self._told[next(iter(self._told))]


def _drafter(plan: SavedPlan, options: SpeculationOptions, num_sublayers: int) -> Selector:
    return SelfSD(
        plan.plan(max_draft_tokens=options.max_draft_tokens, source="knn-ssd"),
        DraftThreshold(options.knn_ssd.threshold, target=options.self_sd.target, adaptive=False),
        acceptance=plan.acceptance,
        expected_tpt=plan.tokens_per_s,
        plain_tpt=plan.plain_tokens_per_s,
        reason=f"the plan for {plan.domain!r}" if plan.domain else "the plan for any text",
    )
