"""Registers, stack and shared memory of the compiled kernels. Compilation needs triton, but no GPU.

`python -m tools.kernel_resources` prints the table of docs/gpu.md. It is next to `launches.py`, because it
compiles the launches of `launches.py` for the tensor shapes of known models, and must change with them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rayspec.model.cuda import launches
from rayspec.model.cuda.launches import Launch

ARCHITECTURES = (80, 90, 100)
_TRITON_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_WARP_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Attention shape of a model, or of one of its tensor-parallel ranks."""

    name: str
    num_heads: int
    num_kv_heads: int
    dim: int
    window: int = 0
    softcap: float = 0.0
    normalised: bool = False


@dataclass(frozen=True, slots=True)
class Bucket:
    name: str
    max_rows: int
    max_context: int
    has_tree: bool = False


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of a compiled kernel: registers per thread, bytes of stack per thread (0 if nothing spills), and bytes
    of shared memory."""

    registers: int
    stack: int
    shared: int
    ptx: str


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table. resources: by architecture."""

    what: str
    launch: Launch
    resources: dict[int, Resources]

    @property
    def markdown(self) -> str:
        kernel, warps = self.launch.kernel.__name__, self.launch.options["num_warps"]
        needs = (f"{need.registers}, {need.stack}, {need.shared / 1024:.0f}" for need in self.resources.values())
        return f"| {' | '.join([self.what, kernel, tile_of(self.launch), str(warps), *needs])} |"


LLAMA_8B = Shape(name="Llama-8B", num_heads=32, num_kv_heads=8, dim=128)
QWEN3_14B = Shape(name="Qwen3-14B", num_heads=40, num_kv_heads=8, dim=128, normalised=True)
LLAMA_70B = Shape(name="Llama-70B", num_heads=64, num_kv_heads=8, dim=128)
LLAMA_70B_TP8 = Shape(name="Llama-70B, TP 8", num_heads=8, num_kv_heads=1, dim=128)
GEMMA = Shape(name="Gemma-like", num_heads=16, num_kv_heads=8, dim=256, window=4096, softcap=50.0)
SHAPES = (LLAMA_8B, QWEN3_14B, LLAMA_70B, LLAMA_70B_TP8, GEMMA)

DECODE = Bucket("decode", 1, 16384)
VERIFY = Bucket("verify", 8, 16384)
TREE = Bucket("tree", 32, 16384, has_tree=True)
CHUNK = Bucket("chunk", 1024, 16384)
BUCKETS = (DECODE, VERIFY, TREE, CHUNK)


