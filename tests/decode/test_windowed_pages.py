"""Sliding-window layers give pages back, and no row misses a key that it sees."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from rayspec.config import EngineConfig
from rayspec.decode.loading import affordable_slots, cache_size
from rayspec.decode.pages import PageTable, WindowedPages, extend_hashes
from rayspec.decode.scheduler import Scheduler
from rayspec.decode.sequence import SequenceState
from rayspec.model import attention
from rayspec.model.kv_cache import PAGE_SIZE
from rayspec.model.rows import RowSpan, slots_between
from tests.decode.scheduling import commit, sequence_of
from tests.engines import GREEDY, NUM_BEHIND, RandomPlans, complete, engine_with, tokens_of
from tests.exhaustive import few_of
from tests.families import WINDOW, cases, checkpoint, parts_of

LOOKAHEAD, NUM_BESIDE, BUDGET = 4, 3, 64


def _pages(window: int, num_behind: int) -> WindowedPages:
    needed = WindowedPages.num_slots_needed(
        window,
        num_behind,
        max_num_seqs=6,
        max_rows=LOOKAHEAD + NUM_BESIDE,
        max_prefill_tokens=BUDGET,
        num_cohorts=1,
    )
    return WindowedPages(needed, window, num_behind)


class _Store:
    """Stands for a windowed layer's keys: each slot holds the tokens up to its own."""

    def __init__(self, pages: WindowedPages, window: int) -> None:
        self._slots: list[tuple[int, ...] | None] = [None] * (pages.pool.num_pages * PAGE_SIZE)
        self._window = window

    def write(self, sequence: SequenceState, rows: RowSpan, token_ids: Sequence[int]) -> None:
        """Write the rows, and require that each row finds the keys in its window."""
        slots = slots_between(rows.windowed, 0, rows.end)
        for place in range(rows.context, rows.end):
            self._slots[slots[place]] = tuple(token_ids[: place + 1])
            for seen in range(max(0, place + 1 - self._window), place + 1):
                assert self._slots[slots[seen]] == tuple(token_ids[: seen + 1]), (sequence.sequence_id, place, seen)


@pytest.mark.parametrize(
    ("window", "seed"), few_of([(w, s) for w in (1, 12, 16, 33, 100) for s in range(6)], [(33, 0)])
)
def test_every_row_finds_its_window(window: int, seed: int) -> None:
    """While sequences share prefixes, are preempted, aborted, drafted and finished, and without a page too many."""
    rng, pages = random.Random(seed), _pages(window, num_behind=seed % 3 * 5)
    scheduler = Scheduler(
        1024, windowed=pages, max_num_seqs=6, max_prefill_tokens=BUDGET, lookahead=LOOKAHEAD, num_beside=NUM_BESIDE
    )
    store, left, num_cached, num_preempted = _Store(pages, window), 150, 0, 0
    texts = [[number] * 150 + [9] * 150 for number in range(4)]
    while left or scheduler.waiting or scheduler.running:
        if left and len(scheduler.waiting) < 4:
            prompt = rng.choice(texts)[: rng.randint(1, 300)]
            scheduler.add(sequence_of(left, [*prompt, *[left] * rng.randint(0, 20)], rng.randint(1, 60)))
            left -= 1
        if scheduler.running and rng.random() < 0.05:
            scheduler.remove(rng.choice([*scheduler.running, *scheduler.waiting]))
        step = scheduler.schedule()
        num_preempted += len(step.preempted)
        num_cached += sum(sequence.num_computed for sequence in step.admitted)
        for sequence, chunk in zip(step.prefill, step.chunks, strict=True):
            store.write(sequence, chunk.rows, sequence.token_ids)
            sequence.num_computed += chunk.rows.num_rows
            commit(scheduler, sequence, [rng.randint(0, 9)] if chunk.sample else [])
        for sequence in step.decode:
            num_rows = min(1 + LOOKAHEAD, sequence.num_remaining)
            drafted = [rng.randint(10, 19) for _ in range(num_rows + NUM_BESIDE)]  # all but the first may be wrong
            rows = sequence.rows(sequence.num_tokens - 1, num_rows)
            store.write(sequence, rows, sequence.token_ids + drafted)
            accepted = rng.randint(0, num_rows - 1)
            commit(scheduler, sequence, [*drafted[:accepted], rng.randint(0, 9)])
    assert num_cached > 1000
    assert num_preempted > 0
    assert pages.pool.num_free == pages.pool.num_pages
    assert not pages.pool._num_users.any()


