"""Where passes of this process run: on which device, in which threads, and over which rows."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from rayspec import local_engine
from rayspec.choices import FULL
from rayspec.config import EngineConfig
from rayspec.decode.runner import Runner, in_thread_of_its_own
from rayspec.decode.search import Cosine
from rayspec.model.kv_cache import PAGE_SIZE, KeyBudget, KeyBudgets, KVCache
from rayspec.model.row_counts import RowCounts
from rayspec.model.rows import RowSpan, one_run
from rayspec.strategies.fixed import FixedPlan
from rayspec.types import Plan
from tests.engines import engine_with, requests_for
from tests.families import cases, checkpoint, parts_of

CPU = torch.device("cpu")


@torch.inference_mode()
def test_padding_rows_touch_nothing_that_is_in_use() -> None:
    parts = parts_of(checkpoint("llama"))
    cache = KVCache(parts.shapes, 120, dtype=torch.float32, device=CPU, num_spare=8)
    runner = Runner(parts, cache, device=CPU, row_counts=RowCounts(8, 8))
    before = {layer: keys[:, :120].clone() for layer, keys in runner.cache.keys.items()}
    batch = runner.batch([RowSpan(one_run(7, 1000), 0, 1)], token_ids=[5])
    runner.run(batch, runner.embed(batch))
    for layer, keys in runner.cache.keys.items():
        changed = (keys[:, :120] != before[layer]).any(-1).any(0).nonzero().flatten().tolist()
        assert changed == [7]


@torch.inference_mode()
def test_a_verify_notes_pages_in_one_batch_and_row_by_row() -> None:
    parts, notes = parts_of(checkpoint("llama")), []
    budgets = KeyBudgets(pages=KeyBudget(newest=1, looked_at=2))
    for row_counts in (None, RowCounts(8, 8)):
        cache = KVCache(
            parts.shapes, 512, dtype=torch.float32, device=CPU, num_spare=8, budgets=budgets, notes_pages=True
        )
        runner = Runner(parts, cache, device=CPU, row_counts=row_counts)
        chunk = runner.batch([RowSpan(one_run(0, 512), 0, 157)], token_ids=torch.arange(3, 160), fixed_shape=False)
        runner.run(chunk, runner.embed(chunk))
        assert bool((runner.cache.looked_at == -1).all()), "nobody asked for notes"
        verify = runner.batch([RowSpan(one_run(0, 512), 157, 5)], token_ids=torch.arange(3, 8), scores_pages=True)
        runner.run(verify, runner.embed(verify))
        notes.append(runner.cache.looked_at)
    assert notes[0] is not None
    assert notes[1] is not None
    assert torch.equal(notes[0], notes[1])
    assert bool((notes[0][:, 157 // PAGE_SIZE] >= 0).all()), "in every layer"


def test_passes_searches_and_moves_run_on_the_engine_s_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the thread's current device, and an engine of cuda:1 is used from any thread."""
    current: list[torch.device] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    plan = Plan(choices=(FULL,) * 8, num_draft_tokens=3, source="all")
    engine = engine_with(parts_of(checkpoint("llama")), FixedPlan(plan, capture=True))
    stages: Any = engine.stages
    monkeypatch.setattr("rayspec.decode.stages.on_device", on)
    for owner, name in ((stages.span, "run"), (stages.span, "move"), (stages.span, "search")):
        monkeypatch.setattr(owner, name, _requiring(getattr(owner, name), current))
    for request in requests_for(cases(checkpoint("llama"), (20, 5), 16).prompts):
        engine.add(request)
    for _ in range(2):
        engine.step()
    stages.move([])
    token = engine._planner.tapped[-1]
    (sequence,) = [one for one in engine._scheduler.running if one.sequence_id == token.sequence_id]
    assert stages.search([token], [sequence.rows(token.position, 1)], Cosine(num_tokens=1)).result().values
    assert not current


def _requiring(method: Callable[..., Any], current: Sequence[torch.device]) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        assert list(current) == [CPU]
        return method(*args, **options)

    return run


def test_an_error_is_raised_here() -> None:
    with pytest.raises(KeyError, match="what"):
        in_thread_of_its_own(lambda: {}["what"])


def _sleep() -> None:
    for _ in range(1000):
        time.sleep(0.01)


def test_an_interrupt_ends_the_work_too() -> None:
    """Else it may be inside torch when Python ends, which then aborts. Python drops an exception in a finalizer."""
    ended = threading.Event()

    def work() -> None:
        try:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)  # to the main thread
            with suppress(SystemExit):
                _sleep()
            os.kill(os.getpid(), signal.SIGINT)  # again
            _sleep()
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        in_thread_of_its_own(work)
    assert ended.is_set()


def test_engines_are_loaded_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads keeps no helpers of OpenMP beside those of whoever decodes."""
    seen: list[threading.Thread] = []
    load = local_engine.load_weights
    monkeypatch.setattr(
        local_engine, "load_weights", lambda config: seen.append(threading.current_thread()) or load(config)
    )
    config = EngineConfig(model=checkpoint("llama"), device="cpu", num_threads=1, max_model_len=64)
    local_engine.load_engine(config, with_tokenizer=False).shutdown()
    assert not seen[0].is_alive()


@pytest.mark.parametrize(
    ("asked", "expected"), [({}, "20000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")]
)
def test_idle_threads_spin_for_a_short_time(asked: dict[str, str], expected: str) -> None:
    """By what torch's own OpenMP prints when it is loaded after rayspec. What the user has set stays."""
    torch_folder = Path(importlib.util.find_spec("torch").origin).parent  # type: ignore[union-attr,arg-type]
    (library,) = [*torch_folder.glob("lib/libgomp*"), *torch_folder.parent.glob("torch.libs/libgomp*")]
    script = f"import rayspec, sys, ctypes; assert 'torch' not in sys.modules; ctypes.CDLL({str(library)!r})"
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**environment, **asked, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert f"GOMP_SPINCOUNT = '{expected}'" in done.stderr
