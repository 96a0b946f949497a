"""Lines of batches beside interactive requests."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, ExitStack

from rayspec.serve.model_server import Precedence


def test_lines_take_what_interactive_requests_leave_and_at_least_one_runs() -> None:
    async def work() -> None:
        precedence = Precedence(8)
        entered: list[int] = []
        ends = [asyncio.Event() for _ in range(10)]

        async def line(number: int) -> None:
            async with precedence.line():
                entered.append(number)
                await ends[number].wait()

        async def settled() -> list[int]:
            for _ in range(20):
                await asyncio.sleep(0)
            return entered

        tasks = [asyncio.create_task(line(number)) for number in range(10)]
        assert await settled() == [0, 1, 2, 3, 4, 5]
        with ExitStack() as requests:
            requests.enter_context(precedence.interactive(3))
            for number in range(5):
                ends[number].set()
            assert await settled() == [0, 1, 2, 3, 4, 5, 6, 7]
            requests.enter_context(precedence.interactive(100))
            for number in range(5, 8):
                ends[number].set()
            assert await settled() == list(range(9))  # one at a time
            tasks[9].cancel()
            await settled()
        async with AsyncExitStack() as lines:
            for _ in range(5):
                await lines.enter_async_context(precedence.line())
        ends[8].set()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(asyncio.wait_for(work(), 30))
