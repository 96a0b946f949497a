import subprocess
import sys
from typing import Any

import pytest
import torch

from rayspec.model.kv_cache import PAGE_SIZE
from tests.model.cuda.batches import lay_out, random_rows

OPERATORS: Any = torch.ops.rayspec
FACTORS = torch.rand(24)
BUCKET = {"page_size": PAGE_SIZE, "max_rows": 8, "max_context": 512}


def _calls() -> dict[str, tuple[Any, ...]]:
    chain, tree = lay_out([random_rows(20, 3)], num_padding=1), lay_out([random_rows(20, 3, parents=(-1, 0, 0))])
    packed, angles = torch.randn(5, 8 * 64), torch.randn(2, 5, 32)
    caches, norms, slots = torch.randn(2, 2, 10, 64), torch.randn(2, 64), torch.tensor([4, 0, 9, 2, 3])
    return {
        "attend, chain": (*chain.values(), 0.1, 0, 0.0, *BUCKET.values()),
        "attend, tree": (*tree.values(), 0.1, 5, 2.0, *BUCKET.values()),
        "rms_norm": (torch.randn(5, 64), torch.randn(64), 1e-5, 0.0),
        "rotate_and_write": (packed, *angles, slots, *caches.clone(), 4, None, None, 0.0),
        "rotate_and_write, norms": (packed, *angles, slots, *caches.clone(), 4, *norms, 1e-6),
        "gated": (torch.randn(5, 64), "silu"),
        "int8_product": (torch.randn(5, 64), torch.randint(-127, 128, (24, 64), dtype=torch.int8), FACTORS),
        "int4_product": (
            torch.randn(5, 64),
            torch.randint(-(2**31), 2**31, (24, 8), dtype=torch.int32),
            torch.randn(2, 24, 2),
        ),
    }


CALLS = _calls()


@pytest.mark.parametrize("call", CALLS)
def test_the_operators_keep_the_rules_of_torch(call: str) -> None:
    """Schema, mutation, and the shape and type that tracing sees."""
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(OPERATORS, call.split(",", maxsplit=1)[0]).default, CALLS[call], test_utils=tests)


def test_the_operators_need_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; import torch; from rayspec.model.cuda import operations as o; "
        "o.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5, 0.0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
