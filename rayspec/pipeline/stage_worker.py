"""One stage of the model as a handler of messages. It neither receives nor sends them itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rayspec.decode.head import Head
from rayspec.decode.rounds import first_pass, script
from rayspec.decode.search import PlanSearch
from rayspec.decode.stages import SpanRunner, out_of_memory
from rayspec.decode.stopwatch import Stopwatch
from rayspec.decode.work import Pass, Result, TapsGoneError
from rayspec.pipeline.endpoint import COORDINATOR, ENGINE
from rayspec.pipeline.messages import (
    Agreement,
    Begin,
    Done,
    Drop,
    Expand,
    Failed,
    Forward,
    Gather,
    Lap,
    Measure,
    Measured,
    Message,
    Moved,
    Moves,
    Operation,
    RunSublayer,
    Seek,
    Ship,
    Shipped,
    Similarity,
    Sought,
    TargetCosines,
    TargetFeature,
    VarySublayer,
)


def stage_name(stage: int) -> str:
    """Return the name under which peers know the (leading) shard of a stage."""
    return f"stage-{stage}"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to be sent."""

    peer: str
    message: Message
    tensors: Sequence[Tensor] = ()


@dataclass(frozen=True, slots=True)
class Placed:
    """Position of a stage in the pipeline: its number, and the sublayers [first, last) of every stage."""

    stage: int
    spans: Sequence[tuple[int, int]]

    @property
    def last(self) -> int:
        return len(self.spans) - 1

    @property
    def is_last(self) -> bool:
        return self.stage == self.last

    def next_stage(self, work: Pass) -> int:
        """Return the next stage with work in the pass; the last one, with the head, always has. Bypass the others."""
        between = range(self.stage + 1, self.last)
        return next((stage for stage in between if work.needs(*self.spans[stage])), self.last)


@dataclass(slots=True)
class _Seeking:
    """A plan search under way: this span's part of it, and the batches of states that this stage has."""

    search_id: int
    search: PlanSearch
    batches: dict[int, Tensor] = field(default_factory=dict)


