"""Simulation of a replica: pipeline, cohorts, drafts and prompts as discrete events, by a LatencyModel.

A round is a pass for each draft step and one for the verify. A pass visits the stages that run any of its sublayers;
each takes the model's `overhead_s`, because it builds its own batch. A stage works on one pass at a time, by due time:
rounds are due at once, prefills a moment later. A cohort continues when both its prefill and its round are finished.
Not modelled: memory, processes that share a core, plan searches, lost shards.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rayspec.choices import SKIP, Choices, num_leading_full
from rayspec.planning.latency import LatencyModel

# How long a stage of the pipeline lets a prefill wait for rounds that arrive later.
_PREFILL_PATIENCE_S = 0.03
_ENDLESS = 2**62  # tokens
# Seconds are linear in the context; the slope is taken over this many tokens.
_FAR = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """How drafts are made. choices: how a draft runs each sublayer. acceptance: probability that a draft token is
    accepted, given that all tokens before it were."""

    choices: Choices
    num_draft_tokens: int
    acceptance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLoad:
    """`concurrency` users, each of whom sends the next request as soon as the previous one is answered. output_tokens:
    None: answers do not end. chunk_tokens: the most prompt tokens that a cohort runs at a time."""

    prompt_tokens: int
    output_tokens: int | None
    concurrency: int
    chunk_tokens: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Results of a simulation of `seconds`. round_s: mean seconds of a round, from its start to its commit.
    idle_shares: of each stage. first_token_s: seconds from sending a request to its first token."""

    seconds: float
    num_tokens: int
    num_rounds: int
    round_s: float
    idle_shares: tuple[float, ...]
    first_token_s: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def simulate(
    latency: LatencyModel,
    workload: SimulatedLoad,
    *,
    cohorts: int = 1,
    drafting: Drafting | None = None,
    prefill: LatencyModel | None = None,
    num_tokens: int,
    seed: int = 0,
) -> Simulated:
    """Simulate until `num_tokens` are committed, from a state in which answers of all lengths are under way. latency:
    its stages are numbered 0, 1, ... without gaps. prefill: another model for prompts. cohorts: batches under way at
    the same time."""
    replica = _Replica(latency, prefill or latency, workload, drafting, np.random.default_rng(seed))
    return replica.run(cohorts, num_tokens)


class _PassCosts:
    """Costs of passes, cached by shape; each shape is computed once, for all contexts."""

    def __init__(self, latency: LatencyModel) -> None:
        self.num_stages = max(latency.stages) + 1
        self._latency = latency
        self._known: dict[tuple[object, ...], list[tuple[int, float, float]]] = {}

    def visits(
        self,
        context: float,
        *,
        rows: int,
        batch: int,
        choices: Choices | None = None,
        prefix: int = 0,
        head_rows: int | None = None,
    ) -> list[tuple[int, float]]:
        """Return the stages that a pass visits, in order, and the seconds on each. choices: of a draft step; None: all
        in full. prefix: leading sublayers that run only one row per sequence. head_rows: of the head, if others."""
        shape = (rows, batch, choices, prefix, head_rows)
        if shape not in self._known:
            latency, stages = self._latency, np.asarray(self._latency.stages)

            def seconds(context: float) -> NDArray[np.float64]:
                found = latency.sublayers_s(rows=rows, context=context, batch=batch, choices=choices)
                if prefix:
                    found[:prefix] = latency.sublayers_s(rows=batch, context=context, batch=batch)[:prefix]
                return np.bincount(stages, weights=found, minlength=self.num_stages).astype(np.float64)

            near, far = seconds(0), seconds(_FAR)
            base_s, slope_s = near + latency.overhead_s, (far - near) / _FAR
            base_s[-1] += latency.head_s(rows if head_rows is None else head_rows)
            visited = stages if choices is None else stages[[choice != SKIP for choice in choices]]
            at = sorted({0, self.num_stages - 1, *visited.tolist()})
            self._known[shape] = list(zip(at, base_s[at].tolist(), slope_s[at].tolist(), strict=True))
        return [(stage, base_s + slope_s * context) for stage, base_s, slope_s in self._known[shape]]


# A pass, prompt or round under way: a generator of the servers that it visits one after the other, by number, with the
# seconds there. Servers are the stages and, last, the engine.
_Work: TypeAlias = Iterator[tuple[int, float]]


@dataclass(slots=True)
class _Server:
    """A stage, or the engine. It serves one work at a time: by due time, then by arrival."""

    inbox: list[tuple[float, int, float, float, _Work]] = field(default_factory=list)
    working: bool = False
    busy_s: float = 0.0
    idle_since_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Sequence:
    """context: computed tokens. num_missing, num_left: tokens of the prompt to compute, and of the answer to commit."""

    context: int
    num_missing: int
    num_left: int
    sent_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Cohort:
    members: list[_Sequence]
    num_under_way: int = 0


