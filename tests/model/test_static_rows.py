from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from rayspec.model.buckets import bucket_of
from rayspec.model.kv_arena import PAGE_SIZE, KVArena, LayerShape
from rayspec.model.rows import RowSpan, Runs, one_run, runs_of_pages
from rayspec.model.static_rows import Filling, StepBuffers

NUM_SLOTS = 256
TREE = (-1, 0, -3, 1)


def _buffers() -> StepBuffers:
    cpu = torch.device("cpu")
    arena = KVArena({0: LayerShape(1, 4, 4)}, NUM_SLOTS, dtype=torch.float32, device=cpu, num_spare=1)
    return StepBuffers(
        arena, max_rows=32, max_sequences=4, max_places=128, hidden_size=8, dtype=torch.float32, device=cpu
    )


def _filling(spans: Sequence[RowSpan], token_ids: Sequence[int] | torch.Tensor = ()) -> Filling:
    paths = [span.paths() for span in spans]
    return Filling(bucket_of(spans, paths), spans, paths, token_ids)


PAGES: Runs = runs_of_pages([7, 2, 3], PAGE_SIZE)


def test_the_buffers_hold_the_numbers_of_a_pass() -> None:
    spans = [RowSpan(PAGES, 15, 2), RowSpan(one_run(0, 32), 5, 1)]
    rows, is_new = _buffers().hold(_filling(spans, [30, 31, 32]))
    assert is_new
    assert rows.bucket.num_rows == 4
    assert rows.tokens.tolist() == [30, 31, 32, 0]
    assert rows.positions.tolist() == [15, 16, 5, 0]
    assert rows.slots.tolist() == [7 * PAGE_SIZE + 15, 2 * PAGE_SIZE, 5, NUM_SLOTS]
    assert rows.row_starts.tolist() == [0, 2, 3]
    assert rows.contexts.tolist() == [15, 5]
    assert rows.page_table[0, :3].tolist() == [7, 2, 3]
    assert rows.page_table[1, :2].tolist() == [0, 1]


def test_rows_of_a_tree_say_what_they_see() -> None:
    rows, _ = _buffers().hold(_filling([RowSpan(PAGES, 10, 4, TREE)]))
    assert rows.positions.tolist() == [10, 11, 8, 12]
    assert rows.shared.tolist() == [10, 10, 8, 10]
    assert [bin(bits) for bits in rows.bits.tolist()] == ["0b1", "0b11", "0b100", "0b1011"]


def test_drawn_tokens_come_from_the_device() -> None:
    rows, _ = _buffers().hold(_filling([RowSpan(PAGES, 3, 1)], torch.tensor([9])))
    assert rows.tokens.tolist() == [9]


def test_a_pass_is_uploaded_once_and_again_after_another_one() -> None:
    buffers = _buffers()
    first, other = _filling([RowSpan(PAGES, 3, 1)]), _filling([RowSpan(one_run(0, 16), 4, 1)])
    assert [buffers.hold(each)[1] for each in (first, first, other, first)] == [True, False, True, True]
    rows, _ = buffers.hold(first)
    assert (rows.contexts.tolist(), rows.page_table[0, :3].tolist()) == ([3], [7, 2, 3])


def test_a_pass_that_was_written_in_part_is_written_again() -> None:
    buffers = _buffers()
    tokens: list[int] = [1, 2]  # one too many
    filling = _filling([RowSpan(PAGES, 3, 1)], tokens)
    with pytest.raises(RuntimeError):
        buffers.hold(filling)
    tokens.pop()
    rows, is_new = buffers.hold(filling)
    assert is_new
    assert rows.tokens.tolist() == [1]
    assert rows.page_table[0, :3].tolist() == [7, 2, 3]


@pytest.mark.parametrize(
    "spans",
    [
        [RowSpan(one_run(0, 256), 0, 33)],
        [RowSpan(one_run(0, 16), 0, 1)] * 5,
        [RowSpan(one_run(0, 256), 128, 1)],
        [RowSpan(one_run(8, 16), 0, 1)],
    ],
    ids=["rows", "sequences", "places", "pages"],
)
def test_what_does_not_fit_is_refused(spans: list[RowSpan]) -> None:
    assert not _buffers().can_hold(_filling(spans))
    assert _buffers().can_hold(_filling([RowSpan(one_run(0, 128), 0, 32)]))
