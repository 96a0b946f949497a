"""Latency profiles, numbers of threads, and who waits for whom among processes that load and measure."""

import itertools
import json
import logging
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from rayspec import LLM, SamplingParams, demo
from rayspec.choices import FULL, SKIP, Choice, choices_of
from rayspec.config import EngineConfig
from rayspec.decode import profile
from rayspec.decode.engine_loop import EngineLoop
from rayspec.decode.profile import LoadLock, chosen_threads, fastest_number, measure, measurements
from rayspec.decode.runner import Runner, Threads, YieldingThreads
from rayspec.local_engine import load_engine
from rayspec.model import fused, matrices
from rayspec.model.graphs import StepGraphs
from rayspec.model.kv_cache import KVCache
from rayspec.model.row_counts import RowCounts
from rayspec.model.sublayers import Decomposition
from rayspec.planning.latency import HEAD, SEARCH, LatencyModel, Measurement
from rayspec.types import Request
from tests.engines import ALL_CHOICES, step_buffers, ways_of
from tests.families import checkpoint, modules_of, operator_parts_of, parts_of
from tests.graph_driver import RecordingDriver

CPU = torch.device("cpu")
SOON_S = 0.1


def _runner(parts: Decomposition, num_slots: int = 1200, choices: Sequence[Choice] = (FULL, SKIP)) -> Runner:
    cache = KVCache(parts.shapes, num_slots, dtype=parts.dtype, device=CPU, notes_pages=True)
    return Runner(parts, cache, device=CPU, row_counts=None, choices=choices)


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


