"""The thread of the engine, and the pieces of streams: joined without a loss, in order, whatever the threads do."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from unittest.mock import Mock

import pytest

from rayspec.config import SamplingParams
from rayspec.decode.engine_loop import EngineDeadError, EngineLoop, LoopThread, _settle
from rayspec.decode.output import NewOutput, PieceQueue, joined
from rayspec.decode.stages import StageLostError
from rayspec.structured import StructuredOutputsParams
from rayspec.types import CompletionOutput, EmptyPromptError, Logprob, OutOfMemoryError, Request, RequestOutput

WAIT_S = 60.0


def request(name: str, *, num_steps: int = 3, stream: bool = False) -> Request:
    return Request(request_id=name, params=SamplingParams(max_tokens=num_steps), prompt=name, stream=stream)


class CountingEngine:
    """Finishes a request after as many steps as it may have tokens; a stream tells of each. Prompts have effects: "bad"
    is refused, "bomb" ends the engine in a step, "bad bomb" when it is added."""

    info = tokenizer = stats = None

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.prompts: dict[str, str | None] = {}
        self.aborted: list[str] = []
        self.num_wakes = 0
        self.num_pings = 0
        self.lost = False
        self.streams: set[str] = set()
        self.most_at_once = 0
        self.num_steps = 0
        self.failure: BaseException = RuntimeError("the device is gone")
        self.may_step, self.may_read = threading.Event(), threading.Event()
        self.may_step.set()
        self.may_read.set()
        self.readers: set[str] = set()

    @property
    def has_unfinished(self) -> bool:
        return bool(self.left)

    def add(self, request: Request) -> None:
        if request.prompt == "bad":
            raise EmptyPromptError("nothing there")
        if request.prompt == "bad bomb":
            raise self.failure
        self.prompts[request.request_id] = request.prompt
        self.left[request.request_id] = request.params.max_tokens
        if request.stream:
            self.streams.add(request.request_id)

    def abort(self, request_id: str) -> RequestOutput | None:
        self.aborted.append(str(self.prompts[request_id]))
        del self.left[request_id]
        return None

    def ping(self) -> None:
        self.num_pings += 1
        if self.lost:
            raise StageLostError("stage-1 is gone")

    def wake(self) -> None:
        self.num_wakes += 1

    def advance(self) -> list[NewOutput]:
        self.may_step.wait(WAIT_S)
        self.num_steps += 1
        self.most_at_once = max(self.most_at_once, len(self.left))
        if any(self.prompts[name] == "bomb" for name in self.left):
            raise self.failure
        self.left = {name: left - 1 for name, left in self.left.items()}
        done = [name for name, left in self.left.items() if left == 0]
        for name in done:
            del self.left[name]
        return [
            _Counted(
                RequestOutput(
                    request_id=name,
                    prompt=name,
                    prompt_token_ids=(),
                    outputs=[],
                    finished=name in done,
                    prompt_logprobs=[None] * 5000 if self.prompts[name] == "large" else None,
                ),
                read=self._read,
            )
            for name in [*done, *(self.streams & self.left.keys())]
        ]

    def _read(self) -> None:
        self.readers.add(threading.current_thread().name)
        self.may_read.wait(WAIT_S)


@dataclass(frozen=True)
class _Counted(NewOutput):
    read: Callable[[], None] = lambda: None

    def decoded(self) -> RequestOutput:
        self.read()
        return self.output


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


@pytest.fixture
def loop(engine: CountingEngine) -> Iterator[EngineLoop]:
    loop = EngineLoop(cast("Any", engine))
    yield loop
    loop.stop()


def names_of(futures: list[Future[RequestOutput]]) -> list[str]:
    return [future.result(WAIT_S).request_id for future in futures]


def test_an_engine_that_waits_is_woken_by_what_comes_in(loop: EngineLoop, engine: CountingEngine) -> None:
    engine.may_step.clear()
    future = loop.submit(request("a"))
    assert engine.num_wakes == 1
    future.cancel()
    assert engine.num_wakes == 2
    engine.may_step.set()
    loop.stop()
    assert engine.num_wakes == 3


def test_two_callers_may_use_the_same_id(loop: EngineLoop, engine: CountingEngine) -> None:
    engine.may_step.clear()
    first, second = loop.submit(request("same", num_steps=5)), loop.submit(request("same", num_steps=1))
    engine.may_step.set()
    assert names_of([second, first]) == ["same", "same"]
    assert engine.most_at_once == 2
    refused = loop.submit(request("bad"))
    assert names_of([refused]) == ["bad"]


def test_who_has_all_outputs_may_use_the_engine_directly(loop: EngineLoop, engine: CountingEngine) -> None:
    """Even at once: in a callback, while the loop waits for work."""
    added = threading.Event()

    def use_directly(_: Future[RequestOutput]) -> None:
        engine.add(request("direct", num_steps=10**9))
        added.set()

    for first in ("good", "bad"):
        added.clear()
        engine.may_step.clear()
        future = loop.submit(request(first, num_steps=1))
        future.add_done_callback(use_directly)
        engine.may_step.set()
        assert added.wait(WAIT_S)
        num_steps = engine.num_steps
        time.sleep(0.05)
        assert engine.num_steps == num_steps
        engine.left.clear()


@pytest.mark.parametrize(
    ("bad", "failure"),
    [("bomb", RuntimeError("the device is gone")), ("bad bomb", KeyboardInterrupt("the device is gone"))],
)
def test_nobody_waits_for_an_engine_that_has_died(
    loop: EngineLoop, engine: CountingEngine, bad: str, failure: BaseException
) -> None:
    engine.failure = failure
    for future in loop.submit_all([request(name, num_steps=1000) for name in ("a", bad, "b")]):
        with pytest.raises(EngineDeadError, match=f"{type(failure).__name__}: the device is gone") as caught:
            future.result(WAIT_S)
        assert caught.value.__cause__ is failure
    assert loop.death is not None
    with pytest.raises(EngineDeadError, match="the device is gone"):
        loop.submit(request("late"))


def test_a_prompt_that_the_tokenizer_cannot_decode_is_left_to_the_engine(loop: EngineLoop) -> None:
    decode = Mock(side_effect=IndexError("piece id is out of range"))
    loop.tokenizer, loop.info = Mock(decode=decode), Mock(config=Mock(reasoning_parser="qwen3"))
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    form = loop._params(Request(request_id="", params=params, prompt_token_ids=[10**9])).structured_outputs
    assert form is not None
    assert form.reasoning == "before"


def test_forms_are_compiled_for_clients_and_not_for_keys() -> None:
    """Without keys all requests have the same owner: the slow forms of one client would hold up those of all others."""
    engine: Any = CountingEngine()
    engine.model, params = Mock(), SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    loop = EngineLoop(engine)
    loop.submit(Request(request_id="a", params=params, prompt="a", owner="key", client="192.0.2.1"))
    assert engine.model.grammars.compiled.call_args.args[-1] == "192.0.2.1"


def test_the_thread_of_deliveries_outlives_a_future_that_was_cancelled_twice() -> None:
    future: Future[RequestOutput] = Future()
    future.cancel()
    for _ in range(2):
        _settle(future, None)
    assert future.cancelled()


def test_a_thread_that_is_closed_by_itself_ends_its_work_first() -> None:
    """As where it collects an LLM with replicas as garbage: their processes stayed, and kept their GPUs."""
    thread, done = LoopThread("own"), threading.Event()

    async def last() -> None:
        await asyncio.sleep(0)
        done.set()

    thread.call_soon(lambda: thread.close(last, 1.0))
    thread._thread.join(WAIT_S)
    assert done.is_set()
    assert thread._loop.is_closed()


def test_a_ping_that_ends_the_engine_is_answered(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(CountingEngine, "ping")  # so that the call raises
    with pytest.raises(EngineDeadError, match="ping"):
        loop.ping().result(WAIT_S)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_in_a_forked_process_nobody_waits_for_a_thread_that_is_not_there(loop: EngineLoop) -> None:
    assert names_of([loop.submit(request("first"))]) == ["first"]
    child = os.fork()
    if child == 0:
        try:
            loop.submit(request("second"))
        except EngineDeadError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert names_of([loop.submit(request("third"))]) == ["third"]


def test_the_engine_goes_on_while_texts_are_made(loop: EngineLoop, engine: CountingEngine) -> None:
    engine.may_read.clear()
    pieces: list[RequestOutput] = []
    stream = loop.submit(request("stream", num_steps=5, stream=True), pieces.append)
    whole = loop.submit(request("whole", num_steps=9))
    while engine.num_steps < 9:
        time.sleep(0.01)
    ping = loop.ping()
    while not engine.num_pings:
        time.sleep(0.01)
    assert not any((pieces, stream.done(), whole.done(), ping.done()))
    engine.may_read.set()
    ping.result(WAIT_S)
    assert stream.done()
    assert whole.done()
    assert [piece.finished for piece in pieces] == [False] * 4
    assert engine.readers == {"rayspec-delivery"}


def test_an_output_with_many_logprobs_does_not_hold_up_the_others(loop: EngineLoop, engine: CountingEngine) -> None:
    def read() -> None:
        if threading.current_thread().name != "rayspec-delivery":
            engine.may_read.wait(60)

    engine._read = read  # type: ignore[method-assign]
    engine.may_read.clear()
    large, small = loop.submit(request("large")), loop.submit(request("small", num_steps=9))
    assert names_of([small]) == ["small"]
    assert not large.done()
    engine.may_read.set()
    assert names_of([large]) == ["large"]


def test_what_came_before_the_end_is_delivered_before_it(loop: EngineLoop, engine: CountingEngine) -> None:
    engine.may_read.clear()
    heard: list[str] = []
    short, endless = request("short", num_steps=3), request("endless", num_steps=10**9, stream=True)
    done, failed = loop.submit(short), loop.submit(endless, lambda _: heard.append("piece"))
    failed.add_done_callback(lambda _: heard.append("end"))
    while engine.num_steps < 9:
        time.sleep(0.01)
    loop.stop(0.01)
    engine.may_read.set()
    assert done.result(WAIT_S).finished
    with pytest.raises(EngineDeadError, match="it was stopped"):
        failed.result(WAIT_S)
    assert len(heard) > 2
    assert heard == ["piece"] * (len(heard) - 1) + ["end"]


def test_a_listener_that_raises_ends_the_loop(loop: EngineLoop) -> None:
    def broken(_: RequestOutput) -> None:
        raise RuntimeError("nobody listens")

    endless = loop.submit(request("endless", num_steps=10**9, stream=True), broken)
    with pytest.raises(EngineDeadError, match="RuntimeError: nobody listens"):
        endless.result(WAIT_S)


@pytest.mark.parametrize("busy", [False, True])
def test_a_ping_is_answered_when_the_loop_comes_round(loop: EngineLoop, engine: CountingEngine, busy: bool) -> None:
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
    whole.prompt_logprobs = [None]  # of the first piece only
    assert joined([whole, piece(5, finished=True)]).prompt_logprobs == [None]


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
