"""Keeps the ranks of a tensor-parallel stage in step: the leader announces each operation, and the others do it too.

The leader announces runs of sublayers, where ranks exchange sums, and changes of what all ranks keep: the KV cache, and
saved and tapped hidden states. It does everything else alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed

from rayspec.choices import Choice
from rayspec.decode.runner import Runner
from rayspec.decode.search import PlanSearch
from rayspec.decode.stages import SpanRunner
from rayspec.decode.work import Move, Pass, TappedToken
from rayspec.model.rows import RowSpan
from rayspec.pipeline.messages import Follow
from rayspec.types import RayspecError

Announce = Callable[[Follow], None]


class RanksOutOfStepError(RayspecError):
    """A rank failed in an operation that all ranks of its stage do together, so the other ranks cannot go on."""

    kind = "ranks_out_of_step"


class LeadingSpan(SpanRunner):
    """The leader's runner of a span whose sublayers are split over ranks: announces each operation, then does it."""

    def __init__(self, runner: Runner, *, num_taps: int, announce: Announce) -> None:
        super().__init__(runner, num_taps=num_taps)
        self.announce = announce

    def run(self, work: Pass, hidden: Tensor | None = None, *, drawn: Tensor | None = None) -> Tensor:
        assert drawn is None, "the other ranks get tokens, not where they lie on this one's device"
        self.announce(Follow(work=work, shape=() if hidden is None else tuple(hidden.shape)))
        with _in_step():
            return super().run(work, None if hidden is None else _shared(hidden))

    def move(self, moves: Sequence[Move]) -> None:
        self.announce(Follow(moves=moves))
        super().move(moves)

    def forget(self) -> None:
        self.announce(Follow(forget=True))
        super().forget()

    def search(self, tokens: Sequence[TappedToken], rows: Sequence[RowSpan], next_tokens: Tensor | None) -> PlanSearch:
        found = super().search(tokens, rows, next_tokens)
        run, rows = found.run, found.tokens

        def announced(sublayer: int, choice: Choice, states: Any) -> Tensor:
            shape = tuple(states.shape)
            self.announce(Follow(sublayer=sublayer, choice=choice, rows=rows, shape=shape))
            with _in_step():
                return run(sublayer, choice, _shared(states))

        found.run = announced  # type: ignore[method-assign]
        return found


@torch.inference_mode()
def follow(span: SpanRunner, message: Follow, measure: Callable[[], object]) -> None:
    """Do what the leader has announced; called on the other ranks. measure: times the sublayers of the span."""
    device, dtype = span.runner.device, span.runner.parts.dtype
    hidden = _shared(torch.empty(tuple(message.shape), dtype=dtype, device=device)) if message.shape else None
    if message.work is not None:
        span.run(message.work, hidden)
    elif message.sublayer is not None:
        nowhere = torch.empty(0, 0, 0, device=device)
        PlanSearch(span.runner, nowhere, message.rows, None).run(message.sublayer, message.choice, hidden)
    elif message.measure:
        measure()
    elif message.forget:
        span.forget()
    else:
        span.move(message.moves)


@contextmanager
def _in_step() -> Iterator[None]:
    """Raise any error of an operation that all ranks do together as RanksOutOfStepError."""
    try:
        yield
    except Exception as error:  # errors of Triton are no RuntimeErrors
        raise RanksOutOfStepError(str(error)) from error


def _shared(states: Tensor) -> Tensor:
    """Broadcast the leader's states to all ranks and return them. states: only shape and dtype count on the others."""
    states = states.contiguous()
    distributed.broadcast(states, src=0)
    return states
