"""Two ranks, started once, split every family in both ways; the tests look at what they reported."""

import gc
import hashlib
import importlib
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from copy import deepcopy
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from rayspec.choices import Choice, choices_of
from rayspec.config import EngineConfig
from rayspec.decode import loading
from rayspec.decode.loading import prepare_span
from rayspec.model.architecture import decompose
from rayspec.model.attention import pack
from rayspec.model.fused import fuse
from rayspec.model.graphs import CapturedGraph, StaticStep, StepGraphs, Work
from rayspec.model.kv_cache import KVCache
from rayspec.model.matrices import SummedLinear
from rayspec.model.rows import RowSpan, bucket_of, one_run
from rayspec.model.static_rows import BatchMetadata, StepBuffers
from rayspec.model.sublayers import Decomposition, run
from rayspec.model.weights import load_model
from rayspec.pipeline import tensor_parallel
from rayspec.pipeline.collective import Rendezvous
from rayspec.pipeline.tensor_parallel import RankGroup, split_tensor_parallel
from rayspec.types import CheckpointError, ConfigError, UnsupportedModelError
from tests.engines import step_buffers
from tests.exhaustive import few_of
from tests.families import FAMILIES, build, checkpoint, modules_of, ragged_prompts
from tests.graph_driver import RecordingDriver

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SIZE = 2
DEEPSPEED, PLAN = "DeepSpeed", "transformers' plan"
# DeepSpeed does not see the experts of transformers 5, which are tensors and not linear layers.
BIASED = "llama with biases"
NAMES = (*FAMILIES, BIASED)
BESIDES = {"llama", "qwen2", "mixtral", BIASED}  # what a rank does besides needs them
HAS_DEEPSPEED = find_spec("deepspeed") is not None
FIRST_CHOICE = {name: DEEPSPEED if HAS_DEEPSPEED and name not in {"qwen3_moe", "mixtral"} else PLAN for name in NAMES}
_ATTENTION = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {"layers.*.self_attn.o_proj": "rowwise"}
_EXPERTS = {"layers.*.mlp.experts.gate_up_proj": "packed_colwise", "layers.*.mlp.experts.down_proj": "rowwise"}
WRONG_PLANS = {
    "foreign": ("llama", {"a": "b"}),
    "incomplete": ("llama", _ATTENTION),
    "inconsistent": ("llama", _ATTENTION | {f"layers.*.mlp.{n}_proj": "colwise" for n in ("gate", "up", "down")}),
    "unknown": ("llama", _ATTENTION | {"layers.*.mlp.gate_proj": "diagonal"}),
    "without the sum": ("mixtral", _ATTENTION | _EXPERTS),
}


# What a rank does


