"""On a GPU: the texts of all families, the kernels and the captured graphs. Run by `pytest -m gpu tests/test_cuda.py`;
without a GPU they are skipped, and other runs leave them out."""

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed

from benchmarks.device.kernels import kernel_differences
from benchmarks.device.parity import replay_differences
from rayspec.bench.run import run_selfcheck
from rayspec.config import EngineConfig, SpeculationOptions
from rayspec.decode.engine import Engine
from rayspec.decode.stages import LocalStages
from rayspec.local_engine import engine_like, load_engine
from rayspec.model.cuda import operations, probe
from rayspec.model.cuda.graphs import CudaDriver
from tests.engines import GREEDY, complete, tokens_of
from tests.families import FAMILIES, HARD_FAMILIES, WHOLE_FAMILIES, cases, checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or "TRITON_INTERPRET" in os.environ,
        reason="needs a GPU that runs compiled kernels: pytest -m gpu tests/test_cuda.py",
    ),
]

DEVICE = torch.device("cuda")
PROBE = probe.probe
LENGTHS, MAX_TOKENS = (5, 37, 130), 32
# Few buckets, so that they are captured quickly.
SMALL = {"device": str(DEVICE), "max_model_len": 256, "max_num_seqs": len(LENGTHS), "max_num_batched_tokens": 128}
EXACT: dict[str, Any] = {"dtype": "float32"}
ROUNDED: dict[str, Any] = {"dtype": "bfloat16", "deterministic": True}
# `auto` is first: it has copies of weights, and the engines of the others take its weights. All of them draft, and may
# search as often as they like.
STRATEGIES: dict[str, dict[str, Any]] = {
    "auto": {"optimise_share": 1.0},
    "static": {"skip": (2, 5), "gate": False},
    "ar": {},
}


@pytest.fixture(autouse=True)
def _kernels_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial of a model takes seconds, and there are many models here."""
    monkeypatch.setattr(probe, "probe", lambda shapes: probe.Tried(None, is_kept=False))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_pass_the_trial_in_the_shapes_of_a_large_model(dtype: str) -> None:
    shapes = probe.Shapes(
        device="cuda:0", dtype=dtype, hidden_size=4096, inner_size=14336, max_context=131072, has_copies=True,
        attention=((32, 8, 128, 0, 0.0), (16, 8, 256, 4096, 50.0)),
    )  # fmt: skip
    assert PROBE(shapes) == probe.Tried(None, is_kept=True)


def engines(family: str, options: dict[str, Any]) -> Iterator[tuple[str, Engine]]:
    """Yield an engine by each strategy, by the same weights where they can be shared."""
    first = None
    for name, how in STRATEGIES.items():
        speculation = SpeculationOptions(strategy=name, max_draft_tokens=4, **how)  # type: ignore[arg-type]
        config = EngineConfig(model=checkpoint(family), speculation=speculation, **SMALL, **options)
        engine = (engine_like(first, config) if first else None) or load_engine(config, with_tokenizer=False)
        first = first or engine
        yield name, engine


def texts(engine: Engine, family: str) -> list[tuple[int, ...]]:
    prompts = cases(checkpoint(family), LENGTHS, MAX_TOKENS).prompts
    return tokens_of(complete(engine, prompts, GREEDY.replace(max_tokens=MAX_TOKENS)))


@pytest.mark.parametrize("family", [*FAMILIES, *HARD_FAMILIES, *WHOLE_FAMILIES])
def test_texts_in_float32_are_those_of_generate(family: str) -> None:
    expected = cases(checkpoint(family), LENGTHS, MAX_TOKENS).expected
    for name, engine in engines(family, EXACT):
        assert texts(engine, family) == expected, name
        if name == "static" and family not in WHOLE_FAMILIES:
            assert engine.stats.num_draft_tokens > 0


@pytest.mark.parametrize("family", [*FAMILIES, *HARD_FAMILIES])
def test_deterministic_texts_in_bfloat16_do_not_depend_on_the_strategy(family: str) -> None:
    found = {name: texts(engine, family) for name, engine in engines(family, ROUNDED)}
    assert found == dict.fromkeys(found, found["ar"])


@pytest.mark.parametrize("options", [{"cuda_graphs": "off"}, {"cuda_kernels": "off"}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_texts_without_graphs_or_kernels_are_those_of_generate(family: str, options: dict[str, Any]) -> None:
    expected = cases(checkpoint(family), LENGTHS, MAX_TOKENS).expected
    for name, engine in engines(family, EXACT | options):
        assert isinstance(engine.stages, LocalStages)
        assert engine.stages.runner.graphs is None
        assert texts(engine, family) == expected, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_compute_what_plain_torch_computes(dtype: torch.dtype) -> None:
    assert [one for one in kernel_differences(dtype, DEVICE) if not one.is_small] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("outputs", "size"), [(4096, 4096), (4096, 14336), (6144, 1536), (1000, 344)])
@torch.inference_mode()
def test_a_row_of_a_product_in_full_has_the_same_bits_in_any_company(
    outputs: int, size: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    rows, weight = (torch.randn(number, size, device=DEVICE, generator=generator).to(dtype) for number in (64, outputs))

    def product(count: int) -> torch.Tensor:
        output = rows.new_empty(count, outputs)
        operations.product(output, rows[:count], weight, None, None, adds=False)
        return output

    most = product(64)
    assert [count for count in (1, 2, 8, 9, 16, 17, 33) if not torch.equal(product(count), most[:count])] == []


@pytest.mark.parametrize(
    ("family", "dtype"), itertools.product(["llama", "gemma2"], [torch.float32, torch.bfloat16]), ids=str
)
def test_captured_passes_have_the_bits_of_eager_launches(family: str, dtype: torch.dtype) -> None:
    found = list(replay_differences(family, dtype, DEVICE, driver_of=CudaDriver))
    assert [one for one in found if not one.is_small] == []


def test_a_graph_holds_a_sum_over_ranks() -> None:
    """With one rank: NCCL refuses two on a GPU."""
    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        numbers, driver = torch.ones(8, device=DEVICE), CudaDriver(DEVICE)

        def work() -> None:
            distributed.all_reduce(numbers.mul_(2))

        driver.rehearse(work)
        driver.capture(work).replay()
        assert numbers.tolist() == [4.0] * 8
    finally:
        distributed.destroy_process_group()


def test_selfcheck_passes() -> None:
    lines: list[str] = []
    found = run_selfcheck(device=str(DEVICE), dtype="bfloat16", num_threads=None, quick=True, say=lines.append)
    assert found["ok"], lines
