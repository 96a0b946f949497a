"""Which engine gets an item, and which item is blamed. Engines are sets of items, and time does not pass."""

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from rayspec.pipeline.recovery import Restarts
from rayspec.pool.dispatch import Dispatch, Router, Slot, part_hashes

ENGINE: Any = object()
PROMPT = part_hashes("The annual review. " * 60)
OTHER = part_hashes("Another review. " * 60)


def dealing(count: int, work: Callable[[Dispatch, list[Slot]], None], *, max_items: int | None = None) -> None:
    async def run() -> None:
        slots = [
            Slot(number=number, restarts=Restarts(3), restarts_alone=Restarts(3), engine=ENGINE)
            for number in range(count)
        ]
        work(Dispatch(slots, max_items=max_items), slots)

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


def test_items_of_a_dead_engine_run_alone_where_it_died_and_the_rest_goes_on() -> None:
    def work(dispatch: Dispatch, slots: list[Slot]) -> None:
        slots[0].under_way = {7, 8}
        assert not dispatch.died(slots[0], RuntimeError("gone"))
        slots[0].under_way.clear()
        for number in (7, 8, 9, 10):
            dispatch.turn(number, ())
        dispatch.deal()
        (first,) = given(slots)[0]
        assert given(slots) == [[first], [9, 10]]
        assert first in {7, 8}
        dispatch.leave(first)
        dispatch.deal()
        assert given(slots)[0] == [15 - first]
        dispatch.leave(15 - first)
        dispatch.turn(11, ())
        dispatch.deal()
        assert given(slots) == [[11], [9, 10]], "no item is isolated any more"

    dealing(2, work)


def test_isolated_items_do_not_wait_for_an_engine_that_finds_no_place() -> None:
    def work(dispatch: Dispatch, slots: list[Slot]) -> None:
        slots[0].under_way = {7, 8}
        dispatch.died(slots[0], RuntimeError("gone"))
        slots[0].under_way, slots[0].engine, slots[0].has_place = set(), None, False
        for number in (7, 8):
            dispatch.turn(number, ())
        dispatch.deal()
        assert [len(items) for items in given(slots)] == [0, 1]

    dealing(2, work)


def test_an_item_that_was_alone_at_two_deaths_is_the_culprit() -> None:
    def work(dispatch: Dispatch, slots: list[Slot]) -> None:
        found = []
        for number, items in enumerate([{7, 8}, {7}, {8}, {7, 9}, {7}]):
            assert dispatch.judgement(7) is None
            slots[0].under_way = set(items)
            found.append(dispatch.died(slots[0], RuntimeError(f"death {number}")))
        assert found == [0, 1, 1, 0, 2]
        assert "the last time so: death 4" in str(dispatch.judgement(7))
        assert dispatch.judgement(8) is None
        dispatch.leave(7)
        assert dispatch.judgement(7) is None

    dealing(1, work)


def run(num_items: int, deadly: set[int], *, width: int = 8, num_kills: int = 0, seed: int = 0) -> tuple[set[int], int]:
    """Run items until all are done. Return those that were blamed, and the number of deaths.

    A deadly item kills the engine when its turn comes. The first `num_kills` deaths come from outside.
    """
    order, blamed, num_deaths = random.Random(seed), set[int](), 0

    def work(dispatch: Dispatch, slots: list[Slot]) -> None:
        nonlocal num_deaths
        (slot,) = slots
        for number in range(num_items):
            dispatch.turn(number, ())
        dispatch.deal()
        while slot.under_way:
            number = order.choice(sorted(slot.under_way))
            if number not in deadly and num_deaths >= num_kills:
                dispatch.leave(number)
            else:
                num_deaths += 1
                dispatch.died(slot, RuntimeError("gone"))
                items = sorted(slot.under_way)
                slot.under_way.clear()
                for one in items:
                    if dispatch.judgement(one) is not None:
                        blamed.add(one)
                        dispatch.leave(one)
                    else:
                        dispatch.turn(one, ())
            dispatch.deal()
        assert not dispatch.has_waiting

    dealing(1, work, max_items=width)
    return blamed, num_deaths


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("num_items", "deadly", "options", "most_deaths"),
    [
        (40, {20}, {}, 3),
        (40, {10, 11, 12}, {}, 9),
        (40, set(range(0, 40, 4)), {}, 30),
        (40, set(range(40)), {}, 120),
        (2000, {700}, {"width": 1000}, 6),
        # Kills from outside, as many in a row as there are items under way.
        (1, set(), {"num_kills": 1}, 1),
        (2, set(), {"num_kills": 3}, 3),
        (40, set(), {"num_kills": 8}, 8),
    ],
)
def test_only_items_that_kill_engines_are_blamed_and_at_the_cost_of_few_deaths(
    num_items: int, deadly: set[int], options: dict[str, int], most_deaths: int, seed: int
) -> None:
    blamed, num_deaths = run(num_items, deadly, **options, seed=seed)
    assert blamed == deadly
    assert num_deaths <= most_deaths


def test_prompts_that_begin_alike_share_the_hashes_of_their_first_parts() -> None:
    text = "".join(chr(ord("a") + number % 26) * 7 for number in range(400))
    one, two = part_hashes(text), part_hashes(text[:1000] + "!" + text[1001:])
    assert len(one) == len(two) == 2800 // 256
    assert one[:3] == two[:3]
    assert not set(one[3:]) & set(two[3:])
    tokens = list(range(300))
    assert part_hashes(tokens) == part_hashes(tuple(tokens))
    assert part_hashes(tokens)[:2] == part_hashes([*tokens[:128], 9, *tokens[129:]])[:2]
    assert part_hashes(None) == part_hashes("short") == part_hashes([1, 2]) == ()
    assert part_hashes(math.nan) == part_hashes({"prompt": text}) == ()  # type: ignore[arg-type]
    assert len(part_hashes("a" * 10**6)) == 32
    assert part_hashes("\ud800" * 256), "what is no text is the engine's to refuse"


def test_the_engine_that_was_given_the_beginning_gets_the_prompt_unless_it_is_busy() -> None:
    router = Router()
    assert router.choose(PROMPT, {0: 1, 1: 0}) == 1
    assert router.choose(PROMPT, {0: 1, 1: 3}) == 1
    assert router.choose(OTHER, {0: 1, 1: 3}) == 0
    assert router.choose(PROMPT, {0: 0, 1: 4}) == 1
    assert router.choose(PROMPT, {0: 10, 1: 24}) == 1
    assert router.choose(PROMPT, {0: 0, 1: 5}) == 0
    assert router.choose(PROMPT, {0: 3, 1: 0}) == 0, "it has the beginning now"


def test_an_engine_that_was_replaced_or_lost_is_not_preferred() -> None:
    router = Router()
    router.choose(PROMPT, {1: 0})
    assert router.choose(PROMPT, {0: 7}) == 0
    router.choose(PROMPT, {1: 0})
    router.forget(1)
    assert router.choose(PROMPT, {0: 0, 1: 1}) == 0