def worker(rank: int, folder: Path, address: str) -> None:
    group = RankGroup(rank=rank, size=SIZE, address=address)
    group.join(timeout_s=60)
    paths, asked = json.loads((folder / "checkpoints.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    for family, path in ((name, paths[name]) for name in asked):
        found[family] = {"first choice": _observe(path, group)}
        with _no_deepspeed():
            found[family]["without DeepSpeed"] = _observe(path, group)
    found["bfloat16"] = _observe(paths["qwen2"], group, "bfloat16")
    found["copies"] = {"first choice": _by_copies(paths[BIASED], group)}
    other = group.rank == 1
    found["graphs"] = [
        _by_graphs(paths[BIASED], group, driver)
        for driver in (
            RecordingDriver(),
            _FailingDriver() if other else RecordingDriver(),
            RecordingDriver(bytes_each=4 if other else 1),
        )
    ]
    found["kernels"] = _runs_kernels(paths[BIASED], group)
    with _no_deepspeed():
        found["copies"]["without DeepSpeed"] = _by_copies(paths[BIASED], group)
        found["refused"] = {name: _refusal(paths[family], group, plan) for name, (family, plan) in WRONG_PLANS.items()}
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


@cache
def _whole(path: str, dtype: str = "float32") -> tuple[Any, Decomposition]:
    model = load_model(EngineConfig(model=path, dtype=dtype, device="cpu"))  # type: ignore[arg-type]
    return model, decompose(model)


def _copy(path: str, dtype: str = "float32") -> tuple[Any, Decomposition]:
    """Of the model, to be split: cheaper than loading it again."""
    model = deepcopy(_whole(path, dtype)[0])
    return model, decompose(model)


def _observe(path: str, group: RankGroup, dtype: str = "float32") -> dict[str, Any]:
    _, whole = _whole(path, dtype)
    expected = _expected(path, dtype)
    model, parts = _copy(path, dtype)
    before = [_bytes(sublayer.block) for sublayer in parts.sublayers]
    with _log() as lines:
        split = split_tensor_parallel(model, parts, group)
    after = [_bytes(sublayer.block) for sublayer in split.sublayers]
    actual, hidden = _logits(split)
    found = {
        "log": lines,
        "modules": sorted({type(m).__module__.split(".")[0] for s in split.sublayers for m in s.block.modules()}),
        "difference": float((expected - actual).abs().max() / expected.abs().max()),
        "tokens": actual.argmax(-1).tolist() == expected.argmax(-1).tolist(),
        "hidden": _digest(hidden),
        "largest share": max(b / a for a, b in zip(before, after, strict=True)),
        "heads": [shape.num_heads for shape in split.shapes.values()],
        "whole heads": [shape.num_heads for shape in whole.shapes.values()],
        "ends": _bytes(split.embedding) == _bytes(whole.embedding) and _bytes(split.lm_head) == _bytes(whole.lm_head),
    }
    lasts = [weakref.ref(m.weight) for s in split.sublayers for m in s.block.modules() if isinstance(m, SummedLinear)]
    gc.disable()
    fused = fuse(split)
    kept = [one for one in lasts if one() is not None]
    gc.enable()
    actual, hidden = _logits(fused)
    return found | {
        "kept": len(kept),
        "fused": [sublayer.index for sublayer in fused.sublayers if sublayer.body is not None],
        "fused difference": float((expected - actual).abs().max() / expected.abs().max()),
        "fused hidden": _digest(hidden),
    }


def _by_copies(path: str, group: RankGroup) -> float:
    """How far the logits of int4 copies of the shares are from those of copies of the whole model."""
    whole = fuse(_copy(path)[1], quantised=["int4"])
    split = fuse(split_tensor_parallel(*_copy(path), group), quantised=["int4"])
    expected, actual = (_logits(parts, ["int4"] * len(parts.sublayers))[0] for parts in (whole, split))
    return float((expected - actual).abs().max() / expected.abs().max())


class _FailingDriver(RecordingDriver):
    """Its second capture fails, after all that it launches has been seen."""

    def capture(self, work: Work) -> CapturedGraph:
        graph = super().capture(work)
        if self.num_captures == 2:
            raise RuntimeError("operation not permitted")
        return graph


def _runs_kernels(path: str, group: RankGroup) -> bool:
    """Whether this rank runs the kernels, which work on the first rank only."""

    def has_kernels(config: EngineConfig, parts: Decomposition) -> bool:
        return config.cuda_kernels != "off" and group.rank == 0

    asked = EngineConfig(model=path, dtype="float32", device="cpu", speculation={"strategy": "ar"})
    model, parts = _copy(path)
    with patch.object(loading, "has_kernels", has_kernels):
        split = partial(split_tensor_parallel, model, group=group)
        parts, _, agreed = prepare_span(asked, model, parts, split, group.all_agree)
        return loading.has_kernels(agreed, parts)


@torch.inference_mode()
def _by_graphs(path: str, group: RankGroup, driver: RecordingDriver) -> dict[str, Any]:
    """Six passes of one row, eager and by graphs: whether the bits are the same, and the number of replays."""
    parts = fuse(split_tensor_parallel(*_copy(path), group), use_operators=True)

    def states(step: StaticStep) -> list[Tensor]:
        found = []
        for place in range(6):
            spans = [RowSpan(one_run(0, 32), place, 1)]
            rows = step.hold(BatchMetadata(bucket_of(spans, [()]), spans, [()], [place]))
            step.embed(rows)
            found.append(step.run(parts.sublayers, rows).clone())
        return found

    def buffers() -> StepBuffers:
        cache = KVCache(parts.shapes, 64, dtype=parts.dtype, device=CPU, num_spare=1)
        return step_buffers(parts, cache, max_places=32)

    graphs = StepGraphs(parts, buffers(), driver, max_bytes=7, agree=group.all_agree)
    eager, captured = states(StaticStep(parts, buffers())), states(graphs)
    return {"equal": all(map(torch.equal, eager, captured)), "replays": driver.num_replays}


def _digest(hidden: Tensor) -> str:
    return hashlib.sha256(hidden.view(torch.uint8).numpy().tobytes()).hexdigest()


@torch.inference_mode()
def _logits(parts: Decomposition, drafted: Sequence[Choice] | None = None) -> tuple[Tensor, Tensor]:
    """Of a prefill of 10 tokens by all sublayers, 3 drafted rows by some of them or by `drafted`, and a verify of 3
    rows."""
    cache = KVCache(parts.shapes, 20, dtype=parts.dtype, device=CPU)
    tokens = torch.tensor(ragged_prompts([16], seed=3)[0])
    skipping = drafted or choices_of([index not in {1, 4, 7} for index in range(len(parts.sublayers))])
    logits, hiddens = [], []
    for start, end, choices in ((0, 10, None), *((at, at + 1, skipping) for at in (10, 11, 12)), (13, 16, None)):
        rows = pack(cache, [RowSpan(one_run(0, 1000), start, end - start)], device=CPU)
        hidden = parts.embed(tokens[start:end])
        parts.rotate(hidden, rows)
        hiddens.append(run(parts.sublayers, hidden, rows, choices=choices))
        logits.append(parts.head(hiddens[-1]))
    return torch.cat(logits).float(), torch.cat(hiddens, 1).contiguous()


@cache
def _expected(path: str, dtype: str) -> Tensor:
    return _logits(_whole(path, dtype)[1])[0]


def _bytes(module: torch.nn.Module) -> int:
    return sum(parameter.untyped_storage().nbytes() for parameter in module.parameters())


def _refusal(path: str, group: RankGroup, plan: dict[str, str]) -> dict[str, Any]:
    """What is said of a model whose plan is wrong, and whether it still works."""
    model, parts = _copy(path)
    model.config.base_model_tp_plan = plan
    before, _ = _logits(parts)
    try:
        split_tensor_parallel(model, parts, group)
    except UnsupportedModelError as error:
        return {"message": str(error), "unharmed": torch.equal(_logits(parts)[0], before)}
    return {"message": "", "unharmed": False}


@contextmanager
def _no_deepspeed() -> Iterator[None]:
    module = sys.modules.pop("deepspeed", None)
    sys.modules["deepspeed"] = None  # type: ignore[assignment]  # what makes an import fail
    try:
        yield
    finally:
        del sys.modules["deepspeed"]
        if module is not None:
            sys.modules["deepspeed"] = module


@contextmanager
def _log() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    tensor_parallel.logger.setLevel(logging.INFO)
    tensor_parallel.logger.addHandler(handler)
    try:
        yield lines
    finally:
        tensor_parallel.logger.removeHandler(handler)


# What is expected of it

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Of the families that the tests here look at."""
    folder = tmp_path_factory.mktemp("ranks")
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = {item.callspec.params.get("family") for item in items}
    build("qwen3", num_key_value_heads=SIZE).save_pretrained(folder / "qwen3")
    build("llama", attention_bias=True, mlp_bias=True, intermediate_size=128).save_pretrained(folder / BIASED)
    names = [name for name in NAMES if name in asked | BESIDES]
    paths = {name: str(folder / name) if (folder / name).exists() else checkpoint(name) for name in names}
    (folder / "checkpoints.json").write_text(json.dumps([paths, [*asked & set(names)]]), encoding="utf-8")
    meeting = Rendezvous("127.0.0.1")
    ranks = subprocess.Popen(
        [sys.executable, __file__, str(folder), meeting.address],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output = ranks.communicate(timeout=280)[0]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()
        meeting.close()
    assert ranks.returncode == 0, output
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(SIZE)]


FEW = {"phi3", "mixtral", BIASED}
CASES = few_of(
    [(family, way) for family in NAMES for way in ("first choice", "without DeepSpeed")],
    [(family, way) for family in FEW for way in ("first choice", "without DeepSpeed")],
)


@pytest.mark.parametrize(("family", "way"), CASES)
def test_the_ranks_together_compute_what_the_whole_model_does(reports: Reports, family: str, way: str) -> None:
    """By modules and by fused bodies. Each rank holds its share of every block and of the cache."""
    whole = fuse(modules_of(checkpoint("llama" if family == BIASED else family)))
    have_bodies = [sublayer.index for sublayer in whole.sublayers if sublayer.body is not None]
    # DeepSpeed has a class of its own for the MLPs of Phi 3 and GLM 4, which run by their modules.
    is_special = family in {"phi3", "glm4"} and way == "first choice" and HAS_DEEPSPEED
    for report in reports:
        found = report[family][way]
        assert found["difference"] < 1e-5
        assert found["tokens"]
        assert found["fused"] == ([] if is_special else have_bodies)
        assert found["fused difference"] < 1e-5
        assert not found["kept"] or len(found["fused"]) < len(found["heads"]) * 2, "bodies have the only weights"
        assert found["largest share"] < 1 / SIZE + 0.02
        assert [SIZE * heads for heads in found["heads"]] == found["whole heads"]
        assert found["ends"]
    for states in ("hidden", "fused hidden"):
        assert len({report[family][way][states] for report in reports}) == 1, "the same to the bit on all ranks"


@pytest.mark.parametrize("family", few_of(NAMES, FEW))
def test_deepspeed_splits_what_it_can_and_the_plan_the_rest(reports: Reports, family: str) -> None:
    for report in reports:
        first, other = report[family]["first choice"], report[family]["without DeepSpeed"]
        assert first["log"][-1].endswith(f"is split by {FIRST_CHOICE[family]}")
        assert ("deepspeed" in first["modules"]) == (FIRST_CHOICE[family] == DEEPSPEED)
        assert other["log"][-1].endswith(f"is split by {PLAN}")
        assert "deepspeed" not in other["modules"]
        assert "DeepSpeed is not used" in other["log"][0]


@pytest.mark.parametrize("way", ["first choice", "without DeepSpeed"])
def test_drafts_run_by_copies_of_both_matrices_of_a_share(reports: Reports, way: str) -> None:
    """A share has the groups of the whole matrix. Without copies of the last matrices, the difference is 0.19."""
    for report in reports:
        assert report["copies"][way] < 0.04


def test_graphs_hold_the_sums_over_ranks(reports: Reports) -> None:
    """The rotary embedding, the embedding and all sublayers are captured at the second pass. If one rank cannot capture
    a part, or has memory for fewer graphs, all ranks have the same graphs as it."""
    for report in reports:
        whole, one_fails, one_is_full = report["graphs"]
        assert whole == {"equal": True, "replays": 3 * 4}
        assert one_fails == {"equal": True, "replays": 4}
        assert one_is_full == reports[0]["graphs"][2]
        assert one_is_full["equal"]
        assert one_is_full["replays"] < whole["replays"]


def test_the_kernels_run_on_all_ranks_or_on_none(reports: Reports) -> None:
    """Passes in buffers have padding rows, which the sums of all ranks must have."""
    assert [report["kernels"] for report in reports] == [False, False]


def test_bfloat16_is_split_too(reports: Reports) -> None:
    assert len({report["bfloat16"]["hidden"] for report in reports}) == 1
    for report in reports:
        assert report["bfloat16"]["difference"] < 0.05


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("foreign", "leaves each rank 100% of the weights of LlamaAttention"),
        ("incomplete", "leaves each rank 100% of the weights of LlamaMLP"),
        ("inconsistent", "the split layer fails with RuntimeError"),
        ("unknown", "the plan's style 'diagonal' for mlp.gate_proj is not known"),
        ("without the sum", "it computes something else"),
    ],
)
def test_a_model_that_no_method_splits_is_refused_unharmed(reports: Reports, plan: str, message: str) -> None:
    for report in reports:
        found = report["refused"][plan]
        assert message in found["message"]
        assert "set option 'tensor' to 1" in found["message"]
        assert found["unharmed"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_key_value_heads": 1}, r"'tensor' is 2, .* the 1 key-value heads of llama"),
        ({"intermediate_size": 97}, r"does not divide the 97 MLP columns of llama: use a divisor of 97"),
    ],
)
def test_what_does_not_divide_is_an_error_of_the_option(options: dict[str, int], message: str, tmp_path: Path) -> None:
    build("llama", **options).save_pretrained(tmp_path)
    model, parts = _copy(str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        split_tensor_parallel(model, parts, RankGroup(rank=0, size=2, address=""))


def test_a_rank_that_is_alone_gives_up_in_time() -> None:
    with closing(Rendezvous("127.0.0.1")) as meeting, pytest.raises(torch.distributed.DistError):
        RankGroup(rank=0, size=2, address=meeting.address).join(timeout_s=1)


def test_a_rank_that_lacks_memory_ends_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Perhaps it alone does. When it went on without what it lacked, the others waited for it for ten minutes."""

    def lacks(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    path = checkpoint("llama")
    model, parts = _copy(path)
    with pytest.raises(torch.OutOfMemoryError):
        tensor_parallel._objection(lacks, [], [], parts, RankGroup(rank=0, size=2, address=""))
    config = EngineConfig(model=path, dtype="float32", device="cpu")
    monkeypatch.setattr("rayspec.model.fused.full_matrix", lacks)
    alone, _, _ = prepare_span(config, *_copy(path))
    assert {one.body for one in alone.sublayers} == {None}, "a model of one process runs by its modules"
    block: Any = parts.sublayers[0].block
    block.o_proj = SummedLinear(block.o_proj.weight, None, lambda products: products)
    with pytest.raises(CheckpointError, match=r"the memory is too small for this model \(CUDA out of memory"):
        prepare_span(config, model, parts)


if __name__ == "__main__":
    if HAS_DEEPSPEED:
        importlib.import_module("deepspeed")
    processes = multiprocessing.get_context("fork")  # what was imported, which takes seconds, is imported once
    started = [processes.Process(target=worker, args=(rank, Path(sys.argv[1]), sys.argv[2])) for rank in range(SIZE)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    sys.exit(any(process.exitcode for process in started))
