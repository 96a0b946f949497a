"""Tuning of plans before their use: real generation from calibration prompts, with one plan after another.

The measured runs equal later runs of Self-SD: the same drafts, ended by the same rule, in the same engine.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import TypeAlias

import msgspec

from rayspec.choices import choices_of
from rayspec.config import SamplingParams, TuningOptions
from rayspec.decode.engine import Engine
from rayspec.decode.search import Answer, Feature, Features
from rayspec.decode.strategy import Ask, BatchState, RoundPlan, Strategy
from rayspec.strategies.auto import Auto
from rayspec.strategies.fixed import FixedPlan
from rayspec.strategies.knn_ssd import radius, representatives
from rayspec.strategies.mask_search import Keep, MaskSearch
from rayspec.strategies.saved_plans import ModelIdentity, Provenance, SavedPlan, SavedPlans
from rayspec.strategies.self_sd import FIRST_THRESHOLD, TARGET_ACCEPTANCE, DraftThreshold, SelfSD
from rayspec.types import ConfigError, Plan, PlanRecord, Request, no_draft

logger = logging.getLogger(__name__)

Prompt: TypeAlias = str | Sequence[int]

_ANCHOR_DIGITS = 6
_NUM_ANCHORS = 10  # typical samples that stand for a domain
_SEED = 1
# Enough tokens to obtain a feature: the question needs one round, and shards may answer a few rounds later.
_TOKENS_TO_LOOK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The result of trying the `number`-th plan for a domain. Speeds are tokens per second of one sequence: by this
    plan, by the best plan so far, and by plain decoding."""

    domain: str
    number: int
    tokens_per_s: float
    best_tokens_per_s: float
    plain_tokens_per_s: float


