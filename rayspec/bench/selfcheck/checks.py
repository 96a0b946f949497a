"""The checks of `rayspec selfcheck`, and their run. Each tells whether this machine computes right, not how fast."""

from __future__ import annotations

import gc
import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from rayspec.bench.options import BenchOptions
from rayspec.bench.result import BASELINE, HF
from rayspec.bench.run import run_bench
from rayspec.bench.selfcheck.models import (
    BUNDLED,
    CHUNKS,
    RANDOM_FAMILIES,
    ROUNDS,
    Prepared,
    Way,
    logits_of,
    prepare,
    prepare_model,
)
from rayspec.bench.selfcheck.report import Outcome, SelfcheckOptions, SelfcheckReport, Table, judged, not_here
from rayspec.bench.workloads import WorkloadOptions
from rayspec.choices import choices_of
from rayspec.command.environment import describe_environment
from rayspec.command.loading import hide_progress_bars
from rayspec.config import EngineConfig, SpeculationOptions
from rayspec.model.cuda import operations
from rayspec.model.cuda.graphs import CudaDriver
from rayspec.model.cuda.trial import has_operators
from rayspec.model.graphs import GraphDriver, StepGraphs, is_capturable

# Relative to the largest logit. In half precision each of some ten sublayers rounds its sum in another order.
_LOGITS = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}
# Relative to the largest number of the result: rounding errors of one operation.
_OPERATION = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
_HEADS, _KV_HEADS, _DIM, _PAGE_SIZE, _NUM_PAGES = 8, 2, 64, 16, 64
_CONTEXTS, _ROWS = (300, 17), (5, 3)
# Some middle sublayers of the bundled model's 32.
_SKIPPED = (13, 15, 16, 17, 18, 19, 21)

