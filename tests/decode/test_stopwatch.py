from __future__ import annotations

import pytest

from rayspec.decode.runner import Mark, queued_s, seconds
from tests.engines import QueuedEvent, RowClock


def test_a_device_that_is_busy_begins_later_and_the_rest_is_its_own() -> None:
    """The device is busy until second 10; the host begins at 4, and has waited until 16."""
    clock = RowClock(behind=True)
    marks = [
        Mark(4.0, QueuedEvent(clock, 10.0)),
        Mark(13.0, QueuedEvent(clock, 13.0)),
        Mark(16.0, QueuedEvent(clock, 16.0)),
    ]
    assert seconds(marks[0], marks[1]) == pytest.approx(3)
    assert seconds(marks[1], marks[2]) == pytest.approx(3)
    assert queued_s(marks[0], marks[2]) == pytest.approx(6)


def test_it_waits_for_a_device_that_has_not_come_so_far() -> None:
    clock = RowClock(behind=True)
    assert seconds(Mark(0.0, QueuedEvent(clock, 1.0)), Mark(0.5, QueuedEvent(clock, 7.0))) == pytest.approx(6)
    assert clock.now_s == 7
    assert queued_s(Mark(0.0, QueuedEvent(clock, 0.0)), Mark(2.0, QueuedEvent(clock, 3.0))) == 0, "never negative"