def test_each_model_and_mode_is_measured(
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
    monkeypatch.setattr(matrices, "_MOST", -1.0)  # all copies have the bits of their checkpoint
    with_own_bits = fused.fuse(modules_of(checkpoint("llama")), quantised=["int4"], own_bits=True)
    load_or_measure(_runner(with_own_bits), str(tmp_path))
    assert len(count_measured) == 4
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    load_or_measure(_runner(llama), str(tmp_path))
    assert len(count_measured) == 5
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


def test_a_damaged_profile_is_replaced(
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


def test_a_read_only_folder_will_do(
    tmp_path: Path, count_measured: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        load_or_measure(_runner(parts_of(checkpoint("llama"))), str(tmp_path / "file"))
    assert len(count_measured) == 1
    assert "could not be saved" in caplog.text


def test_without_time_left_a_coarse_grid_is_measured() -> None:
    """Every kind, choice, context and batch, but few numbers of rows."""
    parts = parts_of(checkpoint("llama"), "float32", ("int4",))
    runner = _runner(parts, 5000, choices=ALL_CHOICES)
    coarse, whole = measurements(runner, budget_s=0.0), measurements(runner)
    assert {(one.kind, one.context, one.batch) for one in coarse} == {
        (one.kind, one.context, one.batch) for one in whole
    }
    rows = [{one.rows for one in found if one.kind == HEAD} for found in (coarse, whole)]
    assert rows == [{1, 2, 8, 128}, set(profile.ROW_COUNTS)]
    assert LatencyModel.fit(coarse, parts.curve_names).covers(profile._grid(5000))


def test_passes_are_timed_as_they_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its second run on, a pass is in the buffers and captured before it is timed."""
    parts = operator_parts_of(checkpoint("llama"))
    cache = KVCache(parts.shapes, 300, dtype=parts.dtype, device=CPU, num_spare=1)
    buffers, driver = step_buffers(parts, cache, max_places=300), RecordingDriver()
    graphs = StepGraphs(parts, buffers, driver)
    runner = Runner(parts, cache, device=CPU, row_counts=None, buffers=buffers, graphs=graphs)
    timed, hold = profile._timed, buffers.hold
    runs: list[dict[str, int]] = []
    is_timing = False

    def noted(work: Any, device: torch.device) -> float:
        nonlocal is_timing
        runs.append({"captured": -driver.num_captures, "written": 0})
        is_timing = True
        seconds = timed(work, device)
        is_timing = False
        runs[-1]["captured"] += driver.num_captures
        return seconds

    def held(metadata: Any) -> Any:
        rows, is_new = hold(metadata)
        if is_timing:
            runs[-1]["written"] += is_new
        return rows, is_new

    monkeypatch.setattr(buffers, "hold", held)
    monkeypatch.setattr(profile, "_timed", noted)
    monkeypatch.setattr(profile, "_NUM_REPEATS", {"cpu": 1})
    with torch.inference_mode(), graphs.trial():
        works = list(profile._works(runner, "", dict.fromkeys(parts.curve_names, 1)))
        assert len(profile._times(works, CPU, math.inf)) == len(works)
    second = runs[len(works) :]
    assert sum(run["captured"] for run in runs) > 0
    assert sum(run["captured"] for run in second) == 0
    assert sum(run["written"] for run in second) == 1, "the fixed cost of a forward"


def test_on_a_gpu_the_fixed_cost_is_what_whole_passes_take_beyond_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts take a known time, and a pass one second more."""
    runner = _runner(parts_of(checkpoint("llama")))
    kinds = dict(zip(dict.fromkeys((*runner.parts.curve_names, HEAD)), (0.5, 0.25, 2.0), strict=True))
    found = [
        *(Measurement(kind=kind, rows=1, context=32, batch=1, seconds=seconds) for kind, seconds in kinds.items()),
        *(Measurement(kind=kind, rows=8, context=32, batch=1, seconds=9.0) for kind in kinds),
    ]
    num_passes, timed = 0, profile._timed

    def six_seconds_a_pass(work: Any, device: torch.device) -> float:
        before = num_passes
        took = timed(work, device)
        return 6.0 * (num_passes - before) or took

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal num_passes
        num_passes += 1
        return head(*args, **options)

    head = runner.head
    monkeypatch.setattr(runner, "head", counted)
    monkeypatch.setattr(profile, "_timed", six_seconds_a_pass)
    with torch.inference_mode():
        overhead = profile._fixed_cost(runner, found, "cuda:0")
        search = profile._of_search(runner, "cuda:0")
    assert (search.kind, search.rows, search.device) == (SEARCH, 128, "cuda:0")
    latency = LatencyModel.fit([*found, overhead, search], runner.parts.curve_names, devices=[""] * 8)
    assert latency.overhead_s == pytest.approx(1.0)
    assert latency.search_s == search.seconds > 0


class _Impatient(LoadLock):
    def take(self, timeout_s: float = 0.2) -> bool:
        return super().take(timeout_s)


def test_beside_an_endless_load_a_coarse_profile_is_not_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LoadLock(tmp_path) as loading, _Impatient(tmp_path) as mine:
        assert loading.share()
        assert mine.share()
        latency = profile.load_or_measure(_runner(parts_of(checkpoint("llama"))), str(tmp_path), lock=mine)
    assert latency.sublayer_s(0, rows=4, context=32, batch=1) > 0
    assert not list(tmp_path.glob("*.json"))
    assert "coarse" in caplog.text


def test_loads_run_side_by_side_and_a_measurement_alone(tmp_path: Path) -> None:
    with LoadLock(tmp_path) as first, LoadLock(tmp_path) as second, LoadLock(tmp_path) as third:
        assert first.share(SOON_S)
        assert second.share(SOON_S)
        assert not first.take(SOON_S), "the second still loads"
        assert second.take(SOON_S), "whoever waits to measure loads no more"
        assert not third.share(SOON_S)
        assert not first.take(SOON_S)
    with LoadLock(tmp_path) as first, LoadLock(tmp_path / "elsewhere") as second:
        assert first.take(SOON_S)
        assert second.take(SOON_S)


def test_a_process_that_is_stopped_or_killed_does_not_block_others_for_ever(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    other = os.fork()
    if not other:  # it has torch already; a Python of its own would import it for seconds
        try:
            with LoadLock(tmp_path) as lock:
                os.write(writing, str(lock.take(60.0)).encode())
                time.sleep(60)
        finally:
            os._exit(0)
    try:
        assert os.read(reading, 4) == b"True"
        os.kill(other, signal.SIGSTOP)
        with LoadLock(tmp_path) as lock:
            assert not lock.take(0.3)
            os.kill(other, signal.SIGKILL)
            assert lock.take(60.0)
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        os.close(reading)
        os.close(writing)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class _Clock:
    """A clock by which a pass takes as long as `seconds` says for torch's number of threads."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self._seconds, self._now = seconds, 0.0

    def __call__(self) -> float:
        self._now += self._seconds[torch.get_num_threads()]
        return self._now


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({1: 1.0, 2: 1.6, 4: 3.0}, 1),
        ({1: 4.0, 2: 2.1, 4: 2.0}, 2),
        ({1: 8.0, 2: 4.0, 4: 2.0}, 4),
        ({1: 2.0, 2: 1.0, 4: 9.0}, 2),
    ],
)
def test_the_fewest_threads_that_are_about_as_fast_as_any(seconds: dict[int, float], expected: int) -> None:
    scaled = {number: value / 1000 for number, value in seconds.items()}
    assert fastest_number(_runner(parts_of(checkpoint("llama"))), [1, 2, 4], _Clock(scaled)) == expected


def test_the_number_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that starts later decodes with the same number, so with the same rounding."""
    answers = iter([2, 1, 1])
    monkeypatch.setattr(profile, "num_cores", lambda: 4)
    monkeypatch.setattr(profile, "fastest_number", lambda runner, numbers: next(answers))
    runner, folder = _runner(parts_of(checkpoint("llama"))), str(tmp_path)
    assert [chosen_threads(runner, folder) for _ in range(2)] == [Threads(few=2, many=4)] * 2
    assert chosen_threads(runner, folder, remeasure=True) == Threads(few=1, many=4)
    (path,) = tmp_path.iterdir()
    for damaged in ("", "{", '{"few": 2}', "99"):
        path.write_text(damaged)
        answers = iter([1])
        assert chosen_threads(runner, folder).few == 1


def test_fewer_threads_decode_while_others_keep_the_cores_busy() -> None:
    now_s = waited_s = 0.0
    threads = YieldingThreads(Threads(few=4, many=8), clock=lambda: now_s, waited_s=lambda: waited_s)

    def numbers(seconds: float, share: float) -> list[int]:
        """Those used from second to second, in which the thread waits for a core for this share of its time."""
        nonlocal now_s, waited_s
        found = []
        for _ in range(round(seconds)):
            for _ in range(10):
                now_s, waited_s = now_s + 0.1, waited_s + 0.1 * share
                threads.use(1)
            found.append(torch.get_num_threads())
            threads.use(100)
            assert torch.get_num_threads() == 8
        return found

    before = torch.get_num_threads()
    try:
        assert numbers(5, 0.1) == [4] * 5
        assert numbers(5, 0.5) == [1] * 5
        assert numbers(5, 0.1) == [1] * 5
        back = numbers(8, 0.0)
        assert sorted(back) == back
        assert back[-1] == 4
        busy = [each for _ in range(6) for each in (*numbers(2, 0.5), *numbers(2, 0.0))]
        assert busy[-4:] == [1] * 4, "after attempts in vain, the next one waits longer"
    finally:
        torch.set_num_threads(before)


def test_passes_of_many_rows_use_all_cores_and_tokens_stay_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = {"prompt_token_ids": [5 + index % 90 for index in range(200)]}
    llm = LLM(
        demo.model_path(), dtype="float32", max_model_len=512, num_threads=1, enable_prefix_caching=False,
        speculation={"strategy": "ar"},
    )  # fmt: skip
    runner = llm.engine.stages.runner  # type: ignore[union-attr]
    texts, use, seen = [], Threads.use, set()

    def noted(self: Threads, num_rows: int) -> None:
        use(self, num_rows)
        seen.add((num_rows, torch.get_num_threads()))

    monkeypatch.setattr(Threads, "use", noted)
    for threads in (Threads(few=1, many=1), Threads(few=1, many=2), Threads(few=2, many=1)):
        runner.threads = threads
        seen.clear()
        (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        texts.append(output.outputs[0].token_ids)
        assert seen == {(200, threads.many), (1, threads.few)}
    assert texts[0] == texts[1] == texts[2]
    llm.shutdown()


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_engines_of_a_process_keep_their_numbers(family: str) -> None:
    """A thread that runs its first operator takes torch's number, which is that of the engine that was loaded last."""
    config = EngineConfig(model=checkpoint(family), dtype="float32", max_model_len=64, speculation={"strategy": "ar"})
    engines = {number: load_engine(config.replace(num_threads=number), with_tokenizer=False) for number in (1, 2)}
    request = Request(request_id="a", prompt_token_ids=[5, 6, 7], params=SamplingParams(temperature=0, max_tokens=4))
    for number, engine in engines.items():
        loop, seen = EngineLoop(engine), []
        hook = register_module_forward_hook(lambda *_, seen=seen: seen.append(torch.get_num_threads()))
        assert loop.submit(request).result(60).error is None
        hook.remove()
        loop.stop()
        assert set(seen[-4:]) == {number}


def test_in_deterministic_mode_the_smallest_second_pass_is_timed() -> None:
    runner = _runner(parts_of(checkpoint("llama")))
    runner.row_counts = RowCounts(1, 16)
    assert {one.rows for one in measurements(runner) if one.kind == HEAD} == {*profile.ROW_COUNTS, 17}
