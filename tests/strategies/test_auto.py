from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import pytest
from msgspec import structs

from rayspec import demo
from rayspec.choices import FULL, SKIP
from rayspec.config import SamplingParams, SpeculationOptions
from rayspec.decode.drafting.lookup import NOTHING, SINGLE, LookupRecord, Proposal, match_classes
from rayspec.decode.search import Answer, Question
from rayspec.decode.strategy import Ask, BatchState
from rayspec.decode.work import Committed, Draft, RoundResult
from rayspec.planning.acceptance import DraftUntilFound, DraftWhileWorth, survival
from rayspec.planning.latency import LatencyModel
from rayspec.planning.learning import CalibrationCurve
from rayspec.strategies.knapspec import Auto, Candidate
from rayspec.types import Plan
from tests.demo_model import EOS, demo_parts, demo_prompts
from tests.engines import complete, engine_with, tokens_of
from tests.families import greedy
from tests.planning.test_latency import model
from tests.strategy_cases import latency_model

FOUND = Proposal((1,) * 16, match_classes(8, [SINGLE]) * 16, survival=tuple(0.9**power for power in range(1, 17)))


@dataclass
class World:
    """Rounds as they would be: looked-up tokens are right so often, drafted ones never, and forwards take what the
    latency model says, `row_factor` times as long when there is more than a row a sequence."""

    auto: Auto
    latency: LatencyModel
    right: float
    row_factor: float = 1.0
    record: LookupRecord = field(default_factory=LookupRecord)
    plans: list[Plan] = field(default_factory=list)
    _luck: float = 0.0

    def play(self, proposals: Sequence[Proposal]) -> float:
        """One round; tokens per second."""
        batch = len(proposals)
        known = [structs.replace(one, survival=survival(self.record.by_class, one.match_classes)) for one in proposals]
        state = replace(_batch_state(), batch=batch, proposals=lambda: known)
        chosen = self.auto.choose(state)
        plan = chosen.plan
        self.plans.append(plan)
        drafts, committed, accepted = [], [], []
        for proposal in proposals:
            drafts.append(Draft(list(proposal.token_ids[: plan.num_lookup_tokens])))
            accepted.append(self._num_right(len(drafts[-1].token_ids)))
            tokens = [1] * accepted[-1] + [1 if accepted[-1] == len(drafts[-1].token_ids) and self._is_right() else 2]
            committed.append(Committed(tokens, (), True))
        rows = batch + sum(len(one.token_ids) for one in drafts)
        verify_s = self.latency.verify_s(rows=rows, context=1024, batch=batch)
        verify_s *= self.row_factor if rows > batch else 1.0
        verify_s += self.latency.rejected_s * sum(
            count < len(one.token_ids) for count, one in zip(accepted, drafts, strict=True)
        )
        result = RoundResult(committed, drafts, accepted, 0, 0.0, verify_s)
        num_tokens = sum(len(one.token_ids) for one in committed)
        for proposal, one in zip(proposals, committed, strict=True):
            self.record.observe(proposal.match_classes, proposal.token_ids, one.token_ids)
        self.auto.observe(state, chosen, result, num_tokens, verify_s + 50e-6)
        return num_tokens / verify_s

    def _is_right(self) -> bool:
        self._luck += self.right
        right = self._luck >= 1
        self._luck -= right
        return right

    def _num_right(self, length: int) -> int:
        return next((at for at in range(length) if not self._is_right()), length)


def world(right: float, row_factor: float = 1.0, rejected_s: float = 0.0) -> World:
    latency = replace(model(), rejected_s=rejected_s)
    return World(Auto(SpeculationOptions(strategy="auto"), latency), latency, right, row_factor)


def _noting(asked: list[Question]) -> Ask:
    """Searches that are noted and never end."""

    def search(question: Question, sequence_id: str | None = None) -> Future[Answer]:
        asked.append(question)
        return Future()

    return search


def test_text_that_repeats_itself_is_looked_up() -> None:
    there = world(right=0.95)
    for _ in range(60):
        there.play([FOUND])
    assert all(plan.num_lookup_tokens >= 4 for plan in there.plans[-20:])
    assert int(there.auto.status.split(". ")[-1].split("%")[0]) >= 90, "but for trials of plain decoding"


