"""KNN-SSD: each domain of text has its own plan, selected by the beginning of an answer (Song et al., 2025).

As published: anchors that represent domains, the nearest anchor by cosine, drafts that end below a fixed confidence.
Ours: the feature is the last state of the answer's first token, where the paper uses the prompt's last token. The first
round can return this state, and it separated the demo model's domains better. Text far from every anchor gets the plan
of the domain "", or no plan. Each domain has a gate of its own. A batch uses the plan of its most frequent domain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future

from rayspec.config import SpeculationOptions
from rayspec.decode.search import Answer, Feature, Features
from rayspec.decode.selection.base import BatchState, FixedPlan, Search, Selector
from rayspec.decode.work import KeepDrafting, RoundResult
from rayspec.planning.latency import LatencyModel
from rayspec.strategies.anchors import Nearest, nearest
from rayspec.strategies.only_if_faster import OnlyIfFaster
from rayspec.strategies.saved_plans import SavedPlan, SavedPlans
from rayspec.strategies.self_sd import TARGET_ACCEPTANCE, DraftThreshold, SelfSD
from rayspec.types import ConfigError, Plan, PlanRecord, no_draft

ANY_DOMAIN = ""
_THRESHOLD = 0.8  # the published value

# Number of sequences whose domain is remembered; the oldest is forgotten. The selector does not learn when sequences
# end, and there are never this many at a time.
_MAX_SEQUENCES = 4096


class Domains:
    """Selects a saved plan by a feature of text. Raises ConfigError if no saved plan has anchors."""

    def __init__(self, saved: SavedPlans) -> None:
        self._saved = saved
        self._anchors = {plan.domain: plan.anchors for plan in saved.plans if plan.anchors}
        if not self._anchors:
            raise ConfigError(
                "strategy 'knn-ssd' tells domains by anchors, and none of the plans in option 'warm_start' has any: "
                "tune the model by domains"
            )

    @property
    def plans(self) -> Sequence[SavedPlan]:
        """All plans that may be selected."""
        return [plan for plan in self._saved.plans if plan.anchors or plan.domain == ANY_DOMAIN]

    def nearest(self, feature: Sequence[float]) -> Nearest:
        """Return the nearest domain. Raises ValueError for a feature of another size than the anchors."""
        found = nearest(self._anchors, feature)
        assert found is not None
        return found

    def plan_for(self, found: Nearest) -> SavedPlan | None:
        """Return the plan of the nearest domain; if that is too far, the plan for any text, or None without one."""
        plan = self._saved.of_domain(found.domain)
        assert plan is not None
        return plan if found.distance <= plan.radius else self._saved.of_domain(ANY_DOMAIN)


class KnnSSD:
    """Selector by `Domains`: the first round of each sequence is tapped, to classify the sequence by its feature.

    Each domain has a drafter: Self-SD with the domain's plan and a fixed threshold. The sequences of a batch vote for
    their drafters. Sequences not yet classified do not vote; sequences of no domain vote against drafting.
    """

    def __init__(self, saved: SavedPlans, options: SpeculationOptions, latency: LatencyModel) -> None:
        num_sublayers = len(latency.sublayers)
        self._domains = Domains(saved)
        self._strangers: Selector = FixedPlan(no_draft(num_sublayers, "knn-ssd: of no domain"))
        self._drafters: dict[str, Selector] = {}
        for plan in self._domains.plans:
            drafter = _drafter(plan, options, num_sublayers)
            self._drafters[plan.domain] = OnlyIfFaster(drafter, latency) if options.gate else drafter
        self._told: dict[str, Selector] = {}  # the drafter of each classified sequence
        self._looks: dict[str, Future[Answer]] = {}  # questions under way, by sequence
        self._begins = False  # whether the round planned last has a sequence to classify
        self._last_look = "nothing was looked at"
        self._last_drafter: Selector = self._strangers

    @property
    def wants_taps(self) -> bool:
        return self._begins

    @property
    def gate_reason(self) -> str:
        """The gate's reason for the sequence that was classified last."""
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
        """Classify new sequences. Return a record when a domain's plan is used for the first time.

        Only sequences with no round under way are classified; so the drafter that planned a round also observes it.
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
        """Ask for the feature of a sequence, or classify the sequence by the answer. If the tapped token is gone or the
        question failed, the sequence has no domain. If the question was cancelled, it is asked again later."""
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
    threshold = _THRESHOLD if options.draft_threshold is None else options.draft_threshold
    return SelfSD(
        plan.plan(max_draft_tokens=options.max_draft_tokens, source="knn-ssd"),
        DraftThreshold(threshold, target=TARGET_ACCEPTANCE, adaptive=False),
        acceptance=plan.acceptance,
        expected_tpt=plan.tokens_per_s,
        plain_tpt=plan.plain_tokens_per_s,
        reason=f"the plan for {plan.domain!r}" if plan.domain else "the plan for any text",
    )
