"""A trial of the Triton kernels in the shapes of a model, against plain torch.

It runs in a process of its own, because a kernel that hangs or crashes takes its process with it. Its verdict is kept
in a file. What a start finds again in a moment, such as a missing compiler, is not kept.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import torch
from torch import Tensor

from rayspec.errors import reason_of
from rayspec.machine import import_path, write_at_once
from rayspec.model.cuda import reference
from rayspec.model.cuda.operations import obstacle
from rayspec.model.kv_cache import PAGE_SIZE, whole_pages
from rayspec.model.rows import MAX_TREE_ROWS

logger = logging.getLogger(__name__)

_COMMAND = (sys.executable, "-m", "rayspec.model.cuda.probe")
# Of the whole trial. Compilation of all kernels takes about a minute on a busy machine.
_LIMIT_S = 600.0
_MARK = "rayspec probe: "
# Signals of a faulty kernel. Others come from outside: Ctrl-C, or a machine that is short of memory.
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
# Largest difference, relative to the largest number of a row. A faulty kernel differs by about 1.
_ALLOWED = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
_LEAST = -1e30  # in place of -inf, whose difference is no number
_NUM_PAGES = 64
# The reference would take seconds for longer contexts. Block table and splits are those of the longest all the same.
_MOST_PLACES = 2**16
# By kind of pass: rows of two sequences, and the most rows of the bucket.
_ROWS = {
    "decode": ((1, 1), 1),
    "verify": ((8, 3), MAX_TREE_ROWS),
    "tree": ((7, 4), MAX_TREE_ROWS),
    "chunk": ((80, 9), 80),
    "tree with a chunk": ((7, 80), 80),
}
# By row of a tree, the rows that it sees, as bits. Later rows are those of a chain.
_PATHS = (0b1, 0b11, 0b101, 0b1011, 0b10001, 0b100101, 0b1000001)


Attention: TypeAlias = tuple[int, int, int, int, float]
"""Of a layer in this process: query heads, key heads, numbers of a head, window and softcap; 0 for neither of these."""


class Shapes(msgspec.Struct, frozen=True, kw_only=True):
    """What decides the kernels of a model. attention: each kind of layer. max_context: the most places of a sequence.
    has_copies: drafts have quantised copies."""

    device: str
    dtype: str
    hidden_size: int
    inner_size: int
    attention: tuple[Attention, ...]
    max_context: int
    has_copies: bool


class Tried(NamedTuple):
    """fault: why the kernels cannot be used, None if they can. is_kept: whether it holds for later starts."""

    fault: str | None
    is_kept: bool


@cache
def works(shapes: Shapes, path: Path, *, remeasure: bool = False) -> bool:
    """Return whether the kernels can be used on the GPU `shapes.device`. Log one warning if they cannot. path: of the
    kept verdict, which `remeasure` ignores. Raises torch.OutOfMemoryError."""
    fault, where = obstacle(torch.device(shapes.device)), ""
    if fault is None:
        kept = None
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            kept = None if remeasure else Tried(json.loads(path.read_text(encoding="utf-8"))["fault"], is_kept=True)
        verdict = kept or probe(shapes)
        fault = verdict.fault
        if kept is None and verdict.is_kept:
            keep(path, fault)
        if verdict.is_kept:
            where = f" (kept in {path}; remeasure=True tries again)"
    if fault is not None:
        logger.warning(
            "%s runs without the GPU kernels: %s%s. Plain PyTorch runs in their place and is slower. "
            "Option cuda_kernels='off' chooses it without this trial.",
            shapes.device, fault, where,
        )  # fmt: skip
    return fault is None


def keep(path: Path, fault: str | None) -> None:
    """Write a verdict for later starts."""
    with suppress(OSError):  # then each start tries again
        write_at_once(path, json.dumps({"fault": fault}).encode())


def probe(shapes: Shapes, *, command: Sequence[str] = _COMMAND, limit_s: float = _LIMIT_S) -> Tried:
    """Try the kernels in a new process for at most `limit_s` seconds; in this one if the new one cannot use the GPU."""
    arguments = [*command, msgspec.json.encode(shapes).decode()]
    try:
        ended = subprocess.run(  # noqa: S603 - this interpreter
            arguments,
            env=os.environ | {"PYTHONPATH": import_path()},
            cwd="/",  # see `import_path`
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        return Tried(f"{_said(late.stdout or b'')[-1]} has no result after {limit_s:g} s", is_kept=True)
    except OSError as error:
        logger.info("the GPU kernels are tried in this process: %s", error)
        return find_fault(shapes)
    *_, last = _said(ended.stdout)
    if last.startswith("{"):
        found: dict[str, Any] = json.loads(last)
        return Tried(found["fault"], found["is_kept"]) if "fault" in found else find_fault(shapes)
    errors = ended.stderr.decode(errors="replace").strip().splitlines()
    how = signal.strsignal(-ended.returncode) if ended.returncode < 0 else (errors or ["no output"])[-1]
    return Tried(f"{last} has ended its process: {how}", is_kept=-ended.returncode in _CRASHES)


def _said(output: bytes) -> list[str]:
    lines = output.decode(errors="replace").splitlines()
    return ["the start", *(line.removeprefix(_MARK) for line in lines if line.startswith(_MARK))]


def find_fault(shapes: Shapes, say: Callable[[str], object] = lambda name: None) -> Tried:
    """Run every kernel in this process, and compare it with the reference. say: gets the name of each before it runs.
    Raises torch.OutOfMemoryError."""
    device, allowed = torch.device(shapes.device), _ALLOWED[getattr(torch, shapes.dtype)]
    for name, operator, arguments in cases(shapes):
        say(name)
        on_device = [each.to(device, copy=True) if isinstance(each, Tensor) else each for each in arguments]
        try:
            launches = importlib.import_module("rayspec.model.cuda.launches")
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                found = getattr(launches, operator)(*on_device).run()
        except torch.OutOfMemoryError:
            raise
        # Triton raises errors of many types: no compiler, no headers, no driver, too little shared memory.
        except Exception as error:  # noqa: BLE001
            return Tried(f"{name}: {reason_of(error)}", is_kept=False)
        expected = getattr(reference, operator)(*arguments)
        pairs = [(found, expected), *zip(on_device, arguments, strict=True)]  # it may have written to its arguments
        for one, other in pairs:
            if isinstance(one, Tensor):
                one, other = (each.cpu().float().clamp(min=_LEAST) for each in (one, other))  # noqa: PLW2901
                largest = other.abs().amax(-1, keepdim=True).clamp(min=1e-3)
                if not bool(((one - other).abs() <= allowed * largest).all()):
                    return Tried(f"{name} computes something else than plain PyTorch", is_kept=True)
    return Tried(None, is_kept=True)


def cases(shapes: Shapes) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """Yield the name, the operator and its arguments on a CPU."""
    generator, dtype = torch.Generator().manual_seed(0), getattr(torch, shapes.dtype)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    for offset in (0.0, 1.0):
        yield "rms_norm", "rms_norm", (random(3, shapes.hidden_size), random(shapes.hidden_size), 1e-6, offset)
    for activation in ("silu", "gelu_tanh"):
        yield f"gated, {activation}", "gated", (random(3, 2 * shapes.inner_size), activation)
    noise_keys = torch.tensor([[0, 1, -1, 2**62 + 1, -(2**63)], [7 << 33, 1, 5, 3, 2**63 - 1]])
    yield "gumbel", "gumbel", (noise_keys, 2**12 + 3)
    top_p = torch.tensor([[0.9], [0.5], [0.9899]], dtype=torch.float64)  # the edges are not between two tokens
    yield "cut_to_top_p", "cut_to_top_p", (_scores(2**12 + 3), top_p)
    for heads, kv_heads, dim in dict.fromkeys(one[:3] for one in shapes.attention):
        slots, (keys, values) = torch.tensor([3, 1, 30]), random(2, kv_heads, 32, dim)
        for norms in ((None, None), (random(dim), random(dim))):
            packed, angles = random(3, (heads + 2 * kv_heads) * dim), random(2, 3, dim)
            rest = (slots, keys.clone(), values.clone(), heads, *norms, 1e-6)
            yield "rotate_and_write", "rotate_and_write", (packed, *angles, *rest)
    size, outputs = min(shapes.hidden_size, 1024), min(2 * shapes.inner_size, 2**14)
    group = next((each for each in (128, 64, 32) if size % each == 0), 0)
    for num_rows in (1, 16, 40):
        rows, scales = random(num_rows, size), torch.linspace(0.001, 0.01, outputs)
        matrices: dict[str, tuple[Tensor, Tensor | None]] = {}
        if dtype.itemsize == 2:
            matrices["in full"] = random(outputs, size) / size**0.5, None
        if shapes.has_copies and group:
            int8 = torch.randint(-127, 128, (outputs, size), generator=generator).to(torch.int8)
            int4 = torch.randint(-(2**31), 2**31, (outputs, size // 8), generator=generator).to(torch.int32)
            matrices |= {"int8": (int8, scales), "int4": (int4, random(size // group, outputs, 2) / 16)}
        for name, matrix in matrices.items():
            bias, adds = (random(outputs), True) if num_rows == 16 else (None, False)
            yield f"product {name}, {num_rows} rows", "product", (random(num_rows, outputs), rows, *matrix, bias, adds)
    for one in shapes.attention:
        for kind in _ROWS:
            yield f"attend, {kind}", "attend", _attention(one, kind, shapes.max_context, random)


def _scores(vocab_size: int) -> Tensor:
    """Return scores with equal ones and forbidden ones, of which a cut keeps a few, one and nearly all."""
    token = torch.arange(vocab_size)
    scores = torch.stack((-(token % 50) / 8, -50.0 * (token % vocab_size), -(token % 3) / 4))
    return scores.masked_fill_(token % 7 == 6, -math.inf)


def _attention(one: Attention, kind: str, longest: int, random: Callable[..., Tensor]) -> tuple[Any, ...]:
    """Return the arguments of `attend` for a long and a short sequence, whose places share a few pages."""
    counts, max_rows = _ROWS[kind]
    num_heads, num_kv_heads, dim, window, softcap = one
    longest = whole_pages(max(longest, 256))
    contexts = (min(longest, _MOST_PLACES if kind == "decode" else 1024) - counts[0], 37)
    rows = [(context, row) for count, context in zip(counts, contexts, strict=True) for row in range(count)]
    positions, shared, bits = torch.tensor([context + row for context, row in rows]), None, None
    if kind.startswith("tree"):
        paths = [_PATHS[row] if row < len(_PATHS) else 0 for _, row in rows]
        shared = torch.tensor(
            [context if path else context + row + 1 for (context, row), path in zip(rows, paths, strict=True)],
            dtype=torch.int32,
        )
        bits = torch.tensor(paths)
        positions = shared.long() + torch.tensor([path.bit_count() - 1 for path in paths])
    table = torch.randperm(2 * (longest // PAGE_SIZE), generator=torch.Generator().manual_seed(0)) % _NUM_PAGES
    keys, values = random(2, num_kv_heads, _NUM_PAGES * PAGE_SIZE, dim)
    return (
        random(sum(counts), num_heads, dim), keys, values, table.view(2, -1).to(torch.int32),
        torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32), torch.tensor(contexts, dtype=torch.int32),
        positions, shared, bits, dim**-0.5, window, softcap, PAGE_SIZE, max_rows, longest,
    )  # fmt: skip


def main() -> None:
    """Print the name of each kernel before it runs, and the verdict; no verdict if the GPU's memory is short."""

    def say(line: str) -> None:
        print(_MARK + line, flush=True)  # noqa: T201 - read by `probe`

    shapes = msgspec.json.decode(sys.argv[1], type=Shapes)
    try:
        torch.zeros(1, device=shapes.device)
        verdict = find_fault(shapes, say)
    except Exception as error:  # noqa: BLE001 - the process that asks tries itself, and meets what is wrong
        say(json.dumps({"unable": reason_of(error)}))
    else:
        say(json.dumps(verdict._asdict()))


if __name__ == "__main__":
    main()
