"""Passes in static buffers: the texts of transformers' generate, by launches that depend on the bucket only."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.device.launches import Launch, LaunchRecorder, first_difference
from rayspec.choices import FULL, SKIP, Choices, choices_of
from rayspec.config import EngineConfig, SamplingParams
from rayspec.decode.loading import make_buffers
from rayspec.decode.runner import Batch, Runner
from rayspec.decode.stages import LocalStages
from rayspec.model.architecture import Decomposition
from rayspec.model.kv_cache import PAGE_SIZE, KVCache
from rayspec.model.rows import RowSpan, Runs, runs_of_pages
from rayspec.model.static_rows import BatchMetadata, StaticRows
from rayspec.types import Plan
from tests.engines import GREEDY, RandomPlans, complete, engine_with, requests_for, step_buffers, tokens_of
from tests.exhaustive import few_of
from tests.families import FAMILIES, cases, checkpoint, operator_parts_of, parts_of

CPU = torch.device("cpu")
NUM_SLOTS, MAX_PLACES = 8192, 1024
# How many experts see a row is decided by the row.
DYNAMIC = {"mixtral", "qwen3_moe"}
_MAX_SEQUENCES = 8
TREE = (-1, 0, 0, 1, 3)


def _runner(family: str) -> Runner:
    return _runner_of(operator_parts_of(checkpoint(family)))


def _runner_of(parts: Decomposition) -> Runner:
    cache = KVCache(parts.shapes, NUM_SLOTS, dtype=torch.float32, device=CPU, num_spare=1)
    buffers = step_buffers(parts, cache, max_places=MAX_PLACES)
    return Runner(parts, cache, device=CPU, row_counts=None, buffers=buffers)


def _pages(seed: int, number: int) -> Runs:
    """Pages of one sequence, none of which belong to another number."""
    pages = list(range(number, NUM_SLOTS // PAGE_SIZE, _MAX_SEQUENCES))[:48]
    random.Random(seed).shuffle(pages)
    return runs_of_pages(pages, PAGE_SIZE)


def _batch(runner: Runner, seed: int, rows: Sequence[int], parents: tuple[int, ...] = ()) -> Batch:
    """Sequences with other contexts and pages for each seed."""
    contexts = [random.Random(f"{seed} {number}").randrange(1, 700) for number in range(len(rows))]
    spans = [
        RowSpan(_pages(seed, number), context, count, parents if count == len(parents) else ())
        for number, (context, count) in enumerate(zip(contexts, rows, strict=True))
    ]
    tokens = [random.Random(f"{seed} {row}").randrange(100) for row in range(sum(rows))]
    return runner.batch(spans, token_ids=tokens)


def _launches(runner: Runner, batch: Batch, choices: Choices | None) -> list[Launch]:
    """From the numbers in the buffers to the logits."""
    assert isinstance(batch.buckets[0][1], BatchMetadata)
    with torch.no_grad():
        runner._step.hold(batch.buckets[0][1])  # type: ignore[union-attr]
    with torch.no_grad(), LaunchRecorder() as recorder:
        logits = runner.head(runner.run(batch, runner.embed(batch), choices=choices))
    assert logits.isfinite().all()
    return recorder.launches


@pytest.mark.parametrize(
    "family", few_of([family for family in FAMILIES if family not in DYNAMIC], ("llama", "gemma2", "qwen3"))
)
@pytest.mark.parametrize(
    ("rows", "other_rows", "parents", "skips"),
    [
        ((1,), (1,), (), False),
        ((1, 1, 1), (1, 1, 1, 1), (), False),
        ((1, 1, 1), (1, 1, 1, 1), (), True),
        ((7,), (8,), (), False),
        ((5, 1, 5), (3, 5, 2), (), False),
        ((5, 1, 5), (5, 2, 4), TREE, False),
    ],
    ids=["decode", "decode-batch", "draft", "verify", "verify-batch", "verify-trees"],
)
def test_a_bucket_has_the_same_launches_whatever_is_in_it(
    family: str, rows: Sequence[int], other_rows: Sequence[int], parents: tuple[int, ...], skips: bool
) -> None:
    runner = _runner(family)
    choices = choices_of([not skips or index % 3 != 1 for index in range(len(runner.parts.sublayers))])
    one, other = _batch(runner, 1, rows, parents), _batch(runner, 2, other_rows, parents)
    assert one.buckets[0][1].bucket == other.buckets[0][1].bucket  # type: ignore[union-attr]
    assert first_difference(_launches(runner, one, choices), _launches(runner, other, choices)) is None


@pytest.mark.parametrize("rows", [(1,), (1,) * 8, (5, 1, 5)])
def test_a_layer_is_few_launches_whatever_the_batch(rows: Sequence[int]) -> None:
    runner = _runner("llama")
    num_sublayers = len(runner.parts.sublayers)
    batch = _batch(runner, 1, rows)
    counts = [len(_launches(runner, batch, (choice,) * num_sublayers)) for choice in (FULL, SKIP)]
    assert counts[0] - counts[1] <= 10 * (num_sublayers // 2)


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, seed=5, max_tokens=16)])
def test_texts_and_drafts_do_not_depend_on_how_often_the_host_looks(verification: str, params: SamplingParams) -> None:
    parts, known = operator_parts_of(checkpoint("llama")), cases(checkpoint("llama"), (1, 80, 37, 3), 16)
    found = []
    for interval in (1, 2, 5):
        engine = engine_with(
            parts, RandomPlans(7, len(parts.sublayers)), verification=verification, max_num_seqs=4,
            max_num_batched_tokens=512, is_static=True,
        )  # fmt: skip
        assert isinstance(engine.stages, LocalStages)
        engine.stages.head.draft_look_interval = interval
        texts = tokens_of(complete(engine, known.prompts, params))
        stats = engine.stats
        found.append((texts, stats.num_rounds, stats.num_draft_tokens, stats.num_accepted_tokens))
    assert found[0] == found[1] == found[2]
    assert found[0][2] > 0


class _Looks:
    """How often the host asks for numbers of the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num = 0
        for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
            monkeypatch.setattr(Tensor, name, self._counting(getattr(Tensor, name)))

    def _counting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.num += 1
            return method(*arguments, **options)

        return counted


