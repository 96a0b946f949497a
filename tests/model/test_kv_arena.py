from __future__ import annotations

import torch

from rayspec.model.kv_arena import KVArena, LayerShape, bytes_per_slot, whole_pages


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


def test_pages_are_whole() -> None:
    assert [whole_pages(number) for number in (1, 16, 17, 100)] == [16, 16, 32, 112]
