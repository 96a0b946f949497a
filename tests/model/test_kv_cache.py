import torch

from rayspec.model.kv_cache import KVCache, LayerShape


def _cache(num_spare: int = 0) -> KVCache:
    layers = {0: LayerShape(2, 4, 3), 5: LayerShape(1, 2, 2)}
    return KVCache(layers, 16, dtype=torch.float32, device=torch.device("cpu"), num_spare=num_spare)


def test_moving_may_overlap() -> None:
    for source, destination in ((2, 5), (5, 2), (3, 3), (0, 8)):
        cache = _cache()
        for tensor in (*cache.keys.values(), *cache.values.values()):
            tensor.copy_(torch.randn_like(tensor))
        before = {layer: (cache.keys[layer].clone(), cache.values[layer].clone()) for layer in cache.keys}
        cache.move(source, destination, 7)
        for layer, (keys, values) in before.items():
            assert torch.equal(cache.keys[layer][:, destination : destination + 7], keys[:, source : source + 7])
            assert torch.equal(cache.values[layer][:, destination : destination + 7], values[:, source : source + 7])
