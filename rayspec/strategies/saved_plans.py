"""Plans saved to disk for later runs, with the model and text they were found for and their measured speed."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from typing_extensions import Self

from rayspec.choices import Choice, Choices, nearest
from rayspec.config import EngineConfig
from rayspec.machine import write_at_once
from rayspec.model.weights import load_config, weights_fingerprint
from rayspec.strategies.knapspec import Candidate
from rayspec.types import ConfigError, Plan, PlanRecord

logger = logging.getLogger(__name__)

FORMAT = "rayspec-plans-2"
# The saved acceptance of a plan counts as this many tokens at most, so that new observations soon outweigh it.
_MAX_REMEMBERED_TOKENS = 128

Vector: TypeAlias = tuple[float, ...]
_Share: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Speed: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
_Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model that a plan belongs to. Models are compared by `weights` (a fingerprint) and `num_sublayers`."""

    name: str
    weights: str
    family: str
    num_sublayers: _Positive

    @classmethod
    def of(cls, config: EngineConfig, num_sublayers: int) -> Self:
        """Return the identity of the configured model. Raises CheckpointError if its files cannot be read."""
        return cls(
            name=config.model,
            weights=weights_fingerprint(config),
            family=str(load_config(config).model_type),
            num_sublayers=num_sublayers,
        )


class SavedPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan, and its acceptance and speed when it was saved.

    domain: the kind of text; "" for any text. threshold: confidence below which drafts ended; None: drafts reached
    their length. Speeds are tokens per second of one of `batch` sequences that hold `context` tokens on average.
    provenance: how it was found, for readers. anchors: unit vectors, features of typical text of the domain.
    radius: the cosine distance from them within which text belongs to the domain.
    """

    domain: str
    choices: Choices
    num_draft_tokens: _Positive
    threshold: _Share | None
    acceptance: _Share
    num_tested_tokens: _Count
    tokens_per_s: _Speed
    plain_tokens_per_s: _Speed
    context: _Count
    batch: _Positive
    provenance: Mapping[str, str]
    anchors: tuple[Vector, ...] = ()
    radius: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    def __post_init__(self) -> None:
        if len({len(anchor) for anchor in self.anchors}) > 1:
            raise ValueError("`anchors` must be of one length")
        if any(not math.isclose(math.hypot(*anchor), 1.0, abs_tol=1e-3) for anchor in self.anchors):
            raise ValueError("`anchors` must be unit vectors")

    def record(self, max_draft_tokens: int, *, source: str, reason: str) -> PlanRecord:
        """Return the record of the plan in a new run, before its first round."""
        length = min(self.num_draft_tokens, max_draft_tokens)
        return PlanRecord(
            plan=Plan(choices=self.choices, num_draft_tokens=length, source=source),
            reason=reason,
            estimated_acceptance=self.acceptance,
            predicted_tpt=self.tokens_per_s,
            plain_tpt=self.plain_tokens_per_s,
        )


class SavedPlans(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: ModelIdentity
    plans: tuple[SavedPlan, ...]
    format: str = FORMAT

    def __post_init__(self) -> None:
        domains = [plan.domain for plan in self.plans]
        if len(set(domains)) < len(domains):
            raise ValueError("there are two plans of one domain")
        foreign = [len(plan.choices) for plan in self.plans if len(plan.choices) != self.model.num_sublayers]
        if foreign:
            raise ValueError(f"`choices` are of {foreign[0]} sublayers, not of {self.model.num_sublayers}")
        if len({len(anchor) for plan in self.plans for anchor in plan.anchors}) > 1:
            raise ValueError("`anchors` of all plans must be of one length")

    def of_domain(self, domain: str) -> SavedPlan | None:
        return next((plan for plan in self.plans if plan.domain == domain), None)

    def only(self) -> SavedPlan:
        """Return the plan of the domain "", or the only plan. Raises ConfigError if neither exists."""
        plan = self.of_domain("") or (self.plans[0] if len(self.plans) == 1 else None)
        if plan is None:
            domains = ", ".join(repr(plan.domain) for plan in self.plans) or "none"
            raise ConfigError(
                f"option 'warm_start' names a file with plans for {domains}, and strategy 'self-sd' needs one for any "
                "text: tune one without a domain, or use 'knn-ssd'"
            )
        return plan

    def within(self, ways: Sequence[Collection[Choice]]) -> SavedPlans:
        """Return a copy whose plans run each sublayer by the choice (of `ways`) that is nearest to the saved one."""
        plans = [msgspec.structs.replace(plan, choices=tuple(map(nearest, plan.choices, ways))) for plan in self.plans]
        return SavedPlans(model=self.model, plans=tuple(plans))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON, atomically."""
        write_at_once(Path(path), msgspec.json.format(msgspec.json.encode(self), indent=1))

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: ModelIdentity) -> SavedPlans:
        """Read plans of this model. Raises ConfigError for a missing or damaged file, and for another model's plans."""
        at = f"option 'warm_start' is {os.fspath(path)!r}"
        try:
            saved = msgspec.json.decode(Path(path).read_bytes(), type=SavedPlans)
        except OSError as error:
            raise ConfigError(f"{at}: it cannot be read ({error.strerror}): name a file of saved plans") from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"{at}: it is not a file of saved plans ({error}): tune the model again") from error
        if saved.format != FORMAT:
            raise ConfigError(f"{at}: its format is {saved.format!r}, not {FORMAT!r}: tune the model again")
        theirs, ours = saved.model, model
        if (theirs.weights, theirs.num_sublayers) != (ours.weights, ours.num_sublayers):
            raise ConfigError(
                f"{at}: its plans are of {theirs.name!r} ({theirs.family}, {theirs.num_sublayers} sublayers, weights "
                f"{theirs.weights}), not of {ours.name!r} ({ours.family}, {ours.num_sublayers} sublayers, weights "
                f"{ours.weights}): tune this model"
            )
        return saved


def known_candidates(saved: SavedPlans) -> list[Candidate]:
    """Return the plans as candidates of KnapSpec. The saved acceptance counts like new observations."""
    candidates = []
    for plan in saved.plans:
        num_tested = min(plan.num_tested_tokens, _MAX_REMEMBERED_TOKENS)
        candidate = Candidate(plan.choices, plan.acceptance, num_agreed=0, num_captured=0)
        candidate.used.observe(plan.acceptance * num_tested, num_tested)
        candidates.append(candidate)
    return candidates
