import torch

from rayspec.choices import SKIP, choices_of
from rayspec.model.attention import pack
from rayspec.model.kv_cache import KVCache
from rayspec.model.rows import RowSpan, one_run
from rayspec.model.sublayers import run
from tests.families import checkpoint, parts_of

CPU = torch.device("cpu")


@torch.inference_mode()
def test_a_skipped_sublayer_passes_its_input_on_and_taps_see_every_boundary() -> None:
    parts = parts_of(checkpoint("llama"))
    cache = KVCache(parts.shapes, 8, dtype=torch.float32, device=CPU)
    hidden = parts.embed(torch.tensor([5, 6, 7]))
    rows = pack(cache, [RowSpan(one_run(0, 1000), 0, 3)], device=CPU)
    parts.rotate(hidden, rows)
    seen: dict[int, torch.Tensor] = {}
    choices = choices_of([True, False, True, True, False, False, True, True])
    output = run(parts.sublayers, hidden, rows, choices=choices, tap=seen.__setitem__)
    assert list(seen) == list(range(8))
    before = hidden
    for index, choice in enumerate(choices):
        assert torch.equal(seen[index], before) == (choice == SKIP)
        before = seen[index]
    assert torch.equal(output, seen[7])
    middle = run(parts.sublayers[2:6], seen[1], rows, choices=choices)
    assert torch.equal(middle, seen[5]), "choices count sublayers of the whole model"
