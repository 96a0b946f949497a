"""Run all checks, one after another. A check that fails or crashes does not stop the others."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Mapping

import torch

from rayspec.bench.clock import measured
from rayspec.bench.selfcheck.comparisons import check_drafted_text
from rayspec.bench.selfcheck.graphs import check_captured_against_eager, check_plan_switch
from rayspec.bench.selfcheck.kernels import check_kernels
from rayspec.bench.selfcheck.options import SelfcheckOptions
from rayspec.bench.selfcheck.outcome import NamedOutcome, Outcome
from rayspec.bench.selfcheck.parity import check_parity
from rayspec.bench.selfcheck.report import SelfcheckReport
from rayspec.command.environment import describe_environment
from rayspec.command.loading import hide_progress_bars

Check = Callable[[SelfcheckOptions], Outcome]

CHECKS: Mapping[str, Check] = {
    "logits of all bodies": check_parity,
    "kernels against plain torch": check_kernels,
    "drafted text against plain": check_drafted_text,
    "captured against eager": check_captured_against_eager,
    "time to switch plans": check_plan_switch,
}


def run_selfcheck(
    options: SelfcheckOptions, say: Callable[[str], None], *, checks: Mapping[str, Check] = CHECKS
) -> SelfcheckReport:
    """Run the checks, and call `say` with each result. Raises ConfigError if the device does not exist."""
    device = options.torch_device
    hide_progress_bars()
    before = torch.get_num_threads()
    torch.set_num_threads(options.num_threads or before)
    outcomes = []
    for name, check in checks.items():
        one = _run(name, check, options)
        say(f"{name}: {one.outcome.status} ({one.seconds:.1f} s): {one.outcome.found}")
        outcomes.append(one)
    torch.set_num_threads(before)
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