class StageWorker:
    """Runs passes through its span and returns the messages to send. The stage with the head keeps the script of each
    work under way. It sends the script's passes to the first stage, and finally the result to the engine.

    measure: times the sublayers of the span. `Endpoint.receive` drops messages of older epochs before they come here.
    """

    def __init__(self, place: Placed, span: SpanRunner, head: Head | None, measure: Callable[[int], Measured]) -> None:
        self._place = place
        self._span = span
        self._head = head
        self._measure = measure
        self._stopwatch = Stopwatch.of(span.runner.device)
        self._scripts: dict[int, Generator[Pass, Tensor, Result]] = {}
        self._seeking: _Seeking | None = None

    def forget(self) -> None:
        """Drop all work under way, because a new epoch has begun."""
        self._scripts.clear()
        self._seeking = None
        self._span.forget()
        if self._head is not None:
            self._head.forget()

    @torch.inference_mode()
    def handle(self, message: Message, tensors: Sequence[Tensor]) -> Sequence[Outgoing]:
        """Handle a message and return the messages to send. Raises model errors; lack of memory becomes a Failed."""
        match message:
            case Begin():
                return self._pass(message.epoch, first_pass(message.work), None, message)
            case Forward():
                hidden = tensors[0].to(self._span.runner.device) if tensors else None
                return self._pass(message.epoch, message.work, hidden, message.begin)
            case Failed():
                return [self._give_up(message)]
            case Seek() | Shipped() | Expand():
                return list(self._search(message, tensors))
            case _:
                return [self._answer(message, tensors)]

    def _answer(self, message: Message, tensors: Sequence[Tensor]) -> Outgoing:
        match message:
            case Moves():
                self._span.move(message.moves)
                return Outgoing(ENGINE, Moved(epoch=message.epoch))
            case Measure():
                return Outgoing(COORDINATOR, self._measure(message.epoch))
            case Lap():
                peer, *rest = message.route
                stamps = [*message.stamps, time.monotonic()]
                return Outgoing(peer, Lap(epoch=message.epoch, route=rest, stamps=stamps), tensors)
        raise AssertionError(f"a stage does not take {type(message).__name__}")

    def _pass(self, epoch: int, work: Pass, hidden: Tensor | None, begin: Begin | None) -> list[Outgoing]:
        if self._place.is_last and begin is not None:
            self._enter(begin)
        try:
            hidden = self._span.run(work, hidden)
            if self._place.is_last:
                return [self._arrive(epoch, work, hidden)]
        except RuntimeError as error:
            reason = str(out_of_memory(error))
            if self._place.is_last:
                return [self._give_up(Failed(epoch=epoch, work_id=work.round_id, reason=reason))]
            failed = Failed(epoch=epoch, work_id=work.round_id, reason=reason, begin=begin)
            return [Outgoing(stage_name(self._place.last), failed)]
        onward = stage_name(self._place.next_stage(work))
        return [Outgoing(onward, Forward(epoch=epoch, work=work, begin=begin), [hidden])]

    def _give_up(self, failed: Failed) -> Outgoing:
        """Drop some work and report it; only on the stage with the head, which first opens the work's sequences."""
        if failed.begin is not None:
            self._enter(failed.begin)
        del self._scripts[failed.work_id]
        return Outgoing(ENGINE, Failed(epoch=failed.epoch, work_id=failed.work_id, reason=failed.reason))

    def _arrive(self, epoch: int, work: Pass, hidden: Tensor) -> Outgoing:
        """Continue the script of some work with the states before the head: send its next pass, or its result."""
        passes = self._scripts[work.round_id]
        try:
            onward = passes.send(hidden)
        except StopIteration as end:
            del self._scripts[work.round_id]
            return Outgoing(ENGINE, Done(epoch=epoch, work_id=work.round_id, result=end.value))
        return Outgoing(stage_name(0), Forward(epoch=epoch, work=onward))

    def _enter(self, begin: Begin) -> None:
        assert self._head is not None
        for sequence_id in begin.closed:
            self._head.close(sequence_id)
        for spec in begin.opened:
            self._head.open(spec)
        passes = script(begin.work, self._head, self._stopwatch)
        next(passes)  # the first stage has run that one already
        self._scripts[begin.work.id] = passes

    def _search(self, message: Seek | Shipped | Expand, tensors: Sequence[Tensor]) -> Iterator[Outgoing]:
        if isinstance(message, Seek):
            self._seeking = None
            if message.tokens:
                yield Outgoing(COORDINATOR, self._seek(message))
        elif self._seeking is not None and self._seeking.search_id == message.search_id:
            if isinstance(message, Expand):
                yield from self._expand(message, self._seeking)
            else:
                self._seeking.batches[message.batch] = tensors[0].to(self._span.runner.device)
                yield Outgoing(COORDINATOR, Sought(epoch=message.epoch, search_id=message.search_id))

    def _seek(self, message: Seek) -> Sought:
        try:
            next_tokens = self._head.next_tokens(message.tokens) if self._head is not None else None
            search = self._span.search(message.tokens, message.rows, next_tokens)
        except TapsGoneError:
            error = f"{stage_name(self._place.stage)} has no states of some tapped tokens any more"
            return Sought(epoch=message.epoch, search_id=message.search_id, error=error)
        self._seeking = _Seeking(message.search_id, search)
        if self._place.stage == 0:
            self._seeking.batches[0] = search.start()
        return Sought(epoch=message.epoch, search_id=message.search_id)

    def _expand(self, message: Expand, seeking: _Seeking) -> Iterator[Outgoing]:
        values: Sequence[float] = ()
        shipped = False
        for operation in message.operations:
            if isinstance(operation, Ship):
                shipped = True
                onward = Shipped(epoch=message.epoch, search_id=message.search_id, batch=operation.source)
                yield Outgoing(operation.peer, onward, [seeking.batches[operation.source]])
            else:
                values = _apply(operation, seeking) or values
        if not shipped:
            answer = Sought(epoch=message.epoch, search_id=message.search_id, values=values)
            yield Outgoing(COORDINATOR, answer)


def _apply(operation: Operation, seeking: _Seeking) -> list[float]:
    search, batches = seeking.search, seeking.batches
    match operation:
        case RunSublayer():
            batches[operation.into] = search.run(operation.sublayer, operation.choice, batches[operation.source])
        case VarySublayer():
            batches[operation.into] = search.vary(operation.sublayer, operation.choice, batches[operation.source])
        case Gather():
            sources = [batches[source] for source in operation.sources]
            batches[operation.into] = search.gather(sources, np.asarray(operation.index, np.int64))
        case Similarity():
            return search.similarity(operation.sublayer, batches[operation.source]).tolist()  # type: ignore[no-any-return]
        case Agreement():
            found = search.agreement(batches[operation.source])
            return [*found.num_agreed.tolist(), *found.confidence.tolist(), *found.missed_confidence.tolist()]
        case TargetCosines():
            return search.cosines()
        case TargetFeature():
            return search.feature()
        case Drop():
            del batches[operation.source]
    return []
