"""Stages whose link cannot be made exchange tensors through the host instead, and say so once."""

from __future__ import annotations

import logging
from unittest.mock import patch

import pytest

from rayspec.config import SamplingParams
from rayspec.pipeline import endpoint as endpoint_module
from rayspec.pipeline.messages import Connect
from tests.engines import complete, tokens_of
from tests.families import cases, checkpoint
from tests.pipeline.loop import LoopReplica, loop_engine

GREEDY = SamplingParams(temperature=0, max_tokens=16)


def require_frames(caplog: pytest.LogCaptureFixture, reason: str) -> set[tuple[int, bool]]:
    """Generate over three stages that are to have a link, of which one dies. Return the epochs, and whether each had a
    link."""
    path = checkpoint("llama")
    known = cases(path, (37, 3, 12), 16)
    with caplog.at_level(logging.WARNING), loop_engine(path, 3, data_plane="collective") as run:
        assert tokens_of(complete(run.engine, known.prompts, GREEDY)) == known.expected
        run.replica.kill("stage-1")
        assert tokens_of(complete(run.engine, known.prompts, GREEDY)) == known.expected
        assert run.replica.num_replaced == 1
        warnings = [record.getMessage() for record in caplog.records if "through the host" in record.getMessage()]
        assert len(warnings) == 1
        assert reason in warnings[0]
        assert not [record for record in caplog.records if "could not be brought back" in record.getMessage()]
        return {
            (message.epoch, bool(message.link)) for _, message in run.loop.delivered if isinstance(message, Connect)
        }


def test_a_link_that_cannot_be_joined_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """One process has all stages here, one after another: the first waits for the others in vain."""
    with patch.object(endpoint_module, "_LINK_TIMEOUT_S", 0.2):
        assert require_frames(caplog, "could not join") == {(1, True), (2, False), (3, False)}


def test_stages_on_the_same_gpu_try_no_link(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(LoopReplica, "stages_share_gpus", True)
    assert require_frames(caplog, "on the same GPU") == {(1, False), (2, False)}
