"""The measurements of a device, as checks of a self-check."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.device.bandwidth import check_bandwidth
from benchmarks.device.host_reads import check_host_reads
from benchmarks.device.static_launches import check_static_launches
from benchmarks.device.step_times import check_step_times
from rayspec.bench.selfcheck.checks import Check

CHECKS: Mapping[str, Check] = {
    "launches of a bucket": check_static_launches,
    "host reads of a round": check_host_reads,
    "bandwidth of matrices": check_bandwidth,
    "steps against the roofline": check_step_times,
}
