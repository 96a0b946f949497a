"""The entry point of all checks."""

from __future__ import annotations

import os

from rayspec.ops.doctor.findings import Finding, ok, skipped
from rayspec.ops.doctor.gpus import check_gpus, check_nccl, inspect_gpus
from rayspec.ops.doctor.machine import machine_findings


def examine(*, model: str | None = None, address: str | None = None, quick: bool = False) -> list[Finding]:
    """Run all checks that apply. model: a folder, a hub id, or "demo".

    address: address of a cluster, in the form of ray.init; None: RAY_ADDRESS. quick: check only this machine, measure
    nothing, and take less than three seconds if it has no GPU.
    """
    gpus = inspect_gpus()
    findings = [*machine_findings(), check_gpus(gpus), check_nccl(gpus)]
    if not quick:
        findings.append(_check_dtype())
    if model is not None:
        # This import loads the hub's client, which other checks need not wait for.
        from rayspec.ops.doctor.model_files import check_model, look_at_model  # noqa: PLC0415

        findings.append(check_model(look_at_model(model)))
    if quick:
        return findings
    where = address or os.environ.get("RAY_ADDRESS")
    if where is None:
        return [*findings, skipped("cluster", "none named: --address auto, host:port or ray://host:10001")]
    # This import loads ray and torch.
    from rayspec.ops.doctor.cluster import cluster_findings  # noqa: PLC0415

    return [*findings, *cluster_findings(where, model)]


def _check_dtype() -> Finding:
    """Say which data type `dtype: auto` takes on this CPU, by the measurement that decides it."""
    import torch  # noqa: PLC0415 - other checks need not wait for torch and transformers

    from rayspec.model.fast_dtype import CLEARLY_FASTER, gain_of_float32  # noqa: PLC0415

    gain = gain_of_float32(torch.bfloat16)
    taken = "float32, if the memory allows" if gain >= CLEARLY_FASTER else "the checkpoint's data type"
    return ok("dtype on the CPU", f"float32 is {gain:.1f} times as fast as bfloat16: dtype auto takes {taken}")
