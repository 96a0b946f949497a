"""Predict the best kind of draft for large models at published acceptances, compared with skipping. Nothing is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.papers.rows import MAX_DRAFT_TOKENS, keep_layers
from benchmarks.roofline import ACCELERATORS, QUANTISED_BYTES, SHAPES, Accelerator, choice_latency
from rayspec.bench.result import markdown_table
from rayspec.choices import Choices, combinations, combined, weights_of
from rayspec.planning.acceptance import DraftRates
from rayspec.planning.latency import LatencyModel

_GPU = "H100"
_CLUSTERS = (("Llama-3.1-70B", 8), ("Llama-3.1-405B", 16))
_CONTEXTS, _BATCHES = (1_024, 8_192, 32_768, 131_072), (1, 8, 64)
_GPU_BYTES = 0.9 * 80e9  # for weights, their copies, keys and values
# Acceptance of a drafted token. "half skipped" (half of the layers): KnapSpec's table 2, Llama-3.1-70B on GovReport.
# int8 and int4: 0.98 to 0.99 and 0.84 to 0.97, measured by others on 7B to 32B. "pages" (few keys): 0.95 to 0.99.
# Both: QuantSpec, 0.92 to 0.94.
ACCEPTANCE = {"half skipped": 0.944, "int8": 0.98, "int4": 0.92, "pages": 0.97, "int8+pages": 0.95, "int4+pages": 0.90}
_SKIPPING = "half skipped"
_CHOICES = combinations(("int8", "int4", "pages"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicePrediction:
    """Predicted gains over plain decoding at the best draft length, by name of the draft; 1 if it does not pay."""

    model: str
    num_gpus: int
    context: int
    batch: int
    gains: dict[str, float]

    @property
    def best(self) -> str:
        """The draft with the highest gain; "no draft" where none pays."""
        name = max(self.gains, key=self.gains.__getitem__)
        return name if self.gains[name] > 1 else "no draft"


def predict_choices() -> list[ChoicePrediction]:
    """Return predictions for all clusters, contexts and batches that fit into GPU memory."""
    return [
        _prediction(model, num_gpus, context, batch)
        for model, num_gpus in _CLUSTERS
        for context in _CONTEXTS
        for batch in _BATCHES
        if _fits(model, num_gpus, context * batch)
    ]


def choices_markdown(predictions: Sequence[ChoicePrediction]) -> str:
    """Return a Markdown section with a table of the predictions."""
    rows = [
        [
            f"{one.model}, {one.num_gpus} {_GPU}",
            f"{one.context:,}",
            str(one.batch),
            one.best,
            f"{max(one.gains.values()):.2f}",
            f"{one.gains[_SKIPPING]:.2f}",
        ]
        for one in predictions
    ]
    assumed = ", ".join(f"{name} {value:g}" for name, value in ACCEPTANCE.items())
    intro = (
        "What a draft gains that runs all sublayers by one choice, at acceptances that others have published for such "
        f"drafts ({assumed}), and which one the plan search would take. Bytes over bandwidth of all GPUs together, "
        "without communication and launches: a bound. Mixed plans, which the knapsack looks for, are not in it, for "
        "nobody has published their acceptance. Contexts and batches whose keys and values do not fit in addition "
        "to the weights and an int4 copy of them are left out."
    )
    table = markdown_table(("model", "context", "batch", "draft taken", "gain", "gain of skipping alone"), rows)
    return f"## Choices on large models\n\n{intro}\n\n{table}"


def _fits(model: str, num_gpus: int, num_tokens: int) -> bool:
    shape = SHAPES[model]
    weights = (2 + QUANTISED_BYTES["int4"]) * shape.num_parameters
    return weights + num_tokens * shape.num_layers * shape.kv_bytes_per_token <= num_gpus * _GPU_BYTES


def _prediction(model: str, num_gpus: int, context: int, batch: int) -> ChoicePrediction:
    gpu, shape = ACCELERATORS[_GPU], SHAPES[model]
    together = Accelerator(name=gpu.name, bytes_per_s=num_gpus * gpu.bytes_per_s, flops=num_gpus * gpu.flops)
    latency = choice_latency(shape, together)
    gains = {
        name: _gain(latency, _pattern(name, shape.num_layers), acceptance, context, batch)
        for name, acceptance in ACCEPTANCE.items()
    }
    return ChoicePrediction(model=model, num_gpus=num_gpus, context=context, batch=batch, gains=gains)


def _pattern(name: str, num_layers: int) -> Choices:
    if name == _SKIPPING:
        return keep_layers(num_layers, 0.5)
    attention = next(choice for choice in _CHOICES if choice == name)
    return (attention, combined(weights_of(attention), "all")) * num_layers


def _gain(latency: LatencyModel, choices: Choices, acceptance: float, context: int, batch: int) -> float:
    rates = DraftRates(latency=latency, context=context, batch=batch, max_draft_tokens=MAX_DRAFT_TOKENS)
    best = rates.best_choice([choices], [acceptance])
    return best.tpt / best.plain_tpt
