from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rayspec.model.kv_arena import KVArena, LayerShape, Span, SpanAllocator, bytes_per_slot

NUM_SLOTS = 64


def _require_consistent(allocator: SpanAllocator, held: list[Span]) -> None:
    slots = sorted(slot for span in held for slot in range(span.start, span.end))
    assert len(slots) == len(set(slots)), "spans overlap"
    assert not slots or 0 <= slots[0] <= slots[-1] < NUM_SLOTS
    assert allocator.num_free == NUM_SLOTS - len(slots)


def _largest_hole(held: list[Span]) -> int:
    taken = {slot for span in held for slot in range(span.start, span.end)}
    longest = run = 0
    for slot in range(NUM_SLOTS):
        run = 0 if slot in taken else run + 1
        longest = max(longest, run)
    return longest


@given(st.lists(st.tuples(st.sampled_from(["allocate", "release", "extend"]), st.integers(1, 40), st.integers(0, 99))))
def test_spans_never_overlap_and_holes_are_found(actions: list[tuple[str, int, int]]) -> None:
    allocator, held = SpanAllocator(NUM_SLOTS), []
    for action, size, which in actions:
        if action == "allocate":
            span = allocator.allocate(size)
            assert (span is not None) == (_largest_hole(held) >= size)
            if span is not None:
                assert span.capacity == size
                held.append(span)
        elif held:
            span = held.pop(which % len(held))
            if action == "release":
                allocator.release(span)
            else:
                capacity = span.capacity + size
                grown = allocator.extend(span, capacity)
                behind = {slot for other in held for slot in range(other.start, other.end)}
                room = span.start + capacity <= NUM_SLOTS and behind.isdisjoint(range(span.end, span.start + capacity))
                assert (grown == Span(span.start, capacity)) == room
                held.append(grown or span)
        _require_consistent(allocator, held)
    for span in held:
        allocator.release(span)
    assert allocator.allocate(NUM_SLOTS) == Span(0, NUM_SLOTS), "released holes have not been merged"


def _arena(num_spare: int = 0) -> KVArena:
    layers = {0: LayerShape(2, 4, 3), 5: LayerShape(1, 2, 2)}
    return KVArena(layers, 16, dtype=torch.float32, device=torch.device("cpu"), num_spare=num_spare)


def test_written_rows_lie_in_their_slots() -> None:
    arena = _arena(num_spare=2)
    keys, values = torch.randn(2, 3, 4), torch.randn(2, 3, 3)
    arena.write(0, torch.tensor([4, 17, 6]), keys, values)
    assert torch.equal(arena.keys[0][:, [4, 17, 6]], keys)
    assert torch.equal(arena.values[0][:, [4, 17, 6]], values)
    untouched = [slot for slot in range(18) if slot not in (4, 17, 6)]
    assert not arena.keys[0][:, untouched].any()
    assert not arena.keys[5].any()


def test_moving_may_overlap() -> None:
    for source, destination in ((2, 5), (5, 2), (3, 3), (0, 8)):
        arena = _arena()
        for tensor in (*arena.keys.values(), *arena.values.values()):
            tensor.copy_(torch.randn_like(tensor))
        before = {layer: (arena.keys[layer].clone(), arena.values[layer].clone()) for layer in arena.keys}
        arena.move(source, destination, 7)
        for layer, (keys, values) in before.items():
            assert torch.equal(arena.keys[layer][:, destination : destination + 7], keys[:, source : source + 7])
            assert torch.equal(arena.values[layer][:, destination : destination + 7], values[:, source : source + 7])


def test_bytes_of_a_slot_are_what_the_tensors_take() -> None:
    arena = _arena()
    tensors = (*arena.keys.values(), *arena.values.values())
    size = bytes_per_slot([LayerShape(2, 4, 3), LayerShape(1, 2, 2)], torch.float32)
    assert sum(tensor.nbytes for tensor in tensors) == size * arena.num_slots
