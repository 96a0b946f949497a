from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayspec.decode import profile
from rayspec.decode.profile import load_or_measure, measure, measurements, profile_key
from rayspec.decode.runner import Runner
from rayspec.model.architecture import Decomposition
from rayspec.model.kv_arena import KVArena
from tests.families import checkpoint, parts_of

CPU = torch.device("cpu")


def _runner(parts: Decomposition, num_slots: int = 1200, bucket_rows: int | None = None) -> Runner:
    dtype: Any = parts.final_norm.weight.dtype
    arena = KVArena(parts.shapes, num_slots, dtype=dtype, device=CPU, num_spare=bucket_rows or 0)
    return Runner(parts, arena, device=CPU, bucket_rows=bucket_rows)


@pytest.fixture
def count_measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    fast = measure(_runner(parts_of(checkpoint("llama")), 200))

    def counted(runner: Runner, *rest: Any) -> Any:
        calls.append(runner.last)
        return fast

    monkeypatch.setattr(profile, "measure", counted)
    return calls


@pytest.mark.parametrize(("family", "num_slots"), [("llama", 5000), ("qwen3_moe", 300), ("gemma2", 40)])
def test_what_is_measured_is_never_negative_and_grows(family: str, num_slots: int) -> None:
    latency = measure(_runner(parts_of(checkpoint(family)), num_slots))
    for rows, context, batch in itertools.product((1, 3, 8, 100, 1000), (0, 10, 5000, 100_000), (1, 8)):
        seconds = latency.sublayers_s(rows=rows, context=context, batch=batch)
        assert (seconds > 0).all()
        assert (latency.sublayers_s(rows=2 * rows, context=context, batch=batch) >= seconds).all()
        assert (latency.sublayers_s(rows=rows, context=context + 1000, batch=batch) >= seconds).all()
    assert latency.head_s(1) > 0
    assert latency.overhead_s >= 0
    assert latency.wake_s >= 0
    keep = [index % 3 > 0 for index in range(8)]
    assert 0 < latency.draft_step_s(keep, context=50, batch=2) < latency.decode_step_s(context=50, batch=2)


def test_sublayers_of_one_kind_cost_the_same_and_others_their_own() -> None:
    latency = measure(_runner(parts_of(checkpoint("qwen3_moe")), 300))
    seconds = latency.sublayers_s(rows=8, context=32, batch=1)
    assert len(set(seconds[0::2])) == 1
    assert seconds[1] == seconds[5] == seconds[7] != seconds[3]


@pytest.mark.parametrize(
    ("num_slots", "contexts"),
    [(64, {32}), (90, {32}), (640, {32, 608}), (2048, {32, 1024, 2016}), (9000, {32, 1024, 4096})],
)
def test_contexts_are_as_long_as_fit(num_slots: int, contexts: set[int]) -> None:
    """What a context costs is never told from much shorter ones that could have been longer."""
    runner = _runner(parts_of(checkpoint("llama")), num_slots)
    found = [one for one in measurements(runner) if one.kind.startswith("attention")]
    assert {one.context for one in found} == contexts
    assert all(one.context + one.rows // one.batch <= num_slots for one in found)


def test_measuring_leaves_the_clock_of_the_caller_in_charge() -> None:
    ticks = itertools.count()
    latency = measure(_runner(parts_of(checkpoint("llama")), 200), clock=lambda: float(next(ticks)))
    assert latency.sublayer_s(0, rows=4, context=32, batch=1) == pytest.approx(1 / 4)


def test_a_saved_profile_is_used_again(tmp_path: Path, count_measured: list[int]) -> None:
    runner = _runner(parts_of(checkpoint("llama")))
    first = load_or_measure(runner, str(tmp_path / "new" / "folder"))
    again = load_or_measure(runner, str(tmp_path / "new" / "folder"))
    assert count_measured == [8]
    for rows, context in itertools.product((1, 7, 40), (0, 900)):
        expected = first.sublayers_s(rows=rows, context=context, batch=1)
        np.testing.assert_allclose(again.sublayers_s(rows=rows, context=context, batch=1), expected, rtol=1e-9)


def test_another_model_dtype_thread_count_or_mode_is_measured_for_itself(
    tmp_path: Path, count_measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = parts_of(checkpoint("llama"))
    load_or_measure(_runner(llama), str(tmp_path))
    load_or_measure(_runner(llama, num_slots=77), str(tmp_path))
    assert len(count_measured) == 1, "the size of the arena does not matter"
    load_or_measure(_runner(parts_of(checkpoint("qwen3"))), str(tmp_path))
    assert len(count_measured) == 2
    load_or_measure(_runner(parts_of(checkpoint("llama"), "bfloat16")), str(tmp_path))
    assert len(count_measured) == 3
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    load_or_measure(_runner(llama), str(tmp_path))
    assert len(count_measured) == 4
    monkeypatch.undo()


def test_the_mode_of_fixed_shapes_has_a_profile_of_its_own() -> None:
    parts = parts_of(checkpoint("llama"))
    assert profile_key(_runner(parts)) != profile_key(_runner(parts, bucket_rows=8))


def test_a_damaged_profile_is_measured_again_and_replaced(
    tmp_path: Path, count_measured: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    runner = _runner(parts_of(checkpoint("llama")))
    load_or_measure(runner, str(tmp_path))
    (path,) = tmp_path.iterdir()
    good = path.read_text()
    for number, bad in enumerate(("", "{", json.dumps({}), good.replace('"key"', '"kez"')), start=2):
        path.write_text(bad)
        with caplog.at_level(logging.WARNING):
            load_or_measure(runner, str(tmp_path))
        assert len(count_measured) == number
        assert json.loads(path.read_text()) == json.loads(good)
    assert str(path.name) in caplog.text


def test_a_folder_that_cannot_be_written_is_no_obstacle(
    tmp_path: Path, count_measured: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        load_or_measure(_runner(parts_of(checkpoint("llama"))), str(tmp_path / "file"))
    assert len(count_measured) == 1
    assert "could not be saved" in caplog.text
