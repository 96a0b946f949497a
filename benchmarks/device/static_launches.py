"""Check that all passes of one bucket have the same launches, as captured graphs need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks.device.launches import (
    Launch,
    LaunchRecorder,
    first_difference,
    host_operations,
    num_kernels,
    record_forward,
)
from benchmarks.device.models import RANDOM_FAMILIES, PassShape, Prepared, prepare_model
from benchmarks.shared import DeviceOptions, Outcome, Table, judged
from rayspec.choices import FULL, SKIP, Choices, choices_of

MAX_KERNELS_A_LAYER = 12
_BOUNDED = "llama"
_TREE = (-1, 0, 0, 1, -2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two passes of one bucket, which differ in contexts, pages and numbers of rows. num_skipped: skipped sublayers in
    every four, as in a draft."""

    name: str
    states: tuple[PassShape, PassShape]
    num_skipped: int = 0

    def choices(self, num_sublayers: int) -> Choices:
        return choices_of([index % 4 >= self.num_skipped for index in range(num_sublayers)])


_SINGLE = (
    PassShape(name="", contexts=(100, 70, 33), num_rows=(1, 1, 1)),
    PassShape(name="", contexts=(17, 130, 2, 64), num_rows=(1, 1, 1, 1), first_page=5),
)
PAIRS = (
    Pair(name="decode", states=_SINGLE),
    Pair(name="draft", states=_SINGLE, num_skipped=2),
    Pair(
        name="verify chain",
        states=(
            PassShape(name="", contexts=(100, 70), num_rows=(5, 4)),
            PassShape(name="", contexts=(31, 160), num_rows=(7, 6), first_page=5),
        ),
    ),
    Pair(
        name="verify tree",
        states=(
            PassShape(name="", contexts=(100, 70), num_rows=(5, 5), parents=_TREE),
            PassShape(name="", contexts=(31, 160), num_rows=(5, 5), parents=(-1, -1, 0, 1, 2), first_page=5),
        ),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Launches of a pair. difference: None if both passes launch the same. kernels_a_layer: of layers that run."""

    model: str
    bucket: str
    num_launches: int
    kernels_a_layer: float
    difference: str | None
    host_operations: list[str]

    @property
    def is_good(self) -> bool:
        is_bounded = self.model == _BOUNDED
        few = self.kernels_a_layer <= MAX_KERNELS_A_LAYER
        return self.difference is None and not self.host_operations and (few or not is_bounded)


def check_static_launches(options: DeviceOptions) -> Outcome:
    found = []
    for family in ["llama"] if options.is_quick else RANDOM_FAMILIES:
        runner = prepare_model(family, "operators", torch.float32, options.torch_device, is_static=True)
        found += [compare(runner, pair, model=family) for pair in PAIRS]
    bad = [one for one in found if not one.is_good]
    most = max(one.kernels_a_layer for one in found if one.model == _BOUNDED)
    words = f"; the first: {bad[0].model}, {bad[0].bucket}: {_problem(bad[0])}" if bad else ""
    return judged(
        is_good=not bad,
        found=f"{len(found) - len(bad)} of {len(found)} buckets launch the same for two states; a Llama layer is "
        f"{most:g} kernels (bound {MAX_KERNELS_A_LAYER}){words}",
        numbers=[asdict(one) | {"is_good": one.is_good} for one in found],
        tables=[_table(found)],
        counted="Operations from token ids to logits that compute something, with shapes, strides, offsets, numbers "
        "and the places of their buffers. An operator of rayspec counts once; attention counts twice, as it has "
        "two kernels where contexts are long. Filling the buffers comes before and is left out.",
    )


def compare(prepared: Prepared, pair: Pair, *, model: str) -> Comparison:
    num_sublayers = len(prepared.parts.sublayers)
    choices = pair.choices(num_sublayers)
    some, others = (launches_of(prepared, state, choices) for state in pair.states)
    ends = launches_of(prepared, pair.states[0], (SKIP,) * num_sublayers)
    return Comparison(
        model=model,
        bucket=pair.name,
        num_launches=len(some),
        kernels_a_layer=(num_kernels(some) - num_kernels(ends)) / (choices.count(FULL) / 2),
        difference=first_difference(some, others),
        host_operations=host_operations(some),
    )


def launches_of(prepared: Prepared, state: PassShape, choices: Choices | None = None) -> list[Launch]:
    recorder = LaunchRecorder()
    record_forward(prepared, recorder, state.spans(), state.token_ids(prepared.vocab_size), choices)
    return recorder.launches


def _problem(one: Comparison) -> str:
    if one.difference is not None:
        return one.difference
    if one.host_operations:
        return f"the host takes part by {one.host_operations[0]}"
    return f"{one.kernels_a_layer:g} kernels a layer"


def _table(found: Sequence[Comparison]) -> Table:
    return Table(
        headings=["model, bucket", "launches", "kernels a layer", "equal", "host operations"],
        rows=[
            [
                f"{one.model}, {one.bucket}",
                str(one.num_launches),
                f"{one.kernels_a_layer:g}",
                "yes" if one.difference is None else "no",
                str(len(one.host_operations)),
            ]
            for one in found
        ],
    )
