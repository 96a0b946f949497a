"""Who is taken and who is sent away."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from rayspec.serve.access import Admission
from rayspec.serve.replies import BUSY, Refused


def test_the_last_place_may_be_taken_by_a_large_request_and_then_there_is_none() -> None:
    admission = Admission(4, refusal=BUSY)
    with ExitStack() as under_way:
        for weight in (1, 2, 100):
            under_way.enter_context(admission.admit(weight))
        with pytest.raises(Refused) as refused, admission.admit():
            pass
        assert refused.value.error.status == 429
        assert admission.under_way == 103
    assert admission.under_way == 0


def test_exactly_so_many_are_admitted() -> None:
    admission = Admission(2)
    with ExitStack() as under_way:
        for _ in range(2):
            under_way.enter_context(admission.admit())
        with pytest.raises(Refused), admission.admit():
            pass


def test_a_failure_gives_the_place_back() -> None:
    admission = Admission(1)
    with pytest.raises(OSError, match="lost"), admission.admit():
        raise OSError("lost")
    with admission.admit():
        assert admission.under_way == 1


def test_without_a_limit_everyone_is_taken() -> None:
    admission = Admission()
    with ExitStack() as under_way:
        for _ in range(1000):
            under_way.enter_context(admission.admit())
        assert admission.under_way == 1000