class _Replica:
    """The engine, which starts the next work of each cohort, and the stages, as queues. The engine runs next to the
    first stage: only the way back from the last stage is a hop. A stage that was idle for longer than wake_s takes
    wake_s more. A single stage has neither."""

    def __init__(
        self,
        latency: LatencyModel,
        prefill: LatencyModel,
        workload: SimulatedLoad,
        drafting: Drafting | None,
        rng: np.random.Generator,
    ) -> None:
        self._costs, self._prefill_costs = _PassCosts(latency), _PassCosts(prefill)
        self._workload, self._drafting, self._rng = workload, drafting, rng
        num_stages = self._costs.num_stages
        self._engine = num_stages  # the number of its server
        self._servers = [_Server() for _ in range(num_stages + 1)]
        self._hop_s, self._wake_s = (latency.hop_s, latency.wake_s) if num_stages > 1 else (0.0, 0.0)
        self._round_s = latency.round_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._num_tokens = self._num_rounds = 0
        self._rounds_s = 0.0
        self._first_token_s: list[float] = []

    def run(self, num_cohorts: int, num_tokens: int) -> Simulated:
        # Progress is spread evenly over the users, and users are distributed over the cohorts.
        load, cohorts = self._workload, [_Cohort([]) for _ in range(num_cohorts)]
        for place, user in enumerate(self._rng.permutation(load.concurrency).tolist()):
            sequence = _Sequence(load.prompt_tokens, 0, _ENDLESS)
            if load.output_tokens is not None:
                num_done = int(load.output_tokens * (user + 0.5) / load.concurrency)
                sequence = _Sequence(load.prompt_tokens + num_done, 0, max(1, load.output_tokens - num_done))
            cohorts[place % num_cohorts].members.append(sequence)
        for cohort in cohorts:
            self._start(cohort)
        while self._num_tokens < num_tokens:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        return Simulated(
            seconds=self._now,
            num_tokens=self._num_tokens,
            num_rounds=self._num_rounds,
            round_s=self._rounds_s / max(1, self._num_rounds),
            idle_shares=tuple(max(0.0, 1 - stage.busy_s / self._now) for stage in self._servers[:-1]),
            first_token_s=tuple(self._first_token_s),
        )

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._order), happen))

    def _go_on(self, work: _Work, patience_s: float = 0.0) -> None:
        """Put the work into the queue of the next server that it visits, behind arrivals until `patience_s` later."""
        for number, seconds in itertools.islice(work, 1):
            server = self._servers[number]
            heapq.heappush(server.inbox, (self._now + patience_s, next(self._order), seconds, patience_s, work))
            if not server.working:
                self._serve(number)

    def _serve(self, number: int) -> None:
        server = self._servers[number]
        server.working = bool(server.inbox)
        if not server.working:
            return
        *_, seconds, patience_s, work = heapq.heappop(server.inbox)
        if number != self._engine and self._now - server.idle_since_s > self._wake_s:
            seconds += self._wake_s
        server.busy_s += seconds
        server.idle_since_s = self._now + seconds

        def end() -> None:
            if number == self._engine:
                self._go_on(work, patience_s)
            else:
                self._after(self._hop_s, partial(self._go_on, work, patience_s))
            self._serve(number)

        self._after(seconds, end)

    def _start(self, cohort: _Cohort) -> None:
        # The prompt tokens to run next, in the order of the members, up to `chunk_tokens` in total.
        budget, chunks = self._workload.chunk_tokens, []
        for sequence in cohort.members:
            if count := min(sequence.num_missing, budget):
                chunks.append((sequence, count))
                budget -= count
        decoding = [sequence for sequence in cohort.members if sequence.num_missing == 0]
        cohort.num_under_way = bool(chunks) + bool(decoding)
        if chunks:
            self._go_on(self._prefill(cohort, chunks), _PREFILL_PATIENCE_S)
        if decoding:
            self._go_on(self._round(cohort, decoding))

    def _finish(self, cohort: _Cohort) -> None:
        cohort.num_under_way -= 1
        if cohort.num_under_way == 0:
            self._start(cohort)

    def _prefill(self, cohort: _Cohort, chunks: Sequence[tuple[_Sequence, int]]) -> _Work:
        yield from self._prefill_costs.visits(
            fmean(sequence.context for sequence, _ in chunks),
            rows=sum(count for _, count in chunks),
            batch=len(chunks),
            head_rows=sum(sequence.num_missing == count for sequence, count in chunks),
        )
        yield self._engine, self._round_s
        for sequence, count in chunks:
            sequence.context += count
            sequence.num_missing -= count
            if sequence.num_missing == 0:
                self._first_token_s.append(self._now - sequence.sent_s)
                sequence.context -= 1  # `_commit` adds the token, which is not computed yet
                self._commit(sequence, 1)
        self._finish(cohort)

    def _round(self, cohort: _Cohort, sequences: Sequence[_Sequence]) -> _Work:
        drafting, batch, started = self._drafting, len(sequences), self._now
        context = fmean(sequence.context for sequence in sequences)
        lengths, prefix = [0] * batch, 0
        if drafting is not None:
            lengths = [min(drafting.num_draft_tokens, sequence.num_left - 1) for sequence in sequences]
            for step in range(max(lengths)):
                count = sum(length > step for length in lengths)
                yield from self._costs.visits(context, rows=count, batch=count, choices=drafting.choices)
                # The verify reuses the sublayers that the draft ran in full.
                prefix = num_leading_full(drafting.choices)
        yield from self._costs.visits(context, rows=batch + sum(lengths), batch=batch, prefix=prefix)
        yield self._engine, self._round_s
        self._num_rounds += 1
        self._rounds_s += self._now - started
        for sequence, length in zip(sequences, lengths, strict=True):
            num_accepted = 0  # up to the first rejected token
            if drafting is not None and length:
                rejected = 1 - drafting.acceptance
                num_accepted = min(length, int(self._rng.geometric(rejected)) - 1) if rejected > 0 else length
            self._commit(sequence, 1 + num_accepted)
        self._finish(cohort)

    def _commit(self, sequence: _Sequence, num_tokens: int) -> None:
        """Commit tokens. After the last token of an answer, the user's next request takes its place."""
        self._num_tokens += num_tokens
        sequence.context += num_tokens
        sequence.num_left -= num_tokens
        if sequence.num_left <= 0:
            load = self._workload
            sequence.context, sequence.sent_s = 0, self._now
            sequence.num_missing, sequence.num_left = load.prompt_tokens, load.output_tokens or _ENDLESS
