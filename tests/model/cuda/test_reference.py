from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from rayspec.model.attention import pack
from rayspec.model.cuda import reference
from rayspec.model.kv_cache import PAGE_SIZE, KVCache, LayerShape
from rayspec.model.rows import RowSpan, runs_of_pages
from tests.model.by_definition import CPU, LAYER, again
from tests.model.cuda.batches import Rows, lay_out, random_rows

BUCKET = (64, 512)
# The last two follow the filled position before the last, and one before that.
TREE = (-1, 0, 0, 1, -2, 4, -4)


@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_attention_of_the_engine(window: int | None, softcap: float | None, dtype: torch.dtype) -> None:
    sequences = [
        random_rows(37, 1, dtype=dtype), random_rows(100, 7, parents=TREE, dtype=dtype),
        random_rows(0, 40, dtype=dtype), random_rows(300, 7, parents=TREE, dtype=dtype),
    ]  # fmt: skip
    batch = lay_out(sequences, num_padding=2)
    found = reference.attend(*batch.values(), 0.1, window or 0, softcap or 0.0, PAGE_SIZE, *BUCKET)
    expected = _engine_attention(sequences, batch, scaling=0.1, sliding_window=window, softcap=softcap)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found[:-2], expected, atol=tolerance, rtol=tolerance)


def _engine_attention(sequences: list[Rows], batch: dict[str, Any], **options: Any) -> Tensor:
    """[N, H, D]. The rows' own keys are already where the engine writes them, so it changes nothing."""
    num_kv_heads, num_slots, dim = batch["keys"].shape
    cache = KVCache({LAYER: LayerShape(num_kv_heads, dim, dim)}, num_slots, dtype=batch["keys"].dtype, device=CPU)
    cache.keys[LAYER].copy_(batch["keys"].nan_to_num())
    cache.values[LAYER].copy_(batch["values"].nan_to_num())
    tables = zip(sequences, batch["block_table"], strict=True)
    pages = [table[: -(-rows.num_places // PAGE_SIZE)].tolist() for rows, table in tables]
    packed = pack(
        cache,
        [
            RowSpan(runs_of_pages(own, PAGE_SIZE), rows.context, len(rows), rows.parents)
            for rows, own in zip(sequences, pages, strict=True)
        ],
        device=CPU,
    )
    assert packed.slots is not None
    query = batch["query"][: len(packed.slots)].transpose(0, 1)
    own_rows = cache.keys[LAYER][:, packed.slots], cache.values[LAYER][:, packed.slots]
    assert torch.equal(packed.positions, batch["positions"][: len(packed.slots)])
    return again(packed, query, *own_rows, **options)


@pytest.mark.parametrize(("bucket", "option"), [((2, 512), "max_rows=2"), ((64, 32), "max_context=32")])
def test_a_sequence_beyond_the_bucket_is_refused(bucket: tuple[int, int], option: str) -> None:
    batch = lay_out([random_rows(30, 3)])
    with pytest.raises(ValueError, match=f"{option}: use a larger bucket"):
        reference.attend(*batch.values(), 1.0, 0, 0.0, PAGE_SIZE, *bucket)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "offset"), [(LlamaRMSNorm, 0.0), (Gemma2RMSNorm, 1.0)])
def test_norms_are_those_of_transformers(family: Any, offset: float, dtype: torch.dtype) -> None:
    norm = family(96, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    norm = norm.to(dtype)
    hidden = torch.randn(7, 96).to(dtype)
    assert torch.equal(reference.rms_norm(hidden, norm.weight, 1e-5, offset), norm(hidden))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary", [64, 32])
@pytest.mark.parametrize("normalised", [False, True])
def test_rotation_is_that_of_transformers(dtype: torch.dtype, rotary: int, normalised: bool) -> None:
    packed, angles = torch.randn(5, 8 * 64).to(dtype), torch.randn(2, 5, rotary).to(dtype)
    norms = [LlamaRMSNorm(64, eps=1e-6).to(dtype) for _ in range(2)]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    query, key, value = packed.view(5, 8, 64)[None].transpose(1, 2).split([4, 2, 2], 1)
    if normalised:
        query, key = norms[0](query), norms[1](key)
    query, key = apply_rotary_pos_emb(query, key, angles[0][None], angles[1][None])
    slots, caches = torch.tensor([4, 0, 9, 2, 3]), torch.zeros(2, 2, 10, 64, dtype=dtype)
    weights = [norm.weight.detach() if normalised else None for norm in norms]
    found = reference.rotate_and_write(packed, *angles, slots, *caches, 4, *weights, 1e-6)
    assert torch.equal(found, query[0].transpose(0, 1))
    assert torch.equal(caches[0][:, slots], key[0])
    assert torch.equal(caches[1][:, slots], value[0])
    assert not caches[:, :, [1, 5, 6, 7, 8]].any(), "other slots stay as they were"
