"""All measurements of a device, and their report."""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.device.bandwidth import check_bandwidth
from benchmarks.device.host_reads import check_host_reads
from benchmarks.device.kernels import check_kernels
from benchmarks.device.parity import check_captured_against_eager, check_parity
from benchmarks.device.static_launches import check_static_launches
from benchmarks.device.step_times import check_step_times
from benchmarks.shared import DeviceOptions, Measured, Outcome
from rayspec.bench.result import describe_environment, markdown_table
from rayspec.command.terminal import hide_progress_bars, save_json

Check = Callable[[DeviceOptions], Outcome]

CHECKS: Mapping[str, Check] = {
    "logits of fused layers": check_parity,
    "kernels against plain torch": check_kernels,
    "captured against eager": check_captured_against_eager,
    "launches of a bucket": check_static_launches,
    "host reads of a round": check_host_reads,
    "bandwidth of matrices": check_bandwidth,
    "steps against the roofline": check_step_times,
}


def measure_device(
    options: DeviceOptions, say: Callable[[str], None], json: Path | None, *, checks: Mapping[str, Check] = CHECKS
) -> tuple[str, bool]:
    """Return a page with all tables, and whether no check failed; save the numbers in `json`. Raises ConfigError."""
    outcomes = run_checks(options, say, checks=checks)
    is_good = all(one.status != "failed" for one, _ in outcomes.values())
    if json is not None:
        found = {
            "ok": is_good,
            "options": asdict(options),
            "device": str(options.torch_device),
            "environment": describe_environment(),
            "load_average": os.getloadavg(),
            "checks": [
                {"name": name, "seconds": seconds} | {key: getattr(one, key) for key in ("status", "found", "numbers")}
                for name, (one, seconds) in outcomes.items()
            ],
        }
        save_json(found, json)
    return _page(options, outcomes), is_good


def run_checks(
    options: DeviceOptions, say: Callable[[str], None], *, checks: Mapping[str, Check] = CHECKS
) -> dict[str, tuple[Outcome, float]]:
    """Run all checks, one after another, and call `say` with each result. Return each outcome with its seconds. A check
    that fails or raises does not stop the others. Raises ConfigError if the device does not exist."""
    options.torch_device  # noqa: B018 - raises
    hide_progress_bars()
    before = torch.get_num_threads()
    torch.set_num_threads(options.num_threads or before)
    outcomes: dict[str, tuple[Outcome, float]] = {}
    for name, check in checks.items():
        started = time.perf_counter()
        try:
            outcome = check(options)
        except Exception as error:  # noqa: BLE001 - it is reported, and the others still run
            say(traceback.format_exc())
            found = f"the check raised {type(error).__name__}: {error}"
            outcome = Outcome(status="failed", found=found, numbers={"traceback": traceback.format_exc()})
        seconds = time.perf_counter() - started
        outcomes[name] = (outcome, seconds)
        say(f"{name}: {outcome.status} ({seconds:.1f} s): {outcome.found}")
        gc.collect()  # free the models of this check
    torch.set_num_threads(before)
    return outcomes


def _page(options: DeviceOptions, outcomes: Mapping[str, tuple[Outcome, float]]) -> str:
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
