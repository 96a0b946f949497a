"""The time of a decoding step from what it launches and moves: a prediction, not a measurement."""

from __future__ import annotations

from dataclasses import dataclass

from rayspec.planning.roofline import Accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLedger:
    """A step of one token for each of `batch` sequences, on one GPU.

    num_bytes: read and written, without the keys and values of earlier tokens, of which each sequence reads
    `kv_bytes_per_place` a place of its context. resident_bytes: of weights.
    """

    batch: int
    num_kernels: int
    num_bytes: int
    kv_bytes_per_place: int
    resident_bytes: int
    num_all_reduces: int = 0

    def bytes_with(self, context: int) -> int:
        """All that a step moves."""
        return self.num_bytes + self.batch * context * self.kv_bytes_per_place

    def fits(self, context: int, memory_bytes: float) -> bool:
        """Weights, and the keys and values of all sequences."""
        return self.resident_bytes + self.batch * context * self.kv_bytes_per_place <= memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """share_of_peak: of the memory's bandwidth that kernels reach. replayed_s, eager_s: from one launch to the next, in
    a replayed graph and from Python. all_reduce_s: of one token's states between 8 GPUs."""

    share_of_peak: float = 0.8
    replayed_s: float = 0.9e-6
    eager_s: float = 6e-6
    all_reduce_s: float = 10e-6


def replayed_seconds(ledger: StepLedger, context: int, accelerator: Accelerator, assumed: Assumptions) -> float:
    """As a captured graph: launches leave gaps between kernels, which otherwise move bytes."""
    moving_s = ledger.bytes_with(context) / (accelerator.bytes_per_s * assumed.share_of_peak)
    return moving_s + ledger.num_kernels * assumed.replayed_s + ledger.num_all_reduces * assumed.all_reduce_s


def host_seconds(ledger: StepLedger, assumed: Assumptions) -> float:
    """To launch all kernels from Python, while the GPU is at work on earlier ones."""
    return (ledger.num_kernels + ledger.num_all_reduces) * assumed.eager_s


def eager_seconds(ledger: StepLedger, context: int, accelerator: Accelerator, assumed: Assumptions) -> float:
    """Launched one by one: the host or the GPU takes longer."""
    return max(host_seconds(ledger, assumed), replayed_seconds(ledger, context, accelerator, assumed))
