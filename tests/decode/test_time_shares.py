from __future__ import annotations

import pytest

from rayspec.decode.stopwatch import TimeShares


class _Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_works_one_after_the_other_have_their_own_time() -> None:
    clock = _Clock()
    shares = TimeShares(clock)
    for work_id, took_s in ((1, 5.0), (2, 0.0), (3, 2.0)):
        shares.begin(work_id)
        clock.now_s += took_s
        assert shares.end(work_id) == took_s
        clock.now_s += 50.0


def test_works_under_way_at_the_same_time_divide_it() -> None:
    clock = _Clock()
    shares = TimeShares(clock)
    shares.begin(1)
    clock.now_s += 1
    shares.begin(2)
    clock.now_s += 4
    shares.begin(3)
    clock.now_s += 6
    found = [shares.end(1)]
    clock.now_s += 2
    found += [shares.end(3), shares.end(2)]
    assert found == pytest.approx([1 + 2 + 2, 2 + 1, 2 + 2 + 1])
    assert sum(found) == pytest.approx(13)


def test_what_is_lost_leaves_nothing_behind() -> None:
    clock = _Clock()
    shares = TimeShares(clock)
    shares.begin(1)
    clock.now_s += 9
    shares.clear()
    shares.begin(2)
    clock.now_s += 3
    assert shares.end(2) == 3
