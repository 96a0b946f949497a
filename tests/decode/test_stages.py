from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rayspec.choices import FULL, choices_of
from rayspec.decode.runner import Runner
from rayspec.decode.search import Cosine
from rayspec.decode.stages import LocalStages
from rayspec.decode.work import Chunk, Prefill, Round, RoundEntry, SamplerSpec, TappedToken
from rayspec.generation import DecodingParams
from rayspec.model.kv_cache import KVCache
from rayspec.model.rows import RowSpan, one_run
from rayspec.types import Plan, no_draft
from tests.families import VOCAB_SIZE, cases, checkpoint, parts_of

PATH = checkpoint("llama")
KNOWN = cases(PATH, (20, 5, 33), 16)
PLACES = tuple(one_run(start, 50) for start in (100, 0, 50))
CPU = torch.device("cpu")


def _rows(tokens: Sequence[TappedToken]) -> list[RowSpan]:
    return [RowSpan(PLACES[int(token.sequence_id)], token.position, 1) for token in tokens]


def _stages(num_tap_tokens: int = 8) -> LocalStages:
    parts = parts_of(PATH)
    runner = Runner(parts, KVCache(parts.shapes, 200, dtype=torch.float32, device=CPU), device=CPU, row_counts=None)
    stages = LocalStages(runner, vocab_size=VOCAB_SIZE, verification="coupled", num_tap_tokens=num_tap_tokens)
    for name, prompt in enumerate(KNOWN.prompts):
        stages.open(
            SamplerSpec(
                sequence_id=str(name),
                params=DecodingParams(temperature=0, max_tokens=16),
                seed=0,
                prompt_token_ids=prompt,
                output_token_ids=(),
                eos_token_ids=(),
            )
        )
    return stages


def _prefill(stages: LocalStages, chunks: list[Chunk]) -> Any:
    return stages.start(Prefill(id=1, chunks=chunks)).result().committed


def _chunk(name: int, tokens: list[int], context: int = 0, sample: bool = True) -> Chunk:
    return Chunk(str(name), RowSpan(PLACES[name], context, len(tokens)), tokens, sample=sample)


def _round(stages: LocalStages, entries: list[RoundEntry], plan: Plan, keep: Any = None, num_taps: int = 0) -> Any:
    return stages.start(Round(id=2, entries=entries, plan=plan, keep_drafting=keep, num_taps=num_taps)).result()


def _prefilled(num_tap_tokens: int = 8) -> LocalStages:
    stages = _stages(num_tap_tokens)
    chunks = [_chunk(name, prompt) for name, prompt in enumerate(KNOWN.prompts)]
    committed = _prefill(stages, chunks)
    assert [tuple(one.token_ids) for one in committed if one] == [tokens[:1] for tokens in KNOWN.expected]
    return stages


def _entries(lengths: tuple[int, ...] = (4, 0, 6), **options: Any) -> list[RoundEntry]:
    return [
        RoundEntry(
            sequence_id=str(name),
            runs=PLACES[name],
            length=len(prompt) + 1,
            last_token=KNOWN.expected[name][0],
            max_draft_tokens=lengths[name],
            **options,
        )
        for name, prompt in enumerate(KNOWN.prompts)
    ]


def _plan(*skip: int) -> Plan:
    return Plan(choices=choices_of([index not in skip for index in range(8)]), num_draft_tokens=6, source="test")


@pytest.mark.parametrize(("skip", "num_taps"), [((), 0), ((2, 5, 6), 0), ((2, 5, 6), 2)])
def test_a_round_commits_what_is_accepted_and_one_more(skip: tuple[int, ...], num_taps: int) -> None:
    result = _round(_prefilled(), _entries(), _plan(*skip), None, num_taps)
    assert [len(one.token_ids) for one in result.drafts] == [4, 0, 6]
    assert result.num_draft_steps == 6
    for name, (committed, drafted, accepted) in enumerate(
        zip(result.committed, result.drafts, result.num_accepted, strict=True)
    ):
        assert committed.finite
        assert tuple(committed.token_ids) == KNOWN.expected[name][1 : 2 + accepted]
        assert list(committed.token_ids[:accepted]) == drafted.token_ids[:accepted]
        if accepted < len(drafted.token_ids):
            assert committed.token_ids[accepted] != drafted.token_ids[accepted]
        assert all(0 < confidence <= 1 for confidence in drafted.confidences)
    if not skip:
        assert result.num_accepted == [4, 0, 6]


def test_a_draft_ends_at_an_end_token_and_when_it_is_told_to() -> None:
    end = KNOWN.expected[2][3]
    result = _round(_prefilled(), _entries(end_tokens=(end,)), _plan())
    assert result.drafts[2].token_ids == list(KNOWN.expected[2][1:4])
    asked: list[list[int]] = []

    def keep(confidences: Any) -> list[bool]:
        asked.append([len(one) for one in confidences])
        return [len(one) < 2 for one in confidences]

    result = _round(_prefilled(), _entries(), _plan(), keep)
    assert [len(one.token_ids) for one in result.drafts] == [2, 0, 2]
    assert asked == [[1, 1], [2, 2]]


@pytest.mark.parametrize("num_drafted", [0, 6])
def test_taps_are_the_targets_states_of_newest_tokens(num_drafted: int) -> None:
    stages = _prefilled()
    _round(stages, _entries((num_drafted,) * 3), _plan(2), num_taps=2)
    tokens = [TappedToken(str(name), len(KNOWN.prompts[name])) for name in range(2)]
    search = stages.plan_search(tokens, _rows(tokens))
    states = search.start()
    assert states.shape == (2, 1, 64)
    newest = torch.tensor([KNOWN.expected[name][0] for name in range(2)])
    assert torch.equal(states[:, 0], stages.runner.parts.embed(newest)[0])
    for sublayer in range(8):
        states = search.run(sublayer, FULL, states)
        assert search.similarity(sublayer, states) == pytest.approx([1.0], abs=1e-5)
    assert stages.head.next_tokens(tokens).tolist() == [KNOWN.expected[name][1] for name in range(2)]
    assert search.agreement(states).num_agreed.tolist() == [2]


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
    _round(stages, _entries(), no_draft(stages.num_sublayers, "test"), num_taps=1)
    stages.move([])
    token = TappedToken("0", len(KNOWN.prompts[0]))
    stages.search([token], _rows([token]), Cosine(num_tokens=1)).result()
    assert not current


def _requiring(method: Callable[..., Any], current: Sequence[torch.device]) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        assert list(current) == [CPU]
        return method(*args, **options)

    return run
