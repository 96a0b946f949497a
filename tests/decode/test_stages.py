from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rayspec.choices import FULL
from rayspec.decode.runner import Runner
from rayspec.decode.search import Cosine
from rayspec.decode.stages import LocalStages
from rayspec.decode.work import Chunk, Prefill, Round, RoundEntry, SamplerSpec, TappedToken
from rayspec.generation import DecodingParams
from rayspec.model.kv_cache import KVCache
from rayspec.model.rows import RowSpan, one_run
from rayspec.types import Plan
from tests.families import VOCAB_SIZE, cases, checkpoint, parts_of

PATH = checkpoint("llama")
KNOWN = cases(PATH, (20, 5, 33), 16)
PLACES = tuple(one_run(start, 50) for start in (100, 0, 50))
CPU = torch.device("cpu")
ALL = Plan(choices=(FULL,) * 8, num_draft_tokens=6, source="test")


def _rows(tokens: Sequence[TappedToken]) -> list[RowSpan]:
    return [RowSpan(PLACES[int(token.sequence_id)], token.position, 1) for token in tokens]


def _prefilled() -> LocalStages:
    parts = parts_of(PATH)
    runner = Runner(parts, KVCache(parts.shapes, 200, dtype=torch.float32, device=CPU), device=CPU, row_counts=None)
    stages = LocalStages(runner, vocab_size=VOCAB_SIZE, verification="coupled", num_tap_tokens=8)
    params = DecodingParams(temperature=0, max_tokens=16)
    for name, prompt in enumerate(KNOWN.prompts):
        stages.open(SamplerSpec(sequence_id=str(name), params=params, seed=0, prompt_token_ids=prompt))
    chunks = [
        Chunk(str(name), RowSpan(PLACES[name], 0, len(prompt)), prompt, sample=True)
        for name, prompt in enumerate(KNOWN.prompts)
    ]
    stages.start(Prefill(id=1, chunks=chunks)).result()
    return stages


def _round(keep: Any = None, stages: LocalStages | None = None, *, num_taps: int = 0, **options: Any) -> Any:
    entries = [
        RoundEntry(
            sequence_id=str(name),
            runs=PLACES[name],
            length=len(prompt) + 1,
            last_token=KNOWN.expected[name][0],
            max_draft_tokens=num_tokens,
            **options,
        )
        for name, (prompt, num_tokens) in enumerate(zip(KNOWN.prompts, (4, 0, 6), strict=True))
    ]
    work = Round(id=2, entries=entries, plan=ALL, keep_drafting=keep, num_taps=num_taps)
    return (stages or _prefilled()).start(work).result()


def test_a_draft_ends_at_an_end_token_and_when_it_is_told_to() -> None:
    end = KNOWN.expected[2][3]
    result = _round(end_tokens=(end,))
    assert result.drafts[2].token_ids == list(KNOWN.expected[2][1:4])
    asked: list[list[int]] = []

    def keep(confidences: Any) -> list[bool]:
        asked.append([len(one) for one in confidences])
        return [len(one) < 2 for one in confidences]

    result = _round(keep)
    assert [len(one.token_ids) for one in result.drafts] == [2, 0, 2]
    assert asked == [[1, 1], [2, 2]]


def test_passes_searches_and_moves_run_on_the_engine_s_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the thread's current device, and an engine of cuda:1 is used from any thread."""
    current: list[torch.device] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    stages = _prefilled()
    monkeypatch.setattr("rayspec.decode.stages.on_device", on)
    for owner, name in ((stages.span, "run"), (stages.span, "move"), (stages.span, "search")):
        monkeypatch.setattr(owner, name, _requiring(getattr(owner, name), current))
    _round(stages=stages, num_taps=1)
    stages.move([])
    token = TappedToken("0", len(KNOWN.prompts[0]))
    stages.search([token], _rows([token]), Cosine(num_tokens=1)).result()
    assert not current


def _requiring(method: Callable[..., Any], current: Sequence[torch.device]) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        assert list(current) == [CPU]
        return method(*args, **options)

    return run
