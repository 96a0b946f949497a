from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any

import pytest

from rayspec.openai.places import Places


def _run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


class _Asked:
    """Turns by name, of which the first letter is the client."""

    def __init__(self, places: Places) -> None:
        self._places, self._turns, self._seen = places, dict[str, tuple[Any, ExitStack]](), set[str]()

    def ask(self, *names: str, weight: int = 1) -> None:
        for name in names:
            held = ExitStack()
            self._turns[name] = self._places.ask(name[0], held, weight), held

    def leave(self, *names: str) -> None:
        for name in names:
            self._turns.pop(name)[1].close()

    def cancel(self, name: str) -> None:
        self._turns[name][0].cancel()

    def entered(self) -> list[str]:
        """Those that have entered since the last call."""
        new = [name for name, (turn, _) in self._turns.items() if turn.done() and name not in self._seen]
        self._seen.update(new)
        return new


def test_places_go_to_clients_in_turn() -> None:
    async def scenario() -> None:
        asked = _Asked(Places(4))
        asked.ask(*(f"a{number}" for number in range(20)))
        assert asked.entered() == ["a0", "a1", "a2", "a3"]
        asked.leave("a0")
        asked.ask("b0", "b1", "b2", "c0")
        assert asked.entered() == ["a4", "b0", "b1", "c0"], "a4 came before them; they have their shares beyond it"
        asked.cancel("b2")  # as a client that hangs up while it waits
        asked.leave("b2", "a1", "a2", "a3")
        assert asked.entered() == [], "they have four together"
        asked.leave("b0", "b1", "c0")
        assert asked.entered() == ["a5", "a6", "a7"]
        asked.leave("a4", "a5")
        asked.cancel("a8")  # too late: it has its place, and gives it back
        asked.leave("a8")
        assert asked.entered() == ["a9", "a10"]

    _run(scenario())


def test_a_client_has_its_share_although_no_place_is_taken_back() -> None:
    """Streams of another may go on for minutes."""

    async def scenario() -> None:
        asked = _Asked(Places(4, least=1))
        asked.ask(*(f"a{number}" for number in range(9)), *"bcdef")
        assert asked.entered() == ["a0", "a1", "a2", "a3", *"bcdef"]
        asked.ask("b1")
        assert asked.entered() == [], "its share is less than two"

    _run(scenario())


def test_work_takes_places_by_its_weight() -> None:
    async def scenario() -> None:
        asked = _Asked(Places(8, least=2))
        asked.ask("a0", weight=3)
        asked.ask("a1", weight=100)
        asked.ask("a2", weight=1)
        assert asked.entered() == ["a0"], "the larger one is next, once it is alone"
        asked.ask("b0", "b1", weight=2)
        asked.ask("b2", weight=1)
        assert asked.entered() == ["b0", "b1"], "its share is half"
        asked.leave("a0", "b0", "b1")
        assert asked.entered() == ["b2"]
        asked.leave("b2")
        assert asked.entered() == ["a1"]
        asked.ask("c0", weight=5)
        asked.ask("d0", weight=2)
        assert asked.entered() == ["d0"], "the share of three clients is two"

    _run(scenario())


def test_a_client_waits_for_one_turn_of_each_other() -> None:
    """However many turns of theirs wait, and also where they give up some."""

    async def scenario() -> None:
        places = Places(1)
        asked = _Asked(places)
        left = ["ab"[number % 2] + str(number) for number in range(100)]
        asked.ask(*left, "c")
        for name in ("a0", "b1", "a22"):
            assert "c" not in asked.entered()
            asked.leave(name)
            left.remove(name)
            for gone in [one for one in left if one[0] == name[0]][:10]:
                asked.cancel(gone)
                asked.leave(gone)
                left.remove(gone)
        assert "c" in asked.entered()
        asked.leave("c", *left)
        assert not any((places._held, places._waiting, places._newest)), "nothing is left"

    _run(scenario())


def test_many_that_wait_take_no_longer_each() -> None:
    async def scenario() -> None:
        places = Places(8)
        asked = _Asked(places)
        names = ["ab"[number % 2] + str(number) for number in range(4096)]
        asked.ask(*names)
        for name in names:
            places.resize(8)
            asked.leave(name)

    start_s = time.process_time()
    _run(scenario())
    assert time.process_time() - start_s < 3


@pytest.mark.parametrize("has_entered", [True, False])
def test_work_that_is_cancelled_gives_its_places_back(has_entered: bool) -> None:
    async def scenario() -> None:
        places = Places(1)

        async def work() -> None:
            async with places.take("a"):
                await asyncio.sleep(60)

        with ExitStack() as held:
            if not has_entered:
                await places.ask("b", held)
            task = asyncio.create_task(work())
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        with ExitStack() as held:
            await places.ask("c", held)

    _run(scenario())
