"""The engine: continuous batching of requests through rounds of draft, verify, accept, commit.

Sequences are divided into cohorts, each of which is scheduled and run together. A model in one process has one cohort.
In a pipeline several have work under way at once, so that no stage waits.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from rayspec.config import EngineConfig
from rayspec.decode.drafting.lookup import OwnedText, tokenised
from rayspec.decode.output import NewOutput
from rayspec.decode.requests import ModelInfo, Requests, SequenceState
from rayspec.decode.round_planner import PlannedRound, RoundPlanner
from rayspec.decode.scheduler import Scheduler
from rayspec.decode.stages import Progress, StageLostError, Stages, StagesReplacedError
from rayspec.decode.strategy import Strategy
from rayspec.decode.work import (
    Committed,
    GenerationDefaults,
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
from rayspec.planning.latency import LatencyModel
from rayspec.planning.learning import PrefillPace
from rayspec.types import (
    EngineLoad,
    EngineStats,
    GrammarError,
    NonFiniteLogitsError,
    OutOfMemoryError,
    RayspecError,
    Request,
    RequestError,
    RequestOutput,
)

# The most consecutive rounds of a cohort that may have prompt chunks in their pass.
_MOST_MIXED = 3
_MASKS_S = 0.05  # that an engine without other work waits for a mask, before it looks for new requests


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """config: the options in force. max_model_len, defaults: see `ModelInfo`. latency: None if not needed."""

    config: EngineConfig
    max_model_len: int
    defaults: GenerationDefaults
    latency: LatencyModel | None


@dataclass(slots=True)
class _WorkUnderWay:
    """prefilled: the sequences of the chunks. planned: None for a prefill. took_s: divided by the works under way."""

    cohort: int
    work: Work
    future: Future[Result]
    prefilled: Sequence[SequenceState]
    planned: PlannedRound | None
    started_s: float
    took_s: float | None = None


class Engine:
    """Runs requests to their end. Not thread-safe: one thread adds requests and calls `step` until all are finished."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        stages: Stages,
        scheduler: Scheduler,
        strategy: Strategy,
        model: ModelInfo,
        latency: LatencyModel | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.stats = EngineStats(weights=model.weights)
        self.model = model
        self.tokenizer = model.tokenizer
        self.latency = latency
        self.info = EngineInfo(
            config=config, max_model_len=model.max_model_len, defaults=model.defaults, latency=latency
        )
        self.stages = stages
        self._clock = clock
        self._scheduler = scheduler
        self._requests = Requests(model=model, num_slots=scheduler.kv.num_slots, clock=clock)
        self._planner = RoundPlanner(
            strategy,
            options=config.speculation,
            num_tap_tokens=config.num_tap_tokens,
            stages=stages,
            scheduler=scheduler,
            stats=self.stats,
            clock=clock,
            given_texts=model.given_texts,
        )
        self._under_way: list[_WorkUnderWay] = []
        self._work_ids = itertools.count(1)
        self._pace = PrefillPace()
        self._num_mixed: Counter[int] = Counter()  # for each cohort: rounds with chunks since its last round without

    def replace_strategy(self, strategy: Strategy) -> Strategy:
        """Set the strategy, and return the previous one. Only allowed while no request is unfinished."""
        assert not self.has_unfinished, "plans are chosen for what is under way"
        return self._planner.replace_strategy(strategy)

    def forget_texts(self) -> None:
        """Forget the outputs that later texts could copy, and what the target found likely in them."""
        self._planner.proposer.forget_texts()

    def finished_texts(self, most: int) -> list[OwnedText]:
        """Return new finished texts, for other engines with this model. Any thread may call this."""
        finished = self._planner.proposer.finished
        return [finished.popleft() for _ in range(min(most, len(finished)))]

    def remember(self, texts: Iterable[OwnedText]) -> None:
        """Let later texts of the same owners copy these. Tokens must be the model's. Any thread may call this."""
        self._planner.proposer.received.extend(texts)

    def remember_texts(self, texts: Iterable[str]) -> None:
        """Let later texts without an owner copy these, up to `corpus_tokens`. Any thread may call this."""
        tokens = tokenised(texts, self.tokenizer, vocab_size=self.model.vocab_size)
        self.remember(("", one) for one in tokens)

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is unfinished, or work of an aborted request is still under way."""
        return bool(self._requests) or bool(self._under_way)

    @property
    def load(self) -> EngineLoad:
        """Any thread may read it."""
        scheduler = self._scheduler
        return EngineLoad(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_used_tokens=scheduler.kv.num_used_slots,
            kv_total_tokens=scheduler.kv.num_slots,
        )

    @property
    def progress(self) -> Progress:
        """Whether the thread that runs the engine is stuck."""
        return self.stages.progress

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError, see `Requests.admit`."""
        live = self._requests.admit(request)
        for sequence in live.sequences:
            self._open(sequence)
            self._scheduler.add(sequence)
        self._requests[request.request_id] = live
        self.stats.num_prompt_tokens += len(live.prompt_token_ids)

    def abort(self, request_id: str) -> NewOutput | None:
        """End a request now and free its resources. Return its output so far, or None for an unknown id."""
        live = self._requests.get(request_id)
        if live is None:
            return None
        for sequence in live.sequences:
            if not sequence.finished:
                sequence.finish_reason = "abort"
                self._retire(sequence)
        return self._requests.new_output(live)

    def abort_all(self) -> list[RequestOutput]:
        return [output.decoded() for name in list(self._requests) if (output := self.abort(name)) is not None]

    def step(self) -> list[RequestOutput]:
        """Call `advance` and decode the texts of its outputs."""
        return [output.decoded() for output in self.advance()]

    def advance(self) -> list[NewOutput]:
        """Start the next work of every cohort that has none under way, wait until some work is done, and commit it.
        Return the outputs of finished and streaming requests; all end with StageLostError if the model is lost."""
        started = self._clock()
        try:
            for cohort in range(self.stages.num_cohorts):
                if not self._is_busy(cohort):
                    self._start(cohort)
            self.stages.wait()
            self._note_done()
            for done in [one for one in self._under_way if one.took_s is not None]:
                self._commit(done)
        except StagesReplacedError:
            self._replay()
        except StageLostError as error:
            for sequence in self._give_up_work():
                if not sequence.finished:
                    sequence.finish_reason, sequence.error = "error", error.with_traceback(None)
                self._scheduler.remove(sequence)
                sequence.metrics.finished_s = self._clock()
        self.stats.total_s += self._clock() - started
        return self._requests.outputs()

    def wake(self) -> None:
        """Let a call of `advance` that waits for work return. Any thread may call this."""
        self.stages.wake()

    def ping(self) -> None:
        """Return when the stages have answered; at once while work is under way, which itself detects a lost stage.
        Raises StageLostError if a stage is lost for good."""
        try:
            if not self._under_way:
                self.stages.check()
        except StagesReplacedError:
            self._replay()

    def shutdown(self) -> None:
        """Abort all requests and shut the stages down."""
        try:
            self.abort_all()
        finally:
            self.stages.shutdown()

    def _start(self, cohort: int) -> None:
        busy = {one.cohort for one in self._under_way}
        # After a few rounds with chunks, one without: strategies learn only from the time of such a round.
        most = self.config.num_batched_tokens if self._num_mixed[cohort] < _MOST_MIXED else 0
        # Wait a short time for the masks of the cohort's sequences; if nothing can run without, a little longer.
        members = self._scheduler.members(cohort)
        late = [one.constraint for one in members if one.constraint is not None and not one.constraint.wait()]
        step = self._scheduler.schedule(cohort, busy, most, self._pace.num_rows(most) if most else 0)
        self.stats.num_preemptions += step.num_out_of_pages
        if late and not (step.chunks or step.decode or self._under_way):
            late[0].wait(_MASKS_S)
        for sequence in step.preempted:
            self._begin_again(sequence)
        for sequence in step.admitted:
            sequence.begin_lookup()
            self.stats.num_cached_tokens += sequence.num_computed
            if sequence.metrics.num_preemptions == sequence.metrics.num_replays == 0:
                sequence.metrics.num_cached_tokens = sequence.num_computed
        # In deterministic mode no pass has both: the shape of a chunk must not depend on other sequences.
        mixes = bool(step.chunks and step.decode) and not self.config.deterministic
        self._num_mixed[cohort] = self._num_mixed[cohort] + 1 if mixes else 0
        if step.chunks and not mixes:
            self._run(cohort, Prefill(id=next(self._work_ids), chunks=step.chunks), step.prefill)
        if step.decode:
            planned = self._planner.plan(next(self._work_ids), step.decode, step.chunks if mixes else ())
            self._run(cohort, planned.work, step.prefill if mixes else (), planned)

    def _run(
        self, cohort: int, work: Work, prefilled: Sequence[SequenceState], planned: PlannedRound | None = None
    ) -> None:
        """Run the work and measure its time, which in one process ends here, before the next work begins."""
        started_s = self._clock()
        self._under_way.append(_WorkUnderWay(cohort, work, self.stages.start(work), prefilled, planned, started_s))
        self._note_done()

    def _note_done(self) -> None:
        going_on = [one for one in self._under_way if one.took_s is None]
        for one in going_on:
            if one.future.done():
                one.took_s = (self._clock() - one.started_s) / len(going_on)

    def _is_busy(self, cohort: int) -> bool:
        return any(one.cohort == cohort for one in self._under_way)

    def _commit(self, done: _WorkUnderWay) -> None:
        self._under_way.remove(done)
        has_round, took_s = done.planned is not None, done.took_s or 0.0
        if not has_round:
            self.stats.prefill_s += took_s
        try:
            result = done.future.result()
        except OutOfMemoryError as error:
            self._give_up(done, error)
        else:
            self._pace.observe(took_s, num_chunk_rows=num_rows(done.work.chunks), has_round=has_round)
            chosen = result.committed if isinstance(result, PrefillResult) else result.prefilled
            for sequence, chunk, rows in zip(done.prefilled, done.work.chunks, result.prompt_logprobs, strict=False):
                sequence.note_prompt_logprobs(rows, chunk.rows.end)
            for sequence, chunk, one in zip(done.prefilled, done.work.chunks, chosen, strict=True):
                sequence.note_computed(sequence.num_computed + chunk.rows.num_rows)
                self.stats.num_prefilled_tokens += chunk.rows.num_rows
                if one is not None:
                    self._commit_tokens(sequence, one)
            if isinstance(result, RoundResult) and done.planned is not None:
                self._commit_round(done.planned, result)
        if not self._is_busy(done.cohort):
            for sequence in self._scheduler.members(done.cohort):
                if sequence.finished:
                    self._release(sequence)

    def _give_up(self, done: _WorkUnderWay, error: OutOfMemoryError) -> None:
        """After work that ran out of memory, fail the sequences of its chunks, or else the youngest of the round."""
        members = done.planned.sequences if done.planned is not None else ()
        for sequence in done.prefilled or members[-1:]:
            self._fail(sequence, error)
        for sequence in members if self.stages.keeps_state else ():
            if not sequence.finished:
                self._scheduler.put_back(sequence)
                self._begin_again(sequence)

    def _commit_round(self, planned: PlannedRound, result: RoundResult) -> None:
        num_tokens, stats = 0, self.stats
        for sequence, committed, drafted, num_accepted in zip(
            planned.sequences, result.committed, result.drafts, result.num_accepted, strict=True
        ):
            num_draft_tokens = len(drafted.token_ids)
            for counts in (sequence.metrics, stats):
                counts.num_rounds += result.num_steps
                counts.num_plain_rounds += 0 if num_draft_tokens else result.num_steps
                counts.num_draft_tokens += num_draft_tokens
                counts.num_accepted_tokens += num_accepted
            if num_draft_tokens:
                stats.accepted_lengths[num_accepted] = stats.accepted_lengths.get(num_accepted, 0) + 1
            num_tokens += self._commit_tokens(sequence, committed)
        stats.draft_s += result.draft_s
        stats.verify_s += result.verify_s
        stats.prefill_s += result.queued_s + result.prefill_s
        moves: list[Move] = []  # of keys and values of accepted branches to the slots of their positions
        for entry, path in zip(planned.work.entries, result.paths, strict=False):
            for runs in filter(None, (entry.runs, entry.windowed)) if path else ():
                slots = slots_between(runs, entry.length - 1, entry.length + max(path))  # of all rows
                pairs = zip([slots[row] for row in path], slots[1:], strict=False)
                moves += [Move(source, to, runs is entry.windowed) for source, to in pairs if source != to]
        # Pages of finished sequences may be free already, but nothing is scheduled before the moves are done.
        if moves:
            self.stages.move(moves)
        self._planner.learn(planned, result, num_tokens)

    def _commit_tokens(self, sequence: SequenceState, committed: Committed) -> int:
        """Return how many of the tokens the sequence has taken."""
        if sequence.finish_reason == "abort":  # while it was under way
            return 0
        try:
            if committed.problem:
                raise GrammarError(committed.problem)
            if not committed.finite:
                raise NonFiniteLogitsError(
                    f"the model gave NaN or infinite logits after {sequence.num_tokens} tokens: "
                    "the weights are damaged or overflow in this dtype; try bfloat16 or float32"
                )
            num_tokens = sequence.commit(committed.token_ids, committed.logprobs)
        except RequestError as error:  # also of the tokenizer, where a stop string is looked for
            self._fail(sequence, error)
            return 0
        if sequence.constraint is not None and not sequence.finished:
            sequence.constraint.extend_to(sequence.token_ids)
        self.stats.num_generated_tokens += num_tokens
        if sequence.metrics.first_token_s is None:
            sequence.metrics.first_token_s = self._clock()
        sequence.num_computed = sequence.num_tokens - 1
        if sequence.finished:
            self._retire(sequence)
        return num_tokens

    def _open(self, sequence: SequenceState) -> None:
        self._planner.proposer.begin(sequence)
        self.stages.open(
            SamplerSpec(
                sequence_id=sequence.sequence_id,
                params=sequence.params,
                seed=sequence.seed,
                prompt_token_ids=sequence.token_ids[: sequence.num_prompt_tokens],
                output_token_ids=sequence.output_token_ids,
                eos_token_ids=tuple(sequence.eos_token_ids),
                lookup=sequence.lookup,
                constraint=sequence.constraint,
            )
        )

    def _begin_again(self, sequence: SequenceState) -> None:
        """Open a sequence that begins again at position 0, by a new id: messages to stages may overtake each other."""
        self._planner.forget(sequence)
        self.stages.close(sequence.sequence_id)
        sequence.sequence_id += "+"
        self._open(sequence)

    def _fail(self, sequence: SequenceState, error: RayspecError) -> None:
        if not sequence.finished:
            # Without its traceback, whose frames hold the sequence: that circle would keep the form's memory for long.
            sequence.finish_reason, sequence.error = "error", error.with_traceback(None)
            self._retire(sequence)

    def _retire(self, sequence: SequenceState) -> None:
        """Release a finished sequence: now, or once its cohort's work is done, whose rows write into its pages."""
        sequence.metrics.finished_s = self._clock()
        if sequence.finish_reason in ("stop", "length"):
            self._planner.proposer.remember(sequence)
        self._planner.forget(sequence)
        if not sequence.table.pages or not self._is_busy(sequence.cohort):
            self._release(sequence)

    def _release(self, sequence: SequenceState) -> None:
        self._scheduler.remove(sequence)
        self.stages.close(sequence.sequence_id)

    def _replay(self) -> None:
        """Open every sequence again after the stages have lost their state; later steps prefill their tokens."""
        lost = self._give_up_work()
        self._scheduler.restart()
        self._planner.forget()
        for sequence in lost:
            if sequence.finished:
                self._scheduler.remove(sequence)
            else:
                self._open(sequence)
                sequence.metrics.num_replays += 1
        self.stats.num_replays += 1

    def _give_up_work(self) -> list[SequenceState]:
        self._under_way.clear()
        return [*self._scheduler.running, *self._scheduler.waiting]
