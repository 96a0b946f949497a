"""Start work for the cohorts of an engine and commit its results. A cohort is a group of sequences that is scheduled
together."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from rayspec.decode.round_planner import PlannedRound, RoundPlanner
from rayspec.decode.scheduler import Scheduler, Step, moves_to_path
from rayspec.decode.sequence import SequenceState
from rayspec.decode.stages import StageLostError, Stages
from rayspec.decode.stopwatch import TimeShares
from rayspec.decode.work import (
    Chunk,
    Committed,
    Move,
    Prefill,
    PrefillResult,
    Result,
    RoundResult,
    SamplerSpec,
    Work,
    num_rows,
)
from rayspec.model.rows import slots_between
from rayspec.planning.prefill_pace import PrefillPace
from rayspec.types import EngineStats, NonFiniteLogitsError, OutOfMemoryError, RayspecError

# The most consecutive rounds of a cohort that may have prompt chunks in their pass.
_MOST_MIXED = 3


@dataclass(slots=True)
class _StartedWork:
    """Work under way for a cohort. commit: called when the work is done. share_s: the work's share of the time in
    seconds; None until the work is done."""

    cohort: int
    work_id: int
    future: Future[Result]
    commit: Callable[[_StartedWork], None]
    share_s: float | None = None


class Cohorts:
    """Starts the scheduler's steps on the stages, and commits their results to the sequences."""

    def __init__(
        self,
        *,
        stages: Stages,
        scheduler: Scheduler,
        planner: RoundPlanner,
        stats: EngineStats,
        clock: Callable[[], float],
        may_mix: bool,
    ) -> None:
        """may_mix: whether prompt chunks and a round may share a pass."""
        self._stages = stages
        self._scheduler = scheduler
        self._planner = planner
        self._stats = stats
        self._clock = clock
        self._under_way: list[_StartedWork] = []
        self._time_shares = TimeShares(clock)
        self._work_ids = itertools.count(1)
        self._pace = PrefillPace()
        self._may_mix = may_mix
        self._num_mixed: Counter[int] = Counter()  # for each cohort: rounds with chunks since its last round without

    @property
    def is_idle(self) -> bool:
        """Whether no work is under way."""
        return not self._under_way

    def add(self, sequence: SequenceState) -> None:
        self._open(sequence)
        self._scheduler.add(sequence)

    def retire(self, sequence: SequenceState) -> None:
        """Release a finished sequence: now, or once its cohort's work is done, because rows under way write into its
        pages."""
        sequence.metrics.finished_s = self._clock()
        self._planner.forget(sequence)
        if not sequence.table.pages or not self._is_busy(sequence.cohort):
            self._release(sequence)

    def start(self) -> None:
        """Start the next step of every cohort that has no work under way."""
        for cohort in range(self._stages.num_cohorts):
            if not self._is_busy(cohort):
                busy = {started.cohort for started in self._under_way}
                self._start(cohort, self._scheduler.schedule(cohort, busy, partial(self._num_beside, cohort)))

    def commit_done(self) -> None:
        """Commit the results of all work that is done, and release finished sequences."""
        for started in [started for started in self._under_way if self._end_if_done(started)]:
            self._under_way.remove(started)
            started.commit(started)
            if not self._is_busy(started.cohort):
                for sequence in self._scheduler.members(started.cohort):
                    if sequence.finished:
                        self._release(sequence)

    def replay(self) -> None:
        """Open every sequence again after the stages have lost their state; later steps prefill the committed
        tokens."""
        lost = self._sequences()
        self._clear()
        self._scheduler.restart()
        self._planner.forget_all()
        for sequence in lost:
            if sequence.finished:
                self._scheduler.remove(sequence)
            else:
                self._open(sequence)
                sequence.metrics.num_replays += 1
        self._stats.num_replays += 1

    def fail_all(self, error: StageLostError) -> None:
        self._clear()
        for sequence in self._sequences():
            if not sequence.finished:
                sequence.fail(error)
            self._scheduler.remove(sequence)
            sequence.metrics.finished_s = self._clock()

    def _sequences(self) -> list[SequenceState]:
        return [*self._scheduler.running, *self._scheduler.waiting]

    def _clear(self) -> None:
        self._under_way.clear()
        self._time_shares.clear()

    def _is_busy(self, cohort: int) -> bool:
        return any(started.cohort == cohort for started in self._under_way)

    def _start(self, cohort: int, step: Step) -> None:
        self._stats.num_preemptions += len(step.preempted)
        for sequence in step.preempted:
            self._planner.forget(sequence)
        for sequence in step.admitted:
            self._stats.num_cached_tokens += sequence.num_computed
            if sequence.metrics.num_preemptions == sequence.metrics.num_replays == 0:
                sequence.metrics.num_cached_tokens = sequence.num_computed
        mixes = self._may_mix and bool(step.chunks and step.decode)
        self._num_mixed[cohort] = self._num_mixed[cohort] + 1 if mixes else 0
        if step.chunks and not mixes:
            prefill = Prefill(id=next(self._work_ids), chunks=step.chunks)
            self._submit(cohort, prefill, partial(self._commit_prefill, step.prefill, prefill))
        if step.decode:
            planned = self._planner.plan(next(self._work_ids), step.decode, step.chunks if mixes else ())
            self._submit(cohort, planned.work, partial(self._commit_round, planned, step.prefill if mixes else ()))

    def _num_beside(self, cohort: int, most: int, streams: bool) -> int:
        """Return how many prompt tokens to run together with a round of the cohort. After a few such rounds return 0:
        selectors learn only from the time of a round without chunks."""
        if self._num_mixed[cohort] >= _MOST_MIXED:
            return 0
        return self._pace.num_rows(most) if streams else most

    def _submit(self, cohort: int, work: Work, commit: Callable[[_StartedWork], None]) -> None:
        """Start the work and measure its time. In one process `start` returns finished work, so its time ends here,
        before the next work begins."""
        self._time_shares.begin(work.id)
        started = _StartedWork(cohort, work.id, self._stages.start(work), commit)
        self._under_way.append(started)
        self._end_if_done(started)

    def _end_if_done(self, started: _StartedWork) -> bool:
        if started.share_s is None and started.future.done():
            started.share_s = self._time_shares.end(started.work_id)
        return started.share_s is not None

    def _commit_prefill(self, sequences: Sequence[SequenceState], work: Prefill, started: _StartedWork) -> None:
        result = self._result(started.future, sequences)
        share_s = started.share_s or 0.0
        if isinstance(result, PrefillResult):
            self._commit_chunks(sequences, work.chunks, result.committed)
            self._pace.observe(share_s, num_chunk_rows=num_rows(work.chunks), has_round=False)
        self._stats.prefill_s += share_s

    def _commit_chunks(
        self, sequences: Sequence[SequenceState], chunks: Sequence[Chunk], committed: Sequence[Committed | None]
    ) -> None:
        for sequence, chunk, one in zip(sequences, chunks, committed, strict=True):
            sequence.note_computed(sequence.num_computed + chunk.rows.num_rows)
            self._stats.num_prefilled_tokens += chunk.rows.num_rows
            if one is not None:
                self._commit(sequence, one)

    def _commit_round(self, planned: PlannedRound, prefilled: Sequence[SequenceState], started: _StartedWork) -> None:
        """Commit the result of a round. prefilled: the sequences of the round's chunks."""
        sequences, chunks = planned.sequences, planned.work.chunks
        result = self._result(started.future, prefilled or sequences[-1:])
        if not isinstance(result, RoundResult):
            return
        self._pace.observe(started.share_s or 0.0, num_chunk_rows=num_rows(chunks), has_round=True)
        self._commit_chunks(prefilled, chunks, result.prefilled)
        num_tokens = 0
        for sequence, committed, drafted, num_accepted in zip(
            sequences, result.committed, result.drafts, result.num_accepted, strict=True
        ):
            self._count(sequence, len(drafted.token_ids), num_accepted)
            num_tokens += self._commit(sequence, committed)
        self._stats.draft_s += result.draft_s
        self._stats.verify_s += result.verify_s
        self._stats.prefill_s += result.queued_s + result.prefill_s
        # Pages of finished sequences may be free already, but nothing is scheduled before the moves are done.
        self._keep_branches(planned, result)
        self._planner.learn(planned, result, num_tokens)
        self._planner.improve(planned.state)

    def _keep_branches(self, planned: PlannedRound, result: RoundResult) -> None:
        """Move keys and values of accepted branches to the slots of their positions, and give the probed tokens to the
        lookahead windows."""
        moves: list[Move] = []
        for entry, path in zip(planned.work.entries, result.paths, strict=False):
            if path:
                first, end = entry.length - 1, entry.length + max(path)
                moves.extend(moves_to_path(slots_between(entry.runs, first, end), path))
                windowed = moves_to_path(slots_between(entry.windowed, first, end), path) if entry.windowed else ()
                moves.extend(replace(move, in_windowed_store=True) for move in windowed)
        if planned.work.plan.lookahead:
            for sequence, probed in zip(planned.sequences, result.probed, strict=False):
                if sequence.lookahead is not None:
                    sequence.lookahead.observe(probed)
        if moves:
            self._stages.move(moves)

    def _result(self, future: Future[Result], victims: Sequence[SequenceState]) -> Result | None:
        """Return the result of the work. If it ran out of memory, fail the victims and return None; the engine goes
        on."""
        try:
            return future.result()
        except OutOfMemoryError as error:
            for sequence in victims:
                self._fail(sequence, error)
        return None

    def _commit(self, sequence: SequenceState, committed: Committed) -> int:
        """Append the target's tokens to the sequence. Return how many were taken."""
        if sequence.finish_reason == "abort":  # while it was under way
            return 0
        if not committed.finite:
            self._fail(
                sequence,
                NonFiniteLogitsError(
                    f"the model gave NaN or infinite logits after {sequence.num_tokens} tokens: "
                    "the weights are damaged or overflow in this dtype; try bfloat16 or float32"
                ),
            )
            return 0
        num_tokens = sequence.commit(committed.token_ids, committed.logprobs)
        self._stats.num_generated_tokens += num_tokens
        if sequence.metrics.first_token_s is None:
            sequence.metrics.first_token_s = self._clock()
        sequence.num_computed = sequence.num_tokens - 1
        if sequence.finished:
            self.retire(sequence)
        return num_tokens

    def _count(self, sequence: SequenceState, num_draft_tokens: int, num_accepted: int) -> None:
        for counts in (sequence.metrics, self._stats):
            counts.num_rounds += 1
            counts.num_draft_tokens += num_draft_tokens
            counts.num_accepted_tokens += num_accepted
            counts.num_plain_rounds += num_draft_tokens == 0
        if num_draft_tokens:
            lengths = self._stats.accepted_lengths
            lengths[num_accepted] = lengths.get(num_accepted, 0) + 1

    def _open(self, sequence: SequenceState) -> None:
        if sequence.lookup is None:
            sequence.lookup = self._planner.lookup_index()
        self._stages.open(
            SamplerSpec(
                sequence_id=sequence.sequence_id,
                params=sequence.params,
                seed=sequence.seed,
                prompt_token_ids=sequence.token_ids[: sequence.num_prompt_tokens],
                output_token_ids=sequence.output_token_ids,
                eos_token_ids=tuple(sequence.eos_token_ids),
                lookup=sequence.lookup,
            )
        )

    def _fail(self, sequence: SequenceState, error: RayspecError) -> None:
        if not sequence.finished:
            sequence.fail(error)
            self.retire(sequence)

    def _release(self, sequence: SequenceState) -> None:
        self._scheduler.remove(sequence)
        self._stages.close(sequence.sequence_id)
