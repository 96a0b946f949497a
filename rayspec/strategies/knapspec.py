"""KnapSpec: the knapsack over sublayers, solved again whenever context, batch or acceptance have changed.

Each round of "auto" uses the expected fastest of four ways: no draft, KnapSpec's plan, lookup, or plan and lookup.
"knapspec" is the same without lookup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from rayspec.choices import (
    FULL,
    SKIP,
    Choice,
    Choices,
    Weights,
    combined,
    drafts_by_copies,
    keys_of,
    nearest,
    num_leading_full,
    weights_of,
)
from rayspec.config import SpeculationOptions
from rayspec.decode.search import Answer, Found, Knapsack
from rayspec.decode.strategy import Ask, BatchState, RoundPlan
from rayspec.decode.work import KeepDrafting, RoundResult
from rayspec.planning.acceptance import (
    Decision,
    DraftRates,
    DraftUntilFound,
    DraftWhileWorth,
    best_lookup,
    estimated_acceptance,
    shrink,
)
from rayspec.planning.knapsack import quantize
from rayspec.planning.latency import LatencyModel
from rayspec.planning.learning import (
    FIRST_OFFSET,
    FIRST_SEARCH_SHARE,
    MAX_PLAN_GAIN,
    PRIOR_TOKENS,
    ROUNDS_TO_REVIEW,
    TEXT_HALF_LIFE,
    TOKENS_HALF_LIFE,
    Calibration,
    Correction,
    Discounted,
    StopRecord,
    Trigger,
)
from rayspec.strategies.gate import PLAIN, Gate, Proposed, Taken
from rayspec.strategies.periodic import answer_of
from rayspec.types import Plan, PlanRecord, no_draft

PLAN, LOOKUP, BOTH = "plan", "prompt lookup", "plan and prompt lookup"

# Limits of the search.
_MAX_STATES = 16  # states kept a row; more is finer and slower
_FEWER_STATES = 8  # of a first search that cannot afford more
_MAX_SKIPPED_SHARE = 0.75  # of the model's time
_MAX_HALVINGS = 5  # of the budget, after searches in vain

# Acceptance of drafts that run all sublayers by a copy of these weights, until anything is known of the model.
_COPIES: Mapping[Weights, float] = {"int4": 0.95, "int8": 0.99}

_HALF_LIFE = 16.0  # rounds after which the seconds of a round's draft steps count half
_CONTEXT_GRID = 64  # tokens; predicted rates are cached in steps of this many, since they change little between


@dataclass(slots=True)
class Candidate:
    """A draft that the last search found. num_agreed: of `num_captured` tokens, those on which draft and target agree.
    used: accepted over tested tokens."""

    choices: Choices
    similarity: float
    num_agreed: int
    num_captured: int
    used: Discounted = field(default_factory=lambda: Discounted(TOKENS_HALF_LIFE), compare=False)

    @property
    def estimate(self) -> float:
        """Estimate of acceptance by the captured tokens alone, with the similarity as the prior."""
        return estimated_acceptance(self.similarity, self.num_agreed, self.num_captured)


class KnapSpec:
    """Finds plans by the knapsack. `Auto` decides whether rounds use them.

    Between searches, the known candidates are compared again at an interval, by what was observed. While a search is
    under way, the last plan stays. known: candidates of an earlier run, compared after the first round; without any,
    drafts by quantised copies of all sublayers, which need no search.
    """

    def __init__(
        self,
        options: SpeculationOptions,
        latency: LatencyModel,
        *,
        known: Sequence[Candidate] = (),
        trigger: Trigger | None = None,
    ) -> None:
        self._options = options
        self._latency = latency
        self._candidates = list(known) or copies_alone(options, latency)
        self._has_searched = bool(known)  # or an earlier run has
        self._in_use: Candidate | None = None
        self._no_draft = no_draft(len(latency.sublayers), "knapspec: no draft")
        self.plan = self._no_draft
        self._record: PlanRecord | None = None  # of the plan
        self._rounds_to_review = 0
        # By plan, context and batch: tokens per second by draft length, predicted since the last review.
        self._rates: dict[tuple[Choices, int, int], NDArray[np.float64]] = {}
        # Learned from rounds.
        self._correction = Correction(prior_offset=FIRST_OFFSET)
        self._calibration = Calibration()
        self._stops = StopRecord()
        # Measured over predicted seconds, of draft steps and of rounds without a draft.
        self._slowness, self._plain_slowness = (Discounted(_HALF_LIFE, prior=1.0) for _ in range(2))
        # Searches.
        self._trigger = trigger or Trigger()
        self._rounds_to_price = 0
        self._num_in_vain = 0  # searches in a row that found no plan
        self._question: Knapsack | None = None  # of the search that waits for captured tokens or is under way
        self._reason = ""  # of this search
        self._predicted_s = 0.0  # that this search takes, by the latency model
        self._cost_ratio: float | None = None  # of the last search: measured over predicted seconds
        self._asked: Future[Answer] | None = None

    @property
    def wants_captures(self) -> bool:
        """Whether the next round should capture hidden states."""
        return self._question is not None and self._asked is None

    def rate(self, state: BatchState, longest: int | None = None) -> float:
        """Return the predicted tokens per second of one sequence by the plan in use. longest: of its drafts."""
        candidate = self._in_use
        assert candidate is not None, "there is a plan in use"
        context = state.context // _CONTEXT_GRID * _CONTEXT_GRID
        key = (candidate.choices, context, state.batch)
        if key not in self._rates:
            rates = self._draft_rates(context, state.batch)
            self._rates[key] = rates.tokens_per_time([candidate.choices], self.acceptance_of([candidate]))[0]
        return float(self._rates[key][:longest].max())

    def keep_drafting(self, state: BatchState, rate: float) -> DraftWhileWorth | None:
        """Return the rule to draft while the next token is expected to gain more than its time costs; None without a
        plan. rate: expected tokens per second of the round, over the batch."""
        candidate = self._in_use
        if candidate is None:
            return None
        context, batch = state.context, state.batch
        usual = self.acceptance_of([candidate])[0]
        return DraftWhileWorth(
            curve=self._calibration.curve(usual),
            usual=usual,
            rate=rate,
            step_s=self._latency.draft_step_s(self.plan.choices, context=context, batch=batch) * self._slowness.value,
            row_s=self._latency.row_s(context=context, batch=batch) * self._slowness.value,
        )

    def observe(self, state: BatchState, plan: Plan, result: RoundResult, num_tokens: int, seconds: float) -> None:
        """Learn from a round by a plan of KnapSpec, or without a draft. A draft's tokens are tested up to and including
        the first rejected token. result: num_accepted counts tokens that the model drafted only."""
        num_accepted = num_tested = 0
        confidences: list[float] = []
        outcomes: list[bool] = []
        for one, accepted in zip(result.drafts, result.num_accepted, strict=True):
            tested = min(accepted + 1, one.num_drafted)
            num_accepted, num_tested = num_accepted + accepted, num_tested + tested
            confidences.extend(one.confidences[:tested])
            outcomes.extend(position < accepted for position in range(tested))
            ended = tested == len(one.token_ids) < plan.num_draft_tokens
            self._stops.observe(num_accepted=accepted, num_tested=tested, ended=ended)
        candidate = self._in_use
        if result.num_draft_steps and not result.is_unready:
            step_s = self._latency.draft_step_s(plan.choices, context=state.context, batch=state.batch)
            self._slowness.observe(result.draft_s, result.num_draft_steps * step_s, age=1)
        elif not result.is_unready:
            plain_s = self._latency.decode_step_s(context=state.context, batch=state.batch)
            self._plain_slowness.observe(seconds, plain_s, age=1)
        if num_tested and candidate is not None:
            self._calibration.observe(confidences, outcomes)
            self._correction.observe(candidate.estimate, num_accepted=num_accepted, num_tested=num_tested)
            candidate.used.observe(num_accepted, num_tested)
        self._trigger.observe(num_tokens=num_tokens / state.batch, num_accepted=num_accepted, num_tested=num_tested)
        if self._record is not None and plan is self._record.plan:
            self._record.add_round(
                num_tokens=num_tokens,
                sequence_s=seconds * state.batch,
                num_accepted=num_accepted,
                num_tested=num_tested,
            )
        self._rounds_to_review -= 1

    def search(self, state: BatchState, ask: Ask, *, share: float = 1.0) -> PlanRecord | None:
        """Search when there is a reason and the budget allows; otherwise, at an interval, review the known candidates.
        share: of the time, in rounds that a plan could make faster; the budget counts only this time."""
        if self._asked is None:
            had_question = self._question is not None
            self._consider_search(state, share)
            if had_question and self._question is not None:
                self._asked = ask(self._question)
        if self._asked is not None and self._asked.done():
            return self._conclude(state, self._asked)
        if self._rounds_to_review <= 0 and self._candidates:
            # Without drafts, only another context or batch can change the choice.
            self._rounds_to_review = ROUNDS_TO_REVIEW * (1 if self.plan.drafts else 4)
            self._rates.clear()
            if self._best_known(state)[1] is not self._in_use:
                why = "the observed speed favours another plan"
                return self._decide(state, why if self._has_searched else "before a search: quantised copies", 0.0)
        return None

    def acceptance_of(self, candidates: Sequence[Candidate]) -> list[float]:
        """Return each candidate's expected acceptance: its observations, with the corrected estimate as the prior."""
        corrected = self._correction.apply([candidate.estimate for candidate in candidates])
        return [
            shrink(one.used.total, one.used.weight, float(prior))
            for one, prior in zip(candidates, corrected, strict=True)
        ]

    def question(self, state: BatchState, max_states: int = _MAX_STATES) -> Knapsack:
        """Return the question of a search. A draft may save all weight transfers and a share of the compute."""
        latency = self._latency
        rows, context, batch = state.batch, state.context, state.batch
        alike = list(zip(latency.sublayers, latency.transfer_s, strict=True))  # these take the same seconds
        known = {
            kind: {
                choice: latency.sublayer_s(index, rows=rows, context=context, batch=batch, choice=choice)
                for choice in latency.choices_of(index)
                if choice in self._options.draft_choices
            }
            for kind, index in {kind: index for index, kind in enumerate(alike)}.items()
        }
        savings = quantize([known[kind] for kind in alike])
        sublayers_s = float(latency.sublayers_s(rows=rows, context=context, batch=batch).sum())
        return Knapsack(
            num_tokens=self._options.num_tap_tokens,
            savings=savings,
            max_saved=int(self._largest_saving(sublayers_s) * sum(each.get(SKIP, 0) for each in savings)),
            min_similarity=0.5,  # states less similar to the target are dropped
            max_states=max_states,
            also=uniform_patterns(savings),
        )

    def _consider_search(self, state: BatchState, share: float) -> None:
        """Set the question of a search that is due and that the budget allows; it stays for ROUNDS_TO_REVIEW rounds.

        After searches in vain, later ones get less and less of the time. The first search may take a share of the time
        that the fastest draft it may find would save, so that it can come early, and may be smaller. It is expected to
        be as slow as rounds without a draft are, compared with the latency model.
        """
        self._rounds_to_price -= 1
        if self._rounds_to_price > 0:
            return
        self._question, reason = None, self._trigger.reason(context=state.context, batch=state.batch)
        if reason is None:
            return
        self._rounds_to_price, self._reason = ROUNDS_TO_REVIEW, reason
        slowness = self._plain_slowness.value
        step_s = self._latency.decode_step_s(context=state.context, batch=state.batch) * slowness
        work_s = share * state.num_outstanding_tokens * step_s / state.batch
        budget_s = (
            self._options.optimise_share
            * (share * state.elapsed_s + work_s)
            / 2 ** min(self._num_in_vain, _MAX_HALVINGS)
        )
        is_first = self._cost_ratio is None
        if is_first and self._options.optimise_share > 0:
            budget_s = max(budget_s, FIRST_SEARCH_SHARE * work_s * (1 - 1 / self._gain_to_expect(state)))
        for max_states in (_MAX_STATES, _FEWER_STATES) if is_first else (_MAX_STATES,):
            question = self.question(state, max_states)
            self._predicted_s = self._search_cost_s(state, question)
            if state.searched_s + (self._cost_ratio or slowness) * self._predicted_s <= budget_s:
                self._question = question
                return

    def _gain_to_expect(self, state: BatchState) -> float:
        """Return the gain of the fastest draft that a search may find, if it agrees on all captured tokens."""
        context, batch = state.context, state.batch
        plain_s = self._latency.decode_step_s(context=context, batch=batch)
        sublayers_s = float(self._latency.sublayers_s(rows=batch, context=context, batch=batch).sum())
        step_s = plain_s - sublayers_s * self._largest_saving(sublayers_s)
        num_captured = self._options.num_tap_tokens
        acceptance, num_tokens, gain = shrink(num_captured, num_captured, 0.5), 1.0, 1.0
        for length in range(1, self._options.max_draft_tokens + 1):
            num_tokens += acceptance**length
            verify_s = self._latency.verify_s(rows=(length + 1) * batch, context=context, batch=batch)
            gain = max(gain, num_tokens * plain_s / (length * step_s + verify_s))
        return gain

    def _largest_saving(self, sublayers_s: float) -> float:
        """Return the share of the sublayers' time that drafts may save: all transfers, and a share of the compute."""
        return 1 - (1 - _MAX_SKIPPED_SHARE) * (1 - sum(self._latency.transfer_s) / sublayers_s)

    def _search_cost_s(self, state: BatchState, question: Knapsack) -> float:
        """Return the predicted seconds of a search: all states run in full, and the captured tokens by each choice.
        Choices of both weights and keys are sums of two others. On a GPU, the host may take longer."""
        num_tokens, context = question.num_tokens, state.context
        ways = {choice for each in question.savings for choice in each if choice != SKIP}
        alone = {one for way in ways for one in (combined(weights_of(way), "all"), combined("full", keys_of(way)))}
        states_s, choice_s = (
            self._latency.verify_s(rows=rows * num_tokens, context=context, batch=num_tokens)
            for rows in (question.max_states + len(question.also), 1)
        )
        return max(states_s + len(alone - {FULL}) * choice_s, len(question.savings) * self._latency.search_s)

    def _conclude(self, state: BatchState, asked: Future[Answer]) -> PlanRecord | None:
        """Choose the best of a search's candidates and the one in use. A cancelled search starts again later."""
        self._asked = None
        if asked.cancelled():
            return None
        self._question = None
        found, previous = answer_of(asked), self._in_use
        if found is None:
            self._tell_trigger(state, changed=False)
            return None
        assert isinstance(found, Found)
        self._candidates = [
            Candidate(one.choices, one.similarity, one.num_agreed, found.num_tokens) for one in found.drafts
        ]
        if previous is not None:
            again = next((one for one in self._candidates if one.choices == previous.choices), None)
            if again is None:
                self._candidates.append(previous)
            else:
                again.used = previous.used
        self._cost_ratio = found.seconds / self._predicted_s if self._predicted_s else 1.0
        self._has_searched = True
        record = self._decide(state, self._reason, found.seconds)
        self._num_in_vain = 0 if self.plan.drafts else self._num_in_vain + 1
        return record

    def _draft_rates(self, context: int, batch: int) -> DraftRates:
        return DraftRates(
            latency=self._latency,
            context=context,
            batch=batch,
            max_draft_tokens=self._options.max_draft_tokens,
            stop_rule=self._stops.rule,
        )

    def _best_known(self, state: BatchState) -> tuple[Decision, Candidate | None]:
        patterns = [candidate.choices for candidate in self._candidates]
        rates = self._draft_rates(state.context, state.batch)
        best = rates.best_choice(patterns, self.acceptance_of(self._candidates))
        return best, None if best.candidate is None else self._candidates[best.candidate]

    def _decide(self, state: BatchState, reason: str, spent_s: float) -> PlanRecord:
        before = self.plan.choices if self.plan.drafts else None
        self._rates.clear()
        best, self._in_use = self._best_known(state)
        self.plan, choices, expected = self._no_draft, None, 0.0
        if self._in_use is not None:
            choices, expected = self._in_use.choices, self.acceptance_of([self._in_use])[0]
            self.plan = Plan(choices=choices, num_draft_tokens=self._options.max_draft_tokens, source="knapspec")
        if self._has_searched:  # else a first search stays due
            self._tell_trigger(state, changed=choices != before)
        self._rounds_to_review = ROUNDS_TO_REVIEW
        self._record = state.record(self.plan, best, reason=reason, estimated_acceptance=expected, optimise_s=spent_s)
        return self._record

    def _tell_trigger(self, state: BatchState, *, changed: bool) -> None:
        expected = self.acceptance_of([self._in_use])[0] if self._in_use else None
        self._trigger.planned(changed=changed, context=state.context, batch=state.batch, expected_acceptance=expected)


