"""Decides which engine gets a waiting item, and which items are blamed for deaths. Starts and ends no engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from rayspec.pool.quarantine import EngineKilledError, Quarantine, Verdict
from rayspec.pool.routing import PartHash, Router
from rayspec.pool.slot import Engine, Slot


@dataclass(frozen=True, slots=True)
class _Waiting:
    turn: asyncio.Future[tuple[Slot, Engine]]
    hashes: tuple[PartHash, ...]


class Dispatch:
    """Gives waiting items, known by number, to engines. While there are suspects (see Quarantine), one slot gets only
    suspects, and the other slots get the other items.

    max_items: largest number of items that an engine has at a time; None: no limit.
    """

    def __init__(self, slots: Sequence[Slot], *, max_items: int | None, clock: Callable[[], float]) -> None:
        self._slots, self._max_items, self._clock = slots, max_items, clock
        self._waiting: dict[int, _Waiting] = {}
        self._router = Router()
        self._quarantine: Quarantine | None = None  # made at the first death
        self._condemned: dict[int, EngineKilledError] = {}
        self._trial_slot: Slot | None = None

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def turn(self, number: int, hashes: tuple[PartHash, ...]) -> asyncio.Future[tuple[Slot, Engine]]:
        """Queue an item. Return a future of the slot and the engine that the item is given to."""
        turn: asyncio.Future[tuple[Slot, Engine]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = _Waiting(turn, hashes)
        return turn

    def withdraw(self, number: int) -> None:
        """Remove an item from the queue, if it is still there."""
        self._waiting.pop(number, None)

    def leave(self, number: int) -> None:
        """Forget an item, which is done, condemned or given up."""
        for slot in self._slots:
            slot.under_way.pop(number, None)
        self._condemned.pop(number, None)
        if self._quarantine is not None:
            self._quarantine.forget(number)

    def fail(self, error: Exception) -> None:
        """Let all waiting items fail with this error."""
        for waiting in self._waiting.values():
            if not waiting.turn.done():
                waiting.turn.set_exception(error)

    def deal(self) -> None:
        """Give waiting items to engines that have room for them."""
        trial = self._slot_for_suspects()
        if trial is not None and self._quarantine is not None:
            for number in self._quarantine.admitted(self._waiting, trial.under_way):
                self._give(number, trial)
        loads = {
            slot.number: len(slot.under_way)
            for slot in self._slots
            if slot.engine is not None and slot is not trial and self._has_room(slot)
        }
        for number in list(self._ordinary()) if loads else ():
            slot = self._slots[self._router.choose(self._waiting[number].hashes, loads)]
            self._give(number, slot)
            loads[slot.number] += 1
            if not self._has_room(slot):
                del loads[slot.number]
            if not loads:
                return

    def died(self, slot: Slot, under_way: Collection[int], lived_s: float, error: Exception) -> Verdict:
        """Record that the engine of a slot died with these items. lived_s: seconds since it got the oldest of them."""
        verdict = self._have_quarantine().died(under_way, lived_s)
        if self._have_quarantine().has_suspects and self._trial_slot is None:
            self._trial_slot = slot
        if verdict.is_guilty and verdict.suspect is not None:
            message = f"engines died of this row, also where it was the only row, the last time so: {error}"
            self._condemned[verdict.suspect] = EngineKilledError(message)
        return verdict

    def died_idle(self) -> None:
        """Record that an engine without items died, or could not be loaded."""
        self._have_quarantine().died(())

    def idled(self, seconds: float) -> None:
        """Record that an engine lived for so many seconds without an item."""
        if self._quarantine is not None:
            self._quarantine.idled(seconds)

    def replaced(self, slot: Slot) -> None:
        """Forget which prompts the engine of this slot was given, because a new engine replaces it."""
        self._router.forget(slot.number)

    def judgement(self, number: int) -> EngineKilledError | None:
        """Return the error of an item that is condemned, else None."""
        return self._condemned.get(number)

    def _have_quarantine(self) -> Quarantine:
        if self._quarantine is None:
            self._quarantine = Quarantine()
        return self._quarantine

    def _slot_for_suspects(self) -> Slot | None:
        """Return the slot for suspects; None without suspects, or while that slot has no engine.

        The slot stays the same as long as possible. The first choice is the slot whose engine has died."""
        if self._quarantine is None or not self._quarantine.has_suspects:
            self._trial_slot = None
        elif self._trial_slot is None or self._trial_slot.failure is not None:
            left = [slot for slot in self._slots if slot.failure is None]
            self._trial_slot = min(left, key=lambda slot: len(slot.under_way), default=None)
        trial = self._trial_slot
        return trial if trial is not None and trial.engine is not None else None

    def _ordinary(self) -> Iterator[int]:
        """Return the waiting items that are not suspects, oldest first."""
        quarantine = self._quarantine
        return (number for number in self._waiting if quarantine is None or not quarantine.is_suspect(number))

    def _has_room(self, slot: Slot) -> bool:
        return self._max_items is None or len(slot.under_way) < self._max_items

    def _give(self, number: int, slot: Slot) -> None:
        turn = self._waiting.pop(number).turn
        if not turn.done() and slot.engine is not None:
            slot.under_way[number] = self._clock()
            turn.set_result((slot, slot.engine))
