import pytest
import torch

from rayspec.choices import SKIP, choices_of
from rayspec.model.attention import PackedRows, pack
from rayspec.model.kv_cache import KVCache
from rayspec.model.rows import RowSpan, one_run
from rayspec.model.sublayers import run
from tests.families import MATRIX, checkpoint, parts_of, ragged_prompts, reference

CPU = torch.device("cpu")


def _rows(family: str, spans: list[RowSpan], cache: KVCache, hidden: torch.Tensor) -> PackedRows:
    rows = pack(cache, spans, device=CPU)
    parts_of(checkpoint(family)).rotate(hidden, rows)
    return rows


@pytest.mark.parametrize("family", MATRIX)
@torch.inference_mode()
def test_pieces_of_packed_sequences_give_the_logits_of_transformers(family: str) -> None:
    path = checkpoint(family)
    parts = parts_of(path)
    prompts = ragged_prompts([40, 9, 23], seed=5)
    starts = [50, 0, 10]
    cache = KVCache(parts.shapes, 100, dtype=torch.float32, device=CPU)
    logits: list[list[torch.Tensor]] = [[], [], []]
    for cuts in ([17, 1, 5], [1, 1, 0], [13, 7, 17], [9, 0, 1]):
        begun = [(number, sum(map(len, logits[number])), count) for number, count in enumerate(cuts) if count]
        hidden = parts.embed(
            torch.tensor([each for n, done, count in begun for each in prompts[n][done : done + count]])
        )
        spans = [RowSpan(one_run(starts[number], 1000), done, count) for number, done, count in begun]
        result = parts.head(run(parts.sublayers, hidden, _rows(family, spans, cache, hidden)))
        for (number, _, _), one in zip(begun, result.split([count for _, _, count in begun]), strict=True):
            logits[number].append(one)
    for prompt, actual in zip(prompts, logits, strict=True):
        expected = reference(path)(torch.tensor([prompt]), use_cache=False).logits[0]
        torch.testing.assert_close(torch.cat(actual), expected, atol=2e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_skipped_sublayer_passes_its_input_on_and_taps_see_every_boundary() -> None:
    parts = parts_of(checkpoint("llama"))
    cache = KVCache(parts.shapes, 8, dtype=torch.float32, device=CPU)
    hidden = parts.embed(torch.tensor([5, 6, 7]))
    rows = _rows("llama", [RowSpan(one_run(0, 1000), 0, 3)], cache, hidden)
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
