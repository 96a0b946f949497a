from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rayspec.pool.dispatch import Dispatch
from rayspec.pool.restart_budget import RestartBudget
from rayspec.pool.slot import Slot

ENGINE: Any = object()


def slots_of(count: int) -> list[Slot]:
    return [
        Slot(number=number, restarts=RestartBudget(3), trials=RestartBudget(3), engine=ENGINE)
        for number in range(count)
    ]


def dealing(count: int, work: Callable[[Dispatch, list[Slot]], None], *, max_items: int | None = None) -> None:
    async def run() -> None:
        slots = slots_of(count)
        work(Dispatch(slots, max_items=max_items, clock=lambda: 0.0), slots)

    asyncio.run(run())


def given(slots: list[Slot]) -> list[list[int]]:
    return [sorted(slot.under_way) for slot in slots]


def test_items_wait_for_room() -> None:
    def work(dispatch: Dispatch, slots: list[Slot]) -> None:
        turns = [dispatch.turn(number, ()) for number in range(5)]
        dispatch.deal()
        assert sorted(map(len, given(slots))) == [2, 2]
        assert dispatch.has_waiting
        dispatch.leave(0)
        dispatch.deal()
        assert all(turn.done() for turn in turns)
        assert not dispatch.has_waiting

    dealing(2, work, max_items=2)


def test_a_slot_without_an_engine_gets_nothing() -> None:
    def work(dispatch: Dispatch, slots: list[Slot]) -> None:
        slots[0].engine = None
        for number in range(3):
            dispatch.turn(number, ())
        dispatch.deal()
        assert given(slots) == [[], [0, 1, 2]]

    dealing(2, work)


def test_a_suspect_is_alone_on_the_engine_where_others_died_and_the_rest_goes_on() -> None:
    def work(dispatch: Dispatch, slots: list[Slot]) -> None:
        for _ in range(2):
            dispatch.died(slots[0], [7], 1.0, RuntimeError("gone"))
        for number in (7, 8, 9):
            dispatch.turn(number, ())
        dispatch.deal()
        assert given(slots) == [[7], [8, 9]]

    dealing(2, work)


def test_a_condemned_item_has_the_last_death_in_its_judgement() -> None:
    def work(dispatch: Dispatch, slots: list[Slot]) -> None:
        assert dispatch.judgement(7) is None
        for number in range(20):
            dispatch.idled(10.0)
            dispatch.died(slots[0], [7], 0.1, RuntimeError(f"death {number}"))
        assert "the last time so: death 19" in str(dispatch.judgement(7))
        dispatch.leave(7)
        assert dispatch.judgement(7) is None

    dealing(1, work)


def test_who_waits_is_told_of_a_failure() -> None:
    def work(dispatch: Dispatch, slots: list[Slot]) -> None:
        turn = dispatch.turn(1, ())
        dispatch.fail(RuntimeError("all engines are lost"))
        with pytest.raises(RuntimeError, match="all engines are lost"):
            turn.result()

    dealing(1, work)
