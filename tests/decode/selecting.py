"""What a selector is told and asked, made up: situations, rounds, answers, and a latency model of round numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from rayspec.decode.search import Answer, Question
from rayspec.decode.selection.base import BatchState, Selector
from rayspec.decode.work import Committed, Draft, RoundResult
from rayspec.planning.latency import Curve, LatencyModel
from rayspec.types import Plan, PlanRecord


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


def state(batch: int = 1, *, context: int = 100) -> BatchState:
    return BatchState(context=context, batch=batch, elapsed_s=1.0, num_outstanding_tokens=1000)


def round_of(plan: Plan, num_accepted: int = 0, *, batch: int = 1) -> RoundResult:
    """Drafts of the plan's full length, of which so many tokens were accepted."""
    length = plan.num_draft_tokens
    drafts = [Draft([7] * length, [0.9] * length) for _ in range(batch)]
    committed = [Committed([7] * (num_accepted + 1), (), True)] * batch
    return RoundResult(committed, drafts, [num_accepted] * batch, length, 0.1, 0.1)


class Asker:
    """Answers every question by `reply`, at once, and remembers them."""

    def __init__(self, reply: Callable[[Question], Answer]) -> None:
        self._reply = reply
        self.asked: list[Question] = []

    def __call__(self, question: Question) -> Future[Answer] | None:
        self.asked.append(question)
        future: Future[Answer] = Future()
        future.set_result(self._reply(question))
        return future


def turn(
    selector: Selector,
    asker: Asker,
    *,
    batch: int = 1,
    num_accepted: int = 0,
    seconds: Callable[[Plan], float] = lambda plan: 1.0,
) -> PlanRecord | None:
    """One round, as the engine goes about it."""
    here = state(batch)
    plan = selector.plan(here)
    accepted = min(num_accepted, plan.num_draft_tokens)
    result = round_of(plan, accepted, batch=batch)
    selector.observe(here, plan, result, batch * (accepted + 1), seconds(plan))
    return selector.improve(here, asker)


def turns(selector: Selector, asker: Asker, count: int, *, batch: int = 1) -> Sequence[PlanRecord]:
    records = [turn(selector, asker, batch=batch) for _ in range(count)]
    return [record for record in records if record is not None]
