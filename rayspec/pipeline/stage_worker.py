"""One stage of the model as a handler of messages. It neither receives nor sends them itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from torch import Tensor

from rayspec.decode.rounds import Head, first_pass, script
from rayspec.decode.search import PlanSearch
from rayspec.decode.stages import SpanRunner, out_of_memory
from rayspec.decode.work import Pass, Result, TapsGoneError
from rayspec.pipeline.endpoint import COORDINATOR, ENGINE, stage_name
from rayspec.pipeline.messages import (
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
    Moves,
    RunSublayer,
    Score,
    Seek,
    Ship,
    Shipped,
    Sought,
)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to be sent."""

    peer: str
    message: Message
    tensors: Sequence[Tensor] = ()


def next_stage(stage: int, spans: Sequence[tuple[int, int]], work: Pass) -> int:
    """Return the next stage with work in the pass; the last one, with the head, always has. Bypass the others. spans:
    the sublayers [first, last) of every stage."""
    last = len(spans) - 1
    return next((number for number in range(stage + 1, last) if work.needs(*spans[number])), last)


@dataclass(slots=True)
class _Seeking:
    """A plan search under way: this span's part of it, and the batches of states that this stage has."""

    search_id: int
    search: PlanSearch
    batches: dict[int, Tensor] = field(default_factory=dict)


class StageWorker:
    """Runs passes through its span and returns the messages to send. The stage with the head keeps the script of each
    work under way. It sends the script's passes to the first stage, and finally the result to the engine.

    stage: its number. spans: the sublayers [first, last) of every stage. measure: times the sublayers of this one.
    `Endpoint.receive` drops messages of older epochs before they come here.
    """

    def __init__(
        self,
        stage: int,
        spans: Sequence[tuple[int, int]],
        span: SpanRunner,
        head: Head | None,
        measure: Callable[[int], Measured],
    ) -> None:
        self._stage, self._spans = stage, spans
        self._is_last = stage == len(spans) - 1
        self._span = span
        self._head = head
        self._measure = measure
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
        outgoing: Sequence[Outgoing] = ()
        match message:
            case Begin():
                outgoing = [self._pass(message.epoch, first_pass(message.work), None, message)]
            case Forward():
                hidden = tensors[0].to(self._span.runner.device) if tensors else None
                outgoing = [self._pass(message.epoch, message.work, hidden, message.begin)]
            case Failed():
                outgoing = [self._give_up(message)]
            case Seek() | Shipped() | Expand():
                outgoing = list(self._search(message, tensors))
            case Moves():
                self._span.move(message.moves)
            case Measure():
                outgoing = [Outgoing(ENGINE, self._measure(message.epoch))]
            case Lap():
                peer, *rest = message.route
                stamps = [*message.stamps, time.monotonic()]
                outgoing = [Outgoing(peer, Lap(epoch=message.epoch, route=rest, stamps=stamps), tensors)]
            case _:
                raise AssertionError(f"a stage does not take {type(message).__name__}")
        return outgoing

    def _pass(self, epoch: int, work: Pass, hidden: Tensor | None, begin: Begin | None) -> Outgoing:
        if self._is_last and begin is not None:
            self._enter(begin)
        try:
            hidden = self._span.run(work, hidden)
            if not self._is_last:
                onward = stage_name(next_stage(self._stage, self._spans, work))
                return Outgoing(onward, Forward(epoch=epoch, work=work, begin=begin), [hidden])
            # Continue the script with the states before the head: send its next pass, or its result.
            following = self._scripts[work.round_id].send(hidden)
            return Outgoing(stage_name(0), Forward(epoch=epoch, work=following))
        except StopIteration as end:
            del self._scripts[work.round_id]
            return Outgoing(ENGINE, Done(epoch=epoch, work_id=work.round_id, result=end.value))
        except RuntimeError as error:
            failed = Failed(epoch=epoch, work_id=work.round_id, reason=str(out_of_memory(error)))
            if self._is_last:
                return self._give_up(failed)
            return Outgoing(stage_name(len(self._spans) - 1), msgspec.structs.replace(failed, begin=begin))

    def _give_up(self, failed: Failed) -> Outgoing:
        """Drop some work and report it; only on the stage with the head, which first opens the work's sequences."""
        if failed.begin is not None:
            self._enter(failed.begin)
        del self._scripts[failed.work_id]
        return Outgoing(ENGINE, msgspec.structs.replace(failed, begin=None))

    def _enter(self, begin: Begin) -> None:
        assert self._head is not None
        for sequence_id in begin.closed:
            self._head.close(sequence_id)
        for spec in begin.opened:
            self._head.open(spec)
        passes = script(begin.work, self._head)
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
            error = f"{stage_name(self._stage)} has no states of some tapped tokens any more"
            return Sought(epoch=message.epoch, search_id=message.search_id, error=error)
        self._seeking = _Seeking(message.search_id, search)
        if self._stage == 0:
            self._seeking.batches[0] = search.start()
        return Sought(epoch=message.epoch, search_id=message.search_id)

    def _expand(self, message: Expand, seeking: _Seeking) -> Iterator[Outgoing]:
        search, batches = seeking.search, seeking.batches
        values: Sequence[float] = ()
        shipped = False
        for operation in message.operations:
            match operation:
                case RunSublayer(sublayer, choice, source, into, varied):
                    run = search.vary if varied else search.run
                    batches[into] = run(sublayer, choice, batches[source])
                case Gather(sources, index, into):
                    found = [batches[source] for source in sources]
                    batches[into] = search.gather(found, np.asarray(index, np.int64))
                case Score("similarity", source, sublayer):
                    values = search.similarity(sublayer, batches[source]).tolist()
                case Score("agreement", source):
                    agreed = search.agreement(batches[source])
                    arrays = (agreed.num_agreed, agreed.confidence, agreed.missed_confidence)
                    values = [value for array in arrays for value in array.tolist()]
                case Score("cosines"):
                    values = search.cosines()
                case Score("feature"):
                    values = search.feature()
                case Drop(source):
                    del batches[source]
                case Ship(source, peer):
                    shipped = True
                    onward = Shipped(epoch=message.epoch, search_id=message.search_id, batch=source)
                    yield Outgoing(peer, onward, [batches.pop(source)])
        if not shipped:
            yield Outgoing(COORDINATOR, Sought(epoch=message.epoch, search_id=message.search_id, values=values))
