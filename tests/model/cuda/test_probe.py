"""The trial of the GPU kernels: in Triton's interpreter, with kernels and processes that fail like real ones."""

import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs
from triton.runtime.errors import OutOfResources

from rayspec.config import EngineConfig
from rayspec.decode.loading import has_kernels
from rayspec.errors import ConfigError
from rayspec.model.cuda import launches, probe
from rayspec.model.cuda.probe import Shapes, Tried, find_fault
from tests.exhaustive import few_of
from tests.families import checkpoint, modules_of

SHAPES = Shapes(
    device="cpu", dtype="float32", hidden_size=64, inner_size=64, max_context=300, has_copies=True,
    attention=((2, 1, 16, 20, 2.0),),
)  # fmt: skip
# A process that fails while it tries a kernel.
FAILING = "import os, signal, time; print(" + repr(probe._MARK + "attend, tree") + ", flush=True); {}"


@pytest.fixture(autouse=True)
def _no_verdict_is_known() -> Iterator[None]:
    probe.works.cache_clear()
    yield
    probe.works.cache_clear()


def test_kernels_that_compute_right_pass_in_a_process_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which does not import files of the user's folder."""
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    assert probe.probe(structs.replace(SHAPES, has_copies=False)) == Tried(None, is_kept=True)


@pytest.mark.parametrize(
    ("fault", "limit_s", "expected", "is_kept"),
    [
        ("time.sleep(10**6)", 1.0, r"(attend, tree|the start) has no result after 1 s", True),
        (
            "os.kill(os.getpid(), signal.SIGSEGV)",
            600.0,
            r"attend, tree has ended its process: Segmentation fault",
            True,
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", 600.0, r"attend, tree has ended its process: Killed", False),
        ("os.kill(os.getpid(), signal.SIGINT)", 600.0, r"attend, tree has ended its process: Interrupt", False),
    ],
)
def test_a_process_that_hangs_or_crashes_is_a_fault_that_is_kept(
    fault: str, limit_s: float, expected: str, is_kept: bool
) -> None:
    """Not if it was stopped, as by Ctrl-C."""
    found = probe.probe(SHAPES, command=(sys.executable, "-c", FAILING.format(fault)), limit_s=limit_s)
    assert found.is_kept == is_kept
    assert re.match(expected, found.fault or ""), found


@pytest.mark.parametrize("command", ["/nowhere/python", sys.executable])
def test_where_no_process_can_use_the_gpu_this_one_tries(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "gated", _raising(RuntimeError("tried here")))
    said = probe._MARK + '{"unable": "the GPU is used by another process"}'
    code = f"print({said!r})"
    assert probe.probe(SHAPES, command=(command, "-c", code)) == Tried("gated, silu: RuntimeError: tried here", False)


def _raising(error: Exception) -> Callable[..., Any]:
    def kernel(*args: object) -> None:
        raise error

    return kernel


def _off_by_one(launch: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        found = launch(*args).run()
        if found is not None:
            return found + 1
        args[0].add_(1)
        return None

    return lambda *args: SimpleNamespace(run=lambda: run(*args))


@pytest.mark.parametrize(
    "operator", few_of(["rms_norm", "gated", "rotate_and_write", "attend", "product"], ["rotate_and_write", "attend"])
)
def test_a_wrong_result_of_any_kernel_is_found(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, operator, _off_by_one(getattr(launches, operator)))
    found = find_fault(SHAPES)
    assert re.fullmatch(f"{operator}.* computes something else than plain PyTorch", found.fault or ""), found
    assert found.is_kept


def test_a_cache_that_is_written_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = launches.rotate_and_write

    def elsewhere(packed: Any, cos: Any, sin: Any, slots: Any, *rest: Any) -> Any:
        return launch(packed, cos, sin, slots + 1, *rest)

    monkeypatch.setattr(launches, "rotate_and_write", elsewhere)
    assert "rotate_and_write computes something else" in (find_fault(SHAPES).fault or "")


@pytest.mark.parametrize("kind", few_of(["decode", "verify", "tree", "chunk", "tree with a chunk"], ["tree"]))
def test_each_kind_of_pass_is_tried(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk may need more shared memory than there is, though a decode fits."""
    launch = launches.attend

    def too_large(*args: Any) -> Any:
        query, bits, max_rows = args[0], args[8], args[13]
        is_small, is_tree = max_rows <= 64, bits is not None
        is_kind = {
            "decode": max_rows == 1,
            "tree": is_tree and is_small,
            "chunk": not is_tree and not is_small,
            "tree with a chunk": is_tree and not is_small,
        }
        if is_kind.get(kind, len(query) == 11 and bits is None):
            raise OutOfResources(81920, 65536, "shared memory")
        return launch(*args)

    monkeypatch.setattr(launches, "attend", too_large)
    found = find_fault(SHAPES)
    assert not found.is_kept, "a start finds it again in a moment"
    assert re.match(f"attend, {kind}: OutOfResources: .*81920", found.fault or ""), found


def test_memory_that_runs_out_is_no_fault_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "gated", _raising(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        find_fault(SHAPES)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The parts of a model on a GPU of compute capability 9.0."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="GPU", uuid="7"))
    whole = modules_of(checkpoint("gemma2"))
    names = ("config", "shapes", "windows", "dtype")
    return SimpleNamespace(device=torch.device("cuda:1"), **{name: getattr(whole, name) for name in names})


def test_one_warning_names_reason_and_switch_and_a_kept_fault_is_not_tried_again(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    config, asked = EngineConfig(model="m", profile_cache=str(tmp_path)), list[Shapes]()

    def trial(shapes: Shapes) -> Tried:
        asked.append(shapes)
        return Tried("attend, tree has ended its process: Segmentation fault", is_kept=True)

    monkeypatch.setattr(probe, "probe", trial)
    assert not has_kernels(config.replace(cuda_kernels="off"), gpu)
    with caplog.at_level(logging.WARNING):
        assert [has_kernels(config, gpu) for _ in range(3)] == [False] * 3
    (record,) = caplog.records
    assert record.message.startswith("cuda:1 runs without the GPU kernels: attend, tree has ended its process: Segm")
    assert "cuda_kernels='off'" in record.message
    assert "remeasure=True tries again" in record.message
    probe.works.cache_clear()  # as in a later process
    assert not has_kernels(config, gpu)
    assert not has_kernels(config.replace(cuda_kernels="off"), gpu)
    assert len(asked) == 1
    assert [(window > 0, softcap) for *_, window, softcap in asked[0].attention] == [(True, 5.0), (False, 5.0)]
    assert not has_kernels(config.replace(remeasure=True), gpu)
    assert not has_kernels(config.replace(max_model_len=64), gpu)
    assert len(asked) == 3


def test_a_missing_compiler_is_looked_for_at_each_start(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    verdicts = [Tried("RuntimeError: Failed to find C compiler", is_kept=False), Tried(None, is_kept=True)]
    monkeypatch.setattr(probe, "probe", lambda shapes: verdicts.pop(0))
    config = EngineConfig(model="m", profile_cache=str(tmp_path))
    for expected in (False, True, True):
        assert has_kernels(config, gpu) == expected
        probe.works.cache_clear()
    assert len(caplog.records) == 1


def test_an_old_gpu_has_none(gpu: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not has_kernels(EngineConfig(model="m"), gpu)
    assert "need compute capability 8.0, this GPU has 7.5" in caplog.text


def test_graphs_need_the_kernels() -> None:
    with pytest.raises(ConfigError, match=r"'cuda_graphs' .* does not work with option 'cuda_kernels' 'off'"):
        EngineConfig(model="m", cuda_graphs="on", cuda_kernels="off")
    with pytest.raises(ConfigError, match="'cuda_graphs' 'plans' is gone: use on"):
        EngineConfig(model="m", cuda_graphs="plans")
