"""The kernels compiled for GPUs, in processes without Triton's interpreter. No GPU is needed."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.exhaustive
# One process for all: torch and Triton take seconds to import. A line of "--" begins the next test's.
QUESTIONS = """
from tools import kernel_resources as r
print(r.table(r.rows([r.LLAMA_8B], [r.VERIFY], [90])))
print("--")
for launch in r.product_launches(r.LLAMA_8B, 8):
    needs = r.compile_launch(launch, 90)
    print(needs.registers, needs.stack, needs.shared)
print("--")
decode, verify, tree = (r.attend_launches(r.LLAMA_8B, bucket)[0] for bucket in (r.DECODE, r.VERIFY, r.TREE))
print(r.code_of(decode) == r.code_of(verify), r.code_of(decode) == r.code_of(tree))
print("--")
_, rotate, *_ = r.row_launches(r.QWEN3_14B)
ptx = r.compile_launch(rotate, 90).ptx
print(ptx.count("cvt.rn.bf16"), ptx.count("fma."))
"""
OTHER_GPUS = """
from tools import kernel_resources as r
for shape, bucket, architecture in ((r.GEMMA, r.CHUNK, 100), (r.QWEN3_14B, r.TREE, 80)):
    print(r.table(r.rows([shape], [bucket], [architecture])))
print("--")
for num_rows, architecture in ((64, 80), (64, 100)):
    for launch in r.product_launches(r.LLAMA_8B, num_rows):
        needs = r.compile_launch(launch, architecture)
        print(needs.registers, needs.stack, needs.shared)
print("--")
decode, verify, tree = (r.attend_launches(r.GEMMA, bucket)[0] for bucket in (r.DECODE, r.VERIFY, r.TREE))
print(r.code_of(decode) == r.code_of(verify), r.code_of(decode) == r.code_of(tree))
print("--")
for architecture in (86, 120):
    attends = [r.attend_launches(shape, r.CHUNK)[0] for shape in (r.LLAMA_8B, r.GEMMA)]
    for launch in (*attends, *r.product_launches(r.LLAMA_8B, 8)):
        needs = r.compile_launch(launch, architecture)
        print(needs.stack, needs.shared)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder for what Triton compiles."""
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(scope="module")
def answers(cache: Path) -> list[list[str]]:
    """Lines for each of the questions."""
    return _answers(cache, QUESTIONS)


@pytest.fixture(scope="module")
def of_other_gpus(cache: Path) -> list[list[str]]:
    """Lines for each of the questions about GPUs other than sm_90, with other shapes."""
    return _answers(cache, OTHER_GPUS)


def _answers(cache: Path, questions: str) -> list[list[str]]:
    return [lines.splitlines() for lines in "\n".join(_python(cache, "-c", questions)).split("\n--\n")]


def _python(cache: Path, *arguments: str) -> list[str]:
    """The lines that a fresh Python prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=ROOT)
    return done.stdout.splitlines()


# Bytes of stack: the tiles of attention were chosen on a GPU of sm_90. Shared memory: what small GPUs have, in KiB.
_MOST_STACK, _MOST_SHARED = {"sm_80": 48}, 99


def _spills(table: list[str]) -> list[str]:
    """Rows of a table whose kernels use the stack, or more shared memory than small GPUs have."""
    heads, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    spills = []
    for line in lines:
        for architecture, cell in zip(heads[4:], line[4:], strict=True):
            registers, stack, shared = map(int, cell.split(","))
            if registers > 255 or stack > _MOST_STACK.get(architecture, 0) or shared > _MOST_SHARED:
                spills.append(f"{line[:2]}, {architecture}: {cell}")
    return spills


def test_kernels_compile_and_do_not_spill(answers: list[list[str]]) -> None:
    assert len(answers[0]) == 2 + 7
    assert not _spills(answers[0])


def test_nor_those_of_other_gpus_and_shapes(of_other_gpus: list[list[str]]) -> None:
    lines = of_other_gpus[0]
    assert len(lines) == 2 + 6 + 2 + 7, "a chunk has no splits to merge"
    assert not _spills(lines[:8])
    assert not _spills(lines[8:])


def test_products_compile_and_do_not_spill(answers: list[list[str]]) -> None:
    _require_no_spills(answers[1], 3)


def test_products_of_many_rows_do_not_spill_on_other_gpus(of_other_gpus: list[list[str]]) -> None:
    _require_no_spills(of_other_gpus[1], 2 * 3)


def _require_no_spills(lines: list[str], number: int) -> None:
    needs = [[int(number) for number in line.split()] for line in lines]
    assert len(needs) == number
    assert all(registers <= 255 and stack == 0 and shared <= 99 * 1024 for registers, stack, shared in needs), needs


def test_kernels_compile_for_smaller_gpus(of_other_gpus: list[list[str]]) -> None:
    """RTX 3090 and 5090: a program may have 99 KiB of shared memory there, as on an RTX 4090. Chunks have the largest
    tiles."""
    needs = [[int(number) for number in line.split()] for line in of_other_gpus[3]]
    assert len(needs) == 2 * (2 + 3)
    assert all(stack <= 96 and shared <= _MOST_SHARED * 1024 for stack, shared in needs), needs


def test_the_table_of_the_documentation_is_what_the_compiler_says(cache: Path) -> None:
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    if f"triton {metadata.version('triton')}" not in text:
        pytest.skip("the table is of another version of triton")
    table = _python(cache, "-m", "tools.kernel_resources")
    assert not _spills(table)
    assert "\n".join(table) in text, "run `python -m tools.kernel_resources` and put its table there"


def test_decode_and_verify_run_the_same_code(answers: list[list[str]]) -> None:
    assert answers[2] == ["True False"]


def test_so_do_those_of_a_model_with_windows(of_other_gpus: list[list[str]]) -> None:
    assert of_other_gpus[2] == ["True False"]


def test_bfloat16_is_rounded_to_nearest_and_products_are_rounded_before_their_sum(answers: list[list[str]]) -> None:
    """The interpreter cannot show it."""
    rounded, fused = map(int, answers[3][0].split())
    assert rounded > 0
    assert fused == 0
