"""Compare each kernel of `rayspec::*` on a GPU with its plain torch version on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor

from benchmarks.device.parity import Difference
from benchmarks.shared import DeviceOptions, Outcome, Table, judged, not_here
from rayspec.model.cuda import operations
from rayspec.model.cuda.operations import has_operators

# Relative to the largest number of the result: rounding errors of one operation.
_ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
_HEADS, _KV_HEADS, _DIM, _PAGE_SIZE, _NUM_PAGES = 8, 2, 64, 16, 64
_CONTEXTS, _ROWS = (300, 17), (5, 3)

Operation = Callable[[torch.device], Tensor]


def check_kernels(options: DeviceOptions) -> Outcome:
    device = options.torch_device
    if not has_operators(device):
        return not_here(f"{device} has no Triton kernels: the operators run as plain torch")
    dtypes = dict.fromkeys([torch.float32, options.torch_dtype])
    found = [one for dtype in dtypes for one in kernel_differences(dtype, device)]
    wrong = [one.what for one in found if not one.is_small]
    return judged(
        is_good=not wrong,
        found=f"{len(wrong)} of {len(found)} differ by more than rounding{': ' if wrong else ''}{'; '.join(wrong)}",
        numbers=[asdict(one) | {"is_small": one.is_small} for one in found],
        tables=[
            Table(
                headings=["kernel", "largest difference", "allowed"],
                rows=[[one.what, f"{one.largest:.1e}", f"{one.allowed:.0e}"] for one in found],
            )
        ],
        counted="Relative to the largest number of the result.",
    )


def kernel_differences(dtype: torch.dtype, device: torch.device) -> list[Difference]:
    name_of_dtype, cpu = str(dtype).removeprefix("torch."), torch.device("cpu")
    return [
        Difference.of(f"{name}, {name_of_dtype}", "", operation(cpu), operation(device).cpu(), allowed=_ALLOWED[dtype])
        for name, operation in _operations(dtype)
    ]


def _operations(dtype: torch.dtype) -> Iterator[tuple[str, Operation]]:
    for is_tree in (False, True):
        for window in (0, 20):
            name = f"attend{', tree' if is_tree else ''}{', window' if window else ''}"
            yield name, partial(_attend, dtype, is_tree=is_tree, window=window)
    yield "rms_norm", partial(_rms_norm, dtype)
    yield "rotate_and_write", partial(_rotate_and_write, dtype)
    for activation in ("silu", "gelu_tanh"):
        yield f"gated, {activation}", partial(_gated, dtype, activation)
    yield "gumbel", _gumbel
    yield "cut_to_top_p", _cut_to_top_p
    for num_rows in (5, 40):
        yield f"product, {num_rows} rows", partial(_product, dtype, num_rows)
        yield f"product by int8, {num_rows} rows", partial(_int8_product, dtype, num_rows)
        yield f"product by int4, {num_rows} rows", partial(_int4_product, dtype, num_rows)


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


def _gumbel(device: torch.device) -> Tensor:
    return operations.gumbel(torch.tensor([[1, -1, 2**62], [7 << 33, 5, 0]], device=device), 1001)


def _cut_to_top_p(device: torch.device) -> Tensor:
    """Return the probabilities that are left: -inf has no difference."""
    scores = _random(torch.float32, device)(3, 1001)
    scores -= scores.amax(1, keepdim=True)
    operations.cut_to_top_p(scores, torch.tensor([[0.9], [0.5], [0.99]], dtype=torch.float64, device=device))
    return scores.exp()


def _product(dtype: torch.dtype, num_rows: int, device: torch.device) -> Tensor:
    """Add a product and a bias to an output."""
    random = _random(dtype, device)
    output = random(num_rows, 300)
    operations.product(output, random(num_rows, 512), random(300, 512), None, random(300), adds=True)
    return output


def _int8_product(dtype: torch.dtype, num_rows: int, device: torch.device) -> Tensor:
    weight = torch.arange(300 * 512).mul(7919).remainder(255).sub(127).to(torch.int8).view(300, 512)
    scales, rows = torch.linspace(0.001, 0.01, 300), _random(dtype, device)(num_rows, 512)
    output = rows.new_empty(num_rows, 300)
    operations.product(output, rows, weight.to(device), scales.to(device), None, adds=False)
    return output


def _int4_product(dtype: torch.dtype, num_rows: int, device: torch.device) -> Tensor:
    random = _random(dtype, device)
    weight = torch.arange(300 * 64).mul(2654435761).remainder(2**32).sub(2**31).to(device, torch.int32)
    rows, scales = random(num_rows, 512), random(4, 300, 2) / 16
    output = rows.new_empty(num_rows, 300)
    operations.product(output, rows, weight.view(300, 64), scales, None, adds=False)
    return output


def _random(dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor]:
    """Return a function that makes the same random tensors on every device."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype)
