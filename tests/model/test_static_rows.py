import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from rayspec.choices import Keys
from rayspec.config import MAX_TREE_TOKENS
from rayspec.model.attention import AttentionKind, pack
from rayspec.model.kv_cache import PAGE_SIZE, KeyBudget, KeyBudgets, KVCache, LayerShape
from rayspec.model.rows import MAX_TREE_ROWS, RowSpan, Runs, bucket_of, one_run, runs_of_pages, slots_between
from rayspec.model.static_rows import BatchMetadata, Staging, StepBuffers

NUM_SLOTS = 256
TREE = (-1, 0, -3, 1)


CPU = torch.device("cpu")


def _cache(num_windowed_slots: int = 0) -> KVCache:
    """Filled at random."""
    store: Any = {"num_windowed_slots": num_windowed_slots, "windowed_layers": [0], "num_spare": 1, "device": CPU}
    budgets = KeyBudgets(window=KeyBudget(newest=2))
    cache = KVCache({0: LayerShape(1, 4, 4)}, NUM_SLOTS, dtype=torch.float32, budgets=budgets, **store)
    for tensor in (cache.keys[0], cache.values[0]):
        tensor.normal_(generator=torch.Generator().manual_seed(0))
    return cache


def _buffers(cache: KVCache | None = None, max_rows: int = 32) -> StepBuffers:
    cache = cache or _cache()
    return StepBuffers(
        cache, max_rows=max_rows, max_sequences=4, max_places=128, hidden_size=8, dtype=torch.float32, device=CPU
    )


def _metadata(spans: Sequence[RowSpan], token_ids: Sequence[int] | torch.Tensor = ()) -> BatchMetadata:
    paths = [span.paths() for span in spans]
    return BatchMetadata(bucket_of(spans, paths), spans, paths, token_ids)


PAGES: Runs = runs_of_pages([7, 2, 3], PAGE_SIZE)


def test_rows_of_a_tree_say_what_they_see() -> None:
    rows, _ = _buffers().hold(_metadata([RowSpan(PAGES, 10, 4, TREE)]))
    assert rows.positions.tolist() == [10, 11, 8, 12]
    assert rows.shared is not None
    assert rows.bits is not None
    assert rows.shared.tolist() == [10, 10, 8, 10]
    assert [bin(bits) for bits in rows.bits.tolist()] == ["0b1", "0b11", "0b100", "0b1011"]


def test_a_pass_is_uploaded_once_and_again_after_another_one() -> None:
    buffers = _buffers()
    first, other = _metadata([RowSpan(PAGES, 3, 1)]), _metadata([RowSpan(one_run(0, 16), 4, 1)])
    assert [buffers.hold(each)[1] for each in (first, first, other, first)] == [True, False, True, True]
    rows, _ = buffers.hold(first)
    assert (rows.contexts.tolist(), rows.block_table[0, :3].tolist()) == ([3], [7, 2, 3])


def test_buckets_that_rarely_come_back_are_not_kept() -> None:
    """The rows of chunks above 512 are not padded, so nearly each would stay."""
    cache = KVCache({0: LayerShape(1, 4, 4)}, 1024, dtype=torch.float32, device=CPU, num_spare=1)
    options: Any = {"hidden_size": 8, "dtype": torch.float32, "device": CPU}
    buffers = StepBuffers(cache, max_rows=1024, max_sequences=4, max_places=1024, **options)
    long = [_metadata([RowSpan(one_run(0, 1024), 0, num)]) for num in range(513, 533)]
    for metadata in (_metadata([RowSpan(one_run(0, 1024), 0, 9)]), *long, long[3]):
        rows, _ = buffers.hold(metadata)
    assert {bucket.num_rows for bucket in buffers._rows} == {16, 516}
    assert rows.slots.tolist() == list(range(516))
    assert buffers.hold(long[3])[0] is rows


def test_rows_beyond_the_pages_of_their_sequence_are_refused() -> None:
    """Also where a sequence with more pages was before it."""
    buffers = _buffers()
    buffers.hold(_metadata([RowSpan(PAGES, 40, 1)]))
    with pytest.raises(ValueError, match="beyond the pages"):
        buffers.hold(_metadata([RowSpan(one_run(0, PAGE_SIZE), PAGE_SIZE, 1)]))


def test_a_pass_that_was_written_in_part_is_written_again() -> None:
    buffers = _buffers()
    tokens: list[int] = [1, 2]  # one too many
    metadata = _metadata([RowSpan(PAGES, 3, 1)], tokens)
    with pytest.raises(ValueError, match="2 tokens for 1 rows"):
        buffers.hold(metadata)
    tokens.pop()
    rows, is_new = buffers.hold(metadata)
    assert is_new
    assert rows.tokens.tolist() == [1]
    assert rows.block_table[0, :3].tolist() == [7, 2, 3]


