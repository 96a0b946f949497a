"""Published results of papers, with the predictions of our own model of a draft. Nothing is run.

The draft of a row skips whole layers: the published share, or else the budget of the method. Its relative cost c
follows from a latency model of the LLM and GPU. Its gain follows from c and the published acceptance by `best_choice`,
which the plan search uses. Unpublished numbers are solved for: the acceptance that explains the published speed-up at
that c, and the c that explains it at that acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.papers.prediction import (
    best_length,
    cost_if_all_accepted,
    draft_cost,
    needed_acceptance,
    needed_cost,
    oracle_gain,
    relative_gain,
    relative_latency,
)
from benchmarks.papers.published import Published, published
from benchmarks.roofline import ACCELERATORS, SHAPES, ideal_latency, reference_latency
from rayspec.choices import FULL, SKIP, Choices, choices_of
from rayspec.planning.latency import LatencyModel

KNAPSPEC_PAPER = "KnapSpec"
# Share of the sublayers' time that drafts skip if a row has no share: KnapSpec may skip half, CLaSp skips 40 to 60 %.
BUDGETS = {"knapspec": 0.5, "clasp": 0.5}
DEFAULT_ACCELERATOR = "A100"  # if a row names no GPU; without fixed times it cancels out of every ratio
MAX_DRAFT_TOKENS = 18  # if a row gives no length: that of KnapSpec
IN_SAMPLE_DRAFT_TOKENS = 17  # the longest draft in the grid of KnapSpec's own estimate
LONG_DOCUMENT, SHORT_PROMPT = 12_800, 2_048  # assumed tokens of context: no row has its own
_LONG_TASKS = ("GovReport", "PG19", "BookSum")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predictions of one latency model for one row.

    cost: c, time of a draft step over a plain step; the draft breaks even at an acceptance of c. needed_acceptance: the
    acceptance that gives the published speed-up; None if no acceptance does.

    The other fields are None if no acceptance was published. gain: for drafts that always have the best length,
    num_draft_tokens. oracle: if each draft ended just before a token to be rejected. residual: published over `gain`,
    less 1. drafted_per_round: tokens that give the published speed-up at the published share of accepted tokens; None
    if no number does.
    """

    cost: float
    needed_acceptance: float | None
    gain: float | None = None
    num_draft_tokens: int | None = None
    oracle: float | None = None
    residual: float | None = None
    drafted_per_round: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRow:
    """A published row with our predictions.

    skip_ratio: the share that the predictions assume; None if unknown. ideal: prediction for good kernels. reference:
    prediction for KnapSpec's published code, only for the results of its paper. needed_cost: c that explains the
    speed-up at the published acceptance. most_cost: the same if every draft token were accepted. tpt_cost: c that gives
    the authors' own estimate if all 17 tokens of a draft were accepted. at_tpt_cost: the prediction at that c.
    ideal_step_ms, reference_step_ms: of plain decoding on one GPU, or on several GPUs with consecutive layers each.
    """

    published: Published
    context: int
    skip_ratio: float | None
    ideal: Prediction | None
    reference: Prediction | None
    needed_cost: float | None
    most_cost: float | None
    tpt_cost: float | None
    at_tpt_cost: Prediction | None
    ideal_step_ms: float | None
    reference_step_ms: float | None

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        return tuple(each for each in (self.ideal, self.reference) if each is not None)


def predict_papers(rows: Sequence[Published] | None = None) -> tuple[PaperRow, ...]:
    """Return predictions for each row; by default for all rows of published.csv."""
    return tuple(_row(each) for each in (published() if rows is None else rows))


