from __future__ import annotations

import torch

from rayspec.model.kv_arena import KVArena, LayerShape


def _arena(num_spare: int = 0) -> KVArena:
    layers = {0: LayerShape(2, 4, 3), 5: LayerShape(1, 2, 2)}
    return KVArena(layers, 16, dtype=torch.float32, device=torch.device("cpu"), num_spare=num_spare)


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