def copies_alone(options: SpeculationOptions, latency: LatencyModel) -> list[Candidate]:
    """Return the drafts that run all sublayers by a quantised copy of their weights, where there is one."""
    ways = [latency.choices_of(index) for index in range(len(latency.sublayers))]
    return [
        Candidate(choices, _COPIES[weights], num_agreed=0, num_captured=0)
        for weights, choices in drafts_by_copies(options.draft_weights, ways).items()
    ]


def uniform_patterns(savings: Sequence[Mapping[Choice, int]]) -> list[Choices]:
    """Return the drafts that run all sublayers by the same choice, or by the nearest that saves time."""
    ways = dict.fromkeys(choice for each in savings for choice in each if choice != SKIP)
    patterns = dict.fromkeys(tuple(nearest(choice, each) for each in savings) for choice in ways)
    return [choices for choices in patterns if num_leading_full(choices) < len(choices)]


class Auto:
    """KnapSpec finds plans; the gate decides which rounds use them. Every round compares the proposed tokens with the
    committed tokens; so their acceptance is learned without trials. looks_up: False for the strategy "knapspec"."""

    def __init__(
        self,
        options: SpeculationOptions,
        latency: LatencyModel,
        *,
        known: Sequence[Candidate] = (),
        looks_up: bool = True,
        trigger: Trigger | None = None,
    ) -> None:
        self._knapspec = KnapSpec(options, latency, known=known, trigger=trigger)
        self._looks_up = looks_up
        self._no_draft = no_draft(len(latency.sublayers), "no draft")
        self._has_gate = options.gate
        self._latency = latency
        self._gate = Gate(latency, trusted=(LOOKUP, BOTH))
        # Means over rounds with KnapSpec's draft: tokens per sequence that were committed, and drafted by the model
        # (looked-up tokens excluded), of the sequences for which it drafted; and draft steps per round.
        self._committed = Discounted(TEXT_HALF_LIFE, prior=1.0)
        self._drafted, self._num_steps = Discounted(TEXT_HALF_LIFE), Discounted(TEXT_HALF_LIFE)
        # Of the text that no lookup copies faster than any plan could generate it. Without lookup, that is all of it.
        self._new_text_share = Discounted(TEXT_HALF_LIFE, prior=0.0 if looks_up else 1.0, strength=PRIOR_TOKENS)
        self._num_rounds = self._num_looked_up = 0

    @property
    def status(self) -> str:
        share = self._num_looked_up / max(1, self._num_rounds)
        looked_up = f". {share:.0%} of decoding rounds used prompt lookup" if self._looks_up else ""
        return f"self-{self._gate.status(PLAN if self._knapspec.plan.drafts else None)}{looked_up}"

    def choose(self, state: BatchState) -> RoundPlan:
        taken = self._gate.choose(state, self._ways(state))
        return replace(taken, keep_drafting=self._rule(state, taken), capture=self._knapspec.wants_captures)

    def observe(
        self, state: BatchState, chosen: RoundPlan, result: RoundResult, num_tokens: int, seconds: float
    ) -> None:
        assert isinstance(chosen, Taken)
        plan = chosen.plan
        drafted = any(one.token_ids for one in result.drafts)
        counts = (drafted or not plan.drafts) and not result.is_unready
        self._gate.observe(state, chosen, num_tokens, seconds, counts=counts)
        self._num_rounds += 1
        self._num_looked_up += any(len(one.token_ids) > one.num_drafted for one in result.drafts)
        # A round copies if lookup is expected to be faster than any plan.
        rate, plain_rate = (self._gate.rate(way, chosen.rates) for way in (chosen.way, PLAIN))
        copies = plan.num_lookup_tokens > 0 and rate > MAX_PLAN_GAIN * plain_rate
        self._new_text_share.observe(0.0 if copies else num_tokens / state.batch, num_tokens / state.batch)
        if plan.num_lookup_tokens and not result.num_draft_steps:
            return
        # KnapSpec learns from the tokens that the model drafted.
        accepted = zip(result.num_accepted, result.drafts, strict=True)
        own = msgspec.structs.replace(result, num_accepted=[min(count, one.num_drafted) for count, one in accepted])
        if result.num_draft_steps:
            drafting = [draft.num_drafted for draft in own.drafts if not draft.looked_up]
            committed = 1 + sum(own.num_accepted) / len(drafting)
            self._committed.observe(committed, age=committed)
            self._drafted.observe(sum(drafting) / len(drafting), age=committed)
            self._num_steps.observe(own.num_draft_steps, age=committed)
        self._knapspec.observe(state, chosen.proposed, own, num_tokens, seconds)

    def search(self, state: BatchState, ask: Ask) -> PlanRecord | None:
        """Let KnapSpec search, with a budget from the time of those rounds only that a plan could make faster."""
        record = self._knapspec.search(state, ask, share=self._new_text_share.value)
        if record is not None:
            self._gate.renew(PLAN)
        return record

    def _rule(self, state: BatchState, taken: Taken) -> KeepDrafting | None:
        """Return KnapSpec's rule for the end of drafts. With lookup, return a rule by which looked-up tokens may also
        complete the draft: those that followed the drafted tokens earlier in the text."""
        if not taken.plan.num_draft_tokens:
            return None
        rate, plain_rate = (self._gate.rate(way, taken.rates) for way in (taken.way, PLAIN))
        worth = self._knapspec.keep_drafting(state, max(rate, plain_rate))
        if worth is None or not self._looks_up:
            return worth
        best = max(self._gate.rate(way, taken.rates) for way in taken.rates)
        return DraftUntilFound(
            worth=worth,
            by_class=tuple(state.by_class()),
            min_survival=best * worth.row_s,
            drafting_gain=rate / plain_rate,
        )

    def _ways(self, state: BatchState) -> dict[str, Proposed]:
        batch, own = state.batch, self._knapspec.plan
        plain_rate = batch / self._latency.decode_step_s(context=state.context, batch=batch)
        ways = {PLAIN: Proposed(self._no_draft, plain_rate)}
        if own.drafts:
            ways[PLAN] = Proposed(
                own,
                batch * self._knapspec.rate(state),
                shorter=lambda longest: batch * self._knapspec.rate(state, longest),
            )
        if not self._has_gate and own.drafts:
            return {PLAIN: ways[PLAN]}
        if any(proposal.token_ids for proposal in state.proposals()):
            ways[LOOKUP] = self._looked_up(state, self._no_draft)
            if own.drafts and self._gate.is_known(PLAN):
                ways[BOTH] = self._looked_up(state, own)
        return ways

    def _looked_up(self, state: BatchState, base: Plan) -> Proposed:
        """Return the plan with the best numbers of looked-up tokens; sequences with 0 of them use the plan `base`."""
        context, batch, latency = state.context, state.batch, self._latency
        survivals = [one.survival for one in state.proposals()]

        def seconds(lengths: Sequence[int]) -> float:
            num_drafting = lengths.count(0) if base.drafts else 0
            step_s = latency.draft_step_s(base.choices, context=context, batch=num_drafting) if num_drafting else 0.0
            rows = round(batch + sum(lengths) + num_drafting * self._drafted.value)
            verify_s = latency.verify_s(rows=rows, context=context, batch=batch)
            if latency.rejected_s:
                kept = (one[count - 1] for one, count in zip(survivals, lengths, strict=True) if count)
                verify_s += latency.rejected_s * sum(1 - each for each in kept)
            return self._num_steps.value * step_s + verify_s + latency.round_s

        lengths, rate = best_lookup(survivals, seconds, committed_without=self._committed.value if base.drafts else 1.0)
        return Proposed(replace(base, num_lookup_tokens=max(lengths), lookup_lengths=lengths), rate)