Check = Callable[[SelfcheckOptions], Outcome]
Operation = Callable[[torch.device], Tensor]
DriverOf = Callable[[torch.device], GraphDriver]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two results that should be equal. largest: their largest difference, relative to the largest expected number."""

    what: str
    rows: str
    largest: float
    allowed: float

    @classmethod
    def of(cls, what: str, rows: str, expected: Tensor, found: Tensor, *, allowed: float) -> Difference:
        expected = expected.float()
        largest = float((expected - found.float()).abs().max() / expected.abs().max())
        return cls(what=what, rows=rows, largest=largest, allowed=allowed)

    @property
    def is_small(self) -> bool:
        """Whether the difference is allowed; NaN is not."""
        return self.largest <= self.allowed


def check_parity(options: SelfcheckOptions) -> Outcome:
    """Compare the logits of all ways to run a model's sublayers with those of transformers' modules."""
    names = ["llama", "qwen3"] if options.is_quick else [BUNDLED, *RANDOM_FAMILIES]
    device, found = options.torch_device, list[Difference]()
    for dtype in _dtypes(options):
        for name in names:
            ways: Sequence[tuple[Way, bool]] = (("fused", False), ("operators", True))
            for way, is_static in ways:
                reference = prepare_model(name, "modules", dtype, device, is_static=False)
                other = prepare_model(name, way, dtype, device, is_static=is_static)
                found += logit_differences(reference, other, what=f"{name}, {_name(dtype)}, {way}")
    return _judged(found, "Largest difference of the logits from those of transformers' modules")


def logit_differences(reference: Prepared, other: Prepared, *, what: str) -> list[Difference]:
    """Run the same passes by both, each in its own KV cache, and compare the logits."""
    allowed = _LOGITS[reference.parts.dtype]
    return [
        Difference.of(what, shape.name, logits_of(reference, shape), logits_of(other, shape), allowed=allowed)
        for shape in (*CHUNKS, *ROUNDS)
    ]


def check_kernels(options: SelfcheckOptions) -> Outcome:
    """Compare the kernels of `rayspec::*` on a GPU with their plain torch versions on a CPU."""
    device = options.torch_device
    if not has_operators(device):
        return not_here(f"{device} has no Triton kernels: the operators run as plain torch")
    found = [one for dtype in _dtypes(options) for one in kernel_differences(dtype, device)]
    return _judged(found, "Largest difference between the GPU's result and the CPU's for the same numbers")


def kernel_differences(dtype: torch.dtype, device: torch.device) -> list[Difference]:
    return [
        Difference.of(
            f"{name}, {_name(dtype)}",
            "",
            operation(torch.device("cpu")),
            operation(device).cpu(),
            allowed=_OPERATION[dtype],
        )
        for name, operation in _operations(dtype)
    ]


def check_drafted_text(options: SelfcheckOptions) -> Outcome:
    """Compare texts in float32, where rounding cannot change the most likely token of these texts."""
    engine = EngineConfig(
        model="demo",
        dtype="float32",
        device=options.device,
        num_threads=1,  # with matrices this small a second thread is slower
        speculation=SpeculationOptions(strategy="static", skip=_SKIPPED),
    )
    asked = BenchOptions(
        engine=engine,
        workloads=WorkloadOptions(inputs=("demo",), contexts=(384,), num_prompts=1 if options.is_quick else 3),
        strategies=("static", "auto"),
        max_tokens=24 if options.is_quick else 48,
        batch=1,
        repeats=1,
        widen=1,
        hf=True,
    )
    rows = run_bench(asked, lambda line: None)["workloads"][0]["results"]
    names = {HF: "transformers generate"}
    texts = [[names.get(row["strategy"], row["strategy"]), f"{row['identical']} of {row['total']}"] for row in rows]
    return judged(
        is_good=all(row["identical"] == row["total"] for row in rows),
        found="; ".join(f"{name}: {same} texts are plain's" for name, same in texts if name != BASELINE),
        numbers=[{key: row[key] for key in ("strategy", "identical", "total", "acceptance_rate")} for row in rows],
        tables=[Table(headings=["written by", "same texts"], rows=texts)],
        counted=f"Greedy texts of the bundled model in float32, against plain decoding token by token. static skips "
        f"the sublayers {', '.join(map(str, _SKIPPED))}.",
    )


def check_captured_against_eager(options: SelfcheckOptions) -> Outcome:
    """Compare the logits of captured graphs with those of eager launches: they must have the same bits."""
    device = options.torch_device
    if device.type != "cuda":
        return not_here(f"{device} has no graphs")
    names = ["llama"] if options.is_quick else ["llama", "gemma2", BUNDLED]
    found = [
        one for name in names for one in replay_differences(name, options.torch_dtype, device, driver_of=CudaDriver)
    ]
    return _judged(found, "Difference of replayed passes from eager ones; inf where a part could not be captured")


def replay_differences(
    name: str, dtype: torch.dtype, device: torch.device, *, driver_of: DriverOf
) -> Iterator[Difference]:
    """Run passes eagerly and captured, each in its own KV cache, and compare the logits of three plans."""
    eager = prepare_model(name, "operators", dtype, device, is_static=True)
    parts = eager.parts
    captured = prepare(parts, is_static=True, capture=lambda step: StepGraphs(step, driver_of(parts.device)))
    graphs, count = captured.runner.graphs, len(parts.sublayers)
    assert graphs is not None
    assert all(map(is_capturable, parts.sublayers)), "these models have no experts"
    # Of a bucket of which every part is captured: the rotary embedding, the embedding and the sublayers.
    num_graphs = 2 + count
    plans = {
        "full": None,
        "every third skipped": choices_of([index % 3 > 0 for index in range(count)]),
        "all but the ends skipped": choices_of([index in (0, count - 1) for index in range(count)]),
    }
    for shape in CHUNKS:
        logits_of(eager, shape)
        logits_of(captured, shape)
    for shape in ROUNDS:
        for plan, choices in plans.items():
            expected = logits_of(eager, shape, choices)
            replayed = [logits_of(captured, shape, choices) for _ in range(3)][-1]  # the second one captures its bucket
            what = f"{name}, {plan}"
            if len(graphs.buckets) * num_graphs != graphs.num_graphs:
                yield Difference(what=what, rows=shape.name, largest=math.inf, allowed=0.0)
            else:
                yield Difference.of(what, shape.name, expected, replayed, allowed=0.0)


CHECKS: Mapping[str, Check] = {
    "logits of fused layers": check_parity,
    "kernels against plain torch": check_kernels,
    "drafted text against plain": check_drafted_text,
    "captured against eager": check_captured_against_eager,
}


def run_selfcheck(
    options: SelfcheckOptions, say: Callable[[str], None], *, checks: Mapping[str, Check] = CHECKS
) -> SelfcheckReport:
    """Run all checks, one after another, and call `say` with each result. A check that fails or raises does not stop
    the others. Raises ConfigError if the device does not exist."""
    device = options.torch_device
    hide_progress_bars()
    before = torch.get_num_threads()
    torch.set_num_threads(options.num_threads or before)
    outcomes: dict[str, tuple[Outcome, float]] = {}
    for name, check in checks.items():
        started = time.perf_counter()
        try:
            outcome = check(options)
        except Exception as error:  # noqa: BLE001 - it is reported, and the others still run
            found = f"the check raised {type(error).__name__}: {error}"
            outcome = Outcome(status="failed", found=found, numbers={"traceback": traceback.format_exc()})
        seconds = time.perf_counter() - started
        outcomes[name] = (outcome, seconds)
        say(f"{name}: {outcome.status} ({seconds:.1f} s): {outcome.found}")
        gc.collect()  # free the models of this check
    torch.set_num_threads(before)
    return SelfcheckReport(options=options, device=str(device), environment=describe_environment(), outcomes=outcomes)


def _judged(found: Sequence[Difference], counted: str) -> Outcome:
    worst = max(found, key=lambda one: (not one.is_small, one.largest / (one.allowed or 1)))
    num_large = sum(not one.is_small for one in found)
    return judged(
        is_good=not num_large,
        found=f"{num_large} of {len(found)} differ by more than rounding; the largest difference is "
        f"{worst.largest:.1e} ({worst.what}{f', {worst.rows}' if worst.rows else ''})",
        numbers=[asdict(one) | {"is_small": one.is_small} for one in found],
        tables=[
            Table(
                headings=["what", "rows", "largest difference", "allowed"],
                rows=[[one.what, one.rows, f"{one.largest:.1e}", f"{one.allowed:.0e}"] for one in found],
            )
        ],
        counted=f"{counted}, relative to the largest number.",
    )


def _dtypes(options: SelfcheckOptions) -> list[torch.dtype]:
    return list(dict.fromkeys([torch.float32, options.torch_dtype]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _operations(dtype: torch.dtype) -> Iterator[tuple[str, Operation]]:
    for is_tree in (False, True):
        for window in (0, 20):
            name = f"attend{', tree' if is_tree else ''}{', window' if window else ''}"
            yield name, partial(_attend, dtype, is_tree=is_tree, window=window)
    yield "rms_norm", partial(_rms_norm, dtype)
    yield "rotate_and_write", partial(_rotate_and_write, dtype)
    for activation in ("silu", "gelu_tanh"):
        yield f"gated, {activation}", partial(_gated, dtype, activation)
    for num_rows in (5, 40):
        yield f"int8_product, {num_rows} rows", partial(_int8_product, dtype, num_rows)
        yield f"int4_product, {num_rows} rows", partial(_int4_product, dtype, num_rows)


def _attend(dtype: torch.dtype, device: torch.device, *, is_tree: bool, window: int) -> Tensor:
    random = _random(dtype, device)
    slots = _NUM_PAGES * _PAGE_SIZE
    pages = torch.randperm(_NUM_PAGES, generator=torch.Generator().manual_seed(1)).view(2, -1)
    starts = (0, _ROWS[0], sum(_ROWS))
    places = [torch.arange(count) for count in _ROWS]
    positions = torch.cat([context + place for context, place in zip(_CONTEXTS, places, strict=True)])
    shared = torch.tensor([context for context, count in zip(_CONTEXTS, _ROWS, strict=True) for _ in range(count)])
    bits = torch.cat([(2 << place) - 1 for place in places])
    return operations.attend(
        random(sum(_ROWS), _HEADS, _DIM),
        random(_KV_HEADS, slots, _DIM),
        random(_KV_HEADS, slots, _DIM),
        pages.to(device, torch.int32),
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(_CONTEXTS, dtype=torch.int32, device=device),
        positions.to(device),
        shared.to(device, torch.int32) if is_tree else None,
        bits.to(device) if is_tree else None,
        scaling=_DIM**-0.5,
        window=window,
        softcap=0.0,
        page_size=_PAGE_SIZE,
        max_rows=max(_ROWS),
        max_context=_NUM_PAGES // 2 * _PAGE_SIZE,
    )


def _rms_norm(dtype: torch.dtype, device: torch.device) -> Tensor:
    random = _random(dtype, device)
    return operations.rms_norm(random(5, 256), random(256), 1e-6, 0.0)


def _rotate_and_write(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the queries, then the written keys and values, in one vector."""
    random = _random(dtype, device)
    keys, values = (torch.zeros(_KV_HEADS, 32, _DIM, dtype=dtype, device=device) for _ in range(2))
    query = operations.rotate_and_write(
        random(5, (_HEADS + 2 * _KV_HEADS) * _DIM),
        random(5, _DIM),
        random(5, _DIM),
        torch.tensor([3, 1, 30, 7, 8], device=device),
        keys,
        values,
        num_heads=_HEADS,
        query_norm=random(_DIM),
        key_norm=random(_DIM),
        eps=1e-6,
    )
    return torch.cat([each.flatten() for each in (query, keys, values)])


def _gated(dtype: torch.dtype, activation: str, device: torch.device) -> Tensor:
    return operations.gated(_random(dtype, device)(5, 512), activation)


def _int8_product(dtype: torch.dtype, num_rows: int, device: torch.device) -> Tensor:
    weight = torch.arange(300 * 512).mul(7919).remainder(255).sub(127).to(torch.int8).view(300, 512)
    scales = torch.linspace(0.001, 0.01, 300)
    return operations.int8_product(_random(dtype, device)(num_rows, 512), weight.to(device), scales.to(device))


def _int4_product(dtype: torch.dtype, num_rows: int, device: torch.device) -> Tensor:
    random = _random(dtype, device)
    weight = torch.arange(300 * 256).mul(7919).remainder(256).to(device, torch.uint8).view(300, 256)
    return operations.int4_product(random(num_rows, 512), weight, random(4, 300, 2) / 16)


def _random(dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor]:
    """Return a function that makes the same random tensors on every device."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype)
