"""KNN-SSD: each domain of text has its own plan, selected by the beginning of an answer (Song et al., 2025).

As published: anchors that represent domains, the nearest anchor by cosine, drafts that end below a fixed confidence.
Ours: the feature is the last state of the answer's first token, where the paper uses the prompt's last token. The first
round can return this state, and it separated the demo model's domains better. Text far from every anchor gets the plan
of the domain "", or no plan. Each domain has a gate of its own. A batch uses the plan of its most frequent domain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rayspec.config import SpeculationOptions
from rayspec.decode.search import Answer, Feature, Values
from rayspec.decode.strategy import Ask, BatchState, RoundPlan, Strategy
from rayspec.decode.work import RoundResult
from rayspec.planning.latency import LatencyModel
from rayspec.strategies.fixed import FixedPlan
from rayspec.strategies.gate import Gated
from rayspec.strategies.periodic import answer_of
from rayspec.strategies.saved_plans import SavedPlans, Vector
from rayspec.strategies.self_sd import SelfSD
from rayspec.types import ConfigError, PlanRecord, no_draft

Floats: TypeAlias = NDArray[np.float64]

ANY_DOMAIN = ""
_THRESHOLD = 0.8  # the published value

# Of the clusters whose centres the anchors of a domain are near to.
_SEED, _NUM_STARTS = 42, 10
# Smallest radius of a domain, as a multiple of the largest distance of its samples.
_SLACK = 2.0
# Number of sequences whose domain is remembered; the oldest is forgotten. The strategy does not learn when sequences
# end, and there are never this many at a time.
_MAX_SEQUENCES = 4096


def unit_rows(vectors: ArrayLike) -> Floats:
    """Return [count, size], each row scaled to length 1. Raises ValueError for a row of zeros."""
    rows = np.atleast_2d(np.asarray(vectors, float))
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    if not (lengths > 0).all():
        raise ValueError("a feature of zeros has no direction")
    return np.asarray(rows / lengths)


def nearest(anchors: Mapping[str, Sequence[Vector]], feature: Sequence[float]) -> tuple[str, float]:
    """Return the domain of the nearest anchor, and the cosine distance to it: 0 (same direction) to 2. anchors: unit
    vectors, by domain. Raises ValueError for a feature of zeros, or of another size than the anchors."""
    (direction,) = unit_rows(feature)
    distances = {domain: float(1 - (np.asarray(vectors) @ direction).max()) for domain, vectors in anchors.items()}
    domain = min(distances, key=distances.__getitem__)
    return domain, distances[domain]


def representatives(features: ArrayLike, count: int) -> Floats:
    """Return [up to count, size]: unit vectors of the samples nearest to the centres of `count` clusters (KNN-SSD, eq.
    2); all distinct samples if there are at most `count`."""
    rows = np.unique(unit_rows(features), axis=0)
    if len(rows) <= count:
        return rows
    # Imported here: the import takes a second, which only users of anchors should wait for.
    from sklearn.cluster import KMeans  # noqa: PLC0415

    distances = KMeans(count, n_init=_NUM_STARTS, random_state=_SEED).fit_transform(rows)  # to each centre
    return np.asarray(rows[np.unique(distances.argmin(axis=0))])


def radius(features: ArrayLike, anchors: Floats, others: Sequence[Floats] = ()) -> float:
    """Return the cosine distance from the anchors within which text belongs to the domain: half of the distance to the
    nearest anchor of the `others`, but at least twice the largest distance of a sample to its nearest anchor other than
    itself, because a few samples lie closer together than other text of their domain."""
    rows = unit_rows(features)
    distances = 1 - rows @ anchors.T
    distances[np.isclose(distances, 0.0, atol=1e-9)] = np.inf
    nearest_anchor = distances.min(axis=1)
    spread = float(nearest_anchor[np.isfinite(nearest_anchor)].max(initial=0.0))
    gap = min((float((1 - anchors @ other.T).min()) for other in others), default=0.0)
    return max(_SLACK * spread, gap / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Voted(RoundPlan):
    """The choice of the drafter that the batch voted for. own: as the drafter made it."""

    drafter: Strategy
    own: RoundPlan


class KnnSSD:
    """The first round of each sequence captures hidden states, to classify the sequence. Each domain has a drafter:
    Self-SD with the domain's plan and a fixed threshold. The classified sequences of a batch vote; those of no domain
    vote against drafting. Raises ConfigError if no saved plan has anchors."""

    def __init__(self, saved: SavedPlans, options: SpeculationOptions, latency: LatencyModel) -> None:
        self._saved = saved
        self._anchors = {plan.domain: plan.anchors for plan in saved.plans if plan.anchors}
        if not self._anchors:
            raise ConfigError(
                "strategy 'knn-ssd' distinguishes domains by anchors, which no plan in option 'warm_start' has: "
                "tune the model by domains"
            )
        self._no_domain: Strategy = FixedPlan(no_draft(len(latency.sublayers), "knn-ssd: of no domain"))
        self._drafters: dict[str, Strategy] = {}
        threshold = _THRESHOLD if options.draft_threshold is None else options.draft_threshold
        for plan in saved.plans:
            if not plan.anchors and plan.domain != ANY_DOMAIN:
                continue  # no text is ever near it
            reason = f"the plan for {plan.domain!r}" if plan.domain else "the plan for any text"
            record = plan.record(options.max_draft_tokens, source="knn-ssd", reason=reason)
            drafter = SelfSD(record, threshold, adapts=False)
            self._drafters[plan.domain] = Gated(drafter, latency) if options.gate else drafter
        self._drafter_by_sequence: dict[str, Strategy] = {}  # of each classified sequence
        self._asked: dict[str, Future[Answer]] = {}  # questions under way, by sequence
        self._last: tuple[str, Strategy] = ("no text was classified yet", self._no_domain)

    @property
    def status(self) -> str:
        """The gate's status for the sequence that was classified last, and the distance of its text."""
        found, drafter = self._last
        is_far = drafter is self._no_domain
        return f"{'drafting is off (text of no domain)' if is_far else drafter.status}; {found}"

    def choose(self, state: BatchState) -> RoundPlan:
        is_new = any(name not in self._drafter_by_sequence and name not in self._asked for name in state.sequence_ids)
        drafter = self._drafter_of(state)
        own = drafter.choose(state)
        return _Voted(plan=own.plan, keep_drafting=own.keep_drafting, capture=is_new, drafter=drafter, own=own)

    def observe(
        self, state: BatchState, chosen: RoundPlan, result: RoundResult, num_tokens: int, seconds: float
    ) -> None:
        assert isinstance(chosen, _Voted)
        chosen.drafter.observe(state, chosen.own, result, num_tokens, seconds)

    def search(self, state: BatchState, ask: Ask) -> PlanRecord | None:
        """Classify new sequences. Return a record when a domain's plan is used for the first time."""
        record = self._drafter_of(state).search(state, ask)
        for name in state.sequence_ids:
            if name not in self._drafter_by_sequence:
                self._classify(name, ask)
        return record

    def _drafter_of(self, state: BatchState) -> Strategy:
        known = self._drafter_by_sequence
        votes = Counter(known[name] for name in state.sequence_ids if name in known)
        return votes.most_common(1)[0][0] if votes else self._no_domain

    def _classify(self, name: str, ask: Ask) -> None:
        """Ask for the feature of a sequence, or classify the sequence by the answer. If the captured token is gone, the
        question failed or the feature has no direction, it has no domain. A cancelled question is asked again."""
        asked = self._asked.pop(name, None) or ask(Feature(num_tokens=1), name)
        if asked is not None and not asked.done():
            self._asked[name] = asked
            if len(self._asked) > _MAX_SEQUENCES:  # some have ended meanwhile
                del self._asked[next(iter(self._asked))]
            return
        if asked is not None and asked.cancelled():
            return
        drafter = self._no_domain
        if asked is not None and (features := answer_of(asked)) is not None:
            assert isinstance(features, Values)
            drafter = self._classified(features)
        self._drafter_by_sequence[name] = drafter
        if len(self._drafter_by_sequence) > _MAX_SEQUENCES:
            del self._drafter_by_sequence[next(iter(self._drafter_by_sequence))]

    def _classified(self, features: Values) -> Strategy:
        try:
            domain, distance = nearest(self._anchors, features.values)
        except ValueError as error:
            self._last = (f"the last text was not classified: {error}", self._no_domain)
            return self._no_domain
        plan = self._saved.of_domain(domain)
        assert plan is not None
        is_near = distance <= plan.radius
        drafter = self._drafters.get(domain if is_near else ANY_DOMAIN, self._no_domain)
        far = "" if is_near else ", too far"
        self._last = (f"the last text began {distance:.3f} from {domain!r}{far}", drafter)
        return drafter