def attend_launches(shape: Shape, bucket: Bucket, dtype: torch.dtype = torch.bfloat16) -> tuple[Launch, ...]:
    """Return the attention launches of a batch of four sequences."""
    num_rows = 4 * bucket.max_rows
    cache = _meta(shape.num_kv_heads, 65536, shape.dim, dtype=dtype)
    integers = _meta(num_rows, dtype=torch.int32)
    return launches.attend(
        _meta(num_rows, shape.num_heads, shape.dim, dtype=dtype), cache, cache,
        _meta(4, bucket.max_context // 16, dtype=torch.int32),
        _meta(5, dtype=torch.int32), _meta(4, dtype=torch.int32), _meta(num_rows, dtype=torch.int64),
        integers if bucket.has_tree else None, integers.long() if bucket.has_tree else None,
        shape.dim**-0.5, shape.window, shape.softcap, 16, bucket.max_rows, bucket.max_context,
    ).launches  # fmt: skip


def row_launches(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
    """Return the launches of the kernels that treat each row alone. The hidden size is H * D, the MLP's size 3.5 times
    that."""
    size, num_rows = shape.num_heads * shape.dim, 8
    cache = _meta(shape.num_kv_heads, 65536, shape.dim, dtype=dtype)
    angles = _meta(num_rows, shape.dim, dtype=dtype)
    norm = _meta(shape.dim, dtype=dtype) if shape.normalised else None
    packed = _meta(num_rows, size + 2 * shape.num_kv_heads * shape.dim, dtype=dtype)
    slots = _meta(num_rows, dtype=torch.int64)
    calls = [
        launches.rms_norm(_meta(num_rows, size, dtype=dtype), _meta(size, dtype=dtype), 1e-5, 0.0),
        launches.rotate_and_write(packed, angles, angles, slots, cache, cache, shape.num_heads, norm, norm, 1e-6),
        launches.gated(_meta(num_rows, 7 * size, dtype=dtype), "silu"),
        launches.gumbel(_meta(2, num_rows, dtype=torch.int64), 128256),
        launches.cut_to_top_p(_meta(num_rows, 128256, dtype=torch.float32), _meta(num_rows, 1, dtype=torch.float64)),
    ]
    return [launch for call in calls for launch in call.launches]


def product_launches(shape: Shape, num_rows: int, dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
    """Return the launches that multiply rows by a matrix of queries, keys and values: in full, int8 and int4."""
    size, num_outputs = shape.num_heads * shape.dim, (shape.num_heads + 2 * shape.num_kv_heads) * shape.dim
    rows, output = _meta(num_rows, size, dtype=dtype), _meta(num_rows, num_outputs, dtype=dtype)
    matrices = [
        (_meta(num_outputs, size, dtype=dtype), None),
        (_meta(num_outputs, size, dtype=torch.int8), _meta(num_outputs, dtype=torch.float32)),
        (_meta(num_outputs, size // 8, dtype=torch.int32), _meta(size // 128, num_outputs, 2, dtype=dtype)),
    ]
    calls = [launches.product(output, rows, *matrix, None, adds=False) for matrix in matrices]
    return [launch for call in calls for launch in call.launches]


def compile_launch(launch: Launch, architecture: int) -> Resources:
    """Compile a launch for an architecture, such as 90 for sm_90."""
    target = GPUTarget("cuda", architecture, _WARP_SIZE)
    compiled = triton.compile(_source(launch), target=target, options=dict(launch.options))
    usage = _usage(compiled.asm["cubin"])
    return Resources(usage["REG"], usage["STACK"], compiled.metadata.shared, compiled.asm["ptx"])


def rows(
    shapes: Iterable[Shape] = SHAPES, buckets: Iterable[Bucket] = BUCKETS, architectures: Iterable[int] = ARCHITECTURES
) -> Iterator[Row]:
    """Compile all launches and yield their rows. Launches that run the same code are compiled once."""
    architectures = tuple(architectures)
    done: set[Any] = set()
    for what, launch in _named_launches(shapes, tuple(buckets)):
        if (code := code_of(launch)) not in done:
            done.add(code)
            yield Row(what, launch, {number: compile_launch(launch, number) for number in architectures})


def table(found: Iterable[Row]) -> str:
    """Format the table in Markdown. Columns: registers and stack bytes per thread, KiB of shared memory."""
    lines = list(found)
    columns = ["for", "kernel", "tile", "warps", *(f"sm_{number}" for number in lines[0].resources)]
    return "\n".join([f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *(row.markdown for row in lines)])


def code_of(launch: Launch) -> tuple[Any, ...]:
    """Return a key that is equal for launches that run the same code."""
    return _source(launch).hash(), *sorted(launch.options.items())


def tile_of(launch: Launch) -> str:
    """Describe a launch's tile: rows times heads x places for attention, else the padded sizes."""
    constants = launch.arguments
    if "TILE_ROWS" in constants:
        return f"{constants['TILE_ROWS'] * constants['GROUP_PADDED']} x {constants['TILE_KEYS']}"
    sizes = ("SPLITS_PADDED", "SIZE_PADDED", "BLOCK", "DIM_PADDED")
    return " x ".join(str(constants[name]) for name in sizes if name in constants)


def _named_launches(shapes: Iterable[Shape], buckets: Iterable[Bucket]) -> Iterator[tuple[str, Launch]]:
    for shape in shapes:
        for bucket in buckets:
            yield from ((f"{shape.name}, {bucket.name}", launch) for launch in attend_launches(shape, bucket))
        yield from ((shape.name, launch) for launch in row_launches(shape))


def _source(launch: Launch) -> ASTSource:
    """Return the source that Triton compiles for a launch, with pointers and numbers that 16 divides marked as such."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    divisible: dict[tuple[int], list[list[Any]]] = {}
    for place, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = _type_of(value)
        if isinstance(value, Tensor) or (_is_whole(value) and value % 16 == 0 and not parameter.do_not_specialize):
            divisible[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, divisible)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int)


def _type_of(value: Tensor | float) -> str:
    if isinstance(value, Tensor):
        return _TRITON_TYPES[value.dtype]
    if isinstance(value, int):
        return "i32" if value < 2**31 else "i64"
    return "fp32"


def _usage(cubin: bytes) -> dict[str, int]:
    """Return the resource usage that cuobjdump prints: REG, STACK and more."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603 - triton's own tool
    return {name: int(number) for name, number in re.findall(r"\b([A-Z]+):(\d+)", said)}


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


if __name__ == "__main__":
    sys.stdout.write(table(rows()) + "\n")
