"""Run all checks, one after another. A check that fails or crashes does not stop the others."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Mapping

import torch

from rayspec.bench.clock import measured
from rayspec.bench.selfcheck.bandwidth import check_bandwidth
from rayspec.bench.selfcheck.comparisons import check_drafted_text, check_strategy_speed
from rayspec.bench.selfcheck.graphs import check_captured_against_eager, check_plan_switch
from rayspec.bench.selfcheck.host_reads import check_host_reads
from rayspec.bench.selfcheck.kernels import check_kernels
from rayspec.bench.selfcheck.options import SelfcheckOptions
from rayspec.bench.selfcheck.outcome import NamedOutcome, Outcome
from rayspec.bench.selfcheck.parity import check_parity
from rayspec.bench.selfcheck.report import SelfcheckReport
from rayspec.bench.selfcheck.static_launches import check_static_launches
from rayspec.bench.selfcheck.step_times import check_step_times
from rayspec.command.environment import describe_environment
from rayspec.command.loading import hide_progress_bars

Check = Callable[[SelfcheckOptions], Outcome]

# The models of these checks are so small that a second CPU thread makes them slower.
_OF_SMALL_MODELS = frozenset({check_parity, check_static_launches, check_host_reads})
CHECKS: Mapping[str, Check] = {
    "logits of all bodies": check_parity,
    "kernels against plain torch": check_kernels,
    "drafted text against plain": check_drafted_text,
    "launches of a bucket": check_static_launches,
    "host reads of a round": check_host_reads,
    "captured against eager": check_captured_against_eager,
    "time to switch plans": check_plan_switch,
    "bandwidth of matrices": check_bandwidth,
    "steps against the roofline": check_step_times,
    "speed of strategies": check_strategy_speed,
}


def run_selfcheck(
    options: SelfcheckOptions, say: Callable[[str], None], *, checks: Mapping[str, Check] = CHECKS
) -> SelfcheckReport:
    """Run the checks, and call `say` with each result. Raises ConfigError if the device does not exist."""
    device = options.torch_device
    hide_progress_bars()
    num_threads = options.num_threads or torch.get_num_threads()
    outcomes = []
    for name, check in checks.items():
        torch.set_num_threads(1 if check in _OF_SMALL_MODELS else num_threads)
        one = _run(name, check, options)
        say(f"{name}: {one.outcome.status} ({one.seconds:.1f} s): {one.outcome.found}")
        outcomes.append(one)
    torch.set_num_threads(num_threads)
    return SelfcheckReport(
        options=options, device=str(device), environment=describe_environment(), outcomes=tuple(outcomes)
    )


def _run(name: str, check: Check, options: SelfcheckOptions) -> NamedOutcome:
    outcome, cost = measured(lambda: _outcome(check, options), options.torch_device)
    gc.collect()  # free the models of this check
    return NamedOutcome(name=name, seconds=cost.wall_s, quiet_share=cost.quiet_share, outcome=outcome)


def _outcome(check: Check, options: SelfcheckOptions) -> Outcome:
    try:
        return check(options)
    except Exception as error:  # noqa: BLE001 - it is reported, and the others still run
        found = f"the check broke: {type(error).__name__}: {error}"
        return Outcome(status="failed", found=found, numbers={"traceback": traceback.format_exc()})
