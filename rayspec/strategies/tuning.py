"""Tuning of plans before their use: generation from calibration prompts by one plan after another, as in Self-SD."""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from importlib import metadata
from typing import TypeAlias

import msgspec

from rayspec.choices import choices_of
from rayspec.config import SamplingParams, TuningOptions
from rayspec.decode.engine import Engine
from rayspec.decode.search import Answer, Feature, Values
from rayspec.decode.strategy import Ask, BatchState, RoundPlan, Strategy
from rayspec.strategies.fixed import FixedPlan
from rayspec.strategies.knn_ssd import radius, representatives
from rayspec.strategies.mask_search import Keep, MaskSearch
from rayspec.strategies.saved_plans import ModelIdentity, SavedPlan, SavedPlans
from rayspec.strategies.self_sd import FIRST_THRESHOLD, SelfSD
from rayspec.types import ConfigError, Plan, PlanRecord, Request, no_draft

logger = logging.getLogger(__name__)

Prompt: TypeAlias = str | Sequence[int]

_NUM_ANCHORS = 10  # typical samples that stand for a domain
# Enough tokens to obtain a feature: the question needs one round, and shards may answer a few rounds later.
_TOKENS_TO_LOOK = 128


def tune_plan(
    engine: Engine,
    prompts: Sequence[Prompt],
    options: TuningOptions,
    *,
    domain: str = "",
    say: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> SavedPlan:
    """Return the plan with the most tokens per second over the prompts, by Bayesian search over all sets of sublayers
    (Self-SD, section 3.2). The saved speed comes from a separate run. say: called with a message for each new best
    plan. Raises ConfigError without prompts and for strategy "ar". Raises the error of a failed prompt."""
    config, num_sublayers = engine.config, engine.stages.num_sublayers
    _require_prompts(prompts)
    if config.speculation.strategy == "ar":
        raise ConfigError("option 'strategy' is 'ar': plans are tuned in an engine that may draft, as with 'static'")

    def measured(plan: Plan, plain_tpt: float = 0.0) -> SelfSD:
        """Generate by a plan; the strategy has its record and its last threshold."""
        first = config.speculation.draft_threshold
        record = PlanRecord(plan=plan, reason="tuning", plain_tpt=plain_tpt)
        strategy = SelfSD(record, FIRST_THRESHOLD if first is None else first)
        with selecting(engine, strategy):
            _generate(engine, prompts, options.max_tokens)
        return strategy

    def plan_of(keep: Keep) -> Plan:
        return Plan(choices=choices_of(keep), num_draft_tokens=config.speculation.max_draft_tokens, source="tuning")

    plain_tpt = measured(no_draft(num_sublayers, "tuning")).record.measured_tpt or 0.0
    search = MaskSearch(num_sublayers, range(num_sublayers), num_skipped=None, suggest_every=1, seed=1)
    started, num_tries = clock(), 0
    while num_tries < options.num_tries and clock() - started < options.max_seconds:
        keep, before = search.propose(), search.best
        tpt = measured(plan_of(keep)).record.measured_tpt or 0.0
        search.observe(keep, tpt)
        num_tries += 1
        if say is not None and (before is None or tpt > before[1]):
            say(
                f"{domain or 'any text'}: plan {num_tries} of {options.num_tries} makes {tpt:.1f} tokens/s "
                f"(plain {plain_tpt:.1f})"
            )
    assert search.best is not None
    plan = plan_of(search.best[0])
    confirmed = measured(plan, plain_tpt)
    record = confirmed.record
    if (record.measured_tpt or 0.0) <= plain_tpt:
        logger.warning("for %r no plan is faster than plain decoding on the calibration prompts", domain)
    if record.observed_acceptance is None or record.measured_tpt is None:
        raise ConfigError("no draft was tested on the calibration prompts: raise max_tokens")
    return SavedPlan(
        domain=domain,
        choices=plan.choices,
        num_draft_tokens=plan.num_draft_tokens,
        threshold=confirmed.threshold,
        acceptance=record.observed_acceptance,
        num_tested_tokens=record.num_tested_tokens,
        tokens_per_s=record.measured_tpt,
        plain_tokens_per_s=plain_tpt,
        context=record.context,
        batch=record.batch,
        provenance={
            "method": f"the fastest of {num_tries} plans by trials",
            "calibration": f"{len(prompts)} prompts, {options.max_tokens} tokens generated from each",
            "device": config.device,
            "dtype": config.dtype,
            "rayspec": metadata.version("rayspec"),
            "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        },
    )


def tune_domains(
    engine: Engine,
    domains: Mapping[str, Sequence[Prompt]],
    options: TuningOptions,
    *,
    model: ModelIdentity,
    say: Callable[[str], None] | None = None,
) -> SavedPlans:
    """Return a plan and anchors for each domain, from its prompts: the input of KNN-SSD. Raises ConfigError without
    domains, for a domain without a name or prompts, and as `tune_plan` does."""
    if not domains or "" in domains:
        raise ConfigError("domains to tune need names, and there must be one: give prompts by domain")
    for prompts in domains.values():
        _require_prompts(prompts)
    features = {domain: features_of(engine, prompts) for domain, prompts in domains.items()}
    anchors = {domain: representatives(samples, _NUM_ANCHORS) for domain, samples in features.items()}
    plans = []
    for domain, prompts in domains.items():
        plan = tune_plan(engine, prompts, options, domain=domain, say=say)
        others = [rows for other, rows in anchors.items() if other != domain]
        rounded = tuple(tuple(round(value, 6) for value in row) for row in anchors[domain].tolist())
        reach = radius(features[domain], anchors[domain], others)
        plans.append(msgspec.structs.replace(plan, anchors=rounded, radius=reach))
    return SavedPlans(model=model, plans=tuple(plans))


def features_of(engine: Engine, prompts: Sequence[Prompt]) -> list[Sequence[float]]:
    """Return [num_prompts, hidden_size]: the last state of the first answer token of each prompt, run by itself. Raises
    the error of a failed prompt, and ConfigError for a prompt that leaves no room for two tokens."""
    features = []
    for prompt in prompts:
        classifier = _Classifier(engine.stages.num_sublayers)
        with selecting(engine, classifier):
            _generate(engine, [prompt], _TOKENS_TO_LOOK, until=classifier.has_answer)
        if not classifier.has_answer() or classifier.asked is None:
            raise ConfigError("a calibration prompt leaves no room for an answer: shorten it, or raise max_model_len")
        answer = classifier.asked.result()
        assert isinstance(answer, Values)
        features.append(answer.values)
    return features


def _require_prompts(prompts: Sequence[Prompt]) -> None:
    if not prompts:
        raise ConfigError("there are no calibration prompts: give some that are like the text to come")


class _Classifier(FixedPlan):
    """Plain decoding that asks, after the first round, for the feature of the first answer token."""

    def __init__(self, num_sublayers: int) -> None:
        super().__init__(no_draft(num_sublayers, "features"))
        self.asked: Future[Answer] | None = None

    def choose(self, state: BatchState) -> RoundPlan:
        return RoundPlan(plan=self.chosen.plan, capture=self.asked is None)

    def search(self, state: BatchState, ask: Ask) -> PlanRecord | None:
        self.asked = self.asked or ask(Feature(num_tokens=1))
        return None

    def has_answer(self) -> bool:
        return self.asked is not None and self.asked.done() and not self.asked.cancelled()


@contextmanager
def selecting(engine: Engine, strategy: Strategy) -> Iterator[None]:
    """Let the engine use another strategy within the context. At its end, abort all unfinished requests."""
    previous = engine.replace_strategy(strategy)
    try:
        yield
    finally:
        engine.abort_all()
        while engine.has_unfinished:
            engine.step()
        engine.replace_strategy(previous)


def _generate(
    engine: Engine, prompts: Sequence[Prompt], max_tokens: int, *, until: Callable[[], bool] = lambda: False
) -> None:
    """Generate greedily, always to `max_tokens`, or until `until` returns True. Raises the error of a failed prompt."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        text, token_ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        name = f"tuning-{index}"
        engine.add(Request(request_id=name, params=params, prompt=text, prompt_token_ids=token_ids))
    while engine.has_unfinished and not until():
        for output in engine.step():
            if output.error is not None:
                raise output.error
