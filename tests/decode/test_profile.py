from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rayspec.choices import FULL, SKIP, Choice, choices_of
from rayspec.decode import profile
from rayspec.decode.profile import LoadLock, measure, measurements
from rayspec.decode.runner import Runner
from rayspec.model.architecture import Decomposition
from rayspec.model.kv_cache import KVCache
from rayspec.model.row_counts import RowCounts
from rayspec.planning.latency import HEAD, LatencyModel
from tests.engines import ALL_CHOICES, ways_of
from tests.families import checkpoint, parts_of

CPU = torch.device("cpu")


def _counts(bucket_rows: int | None) -> RowCounts | None:
    return RowCounts(bucket_rows, bucket_rows) if bucket_rows else None


def _runner(
    parts: Decomposition,
    num_slots: int = 1200,
    bucket_rows: int | None = None,
    choices: Sequence[Choice] = (FULL, SKIP),
) -> Runner:
    dtype: Any = parts.final_norm.weight.dtype
    cache = KVCache(parts.shapes, num_slots, dtype=dtype, device=CPU, num_spare=bucket_rows or 0, notes_pages=True)
    return Runner(parts, cache, device=CPU, row_counts=_counts(bucket_rows), choices=choices)


def load_or_measure(runner: Runner, folder: str) -> LatencyModel:
    """As an engine does that loads."""
    with LoadLock(Path(folder)) as lock:
        lock.share()
        return profile.load_or_measure(runner, folder, lock=lock)


@pytest.fixture(scope="module")
def measured() -> LatencyModel:
    return measure(_runner(parts_of(checkpoint("llama"))))


@pytest.fixture
def count_measured(measured: LatencyModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []

    def counted(runner: Runner, *rest: Any) -> Any:
        calls.append(runner.end_sublayer)
        return measured

    monkeypatch.setattr(profile, "measure", counted)
    return calls


@pytest.mark.parametrize(("family", "num_slots"), [("llama", 5000), ("qwen3_moe", 300), ("gemma2", 40), ("llama", 1)])
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
    choices = choices_of([index % 3 > 0 for index in range(8)])
    assert 0 < latency.draft_step_s(choices, context=50, batch=2) < latency.decode_step_s(context=50, batch=2)


def test_a_profile_of_a_smaller_cache_is_measured_again_and_one_of_a_larger_is_not(tmp_path: Path) -> None:
    parts = parts_of(checkpoint("llama"))
    small, large = (_runner(parts, num_slots) for num_slots in (40, 400))
    alone = load_or_measure(small, str(tmp_path))
    assert (alone.measured_context, alone.measured_batch) == (20, 1)
    assert all(curve.sequence_s == curve.masked_s == 0 for curve in alone.curves.values())
    several = load_or_measure(large, str(tmp_path))
    assert (several.measured_context, several.measured_batch) == (368, 8)
    assert load_or_measure(small, str(tmp_path)) == load_or_measure(large, str(tmp_path)) == several


def test_measuring_leaves_the_clock_of_the_caller_in_charge() -> None:
    ticks = itertools.count()
    latency = measure(_runner(parts_of(checkpoint("llama")), 200), clock=lambda: float(next(ticks)))
    assert latency.sublayer_s(0, rows=4, context=32, batch=1) == pytest.approx(1 / 4)


def test_another_model_dtype_thread_count_or_mode_is_measured_for_itself(
    tmp_path: Path, count_measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = parts_of(checkpoint("llama"))
    load_or_measure(_runner(llama), str(tmp_path))
    load_or_measure(_runner(llama, num_slots=77), str(tmp_path))
    assert len(count_measured) == 1, "the size of the cache does not matter"
    load_or_measure(_runner(parts_of(checkpoint("qwen3"))), str(tmp_path))
    assert len(count_measured) == 2
    load_or_measure(_runner(parts_of(checkpoint("llama"), "bfloat16")), str(tmp_path))
    assert len(count_measured) == 3
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    load_or_measure(_runner(llama), str(tmp_path))
    assert len(count_measured) == 4
    monkeypatch.undo()


@pytest.mark.parametrize("family", ["llama", "smollm3", "qwen3_moe"])
def test_every_way_to_run_a_kind_is_measured(family: str) -> None:
    """What all sublayers of the kind can do: in smollm3 half of the attention has no copies, experts never have."""
    parts = parts_of(checkpoint(family), "float32", ("int8", "int4"))
    latency = measure(_runner(parts, 600, choices=ALL_CHOICES))
    ways = ways_of(parts)
    for index, name in enumerate(parts.curve_names):
        alike = [set(own) for own, kind in zip(ways, parts.curve_names, strict=True) if kind == name]
        assert set(latency.choices_of(index)) == set.intersection(*alike)
        for choice in latency.choices_of(index):
            assert (latency.sublayer_s(index, rows=1, context=200, batch=1, choice=choice) > 0) == (choice != SKIP)
    assert "pages" in latency.choices_of(0)
    assert "pages" not in latency.choices_of(1), "an MLP reads no keys"


def test_a_damaged_profile_is_measured_again_and_replaced(
    tmp_path: Path, count_measured: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    runner = _runner(parts_of(checkpoint("llama")))
    load_or_measure(runner, str(tmp_path))
    (path,) = tmp_path.glob("*.json")
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


def _coarse_and_whole(runner: Runner, budget_s: float) -> tuple[list[Any], list[Any]]:
    return measurements(runner, budget_s=budget_s), measurements(runner)


def test_without_time_left_a_coarse_grid_is_measured() -> None:
    """Every kind, choice, context and batch, but few numbers of rows."""
    parts = parts_of(checkpoint("llama"), "float32", ("int4",))
    coarse, whole = _coarse_and_whole(_runner(parts, 5000, choices=ALL_CHOICES), 0.0)
    assert {(one.kind, one.context, one.batch) for one in coarse} == {
        (one.kind, one.context, one.batch) for one in whole
    }
    rows = [{one.rows for one in found if one.kind == HEAD} for found in (coarse, whole)]
    assert rows == [{1, 2, 8, 128}, set(profile.ROW_COUNTS)]
    assert LatencyModel.fit(coarse, parts.curve_names).covers(profile._grid(5000))


class _Impatient(LoadLock):
    def take(self, timeout_s: float = 0.2) -> bool:
        return super().take(timeout_s)


def test_beside_a_load_that_never_ends_a_coarse_profile_is_measured_and_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LoadLock(tmp_path) as loading, _Impatient(tmp_path) as mine:
        assert loading.share()
        assert mine.share()
        latency = profile.load_or_measure(_runner(parts_of(checkpoint("llama"))), str(tmp_path), lock=mine)
    assert latency.sublayer_s(0, rows=4, context=32, batch=1) > 0
    assert not list(tmp_path.glob("*.json"))
    assert "coarse" in caplog.text