def keep_layers(num_layers: int, kept_share: float) -> Choices:
    """Return [2 * num_layers]: choices that keep a share of whole layers, rounded to a layer and spread evenly."""
    num_kept = round(num_layers * kept_share)
    kept = [(layer + 1) * num_kept // num_layers > layer * num_kept // num_layers for layer in range(num_layers)]
    return choices_of([flag for flag in kept for _ in ("attention", "mlp")])


def max_draft_tokens(row: Published) -> int:
    return row.max_draft_tokens or MAX_DRAFT_TOKENS


def _row(row: Published) -> PaperRow:
    context = LONG_DOCUMENT if row.task in _LONG_TASKS else SHORT_PROMPT
    skip_ratio = BUDGETS.get(row.method) if row.skip_ratio is None else row.skip_ratio
    tpt_cost = None if row.tpt_gain is None else cost_if_all_accepted(row.tpt_gain, IN_SAMPLE_DRAFT_TOKENS)
    ideal, reference = _latencies(row, context)
    return PaperRow(
        published=row,
        context=context,
        skip_ratio=skip_ratio,
        ideal=_ideal_prediction(row, ideal, skip_ratio, context),
        reference=_layers_prediction(row, reference, skip_ratio, context),
        needed_cost=_needed_cost(row),
        most_cost=cost_if_all_accepted(row.speedup, max_draft_tokens(row)),
        tpt_cost=tpt_cost,
        at_tpt_cost=None if tpt_cost is None else _predict_at_cost(row, tpt_cost),
        ideal_step_ms=_step_ms(ideal, context),
        reference_step_ms=_step_ms(reference, context),
    )


def _latencies(row: Published, context: int) -> tuple[LatencyModel | None, LatencyModel | None]:
    """Return the ideal and the reference latency model; the reference only for results of KnapSpec's paper."""
    if not row.shape:
        return None, None
    shape, accelerator = SHAPES[row.shape], ACCELERATORS[row.hardware or DEFAULT_ACCELERATOR]
    ideal = ideal_latency(shape, accelerator, bytes_per_weight=row.bytes_per_weight)
    if row.paper != KNAPSPEC_PAPER:
        return ideal, None
    return ideal, reference_latency(shape, accelerator, context=context, bytes_per_weight=row.bytes_per_weight)


def _ideal_prediction(
    row: Published, latency: LatencyModel | None, skip_ratio: float | None, context: int
) -> Prediction | None:
    """Predict with the ideal latency. Without a shape, c is the share that is kept: the LM head is unknown."""
    if latency is None and skip_ratio is not None:
        return _predict_at_cost(row, 1 - skip_ratio)
    return _layers_prediction(row, latency, skip_ratio, context)


def _layers_prediction(
    row: Published, latency: LatencyModel | None, skip_ratio: float | None, context: int
) -> Prediction | None:
    if latency is None or skip_ratio is None:
        return None
    return _prediction(row, latency, keep_layers(len(latency.sublayers) // 2, 1 - skip_ratio), context)


def _predict_at_cost(row: Published, cost: float) -> Prediction:
    return _prediction(row, relative_latency(cost), (FULL, SKIP), 0)


def _prediction(row: Published, latency: LatencyModel, choices: Choices, context: int) -> Prediction:
    longest = max_draft_tokens(row)
    cost = draft_cost(latency, choices, context=context)
    gain_at = partial(relative_gain, cost, max_draft_tokens=longest)
    needed = needed_acceptance(row.speedup, gain_at)
    if row.acceptance is None:
        return Prediction(cost=cost, needed_acceptance=needed)
    choice = best_length(latency, choices, row.acceptance, context=context, max_draft_tokens=longest)
    gain = choice.tpt / choice.plain_tpt
    return Prediction(
        cost=cost,
        needed_acceptance=needed,
        gain=gain,
        num_draft_tokens=choice.num_draft_tokens,
        oracle=oracle_gain(cost, row.acceptance),
        residual=row.speedup / gain - 1,
        drafted_per_round=_drafted_per_round(row.speedup, row.acceptance, cost),
    )


def _drafted_per_round(speedup: float, accepted_share: float, cost: float) -> float | None:
    """Solve speedup = (1 + accepted_share * n) / (1 + cost * n) for n; None if no n > 0 solves it. The equation holds
    for any rule that ends drafts."""
    margin = accepted_share - speedup * cost
    drafted = (speedup - 1) / margin if margin else 0.0
    return drafted if drafted > 0 else None


def _needed_cost(row: Published) -> float | None:
    """Return c as in `needed_cost`; None also at acceptance 0, where only the cost of a whole draft follows."""
    if not row.acceptance:
        return None
    return needed_cost(row.speedup, row.acceptance, max_draft_tokens=max_draft_tokens(row))


def _step_ms(latency: LatencyModel | None, context: int) -> float | None:
    return None if latency is None else 1000 * latency.decode_step_s(context=context, batch=1)
