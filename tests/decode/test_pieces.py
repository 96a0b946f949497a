"""Pieces of a stream: joined without a loss, in order, whatever the threads do; the first and the end do not wait."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import closing
from typing import Any, TypeVar

import pytest

from rayspec.decode.engine_loop import EngineDeadError
from rayspec.decode.output import PieceQueue, joined
from rayspec.types import CompletionOutput, Logprob, OutOfMemoryError, RequestOutput

T = TypeVar("T")
LONG_S = 30.0


class MadeUpTime(asyncio.SelectorEventLoop):
    """A loop whose clock moves only while all wait, and then at once by as long as they wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s, select = 0.0, self._selector.select

        def skip(timeout_s: float | None) -> Any:
            self._now_s += timeout_s or 0.0
            return select(timeout_s if timeout_s is None else 0.0)

        self._selector.select = skip

    def time(self) -> float:
        return self._now_s


def run(work: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run does, in made-up time."""
    with closing(MadeUpTime()) as loop:
        return loop.run_until_complete(work)


def piece(
    number: int, *, index: int = 0, finished: bool = False, error: OutOfMemoryError | None = None
) -> RequestOutput:
    logprobs = [{number: Logprob(logprob=-0.5, rank=1, decoded_token=f"{number} ")}]
    one = CompletionOutput(
        index=index,
        text=f"{number} ",
        token_ids=(number,),
        logprobs=logprobs,
        finish_reason="stop" if finished else None,
    )
    return RequestOutput(
        request_id="r", prompt=None, prompt_token_ids=(1,), outputs=[one], finished=finished, error=error
    )


def done(outcome: RequestOutput | Exception) -> Future[RequestOutput]:
    future: Future[RequestOutput] = Future()
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
    return future


def tokens(pieces: list[RequestOutput]) -> list[list[int]]:
    return [[token for one in each.outputs for token in one.token_ids] for each in pieces]


def test_joined_pieces_are_the_request_not_streamed() -> None:
    whole = joined([piece(1), piece(2, index=1), piece(3), piece(4, index=1, finished=True)])
    assert [(one.index, one.text, one.token_ids) for one in whole.outputs] == [(0, "1 3 ", (1, 3)), (1, "2 4 ", (2, 4))]
    assert [[next(iter(row)) for row in one.logprobs or ()] for one in whole.outputs] == [[1, 3], [2, 4]]
    assert [one.finish_reason for one in whole.outputs] == [None, "stop"]
    assert whole.finished
    assert joined([whole]) is whole


def test_the_first_piece_and_the_end_do_not_wait_and_the_others_do() -> None:
    async def work() -> list[RequestOutput]:
        pieces = PieceQueue(LONG_S)
        reading = pieces.read()
        pieces.put(piece(1))
        found = [await anext(reading)]
        pieces.put(piece(2))
        rest = asyncio.ensure_future(anext(reading))
        await asyncio.sleep(LONG_S / 2)
        assert not rest.done()
        pieces.put(piece(3))
        pieces.end(done(piece(4, finished=True)))
        found += [await rest, *[one async for one in reading]]
        assert asyncio.get_running_loop().time() == LONG_S / 2, "the end did not wait"
        return found

    assert tokens(run(work())) == [[1], [2, 3, 4]]


@pytest.mark.parametrize("outcome", [EngineDeadError("gone"), piece(3, finished=True, error=OutOfMemoryError("full"))])
def test_what_came_before_a_failure_stays_apart(outcome: RequestOutput | EngineDeadError) -> None:
    found: list[RequestOutput] = []

    async def work() -> None:
        pieces = PieceQueue(0.0)
        for number in (1, 2):
            pieces.put(piece(number))
        pieces.end(done(outcome))
        async for one in pieces.read():
            found.append(one)  # noqa: PERF401 - the last one may raise

    if isinstance(outcome, EngineDeadError):
        with pytest.raises(EngineDeadError):
            asyncio.run(work())
        assert tokens(found) == [[1, 2]]
    else:
        asyncio.run(work())
        assert tokens(found) == [[1, 2], [3]]
        assert found[-1].error is not None


@pytest.mark.parametrize("interval_s", [0.0, 0.002])
def test_nothing_is_lost_between_threads(interval_s: float) -> None:
    number_of_pieces = 3000

    async def work() -> list[RequestOutput]:
        pieces = PieceQueue(interval_s)

        def feed() -> None:
            for number in range(number_of_pieces):
                pieces.put(piece(number))
                if number % 50 == 0:
                    time.sleep(0.0005)
            pieces.end(done(piece(number_of_pieces, finished=True)))

        thread = threading.Thread(target=feed)
        thread.start()
        found = [one async for one in pieces.read()]
        thread.join()
        return found

    found = asyncio.run(asyncio.wait_for(work(), 60))
    assert [token for each in tokens(found) for token in each] == list(range(number_of_pieces + 1))


def test_pieces_for_an_event_loop_that_has_ended_are_dropped() -> None:
    async def make() -> PieceQueue:
        return PieceQueue(0.0)

    pieces = asyncio.run(make())
    pieces.put(piece(1))
    pieces.end(done(piece(2, finished=True)))