def tune_plan(
    engine: Engine,
    prompts: Sequence[Prompt],
    options: TuningOptions,
    *,
    domain: str = "",
    tell: Callable[[Tried], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> SavedPlan:
    """Return the plan with the most tokens per second over the prompts, by Bayesian search over all sets of sublayers
    (Self-SD, section 3.2). All prompts run at once, up to the engine's `max_num_seqs`. The saved speed comes from a
    separate run after the search. tell: called for every plan that was tried.

    Raises ConfigError without prompts and for an engine loaded with strategy "ar". Raises the error of a failed prompt.
    """
    bench = _Bench(engine, prompts, options)
    plain = bench.measure(no_draft(bench.num_sublayers, "tuning"))[0]
    search = MaskSearch(bench.num_sublayers, range(bench.num_sublayers), num_skipped=None, suggest_every=1, seed=_SEED)
    started, num_tries = clock(), 0
    while num_tries < options.num_tries and clock() - started < options.max_seconds:
        keep = search.propose()
        tokens_per_s = bench.measure(bench.plan_of(keep))[0].measured_tpt or 0.0
        search.observe(keep, tokens_per_s)
        num_tries += 1
        assert search.best is not None
        if tell is not None:
            tried = Tried(
                domain=domain,
                number=num_tries,
                tokens_per_s=tokens_per_s,
                best_tokens_per_s=search.best[1],
                plain_tokens_per_s=plain.measured_tpt or 0.0,
            )
            tell(tried)
    assert search.best is not None
    return bench.confirmed(
        bench.plan_of(search.best[0]), plain, domain=domain, method=f"the fastest of {num_tries} plans by trials"
    )


def tune_domains(
    engine: Engine,
    domains: Mapping[str, Sequence[Prompt]],
    options: TuningOptions,
    *,
    model: ModelIdentity,
    tell: Callable[[Tried], None] | None = None,
) -> SavedPlans:
    """Return a plan and anchors for each domain, from its prompts: the input of KNN-SSD.

    tell: called for every plan that was tried, with `plans_by` "trials" only. Raises ConfigError without domains, for a
    domain without a name or prompts, and for an engine loaded with strategy "ar". With `plans_by` "knapspec", also for
    an engine without a latency model, and if KnapSpec found no plan for a domain.
    """
    if not domains or "" in domains:
        raise ConfigError("domains to tune need names, and there must be one: give prompts by domain")
    for prompts in domains.values():
        _require_prompts(prompts)
    tune = partial(tune_plan, tell=tell) if options.plans_by == "trials" else knapspec_plan
    features = {domain: features_of(engine, prompts) for domain, prompts in domains.items()}
    anchors = {domain: representatives(samples, _NUM_ANCHORS) for domain, samples in features.items()}
    plans = []
    for domain, prompts in domains.items():
        plan = tune(engine, prompts, options, domain=domain)
        others = [rows for other, rows in anchors.items() if other != domain]
        rounded = tuple(tuple(round(value, _ANCHOR_DIGITS) for value in row) for row in anchors[domain].tolist())
        reach = radius(features[domain], anchors[domain], others)
        plans.append(msgspec.structs.replace(plan, anchors=rounded, radius=reach))
    return SavedPlans(model=model, plans=tuple(plans))


def knapspec_plan(engine: Engine, prompts: Sequence[Prompt], options: TuningOptions, *, domain: str = "") -> SavedPlan:
    """Return the fastest plan that KnapSpec used in one run over the prompts, which is far cheaper than trials. The
    saved speed comes from a separate run, as in `tune_plan`.

    Raises ConfigError if the engine's strategy has no latency model, or if nothing was drafted.
    """
    if engine.latency is None:
        raise ConfigError("option 'plans_by' is 'knapspec', for which the engine must be loaded with that strategy")
    bench = _Bench(engine, prompts, options)
    speculation = engine.config.speculation.replace(strategy="knapspec", gate=False, optimise_share=1.0)
    earlier = engine.stats.plans
    with selecting(engine, Auto(speculation, engine.latency, looks_up=False)):
        _generate(engine, prompts, options.max_tokens)
    used = [
        record
        for record in engine.stats.plans
        if record.plan.drafts and record.num_tested_tokens and all(record is not one for one in earlier)
    ]
    if not used:
        raise ConfigError(
            f"KnapSpec drafted nothing on the prompts of domain {domain!r}: give more of them, raise max_tokens, or "
            "choose 'trials' for option 'plans_by'"
        )
    best = max(used, key=lambda record: record.measured_tpt or 0.0)
    plain = bench.measure(no_draft(bench.num_sublayers, "tuning"))[0]
    return bench.confirmed(best.plan, plain, domain=domain, method="the fastest of KnapSpec's")


def features_of(engine: Engine, prompts: Sequence[Prompt]) -> list[Sequence[float]]:
    """Return [num_prompts, hidden_size]: the last state of the first answer token of each prompt, run by itself.

    Raises the error of a failed prompt, and ConfigError for a prompt that leaves no room for two tokens.
    """
    features = []
    for prompt in prompts:
        classifier = _Classifier(engine.stages.num_sublayers)
        with selecting(engine, classifier):
            _generate(engine, [prompt], _TOKENS_TO_LOOK, until=classifier.has_answer)
        if not classifier.has_answer() or classifier.asked is None:
            raise ConfigError("a calibration prompt leaves no room for an answer: shorten it, or raise max_model_len")
        answer = classifier.asked.result()
        assert isinstance(answer, Features)
        features.append(answer.vector)
    return features


class _Bench:
    """Runs the calibration prompts in an engine, with any plan."""

    def __init__(self, engine: Engine, prompts: Sequence[Prompt], options: TuningOptions) -> None:
        _require_prompts(prompts)
        if engine.config.speculation.strategy == "ar":
            raise ConfigError(
                "option 'strategy' is 'ar': plans are tuned in an engine that may draft, as with 'static'"
            )
        self._engine = engine
        self._prompts = prompts
        self._options = options
        self.num_sublayers = engine.stages.num_sublayers

    def plan_of(self, keep: Keep) -> Plan:
        length = self._engine.config.speculation.max_draft_tokens
        return Plan(choices=choices_of(keep), num_draft_tokens=length, source="tuning")

    def measure(self, plan: Plan, *, plain: PlanRecord | None = None) -> tuple[PlanRecord, DraftThreshold]:
        """Generate by one plan, and return its record and its last threshold. plain: the record of plain decoding, for
        the plan's record."""
        given = self._engine.config.speculation.draft_threshold
        threshold = DraftThreshold(FIRST_THRESHOLD if given is None else given, target=TARGET_ACCEPTANCE)
        plain_tpt = plain.measured_tpt if plain is not None and plain.measured_tpt is not None else 0.0
        strategy = SelfSD(plan, threshold, acceptance=0.0, expected_tpt=0.0, plain_tpt=plain_tpt)
        with selecting(self._engine, strategy):
            _generate(self._engine, self._prompts, self._options.max_tokens)
        return strategy.record, threshold

    def confirmed(self, plan: Plan, plain: PlanRecord, *, domain: str, method: str) -> SavedPlan:
        """Return the plan in its saved form, with the speed of one more run. Log a warning if plain decoding is as
        fast."""
        best, threshold = self.measure(plan, plain=plain)
        if (best.measured_tpt or 0.0) <= (plain.measured_tpt or 0.0):
            logger.warning("for %r no plan is faster than plain decoding on the calibration prompts", domain)
        if best.observed_acceptance is None or best.measured_tpt is None:
            raise ConfigError("no draft was tested on the calibration prompts: raise max_tokens")
        return SavedPlan(
            domain=domain,
            choices=plan.choices,
            num_draft_tokens=plan.num_draft_tokens,
            threshold=threshold.value,
            acceptance=best.observed_acceptance,
            num_tested_tokens=best.num_tested_tokens,
            tokens_per_s=best.measured_tpt,
            plain_tokens_per_s=best.plain_tpt,
            context=best.context,
            batch=best.batch,
            provenance=Provenance(
                method=method,
                calibration=f"{len(self._prompts)} prompts, {self._options.max_tokens} tokens generated from each",
                device=self._engine.config.device,
                dtype=self._engine.config.dtype,
                rayspec=metadata.version("rayspec"),
                date=dt.datetime.now(dt.timezone.utc).replace(microsecond=0),
            ),
        )


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
