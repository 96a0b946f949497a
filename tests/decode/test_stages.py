"""Where the passes of an engine in this process run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rayspec.choices import FULL
from rayspec.decode.search import Cosine
from rayspec.strategies.fixed import FixedPlan
from rayspec.types import Plan
from tests.engines import engine_with, requests_for
from tests.families import cases, checkpoint, parts_of

CPU = torch.device("cpu")


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
