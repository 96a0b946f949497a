"""The engine: continuous batching of requests through rounds of draft, verify, accept, commit."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache, partial

from transformers import PreTrainedTokenizerBase

from rayspec.config import EngineConfig
from rayspec.decode.admission import admitted_tokens
from rayspec.decode.drafting.lookahead import Guess
from rayspec.decode.drafting.lookup import NOTHING, Proposal, shortest_match
from rayspec.decode.drafting.skip_draft import Turn
from rayspec.decode.head import Committed, Opening
from rayspec.decode.questions import Answer, Question
from rayspec.decode.rounds import Piece, Prefill, PrefillResult, Result, Round, RoundResult, Work
from rayspec.decode.scheduler import Chunk, Move, Scheduler, Step, held
from rayspec.decode.selection.base import Selector, Situation
from rayspec.decode.sequence import Detokenizer, SequenceState
from rayspec.decode.stages import StageLostError, Stages, StagesReplacedError
from rayspec.decode.taps import TapLog
from rayspec.decode.time_shares import TimeShares
from rayspec.decode.token_texts import TokenTexts
from rayspec.planning.latency import LatencyModel
from rayspec.types import (
    CompletionOutput,
    EngineLoad,
    EngineStats,
    Logprob,
    NonFiniteLogitsError,
    OutOfMemoryError,
    Plan,
    RayspecError,
    Request,
    RequestError,
    RequestMetrics,
    RequestOutput,
)

_SEED_STRIDE = 0x9E3779B97F4A7C15
_MAX_PLAN_RECORDS = 1024


@dataclass(slots=True)
class _Live:
    """A request in work and its sequences (params.n of them)."""

    request: Request
    prompt_token_ids: list[int]
    sequences: list[SequenceState] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return all(sequence.finished for sequence in self.sequences)

    def news(self) -> list[CompletionOutput]:
        return [news for sequence in self.sequences if (news := sequence.news()) is not None]


@dataclass(slots=True)
class _Flight:
    """Work under way for a cohort, and what to do when it is done. share_s: its seconds, when it is done."""

    cohort: int
    work_id: int
    future: Future[Result]
    land: Callable[[_Flight], None]
    share_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What the engine must know of the model's tokens."""

    size: int
    eos_token_ids: tuple[int, ...]


