"""Simulation of a replica: pipeline, cohorts, drafts and prompts as discrete events, by a LatencyModel.

The simulation follows the pipeline. A round consists of a pass for each draft step and one pass for the verify. A pass
visits the stages that run any of its sublayers, and the last stage sends the next pass to the first. A stage works on
one pass at a time, by due time: rounds are due at once, prefills a moment later. A cohort continues when both its
prefill and its round are finished.

Not modelled: memory (see `partition`), processes that share a core, plan searches, lost shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from rayspec.choices import Choices, num_leading_full
from rayspec.planning.event_pipeline import EventPipeline, PassCosts, Work
from rayspec.planning.latency import LatencyModel

# How long a stage of the pipeline lets a prefill wait for rounds that arrive later.
_PREFILL_PATIENCE_S = 0.03
_ENDLESS = 2**62  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """How drafts are made. choices: how a draft runs each sublayer. acceptance: probability that a draft token is
    accepted, given that all tokens before it were."""

    choices: Choices
    num_draft_tokens: int
    acceptance: float

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 1 or not 0 <= self.acceptance <= 1:
            raise ValueError(f"{self} cannot be: drafts have 1 token or more, and acceptance lies between 0 and 1")

    @property
    def prefix(self) -> int:
        """Number of leading sublayers that the draft runs in full; the verify reuses their results."""
        return num_leading_full(self.choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLoad:
    """`concurrency` users, each of whom sends the next request as soon as the previous one is answered.

    prompt_tokens, output_tokens: length of every prompt and answer; output_tokens None: answers have just begun, and do
    not end. chunk_tokens: the most prompt tokens that a cohort runs at a time.
    """

    prompt_tokens: int
    output_tokens: int | None
    concurrency: int
    chunk_tokens: int = 1024

    def __post_init__(self) -> None:
        output_tokens = 1 if self.output_tokens is None else self.output_tokens
        if min(self.prompt_tokens, output_tokens, self.concurrency, self.chunk_tokens) < 1:
            raise ValueError(f"{self} cannot be: every number is 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Results of a simulation of `seconds`.

    num_tokens: committed tokens. num_rounds: rounds of any cohort. round_s: mean seconds of a round, from its start to
    its commit. tokens_per_round: mean tokens that a round commits per sequence. idle_shares: share of idle time of each
    stage. first_token_s: seconds from sending a request to its first token, in order of the first tokens.
    """

    seconds: float
    num_tokens: int
    num_rounds: int
    round_s: float
    tokens_per_round: float
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
    num_tokens: int | None = None,
    seed: int = 0,
) -> Simulated:
    """Simulate until `num_tokens` are committed, from a state in which answers of all lengths are under way.

    num_tokens: None for the total length of one answer per user. prefill: a separate latency model for prompts.
    cohorts: batches under way at the same time, over which the users are distributed. The same arguments give the same
    result. Raises ValueError for `choices` of another model, for cohorts below 1, and if neither `num_tokens` nor the
    length of answers is given.
    """
    if cohorts < 1:
        raise ValueError(f"cohorts is {cohorts}; it must be 1 or more")
    if drafting is not None and len(drafting.choices) != len(latency.sublayers):
        raise ValueError(f"choices has {len(drafting.choices)} entries for {len(latency.sublayers)} sublayers")
    if num_tokens is None:
        if workload.output_tokens is None:
            raise ValueError("answers do not end: say how many tokens are to be committed, with num_tokens")
        num_tokens = workload.concurrency * workload.output_tokens
    replica = _Replica(latency, prefill or latency, workload, drafting, np.random.default_rng(seed))
    return replica.run(cohorts, num_tokens)


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request. context: computed tokens. num_missing: prompt tokens still to compute. num_left: answer tokens still
    to commit."""

    context: int
    num_missing: int
    num_left: int
    sent_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Cohort:
    members: list[_Sequence]
    num_under_way: int = 0


@dataclass(slots=True)
class _Tally:
    num_tokens: int = 0
    num_rounds: int = 0
    num_sequence_rounds: int = 0
    num_sequence_tokens: int = 0
    rounds_s: float = 0.0


class _Replica:
    """The engine: it assigns sequences to cohorts and starts the next work of each cohort."""

    def __init__(
        self,
        latency: LatencyModel,
        prefill: LatencyModel,
        workload: SimulatedLoad,
        drafting: Drafting | None,
        rng: np.random.Generator,
    ) -> None:
        self._costs, self._prefill_costs = PassCosts(latency), PassCosts(prefill)
        self._pipeline = EventPipeline(
            self._costs.num_stages, hop_s=latency.hop_s, round_s=latency.round_s, wake_s=latency.wake_s
        )
        self._workload, self._drafting, self._rng = workload, drafting, rng
        self._tally = _Tally()
        self._first_token_s: list[float] = []

    def run(self, num_cohorts: int, num_tokens: int) -> Simulated:
        for cohort in self._cohorts(num_cohorts):
            self._start(cohort)
        while self._tally.num_tokens < num_tokens:
            self._pipeline.step()
        tally, seconds = self._tally, self._pipeline.now
        return Simulated(
            seconds=seconds,
            num_tokens=tally.num_tokens,
            num_rounds=tally.num_rounds,
            round_s=tally.rounds_s / max(1, tally.num_rounds),
            tokens_per_round=tally.num_sequence_tokens / max(1, tally.num_sequence_rounds),
            idle_shares=tuple(max(0.0, 1 - busy_s / seconds) for busy_s in self._pipeline.busy_s),
            first_token_s=tuple(self._first_token_s),
        )

    def _cohorts(self, num_cohorts: int) -> list[_Cohort]:
        """Return the cohorts. Progress is spread evenly over the users, and users are distributed over the cohorts."""
        work, cohorts = self._workload, [_Cohort([]) for _ in range(num_cohorts)]
        for place, user in enumerate(self._rng.permutation(work.concurrency).tolist()):
            sequence = _Sequence(work.prompt_tokens, 0, _ENDLESS)
            if work.output_tokens is not None:
                num_done = int(work.output_tokens * (user + 0.5) / work.concurrency)
                sequence = _Sequence(work.prompt_tokens + num_done, 0, max(1, work.output_tokens - num_done))
            cohorts[place % num_cohorts].members.append(sequence)
        return cohorts

    def _start(self, cohort: _Cohort) -> None:
        """Start the next prefill and round of a cohort that has no work under way."""
        # The prompt tokens to run next, in the order of the members, up to `chunk_tokens` in total.
        budget, chunks = self._workload.chunk_tokens, []
        for sequence in cohort.members:
            if count := min(sequence.num_missing, budget):
                chunks.append((sequence, count))
                budget -= count
        decoding = [sequence for sequence in cohort.members if sequence.num_missing == 0]
        if chunks:
            cohort.num_under_way += 1
            self._start_prefill(cohort, chunks)
        if decoding:
            cohort.num_under_way += 1
            self._start_round(cohort, decoding)

    def _finish(self, cohort: _Cohort) -> None:
        cohort.num_under_way -= 1
        if cohort.num_under_way == 0:
            self._start(cohort)

    def _start_prefill(self, cohort: _Cohort, chunks: Sequence[tuple[_Sequence, int]]) -> None:
        num_sampled = sum(sequence.num_missing == count for sequence, count in chunks)
        rows = sum(count for _, count in chunks)
        cost = self._prefill_costs.of(rows=rows, batch=len(chunks), head_rows=num_sampled)
        work = Work(
            passes=[cost],
            context=_mean_context([sequence for sequence, _ in chunks]),
            when_done=partial(self._finish_prefill, cohort, chunks),
            patience_s=_PREFILL_PATIENCE_S,
        )
        self._pipeline.submit(work)

    def _finish_prefill(self, cohort: _Cohort, chunks: Sequence[tuple[_Sequence, int]], now: float) -> None:
        for sequence, count in chunks:
            sequence.context += count
            sequence.num_missing -= count
            if sequence.num_missing == 0:
                self._first_token_s.append(now - sequence.sent_s)
                sequence.context -= 1  # `_commit` adds the token, which is not computed yet
                self._commit(sequence, 1, now)
        self._finish(cohort)

    def _start_round(self, cohort: _Cohort, sequences: Sequence[_Sequence]) -> None:
        drafting, batch = self._drafting, len(sequences)
        lengths = [0] * batch
        passes = []
        if drafting is not None:
            lengths = [min(drafting.num_draft_tokens, sequence.num_left - 1) for sequence in sequences]
            for step in range(max(lengths)):
                num_drafting = sum(length > step for length in lengths)
                passes.append(self._costs.of(rows=num_drafting, batch=num_drafting, choices=drafting.choices))
        prefix = drafting.prefix if drafting is not None and passes else 0
        passes.append(self._costs.of(rows=batch + sum(lengths), batch=batch, prefix=prefix))
        when_done = partial(self._finish_round, cohort, sequences, lengths, self._pipeline.now)
        self._pipeline.submit(Work(passes=passes, context=_mean_context(sequences), when_done=when_done))

    def _finish_round(
        self, cohort: _Cohort, sequences: Sequence[_Sequence], lengths: Sequence[int], started: float, now: float
    ) -> None:
        tally = self._tally
        tally.num_rounds += 1
        tally.rounds_s += now - started
        for sequence, length in zip(sequences, lengths, strict=True):
            num_accepted = 0  # up to the first rejected token
            if self._drafting is not None and length:
                rejected = 1 - self._drafting.acceptance
                num_accepted = min(length, int(self._rng.geometric(rejected)) - 1) if rejected > 0 else length
            num_tokens = 1 + num_accepted
            tally.num_sequence_rounds += 1
            tally.num_sequence_tokens += num_tokens
            self._commit(sequence, num_tokens, now)
        self._finish(cohort)

    def _commit(self, sequence: _Sequence, num_tokens: int, now: float) -> None:
        """Commit tokens. After the last token of an answer, the user's next request takes its place."""
        self._tally.num_tokens += num_tokens
        sequence.context += num_tokens
        sequence.num_left -= num_tokens
        if sequence.num_left <= 0:
            work = self._workload
            sequence.context, sequence.sent_s = 0, now
            sequence.num_missing, sequence.num_left = work.prompt_tokens, work.output_tokens or _ENDLESS


def _mean_context(sequences: Sequence[_Sequence]) -> float:
    return sum(sequence.context for sequence in sequences) / len(sequences)
