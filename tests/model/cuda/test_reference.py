from typing import Any

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from rayspec.model.cuda import reference
from rayspec.model.kv_cache import PAGE_SIZE
from tests.model.cuda.batches import lay_out, random_rows


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
