import torch

from rayspec.decode.runner import Runner
from rayspec.model.kv_cache import PAGE_SIZE, KeyBudget, KeyBudgets, KVCache
from rayspec.model.row_counts import RowCounts
from rayspec.model.rows import RowSpan, one_run
from tests.families import checkpoint, parts_of

CPU = torch.device("cpu")


@torch.inference_mode()
def test_padding_rows_touch_nothing_that_is_in_use() -> None:
    parts = parts_of(checkpoint("llama"))
    cache = KVCache(parts.shapes, 120, dtype=torch.float32, device=CPU, num_spare=8)
    runner = Runner(parts, cache, device=CPU, row_counts=RowCounts(8, 8))
    before = {layer: keys[:, :120].clone() for layer, keys in runner.cache.keys.items()}
    batch = runner.batch([RowSpan(one_run(7, 1000), 0, 1)], token_ids=[5])
    runner.run(batch, runner.embed(batch))
    for layer, keys in runner.cache.keys.items():
        changed = (keys[:, :120] != before[layer]).any(-1).any(0).nonzero().flatten().tolist()
        assert changed == [7]


@torch.inference_mode()
def test_a_verify_notes_pages_in_one_batch_and_row_by_row() -> None:
    parts, notes = parts_of(checkpoint("llama")), []
    budgets = KeyBudgets(pages=KeyBudget(newest=1, looked_at=2))
    for row_counts in (None, RowCounts(8, 8)):
        cache = KVCache(
            parts.shapes, 512, dtype=torch.float32, device=CPU, num_spare=8, budgets=budgets, notes_pages=True
        )
        runner = Runner(parts, cache, device=CPU, row_counts=row_counts)
        chunk = runner.batch([RowSpan(one_run(0, 512), 0, 157)], token_ids=torch.arange(3, 160), fixed_shape=False)
        runner.run(chunk, runner.embed(chunk))
        assert bool((runner.cache.looked_at == -1).all()), "nobody asked for notes"
        verify = runner.batch([RowSpan(one_run(0, 512), 157, 5)], token_ids=torch.arange(3, 8), scores_pages=True)
        runner.run(verify, runner.embed(verify))
        notes.append(runner.cache.looked_at)
    assert notes[0] is not None
    assert notes[1] is not None
    assert torch.equal(notes[0], notes[1])
    assert bool((notes[0][:, 157 // PAGE_SIZE] >= 0).all()), "in every layer"
