"""Check that all ways to run a model's sublayers compute the same logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from rayspec.bench.selfcheck.models import BUNDLED, RANDOM_FAMILIES, Capture, Prepared, Way, model_named, prepare, split
from rayspec.bench.selfcheck.options import SelfcheckOptions
from rayspec.bench.selfcheck.outcome import Outcome, Table, judged
from rayspec.bench.selfcheck.sequences import (
    MAX_PLACES,
    MAX_ROWS,
    MAX_SEQUENCES,
    NUM_SLOTS,
    PARITY_PASSES,
    PassShape,
    logits_of,
)
from rayspec.model.architecture import Decomposition

# Relative to the largest logit. In half precision each of some ten sublayers rounds its sum in another order.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Difference of logits from those of the modules. largest: relative to the largest logit of the pass."""

    model: str
    dtype: str
    way: str
    rows: str
    largest: float
    tolerance: float

    @property
    def is_small(self) -> bool:
        """Whether the difference is within the tolerance; NaN is not."""
        return self.largest <= self.tolerance


def check_parity(options: SelfcheckOptions) -> Outcome:
    names = ["llama", "qwen3"] if options.is_quick else [BUNDLED, *RANDOM_FAMILIES]
    found = [
        difference
        for dtype in options.parity_dtypes
        for name in names
        for difference in _of_model(name, dtype, options.torch_device)
    ]
    large = [difference for difference in found if not difference.is_small]
    worst = max(found, key=lambda one: one.largest / one.tolerance)
    return judged(
        is_good=not large,
        found=f"{len(large)} of {len(found)} comparisons differ by more than rounding; the largest difference is "
        f"{worst.largest:.1e} of the largest logit ({worst.model}, {worst.dtype}, {worst.way}, {worst.rows})",
        numbers=[asdict(one) | {"is_small": one.is_small} for one in found],
        tables=[_table(found)],
        counted="Largest difference of the logits from those of transformers' modules, relative to the largest logit.",
    )


def differences(
    reference: Prepared, other: Prepared, *, model: str, way: str, passes: Sequence[PassShape] = PARITY_PASSES
) -> list[Difference]:
    """Run the same passes by both, each in its own KV cache, and compare the logits."""
    dtype = reference.parts.dtype
    return [
        Difference(
            model=model,
            dtype=str(dtype).removeprefix("torch."),
            way=way,
            rows=shape.name,
            largest=_relative(logits_of(reference, shape), logits_of(other, shape)),
            tolerance=TOLERANCES[dtype],
        )
        for shape in passes
    ]


def prepare_model(name: str, way: Way, dtype: torch.dtype, device: torch.device, *, is_static: bool) -> Prepared:
    """Make a new model, with an arena for the passes of a check."""
    return prepare_parts(split(model_named(name, dtype, device), way), is_static=is_static)


def prepare_parts(parts: Decomposition, *, is_static: bool, capture: Capture | None = None) -> Prepared:
    """Make a runner with an arena for the passes of a check. is_static: passes run in static buffers. capture: makes
    graphs of these passes."""
    return prepare(
        parts,
        num_slots=NUM_SLOTS,
        max_rows=MAX_ROWS if is_static else 0,
        max_sequences=MAX_SEQUENCES,
        max_places=MAX_PLACES,
        capture=capture,
    )


def _of_model(name: str, dtype: torch.dtype, device: torch.device) -> list[Difference]:
    found = []
    for way, is_static in (("fused", False), ("operators", True)):
        reference = prepare_model(name, "modules", dtype, device, is_static=False)
        other = prepare_model(name, way, dtype, device, is_static=is_static)  # type: ignore[arg-type]
        found += differences(reference, other, model=name, way=f"{way}, static buffers" if is_static else way)
    return found


def _relative(expected: torch.Tensor, actual: torch.Tensor) -> float:
    return float((expected - actual).abs().max() / expected.abs().max())


def _table(found: Sequence[Difference]) -> Table:
    passes = list(dict.fromkeys(one.rows for one in found))
    by_row: dict[tuple[str, str, str], dict[str, float]] = {}
    for one in found:
        by_row.setdefault((one.model, one.dtype, one.way), {})[one.rows] = one.largest
    rows = [[", ".join(key), *(f"{cells[name]:.1e}" for name in passes)] for key, cells in by_row.items()]
    return Table(headings=["model, type, way", *passes], rows=rows)
