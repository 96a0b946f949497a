"""What tests of strategies have in common: rounds and answers made up, and real engines that must change no token."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from rayspec.choices import choices_of
from rayspec.decode.search import Answer, Question
from rayspec.decode.strategy import Ask, BatchState, Strategy
from rayspec.decode.work import Committed, Draft, RoundResult
from rayspec.planning.latency import Curve, LatencyModel
from rayspec.strategies.saved_plans import SavedPlan
from rayspec.types import Plan, PlanRecord

LENGTHS = (37, 3, 120, 12, 70)


def latency_model(
    num_layers: int, *, sublayer_s: float = 1.0, row_s: float = 0.0, round_s: float = 0.0
) -> LatencyModel:
    """Every sublayer takes `sublayer_s` for one row and `row_s` for each other, the head nothing."""
    base_s = (sublayer_s, sublayer_s + 4095 * row_s)
    curves = {kind: Curve(rows=(1, 4096), base_s=base_s) for kind in ("attention", "mlp")}
    return LatencyModel(
        sublayers=("attention", "mlp") * num_layers,
        curves=curves | {"head": Curve(rows=(1, 4096), base_s=(0.0, 0.0))},
        head="head",
        round_s=round_s,
        stages=(0,) * (2 * num_layers),
        transfer_s=(0.0,) * (2 * num_layers),
    )


def verify_after_draft_s(model: LatencyModel, *, rows: int, context: float, batch: int, prefix: int) -> float:
    """Seconds of a verify whose first `prefix` sublayers run one row of each sequence: the draft ran the others."""
    every, one = (model.sublayers_s(rows=count, context=context, batch=batch)[:prefix].sum() for count in (rows, batch))
    return model.verify_s(rows=rows, context=context, batch=batch) - float(every - one)


def latency(num_sublayers: int = 8) -> LatencyModel:
    """Sublayers take all the time, so that every draft that is accepted pays."""
    return latency_model(num_sublayers // 2, sublayer_s=1e-3, row_s=1e-5)


def state(batch: int = 1, *, context: int = 100, sequence_ids: Sequence[str] = ()) -> BatchState:
    return BatchState(
        context=context, batch=batch, elapsed_s=1.0, num_outstanding_tokens=1000, sequence_ids=sequence_ids
    )


def result(lengths: Sequence[int], accepted: Sequence[int]) -> RoundResult:
    """A round whose drafts had these lengths, of which so many tokens were accepted."""
    return RoundResult(
        committed=[Committed([7] * (count + 1), (), True) for count in accepted],
        drafts=[Draft([7] * length, [0.9] * length) for length in lengths],
        num_accepted=list(accepted),
        num_draft_steps=max(lengths),
        draft_s=0.1,
        verify_s=0.1,
    )


def round_of(plan: Plan, num_accepted: int = 0, *, batch: int = 1) -> RoundResult:
    """Drafts of the plan's full length, of which so many tokens were accepted."""
    return result([plan.num_draft_tokens] * batch, [num_accepted] * batch)


class Asker:
    """Answers every question by `reply`, at once, and remembers them."""

    def __init__(self, reply: Callable[[Question], Answer]) -> None:
        self._reply = reply
        self.asked: list[Question] = []

    def __call__(self, question: Question, sequence_id: str | None = None) -> Future[Answer] | None:
        self.asked.append(question)
        future: Future[Answer] = Future()
        future.set_result(self._reply(question))
        return future


def run_round(
    strategy: Strategy,
    ask: Ask,
    *,
    batch: int = 1,
    num_accepted: int = 0,
    seconds: Callable[[Plan], float] = lambda plan: 1.0,
) -> PlanRecord | None:
    """One round, as the engine goes about it."""
    here = state(batch)
    chosen = strategy.choose(here)
    accepted = min(num_accepted, chosen.plan.num_draft_tokens)
    outcome = round_of(chosen.plan, accepted, batch=batch)
    strategy.observe(here, chosen, outcome, batch * (accepted + 1), seconds(chosen.plan))
    return strategy.search(here, ask)


def run_rounds(strategy: Strategy, ask: Ask, count: int, *, batch: int = 1) -> Sequence[PlanRecord]:
    records = [run_round(strategy, ask, batch=batch) for _ in range(count)]
    return [record for record in records if record is not None]


def saved_plan(domain: str = "", skip: Sequence[int] = (4, 5), *, num_sublayers: int = 8, **changes: Any) -> SavedPlan:
    """A plan as it could have been saved, of a model of so many sublayers."""
    values: dict[str, Any] = {
        "num_draft_tokens": 5, "threshold": 0.7, "acceptance": 0.75, "num_tested_tokens": 60, "tokens_per_s": 30.0,
        "plain_tokens_per_s": 20.0, "context": 300, "batch": 2, "provenance": {"method": "by hand"},
    }  # fmt: skip
    values["choices"] = choices_of([index not in skip for index in range(num_sublayers)])
    return SavedPlan(domain=domain, **(values | changes))
