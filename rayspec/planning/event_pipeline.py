"""A discrete-event simulation of the stages of a pipeline and its engine, as a queueing system."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from rayspec.planning.pass_costs import PassCost


@dataclass(slots=True, eq=False, kw_only=True)
class Work:
    """Passes that run one after the other.

    context: tokens that each sequence holds. patience_s: how long the work lets later arrivals go first at a stage.
    landed: called with the time when the engine has processed the result.
    """

    passes: Sequence[PassCost]
    context: float
    landed: Callable[[float], None]
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
            work.landed(self.now)
        else:
            work.advance()
            onward = self._engine if work.done else self._stages[work.stage]
            self._after(self._hop_s, partial(self._arrive, onward, work))
        self._take(server)