def test_pages_outside_the_window_are_given_back_and_found_until_they_are_reused() -> None:
    pages, table = WindowedPages(16 * PAGE_SIZE, 2 * PAGE_SIZE, num_behind=0), PageTable()
    token_ids = list(range(8 * PAGE_SIZE))
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids, 8)
    pages.grow(table, 0, len(token_ids))
    for one in hashes:
        pages.pool.register(table, one)
    pages.grow(table, 8 * PAGE_SIZE, 8 * PAGE_SIZE + 1)
    assert (table.num_gone, len(table.pages), pages.pool.num_free) == (6, 3, 13)
    assert slots_between(table.runs, 0, 9 * PAGE_SIZE)[6 * PAGE_SIZE] == table.pages[0] * PAGE_SIZE
    assert not pages.holds_window(table, 7 * PAGE_SIZE)
    assert pages.holds_window(table, 8 * PAGE_SIZE)
    assert pages.longest_prefix(hashes) == 8
    assert pages.longest_prefix(hashes[:5]) == 5, "what was given back can still be shared"
    pages.pool.forget(pages.pool.find(hashes[3:4]))
    assert pages.longest_prefix(hashes[:5]) == 3, "the windows after five and four pages have a hole"
    other = PageTable()
    pages.share(other, hashes)
    assert (other.num_gone, other.pages) == (6, table.pages[:2])


@pytest.mark.parametrize("family", few_of(["gemma2", "gemma3_text", "mistral", "phi3", "mixtral"], ["gemma3_text"]))
@pytest.mark.parametrize("way", ["plain", "static", "deterministic"])
def test_long_texts_equal_generate_in_a_store_of_few_pages(
    family: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All runs of windows are read in place, though they are short."""
    monkeypatch.setattr(attention, "_LONG_RUN_BYTES", 1)
    parts = parts_of(checkpoint(family))
    known = cases(checkpoint(family), (600, 40, 333, 90), 120)
    engine = engine_with(
        parts,
        RandomPlans(3, len(parts.sublayers)),
        is_static=way == "static",
        deterministic=way == "deterministic",
        max_num_seqs=3,
        max_num_batched_tokens=64,
    )
    cache = engine.stages.runner.cache  # type: ignore[attr-defined]
    assert cache.num_windowed_slots == (2 * 3 * (2 + -(-(WINDOW + NUM_BEHIND + 6) // PAGE_SIZE)) + 4) * PAGE_SIZE < 600
    outputs = complete(engine, known.prompts, GREEDY.replace(max_tokens=120, ignore_eos=True))
    assert tokens_of(outputs) == known.expected


def test_a_shared_prefix_is_found_where_its_window_is() -> None:
    parts = parts_of(checkpoint("gemma2"))
    document = [random.Random(4).randrange(3, 190) for _ in range(320)]
    questions = [[*document, 5, number] for number in range(4)]
    expected = tokens_of(complete(engine_with(parts, enable_prefix_caching=False), questions))
    engine = engine_with(parts, max_num_seqs=2, max_num_batched_tokens=64)
    assert engine._scheduler.windowed is not None
    outputs = complete(engine, questions)
    assert tokens_of(outputs) == expected
    assert [output.metrics.num_cached_tokens for output in outputs] == [0, 320, 320, 320]


def test_free_memory_holds_more_tokens_where_layers_have_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(checkpoint("gemma2"))  # two layers of four have windows, and a slot takes 256 bytes a layer
    config = EngineConfig(model="test", max_num_seqs=2, max_num_batched_tokens=64, speculation={"strategy": "ar"})
    monkeypatch.setattr("rayspec.decode.loading.free_bytes", lambda device: 4 * 2**20)
    windowed = cache_size(config, 10**6, WINDOW).num_windowed_slots
    assert affordable_slots(config, parts, parts.device) == (2**20 - windowed * 512) // 512
    monkeypatch.setattr("rayspec.decode.loading.free_bytes", lambda device: 4 * 2**16)
    assert affordable_slots(config, parts, parts.device) == 2**16 // 1024, "one store for all layers"
    half = config.replace(kv_cache_share=0.125)
    assert affordable_slots(half, parts, parts.device) == 2**15 // 1024
    assert affordable_slots(config, parts, parts.device, num_sharing=2) == 2**15 // 1024
