from __future__ import annotations

import pytest

from benchmarks.roofline import ACCELERATORS, SHAPES, ideal_latency

H200 = ACCELERATORS["H200"]


@pytest.mark.parametrize(
    ("name", "bytes_per_weight", "milliseconds"),
    [
        ("Llama-3.1-8B", 2, (3.2, 3.6, 6.7)),
        ("Llama-3.1-8B", 1, (1.7, 2.1, 5.3)),
        ("Llama-3.1-405B", 2, (168, 170, 182)),
    ],
)
def test_steps_of_plain_decoding(name: str, bytes_per_weight: float, milliseconds: tuple[float, ...]) -> None:
    """Worked out apart: weights and KV cache over 4.8 TB/s, at 1K, 16K and 128K tokens."""
    latency = ideal_latency(SHAPES[name], H200, bytes_per_weight=bytes_per_weight)
    steps = [1000 * latency.decode_step_s(context=context, batch=1) for context in (1024, 16384, 131072)]
    assert steps == pytest.approx(milliseconds, rel=0.02)
