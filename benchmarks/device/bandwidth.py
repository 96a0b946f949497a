"""Read bandwidth of large models' matrices, compared with the highest read bandwidth of the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.roofline import SHAPES, ModelShape
from benchmarks.shared import DeviceOptions, Outcome, Table, cache_bytes, fastest_seconds, measured
from rayspec.model.cuda.operations import has_operators
from rayspec.model.matrices import LinearMap, full_matrix

_MODELS = ("Llama-3.1-8B", "Qwen3-14B", "Llama-3.1-70B")
_ROW_COUNTS = (1, 2, 4, 8, 16)
# Maximum bytes of a matrix. Of a larger matrix only the first rows are measured.
_MAX_BYTES = {"cpu": 48 * 2**20, "cuda": 2**31}
_MAX_BYTES_QUICK = 24 * 2**20
# Bytes read between two reads of the same matrix, as a multiple of the last-level cache.
_NUM_CACHES = 2
_READ_CACHES = 4
_NUM_REPEATS, _BUDGET_S = 5, 4.0
# Least bytes of a measurement: on a fast GPU the time to synchronise would matter otherwise.
_LEAST_BYTES = {"cpu": 2**27, "cuda": 2**32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Bandwidth of one matrix of a layer. share: measured part of the matrix. bytes_per_s: of weights, by row count."""

    model: str
    matrix: str
    num_outputs: int
    num_inputs: int
    share: float
    bytes_per_s: dict[int, float]


def check_bandwidth(options: DeviceOptions) -> Outcome:
    device = options.torch_device
    peak = read_bytes_per_s(device)
    names = _MODELS[:1] if options.is_quick else _MODELS
    counts = (1, 8) if options.is_quick else _ROW_COUNTS
    limit = _MAX_BYTES_QUICK if options.is_quick else _MAX_BYTES[device.type]
    found = [
        _reading(SHAPES[name].name, matrix, sizes, counts, limit, options)
        for name in names
        for matrix, sizes in layer_matrices(SHAPES[name]).items()
    ]
    shares = [reading.bytes_per_s[1] / peak for reading in found]
    return measured(
        f"the device reads {peak / 1e9:.1f} GB/s; one row reaches {min(shares):.0%} to {max(shares):.0%} of it",
        numbers={"read_bytes_per_s": peak, "matrices": [asdict(reading) for reading in found]},
        tables=[_table(found, counts)],
        counted=f"GB/s of weights in {options.torch_dtype}, from memory: the fastest of several runs. Copies of a "
        "matrix take turns, which together are larger than the last-level cache. In brackets the share of the matrix "
        "that was measured, where not all of it.",
    )


def layer_matrices(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return rows and columns of a layer's fused matrices."""
    heads = shape.num_heads * shape.head_dim
    return {
        "query, key, value": (heads + 2 * shape.num_kv_heads * shape.head_dim, shape.hidden_size),
        "output": (shape.hidden_size, heads),
        "gate, up": (2 * shape.mlp_size, shape.hidden_size),
        "down": (shape.hidden_size, shape.mlp_size),
    }


def read_bytes_per_s(device: torch.device) -> float:
    """Return the bytes per second of the fastest of several ways to read a large tensor."""
    num_bytes = max(_READ_CACHES * cache_bytes(device), _LEAST_BYTES[device.type])
    numbers = torch.zeros(num_bytes // 4, device=device)
    numbers.fill_(1.0)  # untouched zeros may share a single memory page
    ways: list[Callable[[], Tensor]] = [numbers.sum, numbers.max, partial(torch.dot, numbers, numbers)]
    return num_bytes / min(fastest_seconds(ways, device, num_repeats=_NUM_REPEATS, budget_s=_BUDGET_S))


def _reading(
    model: str,
    matrix: str,
    sizes: tuple[int, int],
    counts: Sequence[int],
    max_bytes: int,
    options: DeviceOptions,
) -> Reading:
    device, dtype = options.torch_device, options.torch_dtype
    num_outputs, num_inputs = sizes
    measured_outputs = max(1, min(num_outputs, max_bytes // (num_inputs * dtype.itemsize)))
    copies = list(_copies(measured_outputs, num_inputs, options))
    num_bytes = len(copies) * measured_outputs * num_inputs * dtype.itemsize
    num_rounds = -(-_LEAST_BYTES[device.type] // num_bytes)
    works = []
    for count in counts:
        rows = torch.randn(count, num_inputs, device=device).to(dtype)
        works.append(partial(_multiply, copies * num_rounds, rows))
    seconds = fastest_seconds(works, device, num_repeats=_NUM_REPEATS, budget_s=_BUDGET_S)
    return Reading(
        model=model,
        matrix=matrix,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        share=measured_outputs / num_outputs,
        bytes_per_s={count: num_rounds * num_bytes / each for count, each in zip(counts, seconds, strict=True)},
    )


def _copies(num_outputs: int, num_inputs: int, options: DeviceOptions) -> Iterator[LinearMap]:
    """Yield enough copies that each leaves the cache before its next use, in the layout of the engine."""
    device, dtype = options.torch_device, options.torch_dtype
    weight = torch.randn(num_outputs, num_inputs, device=device, dtype=dtype)
    for _ in range(1 + -(-_NUM_CACHES * cache_bytes(device) // weight.nbytes)):
        linear = nn.Linear(num_inputs, num_outputs, bias=False, device="meta")
        linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
        yield full_matrix([linear], use_operators=has_operators(device))


@torch.inference_mode()
def _multiply(copies: Sequence[LinearMap], rows: Tensor) -> None:
    for copy in copies:
        copy(rows)


def _table(found: Sequence[Reading], counts: Sequence[int]) -> Table:
    rows = [
        [
            f"{reading.model}, {reading.matrix}, {reading.num_outputs} x {reading.num_inputs}"
            + (f" ({reading.share:.0%})" if reading.share < 1 else ""),
            *(f"{reading.bytes_per_s[count] / 1e9:.1f}" for count in counts),
        ]
        for reading in found
    ]
    headings = [f"{count} {'row' if count == 1 else 'rows'}" for count in counts]
    return Table(headings=["matrix", *headings], rows=rows)