def test_what_is_never_right_is_soon_left_alone_and_taken_up_again_when_it_is() -> None:
    there = world(right=0.0)
    plain_rate = 1 / there.latency.verify_s(rows=1, context=1024, batch=1)
    assert sum(there.play([FOUND]) for _ in range(100)) > 100 * 0.97 * plain_rate
    assert all(plan.num_lookup_tokens == 0 for plan in there.plans[-20:])
    there.right = 1.0
    for _ in range(100):
        there.play([FOUND])
    assert all(plan.num_lookup_tokens >= 4 for plan in there.plans[-20:]), "plain rounds have shown that it would pay"


def test_rows_that_cost_more_than_they_earn_are_not_verified() -> None:
    dear = world(right=0.6, row_factor=8.0)
    for _ in range(80):
        dear.play([FOUND, NOTHING])
    assert sum(plan.num_lookup_tokens > 0 for plan in dear.plans) < 20


def test_rows_whose_rejection_costs_a_later_pass_are_verified_only_if_they_are_nearly_sure() -> None:
    plain_s = model().verify_s(rows=1, context=1024, batch=1)
    cheap, dear, sure = world(0.5), world(0.5, rejected_s=3 * plain_s), world(0.95, rejected_s=3 * plain_s)
    rates = [sum(each.play([FOUND]) for _ in range(100)) / 100 for each in (cheap, dear, sure)]
    counts = [sum(plan.num_lookup_tokens > 0 for plan in each.plans[-40:]) for each in (cheap, dear, sure)]
    assert rates[1] > 0.97 / plain_s
    assert rates[2] > 1.5 / plain_s
    assert counts[1] < 5 < counts[0] < counts[2]
    assert counts[2] > 35


@pytest.mark.parametrize(
    ("proposal", "right", "searches"), [(FOUND, 1.0, False), (FOUND, 0.4, True), (NOTHING, 0.95, True)]
)
def test_a_search_must_pay_in_the_rounds_that_lookup_leaves(proposal: Proposal, right: float, searches: bool) -> None:
    there, asked = world(right), []

    for _ in range(40):
        there.play([proposal])
        there.auto.search(replace(_batch_state(), num_outstanding_tokens=20_000), _noting(asked))
    assert bool(asked) == searches


def test_a_search_that_waits_for_tokens_is_given_up_when_copying_leaves_it_none() -> None:
    there, state = world(right=1.0), replace(_batch_state(), num_outstanding_tokens=20_000)
    for proposal, is_wanted in ((NOTHING, True), (FOUND, False), (NOTHING, True)):
        for _ in range(30):
            there.play([proposal])
            there.auto.search(state, lambda question, sequence_id=None: None)  # too few are tapped
        assert there.auto.choose(state).capture == is_wanted


def use_plan(auto: Auto, rate: float) -> Plan:
    """Let KnapSpec have a plan that is predicted to make so many tokens per second."""
    auto._knapspec.plan = Plan(choices=(SKIP,) * 8, num_draft_tokens=8, source="x")
    auto._knapspec.rate = lambda state, longest=None: rate  # type: ignore[method-assign]
    return auto._knapspec.plan


def _continued(num_accepted: int) -> RoundResult:
    """A draft of two tokens of the model and four looked-up ones."""
    draft = Draft([5, 6, 1, 1, 1, 1], [0.9, 0.8], match_classes=list(match_classes(4, [SINGLE] * 4)))
    tokens = [*draft.token_ids[:num_accepted], 9]
    return RoundResult([Committed(tokens, (), True)], [draft], [num_accepted], 2, 0.02, 0.01)


@pytest.mark.parametrize("num_accepted", [1, 4])
def test_the_plan_hears_of_its_own_part_of_a_draft_that_lookup_completed(num_accepted: int) -> None:
    there, heard = world(right=1.0), []
    auto = there.auto
    there.play([FOUND])
    plan = use_plan(auto, 1e9)
    auto._knapspec.observe = lambda *told: heard.append(told)  # type: ignore[method-assign]
    state = replace(_batch_state(), proposals=lambda: [NOTHING])
    chosen = auto.choose(state)
    assert 0 < chosen.plan.num_draft_tokens < 8
    auto.observe(state, chosen, _continued(num_accepted), num_accepted + 1, 0.04)
    [(_, own_plan, own, _, _)] = heard
    assert own_plan is plan, "also where its drafts were made shorter"
    assert own.num_accepted == [min(2, num_accepted)]