def _random_spans(rng: random.Random) -> list[RowSpan]:
    """Sequences whose pages lie anywhere in the cache."""
    spans = []
    for _ in range(rng.randint(1, 4)):
        pages = rng.sample(range(NUM_SLOTS // PAGE_SIZE), rng.randint(1, 8))
        num_rows = rng.randint(1, 8)
        spans.append(RowSpan(runs_of_pages(pages, PAGE_SIZE), rng.randint(0, len(pages) * PAGE_SIZE - 8), num_rows))
    return spans


def test_pages_and_slots_are_those_of_the_pass_whatever_was_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy takes few pages at a time, and some copies fail half-way."""
    rng, buffers, index_copy = random.Random(0), _buffers(), torch.Tensor.index_copy_
    monkeypatch.setattr("rayspec.model.static_rows._MOST_ENTRIES", 3)

    def failing(tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
        copied = index_copy(tensor, *arguments)
        if rng.random() < 0.1:
            raise RuntimeError("out of memory")
        return copied

    monkeypatch.setattr(torch.Tensor, "index_copy_", failing)
    passes = [_random_spans(rng) for _ in range(10)]
    num_failures = 0
    for _ in range(200):
        spans = rng.choice(passes)
        try:
            rows, _ = buffers.hold(_metadata(spans))
        except RuntimeError:
            num_failures += 1
            continue
        for at, span in enumerate(spans):
            every = slots_between(span.runs, 0, 10**6)
            assert rows.block_table[at, : len(every) // PAGE_SIZE].tolist() == [
                slot // PAGE_SIZE for slot in every[::PAGE_SIZE]
            ]
            assert rows.contexts[at] == span.context
            first, end = rows.row_starts[at : at + 2].tolist()
            assert rows.slots[first:end].tolist() == every[span.context : span.end]
            assert rows.positions[first:end].tolist() == list(range(span.context, span.end))
        assert set(rows.slots[end:].tolist()) <= {NUM_SLOTS}
    assert num_failures > 10


@pytest.mark.parametrize(
    "spans",
    [
        [RowSpan(one_run(0, 256), 0, 33)],
        [RowSpan(one_run(0, 16), 0, 1)] * 5,
        [RowSpan(one_run(0, 256), 128, 1)],
        [RowSpan(one_run(8, 16), 0, 1)],
        [RowSpan(one_run(0, 16), 0, 1, adapter=1)],
    ],
    ids=["rows", "sequences", "places", "pages", "adapter"],
)
def test_what_does_not_fit_is_refused(spans: list[RowSpan]) -> None:
    assert not _buffers().can_hold(_metadata(spans))
    assert _buffers().can_hold(_metadata([RowSpan(one_run(0, 128), 0, 32)]))


def _long_sequences() -> list[RowSpan]:
    """Single rows: within the window's four pages, at its edge, at either end of a page, far beyond."""
    order = (7, 2, 13, 3, 11, 5, 0, 9)
    return [RowSpan(runs_of_pages(order, PAGE_SIZE), context, 1) for context in (20, 63, 64, 127)]


def _attend(
    cache: KVCache, spans: Sequence[RowSpan], keys: Keys, kind: AttentionKind, buffers: StepBuffers | None
) -> torch.Tensor:
    """What the rows saw, in these buffers or as packed rows: [N, H, D]."""
    num_rows = sum(span.num_rows for span in spans)
    torch.manual_seed(1)
    query, key, value = torch.randn(2, 96, 4), torch.randn(1, 96, 4), torch.randn(1, 96, 4)
    if buffers is not None:
        rows, _ = buffers.hold(_metadata(spans))
        padded = rows.bucket.num_rows
        own = (each[:, :padded] for each in (query, key, value))
        return rows.seeing(keys).attend(0, *own, kind)[:num_rows]
    own = (each[:, :num_rows] for each in (query, key, value))
    return pack(cache, spans, device=CPU).seeing(keys).attend(0, *own, kind)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sliding_window", [None, 40, 100])
@pytest.mark.parametrize("keys", ["all", "window"])
@pytest.mark.parametrize("is_windowed", [False, True])
def test_single_rows_see_what_packed_rows_see(
    is_windowed: bool, keys: Keys, sliding_window: int | None, softcap: float | None
) -> None:
    """Also with a windowed store. A sliding window of 40 places is less than the budget: it stays as it is."""
    cache, kind = _cache(NUM_SLOTS * is_windowed), AttentionKind(0.5, sliding_window, softcap)
    buffers = _buffers(cache)
    apart = [RowSpan(one_run(start, 80), 70, 1) for start in (0, 160, 80)]
    for spans in (*([span] for span in _long_sequences()), apart):
        if is_windowed:
            spans = [RowSpan(one_run(0, 128), one.context, 1, windowed=one.runs) for one in spans]  # noqa: PLW2901
        found, expected = (_attend(cache, spans, keys, kind, each) for each in (buffers, None))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sliding_window", [None, 5, 100])
def test_chains_and_trees_see_what_packed_rows_see(sliding_window: int | None, softcap: float | None) -> None:
    """The last rows of the tree follow the filled position before the last, and one before that."""
    cache, kind = _cache(), AttentionKind(0.5, sliding_window, softcap)
    tree = RowSpan(_long_sequences()[0].runs, 110, 7, (-1, 0, 0, 1, -2, 4, -4))
    spans = [RowSpan(one_run(64, 16), 0, 5), tree, RowSpan(runs_of_pages([14, 1, 6], PAGE_SIZE), 20, 9)]
    found, expected = (_attend(cache, spans, "all", kind, each) for each in (_buffers(cache), None))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sliding_window", [None, 5])
def test_a_chunk_beside_a_tree_sees_what_it_sees_alone(sliding_window: int | None) -> None:
    """It has more rows than an int64 has bits. A tree of so many rows is refused."""
    cache, kind = _cache(), AttentionKind(0.5, sliding_window, None)
    buffers = _buffers(cache, max_rows=96)
    chunk = RowSpan(runs_of_pages([14, 1, 6, 4, 8, 10], PAGE_SIZE), 5, 80)
    tree = RowSpan(_long_sequences()[0].runs, 110, 4, TREE)
    assert buffers.can_hold(_metadata([chunk, tree]))
    found, expected = (_attend(cache, [chunk, tree], "all", kind, each) for each in (buffers, None))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(found[:80], _attend(cache, [chunk], "all", kind, buffers)[:80])
    fits = [buffers.can_hold(_metadata([RowSpan(one_run(64, 96), 5, num, (-1,) * num)])) for num in (63, 64)]
    assert fits == [True, False]
    assert MAX_TREE_TOKENS + 1 == MAX_TREE_ROWS, "a full tree and the newest token fit"


@pytest.mark.parametrize("parents", [(), TREE])
def test_several_rows_of_a_sequence_read_all(parents: tuple[int, ...]) -> None:
    cache, kind = _cache(), AttentionKind(0.5, None, None)
    spans = [RowSpan(_long_sequences()[0].runs, 110, 4, parents)]
    found, expected = (_attend(cache, spans, keys, kind, _buffers(cache)) for keys in ("window", "all"))
    assert torch.equal(found, expected)


class LateDevice:
    """A device that does nothing before the host waits for it: then, what was queued on that stream before an event."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queues: dict[str, list[Callable[[], object]]] = defaultdict(list)
        zeros, copy = torch.zeros, Tensor.copy_
        monkeypatch.setattr(torch, "zeros", lambda *size, dtype, **_: zeros(*size, dtype=dtype))
        monkeypatch.setattr(torch.cuda, "Event", lambda: LateEvent(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device="cuda:0": str(device))

        def queue(own: Tensor, other: Tensor, *, non_blocking: bool) -> None:
            assert non_blocking
            self.queues["cuda:1"].append(lambda: copy(own, other))

        monkeypatch.setattr(Tensor, "copy_", queue)


@dataclass
class LateEvent:
    device: LateDevice
    before: list[Callable[[], object]] = field(default_factory=list)

    def record(self, stream: str = "cuda:0") -> None:
        self.before = list(self.device.queues[stream])

    def synchronize(self) -> None:
        for work in self.before:
            for queue in self.device.queues.values():
                if work in queue:
                    queue.remove(work)
                    work()


def test_a_buffer_is_not_overwritten_before_a_late_device_has_copied_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event is on the stream of the copy, not on that of cuda:0, whose work may have ended long before."""
    device, found = LateDevice(monkeypatch), list[list[int]]()
    staging = Staging(3, torch.device("cuda:1"))
    for number in range(12):
        staging.upload(3, lambda words, number=number: words.fill(number))  # type: ignore[misc]
        device.queues["cuda:1"].append(lambda: found.append(staging.buffer.tolist()))
    assert len(found) < 12
    for work in device.queues["cuda:1"]:
        work()
    assert found == [[number] * 3 for number in range(12)]
