"""All measurements of a device, and their report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.device.bandwidth import check_bandwidth
from benchmarks.device.host_reads import check_host_reads
from benchmarks.device.kernels import check_kernels
from benchmarks.device.parity import check_captured_against_eager, check_parity
from benchmarks.device.static_launches import check_static_launches
from benchmarks.device.step_times import check_step_times
from benchmarks.shared import Measured
from rayspec.bench.result import markdown_table
from rayspec.bench.selfcheck import Check, Outcome, SelfcheckOptions, run_selfcheck, save_outcomes
from rayspec.command.environment import describe_environment

CHECKS: Mapping[str, Check] = {
    "logits of fused layers": check_parity,
    "kernels against plain torch": check_kernels,
    "captured against eager": check_captured_against_eager,
    "launches of a bucket": check_static_launches,
    "host reads of a round": check_host_reads,
    "bandwidth of matrices": check_bandwidth,
    "steps against the roofline": check_step_times,
}


def measure_device(options: SelfcheckOptions, say: Callable[[str], None], json: Path | None) -> tuple[str, bool]:
    """Return a page with all tables, and whether no check failed; save the numbers in `json`. Raises ConfigError."""
    outcomes = run_selfcheck(options, say, checks=CHECKS)
    if json is not None:
        save_outcomes(outcomes, options, json)
    return _page(options, outcomes), all(one.status != "failed" for one, _ in outcomes.values())


def _page(options: SelfcheckOptions, outcomes: Mapping[str, tuple[Outcome, float]]) -> str:
    environment = describe_environment()
    where = (
        f"On {options.torch_device} ({environment['hardware']}), {environment['threads']} threads; "
        f"commit {environment['commit'] or 'unknown'}, {environment['date']}."
    )
    lines = [f"`{environment['command']}`", "", where]
    for name, (one, seconds) in outcomes.items():
        lines += ["", f"## {name}: {one.status} ({seconds:.1f} s)", "", f"{one.found}."]
        if isinstance(one, Measured):
            lines += ["", one.counted] if one.counted else []
            for table in one.tables:
                lines += ["", markdown_table(table.headings, table.rows, num_left=1)]
    return "\n".join([*lines, ""])
