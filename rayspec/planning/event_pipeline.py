"""A discrete-event simulation of the stages of a pipeline and its engine, as a queueing system."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rayspec.choices import SKIP, Choices
from rayspec.planning.latency import LatencyModel

# Seconds are linear in the context; the slope is taken over this many tokens.
_FAR = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCost:
    """The stages that a pass visits, in order, and the seconds on each: base_s + slope_s * context."""

    stages: tuple[int, ...]
    base_s: tuple[float, ...]
    slope_s: tuple[float, ...]


class PassCosts:
    """Costs of passes, cached by shape; each shape is computed once, for all contexts.

    Every stage that a pass visits takes the model's `overhead_s`, because each stage builds its own batch. So a pass
    over several stages takes longer than `LatencyModel` predicts, by `overhead_s` for each stage but one.
    """

    def __init__(self, latency: LatencyModel) -> None:
        """Use the costs of a latency model. Raises ValueError unless its stages are numbered 0, 1, ... without gaps."""
        if sorted(set(latency.stages)) != list(range(max(latency.stages) + 1)):
            raise ValueError(f"stages are {sorted(set(latency.stages))}; they must be numbered 0, 1, ...")
        self._latency = latency
        self._known: dict[tuple[object, ...], PassCost] = {}
        self.num_stages = max(latency.stages) + 1

    def of(
        self, *, rows: int, batch: int, choices: Choices | None = None, prefix: int = 0, head_rows: int | None = None
    ) -> PassCost:
        """Return the cost of a pass of `rows` rows of `batch` sequences through all sublayers and the head.

        choices: of a draft step; None: all in full. prefix: leading sublayers that run only one row per sequence, as in
        a verify. head_rows: rows of the head, if they are others, as in a prompt.
        """
        shape = (rows, batch, choices, prefix, head_rows)
        if shape not in self._known:
            latency, stages = self._latency, np.asarray(self._latency.stages)

            def seconds(context: float) -> NDArray[np.float64]:
                found = latency.sublayers_s(rows=rows, context=context, batch=batch, choices=choices)
                if prefix:
                    found[:prefix] = latency.sublayers_s(rows=batch, context=context, batch=batch)[:prefix]
                return np.bincount(stages, weights=found, minlength=self.num_stages).astype(np.float64)

            near, far = seconds(0), seconds(_FAR)
            base_s = near + latency.overhead_s
            base_s[-1] += latency.head_s(rows if head_rows is None else head_rows)
            visited = stages if choices is None else stages[[choice != SKIP for choice in choices]]
            at = sorted({0, self.num_stages - 1, *visited.tolist()})
            self._known[shape] = PassCost(
                stages=tuple(at), base_s=tuple(base_s[at].tolist()), slope_s=tuple(((far - near) / _FAR)[at].tolist())
            )
        return self._known[shape]


@dataclass(slots=True, eq=False, kw_only=True)
class Work:
    """Passes that run one after the other.

    context: tokens that each sequence holds. patience_s: how long the work lets later arrivals go first at a stage.
    when_done: called with the time when the engine has processed the result.
    """

    passes: Sequence[PassCost]
    context: float
    when_done: Callable[[float], None]
    patience_s: float = 0.0
    num_made: int = 0
    num_visited: int = 0

    @property
    def stage(self) -> int:
        """The stage where the work is, or goes next."""
        return self.passes[self.num_made].stages[self.num_visited]

    @property
    def seconds(self) -> float:
        """Seconds of the current pass on this stage."""
        cost, at = self.passes[self.num_made], self.num_visited
        return cost.base_s[at] + cost.slope_s[at] * self.context

    @property
    def done(self) -> bool:
        return self.num_made == len(self.passes)

    def advance(self) -> None:
        """Move the work to the next stage of the pass, or to the first stage of the next pass."""
        self.num_visited += 1
        if self.num_visited == len(self.passes[self.num_made].stages):
            self.num_visited = 0
            self.num_made += 1


@dataclass(slots=True)
class _Server:
    """A queue that serves one work at a time: by due time, then by arrival."""

    inbox: list[tuple[float, int, Work]] = field(default_factory=list)
    working: bool = False
    busy_s: float = 0.0
    idle_since_s: float = 0.0


class EventPipeline:
    """Stages and the engine. A message between stages takes hop_s; the engine takes round_s for each finished work.

    The engine is assumed to run next to the first stage: only the way back from the last stage is a hop. With a single
    stage there are no hops. wake_s: extra time of a pass on a stage that was idle for longer than wake_s. It does not
    apply to a single stage, because the engine keeps its core busy in the meantime.
    """

    def __init__(self, num_stages: int, *, hop_s: float, round_s: float, wake_s: float = 0.0) -> None:
        self._stages = [_Server() for _ in range(num_stages)]
        self._engine = _Server()
        self._hop_s = hop_s if num_stages > 1 else 0.0
        self._wake_s = wake_s if num_stages > 1 else 0.0
        self._round_s = round_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.now = 0.0

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Busy seconds of each stage up to now."""
        return tuple(stage.busy_s for stage in self._stages)

    def submit(self, work: Work) -> None:
        """Put the work into the queue of its first stage, now."""
        self._arrive(self._stages[work.stage], work)

    def step(self) -> None:
        """Advance the clock to the next event and handle it. Raises IndexError where nothing is under way."""
        self.now, _, happen = heapq.heappop(self._events)
        happen()

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), happen))

    def _arrive(self, server: _Server, work: Work) -> None:
        heapq.heappush(server.inbox, (self.now + work.patience_s, next(self._order), work))
        if not server.working:
            self._take(server)

    def _take(self, server: _Server) -> None:
        """Start the work that is due first, if any work waits."""
        server.working = bool(server.inbox)
        if server.working:
            work = heapq.heappop(server.inbox)[-1]
            idle_s = self.now - server.idle_since_s
            waking_s = self._wake_s if idle_s > self._wake_s else 0.0
            seconds = self._round_s if work.done else work.seconds + waking_s
            server.busy_s += seconds
            server.idle_since_s = self.now + seconds
            self._after(seconds, partial(self._finish, server, work))

    def _finish(self, server: _Server, work: Work) -> None:
        if work.done:
            work.when_done(self.now)
        else:
            work.advance()
            onward = self._engine if work.done else self._stages[work.stage]
            self._after(self._hop_s, partial(self._arrive, onward, work))
        self._take(server)