def test_drafts_go_on_by_what_lookup_has_learned() -> None:
    there = world(right=1.0)
    assert there.auto.choose(_batch_state()).keep_drafting is None, "the plan does not draft"
    for _ in range(20):
        there.play([FOUND])
    worth = DraftWhileWorth(
        curve=CalibrationCurve(confidence=(0.0, 1.0), excess=(0.0, 0.0)), usual=0.8, rate=1.0, step_s=0.5, row_s=0.01
    )
    use_plan(there.auto, 1e9)
    there.auto._knapspec.keep_drafting = lambda state, rate: worth  # type: ignore[method-assign]
    state = replace(_batch_state(), proposals=lambda: [NOTHING], by_class=lambda: (0.25, 0.75))
    rule = there.auto.choose(state).keep_drafting
    assert isinstance(rule, DraftUntilFound)
    assert (rule.worth, rule.by_class) == (worth, (0.25, 0.75))
    assert rule.drafting_gain > 1


def test_drafts_are_as_long_on_a_machine_that_is_faster_or_slower_than_its_profile() -> None:
    def lengths(slowness: float) -> list[int]:
        latency = latency_model(4, sublayer_s=1e-3, row_s=1e-5)
        draft = Candidate((SKIP,) * 4 + (FULL,) * 4, similarity=0.9, num_agreed=50, num_captured=50)
        auto = Auto(SpeculationOptions(gate=False), latency, known=[draft], looks_up=False)
        found = []
        for _ in range(30):
            auto.search(_batch_state(), _noting([]))
            chosen, confidences = auto.choose(_batch_state()), [0.9]
            if chosen.keep_drafting is None:
                continue
            while len(confidences) < 16 and chosen.keep_drafting([confidences])[0]:
                confidences.append(0.9)
            found.append(length := len(confidences))
            committed = [Committed([1] * (length + 1), (), True)]
            one = Draft([1] * length, confidences)
            draft_s = slowness * length * latency.draft_step_s(chosen.plan.choices, context=1024, batch=1)
            verify_s = slowness * 9e-3
            result = RoundResult(committed, [one], [length], length, draft_s, verify_s)
            auto.observe(_batch_state(), chosen, result, length + 1, draft_s + verify_s)
        return found

    assert len(lengths(1.0)) > 20
    assert max(lengths(1.0)) > 4
    assert lengths(1 / 3) == lengths(1.0) == lengths(3.0)


def _batch_state() -> BatchState:
    return BatchState(context=1024, batch=1, elapsed_s=1.0, num_outstanding_tokens=1000)


@pytest.mark.exhaustive
@pytest.mark.parametrize("batch", [1, 4])
def test_on_the_demo_model_it_drafts_both_ways_and_changes_no_token(batch: int) -> None:
    latency = latency_model(16, sublayer_s=1e-3, row_s=1e-5, round_s=1e-3)
    options = SpeculationOptions(strategy="auto", gate=False, optimise_share=1.0, num_search_tokens=6)
    engine = engine_with(demo_parts(), Auto(options, latency), max_draft_tokens=16, eos=(EOS,), max_num_seqs=batch)
    prompts = demo_prompts(4, 12)
    outputs = complete(engine, prompts, SamplingParams(temperature=0, max_tokens=60))
    assert tokens_of(outputs) == greedy(demo.model_path(), prompts, 60, eos=(EOS,))
    assert ". 0% of decoding rounds" not in engine.stats.gate_reason
    assert engine.stats.num_accepted_tokens > 100


def test_a_plan_that_may_well_be_faster_is_tried_although_lookup_pays() -> None:
    there = world(right=0.7)
    for _ in range(30):
        there.play([FOUND])
    assert there.plans[-1].num_lookup_tokens > 0
    plain_rate = 1 / there.latency.decode_step_s(context=1024, batch=1)
    for gain, tried in ((0.5, False), (8.0, True)):
        use_plan(there.auto, gain * plain_rate)
        there.play([FOUND])
        there.play([FOUND])
        assert any(plan.num_draft_tokens for plan in there.plans[-2:]) == tried
