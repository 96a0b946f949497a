from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.device.ledger import Assumptions, StepLedger, eager_seconds, host_seconds, replayed_seconds
from rayspec.ops.plan.gpus import Accelerator

GPU = Accelerator(name="test", bytes_per_s=1e12, flops=1e15)
LEDGER = StepLedger(batch=4, num_kernels=100, num_bytes=10**10, kv_bytes_per_place=10**5, resident_bytes=10**10)
ASSUMED = Assumptions(share_of_peak=0.5, replayed_s=1e-6, eager_s=5e-6, all_reduce_s=1e-5)


def test_a_step_moves_weights_and_the_keys_of_every_sequence() -> None:
    assert LEDGER.bytes_with(0) == 10**10
    assert LEDGER.bytes_with(1000) == 10**10 + 4 * 10**8


def test_replayed_is_moving_and_gaps() -> None:
    assert replayed_seconds(LEDGER, 0, GPU, ASSUMED) == pytest.approx(0.02 + 1e-4)
    ranks = replace(LEDGER, num_all_reduces=10)
    assert replayed_seconds(ranks, 0, GPU, ASSUMED) == pytest.approx(0.02 + 1e-4 + 1e-4)


def test_eager_is_the_longer_of_host_and_gpu() -> None:
    assert eager_seconds(LEDGER, 0, GPU, ASSUMED) == replayed_seconds(LEDGER, 0, GPU, ASSUMED)
    many = replace(LEDGER, num_kernels=10_000)
    assert eager_seconds(many, 0, GPU, ASSUMED) == host_seconds(many, ASSUMED) == pytest.approx(0.05)


def test_what_fits() -> None:
    assert LEDGER.fits(0, 10**10)
    assert not LEDGER.fits(1, 10**10)
    assert LEDGER.fits(1000, 10**10 + 4 * 10**8)
