from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest

from rayspec.config import SamplingParams
from rayspec.decode.engine_loop import EngineDeadError, EngineLoop
from rayspec.decode.stages import StageLostError
from rayspec.types import EmptyPromptError, Request, RequestOutput

WAIT_S = 10.0


def request(name: str, *, num_steps: int = 3, stream: bool = False) -> Request:
    return Request(request_id=name, params=SamplingParams(max_tokens=num_steps), prompt=name, stream=stream)


class CountingEngine:
    """Finishes a request after as many steps as it may have tokens; a stream tells of each. "bad" is refused; "bomb"
    blows the engine up."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.aborted: list[str] = []
        self.num_idle_steps = 0
        self.num_pings = 0
        self.lost = False
        self.streams: set[str] = set()
        self.most_at_once = 0
        self.may_step = threading.Event()
        self.may_step.set()

    @property
    def has_unfinished(self) -> bool:
        return bool(self.left)

    def add(self, request: Request) -> None:
        if request.prompt == "bad":
            raise EmptyPromptError("nothing there")
        self.left[request.request_id] = request.params.max_tokens
        if request.stream:
            self.streams.add(request.request_id)

    def abort(self, request_id: str) -> RequestOutput | None:
        self.aborted.append(request_id)
        del self.left[request_id]
        return None

    def ping(self) -> Future[None]:
        self.num_pings += 1
        answered: Future[None] = Future()
        if self.lost:
            answered.set_exception(StageLostError("stage-1 is gone"))
        else:
            answered.set_result(None)
        return answered

    def step(self) -> list[RequestOutput]:
        self.may_step.wait(WAIT_S)
        self.num_idle_steps += not self.left
        self.most_at_once = max(self.most_at_once, len(self.left))
        if "bomb" in self.left:
            raise RuntimeError("the device is gone")
        self.left = {name: left - 1 for name, left in self.left.items()}
        done = [name for name, left in self.left.items() if left == 0]
        for name in done:
            del self.left[name]
        return [
            RequestOutput(request_id=name, prompt=name, prompt_token_ids=(), outputs=[], finished=name in done)
            for name in [*done, *(self.streams & self.left.keys())]
        ]


def names_of(futures: list[Future[RequestOutput]]) -> list[str]:
    return [future.result(WAIT_S).request_id for future in futures]


def test_requests_from_many_threads_run_together() -> None:
    engine = CountingEngine()
    loop = EngineLoop(engine)
    engine.may_step.clear()
    futures: list[Future[RequestOutput]] = []
    threads = [
        threading.Thread(target=lambda n=n: futures.append(loop.submit(request(f"r{n}", num_steps=2 + n % 3))))
        for n in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.may_step.set()
    assert sorted(names_of(futures)) == sorted(f"r{n}" for n in range(20))
    assert engine.most_at_once >= 19
    loop.stop()


def test_the_loop_sleeps_without_work_and_wakes_for_it() -> None:
    engine = CountingEngine()
    loop = EngineLoop(engine)
    assert names_of([loop.submit(request("first"))]) == ["first"]
    assert loop.death is None
    time.sleep(0.05)
    assert engine.num_idle_steps == 0
    assert names_of([loop.submit(request("second"))]) == ["second"]
    loop.stop()


def test_a_refused_request_is_an_output_with_an_error() -> None:
    loop = EngineLoop(CountingEngine())
    bad, good = loop.submit(request("bad")), loop.submit(request("good"))
    assert bad.result(WAIT_S).error is not None
    assert good.result(WAIT_S).error is None
    loop.stop()


def test_an_id_in_use_is_refused_and_the_first_goes_on() -> None:
    engine = CountingEngine()
    loop = EngineLoop(engine)
    engine.may_step.clear()
    first, second = loop.submit(request("same", num_steps=5)), loop.submit(request("same", num_steps=1))
    engine.may_step.set()
    assert "in use" in str(second.result(WAIT_S).error)
    assert first.result(WAIT_S).error is None
    loop.stop()


def test_cancelling_a_future_aborts_its_request() -> None:
    engine = CountingEngine()
    loop = EngineLoop(engine)
    endless, short = loop.submit(request("endless", num_steps=10**9)), loop.submit(request("short", num_steps=50))
    assert short.result(WAIT_S).finished
    assert endless.cancel()
    assert names_of([loop.submit(request("next"))]) == ["next"]
    assert engine.aborted == ["endless"]
    loop.stop()


def test_when_the_engine_dies_everyone_who_waits_is_told_why() -> None:
    engine = CountingEngine()
    loop = EngineLoop(engine)
    engine.may_step.clear()
    futures = [loop.submit(request(name, num_steps=1000)) for name in ("a", "b", "bomb", "c")]
    engine.may_step.set()
    for future in futures:
        with pytest.raises(EngineDeadError, match="RuntimeError: the device is gone"):
            future.result(WAIT_S)
    assert loop.death is not None
    with pytest.raises(EngineDeadError, match="the device is gone"):
        loop.submit(request("late"))


def test_stopping_fails_what_is_unfinished() -> None:
    loop = EngineLoop(CountingEngine())
    future = loop.submit(request("endless", num_steps=10**9))
    loop.stop()
    with pytest.raises(EngineDeadError, match="it was stopped"):
        future.result(WAIT_S)


def test_a_stream_is_told_piece_by_piece_and_ends_with_its_future() -> None:
    loop = EngineLoop(CountingEngine())
    pieces: list[RequestOutput] = []
    last = loop.submit(request("stream", num_steps=5, stream=True), pieces.append).result(WAIT_S)
    assert [piece.finished for piece in pieces] == [False] * 4
    assert last.finished
    loop.stop()


def test_a_stream_that_nobody_waits_for_any_more_is_aborted() -> None:
    engine = CountingEngine()
    loop = EngineLoop(engine)
    told = threading.Event()
    endless = loop.submit(request("endless", num_steps=10**9, stream=True), lambda _: told.set())
    assert told.wait(WAIT_S)
    endless.cancel()
    assert names_of([loop.submit(request("next"))]) == ["next"]
    assert engine.aborted == ["endless"]
    loop.stop()


@pytest.mark.parametrize("busy", [False, True])
def test_a_ping_is_answered_when_the_loop_comes_round(busy: bool) -> None:
    engine = CountingEngine()
    loop = EngineLoop(engine)
    if busy:
        loop.submit(request("endless", num_steps=10**9))
    loop.ping().result(WAIT_S)
    assert engine.num_pings == 1
    engine.lost = True
    with pytest.raises(StageLostError, match="stage-1 is gone"):
        loop.ping().result(WAIT_S)
    assert loop.death is None
    loop.stop()
    with pytest.raises(EngineDeadError):
        loop.ping()


def test_a_ping_to_a_stuck_loop_is_not_answered_until_it_goes_on() -> None:
    engine = CountingEngine()
    loop = EngineLoop(engine)
    engine.may_step.clear()
    loop.submit(request("endless", num_steps=10**9))
    time.sleep(0.05)
    ping = loop.ping()
    with pytest.raises(TimeoutError):
        ping.result(0.2)
    engine.may_step.set()
    ping.result(WAIT_S)
    loop.stop()