class Engine:
    """Not thread-safe: one thread adds requests and calls `step` until nothing is unfinished."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        stages: Stages,
        scheduler: Scheduler,
        selector: Selector,
        vocabulary: Vocabulary,
        max_model_len: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        latency: LatencyModel | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.stats = EngineStats()
        self.tokenizer = tokenizer
        self.latency = latency
        self.max_model_len = max_model_len
        self._stages = stages
        self._scheduler = scheduler
        self._selector = selector
        self._vocabulary = vocabulary
        self._clock = clock
        self._texts = TokenTexts(tokenizer) if tokenizer is not None else None
        self._live: dict[str, _Live] = {}
        self._flights: list[_Flight] = []
        self._time_shares = TimeShares(clock)
        self._work_ids = itertools.count(1)
        self._sequence_ids = itertools.count(1)
        self._taps = TapLog(config.num_tap_tokens)
        self._searching: Future[Answer] | None = None
        self._searched_s = 0.0  # that no round was charged with yet

    @property
    def stages(self) -> Stages:
        """Where the model runs."""
        return self._stages

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    def replace_selector(self, selector: Selector) -> Selector:
        """Who chooses plans from now on; returns who did. Only while nothing is unfinished."""
        assert not self.has_unfinished, "plans are chosen for what is under way"
        previous, self._selector = self._selector, selector
        return previous

    @property
    def has_unfinished(self) -> bool:
        """Requests to finish, or work of aborted ones to come back."""
        return bool(self._live or self._flights)

    @property
    def num_unfinished(self) -> int:
        return len(self._live)

    @property
    def load(self) -> EngineLoad:
        """May be asked from any thread."""
        scheduler = self._scheduler
        num_slots = scheduler.allocator.num_slots
        return EngineLoad(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_used_tokens=num_slots - scheduler.allocator.num_free,
            kv_total_tokens=num_slots,
        )

    @property
    def num_wanted(self) -> int:
        """Requests that keep it busy."""
        return 2 * self.config.max_num_seqs

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError: the prompt is not one, empty, too long, or has foreign tokens."""
        if request.request_id in self._live:
            raise RequestError(f"request id {request.request_id!r} is in use: give each request its own")
        live = _Live(request, self._tokens_of(request))
        for index in range(request.params.n):
            live.sequences.append(self._new_sequence(live, index))
        for sequence in live.sequences:
            self._open(sequence)
            self._scheduler.add(sequence)
        self._live[request.request_id] = live
        self.stats.num_prompt_tokens += len(live.prompt_token_ids)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and free what it holds; returns what it had become, or None when it is not here."""
        live = self._live.get(request_id)
        if live is None:
            return None
        for sequence in live.sequences:
            if not sequence.finished:
                sequence.finish_reason = "abort"
                self._retire(sequence)
        return self._finish(live)

    def abort_all(self) -> list[RequestOutput]:
        """`abort` for every request."""
        return [output for name in list(self._live) if (output := self.abort(name)) is not None]

    def step(self) -> list[RequestOutput]:
        """Start every cohort that is at rest, wait until something is done, commit it; returns the requests that
        finished, and of those that stream what is new. When the model is lost for good, every request finishes with
        StageLostError."""
        started = self._clock()
        try:
            self._start_cohorts()
            self._stages.wait()
            self._take_finished()
        except StagesReplacedError:
            self._replay()
        except StageLostError as error:
            self._fail_all(error)
        self.stats.total_s += self._clock() - started
        return [output for live in list(self._live.values()) if (output := self._told(live)) is not None]

    def ping(self) -> Future[None]:
        """Done when the stages have answered; while they work, the work is the answer. Fails with StageLostError when
        they are lost for good."""
        answered: Future[None] = Future()
        try:
            if not self._flights:
                self._stages.check()
        except StagesReplacedError:
            self._replay()
        except StageLostError as error:
            answered.set_exception(error)
            return answered
        answered.set_result(None)
        return answered

    def shutdown(self) -> None:
        """Abort everything and let the stages go."""
        try:
            self.abort_all()
        finally:
            self._stages.shutdown()

    def _start_cohorts(self) -> None:
        for cohort in range(self._stages.num_cohorts):
            if not self._in_flight(cohort):
                in_flight = {flight.cohort for flight in self._flights}
                self._start(cohort, self._scheduler.schedule(cohort, in_flight))

    def _in_flight(self, cohort: int) -> bool:
        return any(flight.cohort == cohort for flight in self._flights)

    def _start(self, cohort: int, step: Step) -> None:
        self.stats.num_preemptions += len(step.preempted)
        for sequence in step.preempted:
            self._forget_taps(sequence)
        if step.moves:
            self._cancel_search()
            self._stages.move(step.moves)
        if step.chunks:
            self._start_prefill(cohort, step.chunks)
        if step.decode:
            self._start_round(cohort, step.decode)

    def _start_prefill(self, cohort: int, chunks: Sequence[Chunk]) -> None:
        work = Prefill(id=next(self._work_ids), pieces=[_piece(chunk) for chunk in chunks])
        self._take_off(cohort, work, partial(self._land_prefill, chunks))

    def _start_round(self, cohort: int, sequences: Sequence[SequenceState]) -> None:
        started = self._clock()
        situation = self._situation(sequences)
        plan = self._selector.plan(situation)
        proposals = situation.proposals() if plan.num_lookup_tokens else [NOTHING] * len(sequences)
        work = Round(
            id=next(self._work_ids),
            turns=[self._turn(*each, plan) for each in zip(sequences, proposals, strict=True)],
            plan=plan,
            keep_drafting=self._selector.keep_drafting(situation),
            num_taps=self._taps.capacity if self._selector.wants_taps else 0,
        )
        self._take_off(cohort, work, partial(self._land_round, sequences, situation, work, started))

    def _take_off(self, cohort: int, work: Work, land: Callable[[_Flight], None]) -> None:
        """In one process the work is done at once: its time ends here, before the next work begins."""
        self._time_shares.begin(work.id)
        flight = _Flight(cohort, work.id, self._stages.start(work), land)
        self._flights.append(flight)
        self._end_if_done(flight)

    def _end_if_done(self, flight: _Flight) -> bool:
        if flight.share_s is None and flight.future.done():
            flight.share_s = self._time_shares.end(flight.work_id)
        return flight.share_s is not None

    def _take_finished(self) -> None:
        for flight in [flight for flight in self._flights if self._end_if_done(flight)]:
            self._flights.remove(flight)
            flight.land(flight)
            if not self._in_flight(flight.cohort):
                for sequence in self._scheduler.members(flight.cohort):
                    if sequence.finished:
                        self._release(sequence)

    def _land_prefill(self, chunks: Sequence[Chunk], flight: _Flight) -> None:
        result = self._result(flight.future, [chunk.sequence for chunk in chunks])
        if isinstance(result, PrefillResult):
            for chunk, committed in zip(chunks, result.committed, strict=True):
                chunk.sequence.num_computed += chunk.num_tokens
                if committed is not None:
                    self._commit(chunk.sequence, committed)
        self.stats.prefill_s += flight.share_s or 0.0

    def _land_round(
        self,
        sequences: Sequence[SequenceState],
        situation: Situation,
        work: Round,
        started: float,
        flight: _Flight,
    ) -> None:
        result = self._result(flight.future, sequences[-1:])
        if isinstance(result, RoundResult):
            num_tokens = 0
            for sequence, committed, drafted, num_accepted in zip(
                sequences, result.committed, result.drafts, result.num_accepted, strict=True
            ):
                self._count(sequence, len(drafted.token_ids), num_accepted)
                num_tokens += self._commit(sequence, committed)
            self.stats.draft_s += result.draft_s
            self.stats.verify_s += result.verify_s
            self.stats.prefill_s += result.queued_s
            self._taps.add(work.taps)
            for sequence in sequences:
                if sequence.finished:
                    self._taps.drop(sequence.sequence_id)
            self._keep_branches(sequences, work, result)
            if num_tokens or not all(committed.finite for committed in result.committed):
                seconds = self._clock() - started - result.queued_s
                self._selector.observe(situation, work.plan, result, num_tokens, seconds)
            self._improve(situation)

    def _keep_branches(self, sequences: Sequence[SequenceState], work: Round, result: RoundResult) -> None:
        """Keys and values of accepted branches go where their positions are; windows hear what was probed."""
        moves: list[Move] = []
        for sequence, turn, path in zip(sequences, work.turns, result.paths, strict=False):
            if not sequence.finished:
                moves.extend(_moves_to_path(turn.start + turn.length - 1, path))
        if work.plan.lookahead:
            for sequence, probed in zip(sequences, result.probed, strict=False):
                if sequence.lookahead is not None:
                    sequence.lookahead.observe(probed)
        if moves:
            self._stages.move(moves)

    def _result(self, future: Future[Result], victims: Sequence[SequenceState]) -> Result | None:
        """What the work gave. Run out of memory: the victims fail, the engine goes on."""
        try:
            return future.result()
        except OutOfMemoryError as error:
            for sequence in victims:
                self._fail(sequence, error)
        return None

    def _improve(self, situation: Situation) -> None:
        started = self._clock()
        record = self._selector.improve(situation, self._search)
        if record is not None:
            self.stats.plans = [*self.stats.plans[-_MAX_PLAN_RECORDS + 1 :], record]
        if record is not None or self._searched_s:
            self.stats.optimise_s += max(self._searched_s, self._clock() - started)
            self._searched_s = 0.0
        self.stats.gate_reason = self._selector.gate_reason

    def _search(self, question: Question, sequence_id: str | None = None) -> Future[Answer] | None:
        """Over the tokens tapped last, of sequences that may not move until it is done."""
        tokens = [token for token in self._taps.tokens if sequence_id in (None, token.sequence_id)]
        if len(tokens) < question.num_tokens:
            return None
        starts = {s.sequence_id: held(s).start for s in self._scheduler.running}
        chosen = tokens[-question.num_tokens :]
        self._searching = self._stages.search(chosen, [starts[token.sequence_id] for token in chosen], question)
        self._searching.add_done_callback(self._count_search)
        return self._searching

    def _count_search(self, search: Future[Answer]) -> None:
        if not search.cancelled() and search.exception() is None:
            self._searched_s += search.result().seconds

    def _cancel_search(self) -> None:
        if self._searching is not None:
            self._searching.cancel()

    def _forget_taps(self, sequence: SequenceState) -> None:
        """The sequence leaves its place in the arena."""
        self._taps.drop(sequence.sequence_id)
        self._cancel_search()

    def _replay(self) -> None:
        """The stages hold nothing any more: open every sequence again; it is prefilled with its committed tokens."""
        lost = [*self._scheduler.running, *self._scheduler.waiting]
        self._flights.clear()
        self._time_shares.clear()
        self._scheduler.restart()
        self._cancel_search()
        self._taps.clear()
        for sequence in lost:
            if sequence.finished:
                self._scheduler.remove(sequence)
            else:
                self._open(sequence)
                sequence.metrics.num_replays += 1
        self.stats.num_replays += 1

    def _fail_all(self, error: StageLostError) -> None:
        self._flights.clear()
        self._time_shares.clear()
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            if not sequence.finished:
                sequence.fail(error)
            self._scheduler.remove(sequence)
            sequence.metrics.finished_s = self._clock()

    def _turn(self, sequence: SequenceState, proposal: Proposal, plan: Plan) -> Turn:
        num_free = held(sequence).capacity - sequence.num_tokens
        max_tree_tokens = min(self.config.speculation.max_tree_tokens, num_free)
        guess = Guess(list(proposal.token_ids[: plan.num_lookup_tokens]))
        if plan.lookahead:
            guess = sequence.guess(self.config.speculation.lookahead, max_tree_tokens)
        return Turn(
            sequence_id=sequence.sequence_id,
            start=held(sequence).start,
            length=sequence.num_tokens,
            last_token=sequence.token_ids[-1],
            max_draft_tokens=min(plan.num_draft_tokens, sequence.num_remaining - 1),
            end_tokens=() if sequence.params.ignore_eos else self._vocabulary.eos_token_ids,
            looked_up=guess.token_ids,
            parents=guess.parents,
            num_probes=guess.num_probes,
            max_tree_tokens=max_tree_tokens,
        )

    def _situation(self, sequences: Sequence[SequenceState]) -> Situation:
        outstanding = sum(s.num_remaining for s in (*self._scheduler.running, *self._scheduler.waiting))
        return Situation(
            context=sum(sequence.num_tokens for sequence in sequences) // len(sequences),
            batch=len(sequences),
            elapsed_s=self.stats.total_s,
            num_outstanding_tokens=outstanding,
            sequence_ids=[sequence.sequence_id for sequence in sequences],
            proposals=cache(partial(self._proposals, sequences)),
        )

    def _proposals(self, sequences: Sequence[SequenceState]) -> list[Proposal]:
        options = self.config.speculation
        shortest = shortest_match(options)
        return [sequence.proposal(options.lookup_ngram, options.max_draft_tokens, shortest) for sequence in sequences]

    def _commit(self, sequence: SequenceState, committed: Committed) -> int:
        """Make the target's tokens the sequence's; returns how many counted."""
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
        num_tokens = sequence.commit(committed.token_ids, self._with_texts(committed.logprobs))
        self.stats.num_generated_tokens += num_tokens
        if sequence.metrics.first_token_s is None:
            sequence.metrics.first_token_s = self._clock()
        sequence.num_computed = sequence.num_tokens - 1
        if sequence.finished:
            self._retire(sequence)
        return num_tokens

    def _count(self, sequence: SequenceState, num_draft_tokens: int, num_accepted: int) -> None:
        for counts in (sequence.metrics, self.stats):
            counts.num_rounds += 1
            counts.num_draft_tokens += num_draft_tokens
            counts.num_accepted_tokens += num_accepted
            counts.num_plain_rounds += num_draft_tokens == 0
        if num_draft_tokens:
            lengths = self.stats.accepted_lengths
            lengths[num_accepted] = lengths.get(num_accepted, 0) + 1

    def _tokens_of(self, request: Request) -> list[int]:
        return admitted_tokens(
            request, self.tokenizer, vocab_size=self._vocabulary.size, max_model_len=self.max_model_len
        )

    def _with_texts(self, rows: Sequence[dict[int, Logprob]]) -> Sequence[dict[int, Logprob]]:
        texts = self._texts
        if texts is None:
            return rows
        return [
            {token_id: replace(one, decoded_token=texts.text(token_id)) for token_id, one in row.items()}
            for row in rows
        ]

    def _new_sequence(self, live: _Live, index: int) -> SequenceState:
        params = live.request.params
        seed = secrets.randbits(63) if params.seed is None else params.seed
        sequence = SequenceState(
            sequence_id=f"{next(self._sequence_ids)}/{live.request.request_id}/{index}",
            index=index,
            params=params,
            seed=_signed(seed + index * _SEED_STRIDE),
            token_ids=list(live.prompt_token_ids),
            num_prompt_tokens=len(live.prompt_token_ids),
            max_total_tokens=min(len(live.prompt_token_ids) + params.max_tokens, self.max_model_len),
            eos_token_ids=self._vocabulary.eos_token_ids,
            detokenizer=Detokenizer(self.tokenizer, params, stream=live.request.stream) if self.tokenizer else None,
            metrics=RequestMetrics(arrival_s=self._clock()),
        )
        if not self._scheduler.fits(sequence):
            raise OutOfMemoryError(
                f"the request may need {sequence.max_total_tokens} tokens of KV cache, more than there are: "
                "raise kv_cache_tokens or lower max_tokens"
            )
        return sequence

    def _open(self, sequence: SequenceState) -> None:
        self._stages.open(
            Opening(
                sequence_id=sequence.sequence_id,
                params=sequence.params,
                seed=sequence.seed,
                prompt_token_ids=sequence.token_ids[: sequence.num_prompt_tokens],
                output_token_ids=sequence.output_token_ids,
                eos_token_ids=self._vocabulary.eos_token_ids,
            )
        )

    def _fail(self, sequence: SequenceState, error: RayspecError) -> None:
        if not sequence.finished:
            sequence.fail(error)
            self._retire(sequence)

    def _retire(self, sequence: SequenceState) -> None:
        """A finished sequence lets go of what it holds: now, or when its cohort has landed, for rows that are under way
        write into its span."""
        sequence.metrics.finished_s = self._clock()
        self._forget_taps(sequence)
        if sequence.span is None or not self._in_flight(sequence.cohort):
            self._release(sequence)

    def _release(self, sequence: SequenceState) -> None:
        self._scheduler.remove(sequence)
        self._stages.close(sequence.sequence_id)

    def _told(self, live: _Live) -> RequestOutput | None:
        """What there is to say of a request after a step."""
        if live.finished:
            return self._finish(live)
        news = live.news() if live.request.stream else []
        return self._output(live, news) if news else None

    def _finish(self, live: _Live) -> RequestOutput:
        del self._live[live.request.request_id]
        return self._output(live, live.news() if live.request.stream else [one.output() for one in live.sequences])

    def _output(self, live: _Live, outputs: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            request_id=live.request.request_id,
            prompt=live.request.prompt,
            prompt_token_ids=tuple(live.prompt_token_ids),
            outputs=outputs,
            finished=live.finished,
            metrics=_summed([sequence.metrics for sequence in live.sequences]),
            error=next((sequence.error for sequence in live.sequences if sequence.error), None),
        )


def _piece(chunk: Chunk) -> Piece:
    sequence, end = chunk.sequence, chunk.first + chunk.num_tokens
    return Piece(
        sequence_id=sequence.sequence_id,
        start=held(sequence).start,
        first=chunk.first,
        token_ids=sequence.token_ids[chunk.first : end],
        sample=chunk.completes,
        replay=chunk.first >= sequence.num_prompt_tokens,
    )


def _moves_to_path(first: int, path: Sequence[int]) -> list[Move]:
    """Bring rows `path` behind the newest token's, in whose slot `first` the rows begin: a move for each run of rows
    that lie side by side. In this order nothing is overwritten that is yet to be moved, for no row moves up."""
    moves: list[Move] = []
    for at, row in enumerate(path, 1):
        if moves and moves[-1].source + moves[-1].length == first + row:
            moves[-1] = replace(moves[-1], length=moves[-1].length + 1)
        else:
            moves.append(Move(first + row, first + at, 1))
    return [move for move in moves if move.source != move.destination]


def _signed(seed: int) -> int:
    """Wrapped into the signed 64-bit range."""
    return (seed + 2**63) % 2**64 - 2**63


def _summed(metrics: Sequence[RequestMetrics]) -> RequestMetrics:
    first_tokens = [m.first_token_s for m in metrics if m.first_token_s is not None]
    return RequestMetrics(
        num_rounds=sum(m.num_rounds for m in metrics),
        num_plain_rounds=sum(m.num_plain_rounds for m in metrics),
        num_draft_tokens=sum(m.num_draft_tokens for m in metrics),
        num_accepted_tokens=sum(m.num_accepted_tokens for m in metrics),
        num_preemptions=sum(m.num_preemptions for m in metrics),
        num_replays=sum(m.num_replays for m in metrics),
        arrival_s=min(m.arrival_s for m in metrics),
        first_token_s=min(first_tokens, default=None),
        finished_s=max((m.finished_s or 0.0 for m in metrics), default=None),
    )
