from __future__ import annotations

import pytest
import torch

from benchmarks.device import host_reads
from benchmarks.device.host_reads import check_host_reads
from benchmarks.shared import DeviceOptions
from rayspec.decode import head

CPU = torch.device("cpu")


def test_rounds_of_the_bundled_model() -> None:
    outcome = check_host_reads(DeviceOptions(device="cpu"))
    assert outcome.status == "passed", outcome.found
    plain, drafting = outcome.numbers
    assert plain["num_draft_steps"] == 0
    assert drafting["num_draft_steps"] > 0
    assert 0 < plain["num_reads"] < drafting["num_reads"]


def test_one_read_more_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = head.Head.accept

    def asking(self: head.Head, logits: torch.Tensor, *arguments: object) -> object:
        logits[0, 0].item()
        return accept(self, logits, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(head.Head, "accept", asking)
    assert host_reads.check_host_reads(DeviceOptions(device="cpu")).status == "failed"