@pytest.mark.parametrize(("num_draft_tokens", "expected"), [(0, 1), (3, 2), (6, 3)])
def test_the_host_looks_once_a_round_and_once_for_three_drafted_tokens(
    num_draft_tokens: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, known = parts_of(checkpoint("llama")), cases(checkpoint("llama"), (1, 80, 37, 3), 16)
    choices = (FULL,) * len(parts.sublayers)
    plan = Plan(choices=choices, num_draft_tokens=num_draft_tokens, source="test") if num_draft_tokens else None
    engine = engine_with(parts, plan, max_num_seqs=4, max_num_batched_tokens=512, is_static=True)
    assert isinstance(engine.stages, LocalStages)
    engine.stages.runner._buffers = None  # whose CPU reference looks at everything
    for request in requests_for(known.prompts, GREEDY):
        engine.add(request)
    engine.step()
    looks, before = _Looks(monkeypatch), engine.stats.num_rounds
    engine.step()
    assert engine.stats.num_rounds == before + 4
    assert looks.num == expected


def test_buffers_whose_attention_is_wrong_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second sequence reads the first's pages."""
    parts, config = operator_parts_of(checkpoint("gemma2")), EngineConfig(model="any")
    cache = KVCache(parts.shapes, 64, dtype=torch.float32, device=CPU, num_spare=1)
    monkeypatch.setattr("rayspec.decode.loading.has_operators", lambda device: True)
    assert make_buffers(config, parts, cache, 64) is not None
    assert not caplog.messages
    mixed = StaticRows._mixed

    def wrong(rows: StaticRows, *args: Any) -> torch.Tensor:
        return mixed(replace(rows, block_table=rows.block_table[:1].expand_as(rows.block_table)), *args)

    monkeypatch.setattr(StaticRows, "_mixed", wrong)
    assert make_buffers(config, parts, cache, 64) is None
    assert "passes have no static buffers, and so no CUDA graphs: attention of layer 0 differs" in caplog.text
