"""The time of a decoding step from its kernel launches and memory traffic: a prediction, not a measurement."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.roofline import Accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLedger:
    """Launches and memory traffic of a step of one token for each of `batch` sequences, on one GPU.

    num_bytes: bytes read and written, without the keys and values of earlier tokens. Of these, each sequence reads
    `kv_bytes_per_place` bytes per token of its context. resident_bytes: bytes of weights.
    """

    batch: int
    num_kernels: int
    num_bytes: int
    kv_bytes_per_place: int
    resident_bytes: int
    num_all_reduces: int = 0

    def bytes_with(self, context: int) -> int:
        """Return all bytes that a step reads and writes at this context length."""
        return self.num_bytes + self.batch * context * self.kv_bytes_per_place

    def fits(self, context: int, memory_bytes: float) -> bool:
        """Whether the weights and the keys and values of all sequences fit into memory."""
        return self.resident_bytes + self.batch * context * self.kv_bytes_per_place <= memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """share_of_peak: share of the peak memory bandwidth that kernels reach. replayed_s, eager_s: seconds between two
    launches, in a replayed graph and from Python. all_reduce_s: seconds to all-reduce a token's states on 8 GPUs."""

    share_of_peak: float = 0.8
    replayed_s: float = 0.9e-6
    eager_s: float = 6e-6
    all_reduce_s: float = 10e-6


def replayed_seconds(ledger: StepLedger, context: int, accelerator: Accelerator, assumed: Assumptions) -> float:
    """Return the seconds of a step as a captured graph: the time to move bytes, plus a gap for each launch."""
    moving_s = ledger.bytes_with(context) / (accelerator.bytes_per_s * assumed.share_of_peak)
    return moving_s + ledger.num_kernels * assumed.replayed_s + ledger.num_all_reduces * assumed.all_reduce_s


def host_seconds(ledger: StepLedger, assumed: Assumptions) -> float:
    """Return the seconds to launch all kernels from Python, while the GPU works on earlier kernels."""
    return (ledger.num_kernels + ledger.num_all_reduces) * assumed.eager_s
