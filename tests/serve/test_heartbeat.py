"""An engine that answers, dies, or is stuck."""

from __future__ import annotations

import asyncio

from rayspec.decode.engine_loop import EngineDeadError
from rayspec.serve.heartbeat import Heartbeat


def test_an_engine_that_answers_is_never_silent_and_one_that_is_stuck_is() -> None:
    async def scenario() -> None:
        now_s, stuck = [0.0], asyncio.Event()
        heartbeat = Heartbeat(stuck.wait, clock=lambda: now_s[0])
        beat = asyncio.create_task(heartbeat.beat())
        await asyncio.sleep(0)
        now_s[0] = 7.0
        assert heartbeat.silent_s == 7.0
        stuck.set()
        await beat
        assert (heartbeat.silent_s, heartbeat.failure) == (0.0, None)

    asyncio.run(scenario())


def test_a_death_is_kept_until_the_engine_answers_again() -> None:
    deaths = [EngineDeadError("gone"), None]

    async def ping() -> None:
        death = deaths.pop(0)
        if death is not None:
            raise death

    async def scenario() -> None:
        heartbeat = Heartbeat(ping)
        await heartbeat.beat()
        assert isinstance(heartbeat.failure, EngineDeadError)
        assert heartbeat.silent_s == 0.0
        await heartbeat.beat()
        assert heartbeat.failure is None

    asyncio.run(scenario())
