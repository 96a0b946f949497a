"""Checks of captured graphs. They are placeholders, which measure nothing yet."""

from __future__ import annotations

from rayspec.bench.selfcheck.options import SelfcheckOptions
from rayspec.bench.selfcheck.outcome import Outcome, not_here


def check_captured_against_eager(options: SelfcheckOptions) -> Outcome:
    return not_here(_why(options))


def check_plan_switch(options: SelfcheckOptions) -> Outcome:
    return not_here(_why(options))


def _why(options: SelfcheckOptions) -> str:
    if options.torch_device.type != "cuda":
        return f"{options.torch_device} has no graphs"
    return "not available: this command does not measure the engine's captured graphs yet"
