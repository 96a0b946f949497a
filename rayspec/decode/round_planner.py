"""Plan the rounds of an engine by asking the strategy, and report their outcome to it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial

from rayspec.config import MAX_TREE_TOKENS, SpeculationOptions
from rayspec.decode.drafting.lookup import Proposal
from rayspec.decode.drafting.proposer import Proposer, sources_of
from rayspec.decode.requests import SequenceState
from rayspec.decode.scheduler import Scheduler
from rayspec.decode.search import Answer, Question
from rayspec.decode.stages import Stages
from rayspec.decode.strategy import BatchState, RoundPlan, Strategy
from rayspec.decode.work import Chunk, Round, RoundEntry, RoundResult, TappedToken
from rayspec.planning.learning import AnswerLength
from rayspec.types import EngineStats, Plan

_MAX_PLAN_RECORDS = 1024
# Between two rounds, a search in this process takes at most the time of so many steps of the last round. After a search
# that was cancelled, which sequences too short for it cause, the next one may take twice the time, and so on.
SEARCH_STEPS, _MAX_DOUBLINGS = 3.0, 8


@dataclass(frozen=True, slots=True)
class PlannedRound:
    """A round, and the strategy's choice for it in this batch state. started: when planning began."""

    work: Round
    sequences: Sequence[SequenceState]
    state: BatchState
    chosen: RoundPlan
    started: float


@dataclass(slots=True)
class _Searching:
    """A search under way over these tokens. counted_s: its seconds that are in the statistics."""

    tokens: Sequence[TappedToken]
    counted_s: float = 0.0


class RoundPlanner:
    """Connects the strategy to the engine. Keeps the last tapped tokens and the plan searches under way over them."""

    def __init__(
        self,
        strategy: Strategy,
        *,
        options: SpeculationOptions,
        num_tap_tokens: int,
        stages: Stages,
        scheduler: Scheduler,
        stats: EngineStats,
        clock: Callable[[], float],
        given_texts: Sequence[int] = (),
    ) -> None:
        self.strategy = strategy
        # The last tapped tokens. None stands for a token whose sequence has left its place in the KV cache, until new
        # tokens push it out, as they do with its states in the stages: so the states of all others are still there.
        self._taps: deque[TappedToken | None] = deque(maxlen=num_tap_tokens)
        self.proposer = Proposer(options, takes_trees=stages.takes_trees, given_texts=given_texts)
        self._options = options
        self._stages = stages
        self._scheduler = scheduler
        self._stats = stats
        self._clock = clock
        self._answer_length = AnswerLength()
        self._searching: dict[Future[Answer], _Searching] = {}  # the oldest first
        self._num_cancelled = 0  # searches in a row
        self._searched_s = 0.0  # seconds of searches that are not yet in the statistics

    @property
    def tapped(self) -> list[TappedToken]:
        return [token for token in self._taps if token is not None]

    def plan(self, work_id: int, sequences: Sequence[SequenceState], chunks: Sequence[Chunk] = ()) -> PlannedRound:
        started = self._clock()
        outstanding = sum(
            self._answer_length.expected(sequence.num_remaining)
            for sequence in (*self._scheduler.running, *self._scheduler.waiting)
        )
        state = BatchState(
            context=sum(sequence.num_tokens for sequence in sequences) // len(sequences),
            batch=len(sequences),
            elapsed_s=self._stats.total_s,
            searched_s=self._stats.optimise_s,
            num_outstanding_tokens=outstanding,
            sequence_ids=[sequence.sequence_id for sequence in sequences],
            proposals=cache(partial(self._proposals, sequences)),
            by_class=lambda: self.proposer.record.by_class,
        )
        chosen = self.strategy.choose(state)
        plan = chosen.plan
        proposals = state.proposals()  # in any case, because they are compared with what comes
        lengths = plan.lookup_lengths or [plan.num_lookup_tokens] * len(sequences)
        if self._options.strategy == "static":  # its proposals are what the forms of the outputs force
            lengths = [len(proposal.token_ids) for proposal in proposals]
        entries = [self._entry(*each, plan) for each in zip(sequences, proposals, lengths, strict=True)]
        num_taps = (self._taps.maxlen or 0) if chosen.capture else 0
        num_likeliest = self.proposer.num_likeliest(len(sequences))
        is_plain = not any(entry.max_draft_tokens or entry.looked_up for entry in entries)
        work = Round(
            id=work_id,
            entries=entries,
            plan=plan,
            keep_drafting=chosen.keep_drafting,
            num_taps=num_taps,
            chunks=chunks,
            num_likeliest=num_likeliest,
            num_steps=self._num_steps(sequences) if is_plain and not (num_taps or chunks or num_likeliest) else 1,
        )
        return PlannedRound(work, sequences, state, chosen, started)

    def _num_steps(self, sequences: Sequence[SequenceState]) -> int:
        """Return how many tokens all sequences may have and have places for, at most the stages' number."""
        lefts = (min(each.num_remaining, each.table.capacity - each.num_tokens + 1) for each in sequences)
        return min(self._stages.num_steps, *lefts)

    def _proposals(self, sequences: Sequence[SequenceState]) -> list[Proposal]:
        longest, batch = self._options.max_draft_tokens, len(sequences)
        return [self.proposer.propose(one, longest, batch=batch) for one in sequences]

    def learn(self, planned: PlannedRound, result: RoundResult, num_tokens: int) -> None:
        """Log the taps of a finished round, give the strategy its result, and let the strategy search. The strategy
        learns nothing from a round with chunks, because the round's own time is then unknown."""
        step_s = (self._clock() - planned.started - result.queued_s - result.owed_s) / result.num_steps
        self._taps.extend(planned.work.taps)
        num_ends = sum(sequence.finish_reason == "stop" for sequence in planned.sequences)
        self._answer_length.observe(num_tokens=num_tokens, num_ends=num_ends)
        self._teach(planned, result)
        for sequence, probed in itertools.zip_longest(planned.sequences, result.probed):
            if sequence.lookahead is not None and planned.work.plan.lookahead:
                sequence.lookahead.observe(probed or ())
            if sequence.finished:
                self._drop_taps(sequence)
        committed_any = num_tokens or not all(committed.finite for committed in result.committed)
        if committed_any and not planned.work.chunks:
            num_a_step = -(-num_tokens // result.num_steps)
            self.strategy.observe(planned.state, planned.chosen, result, num_a_step, step_s)
            if (plain_rate := planned.chosen.plain_rate) is not None:
                self._stats.compared_s += step_s * result.num_steps
                self._stats.plain_s += num_tokens / plain_rate
        self._continue_searches(step_s)
        started = self._clock()
        record = self.strategy.search(planned.state, self._search)
        if record is not None:
            self._stats.plans = [*self._stats.plans[-_MAX_PLAN_RECORDS + 1 :], record]
        if record is not None or self._searched_s:
            self._stats.optimise_s += max(self._searched_s, self._clock() - started)
            self._searched_s = 0.0
        self._stats.gate_reason = self.strategy.status

    def _teach(self, planned: PlannedRound, result: RoundResult) -> None:
        """Let the proposer compare what it proposed with what came."""
        proposals, by_source = planned.state.proposals(), self._stats.accepted_by_source
        for at, (sequence, entry) in enumerate(zip(planned.sequences, planned.work.entries, strict=True)):
            committed, draft = result.committed[at], result.drafts[at]
            rows = (result.paths[at] if result.paths else ()) or range(1, result.num_accepted[at] + 1)
            for source in sources_of(draft, proposals[at], rows):
                for counts in (by_source, sequence.metrics.accepted_by_source):
                    counts[source] = counts.get(source, 0) + 1
            if committed.finite and not committed.problem and sequence.finish_reason != "abort":
                likeliest = result.likeliest[at] if result.likeliest else ()
                self.proposer.learn(sequence, entry, proposals[at], draft, committed.token_ids, likeliest)

    def forget(self, sequence: SequenceState | None = None) -> None:
        """Drop the taps of the sequence, or of all, and cancel the searches over them, because the sequence leaves its
        place in the KV cache."""
        self._drop_taps(sequence)
        for search, asked in self._searching.items():
            if sequence is None or any(token.sequence_id == sequence.sequence_id for token in asked.tokens):
                search.cancel()

    def _continue_searches(self, step_s: float) -> None:
        """Let this process work on the oldest search for the time of a few steps, so that no sequence waits long.
        Cancel searches over tokens whose keys the cache does not have any more."""
        sequences = {sequence.sequence_id: sequence for sequence in self._scheduler.running}
        for search, asked in list(self._searching.items()):
            if not all(self._is_held(token, sequences) for token in asked.tokens):
                search.cancel()
            if search.done():
                del self._searching[search]
        for search, asked in list(self._searching.items())[:1]:
            started = self._clock()
            self._stages.continue_search(SEARCH_STEPS * 2 ** min(self._num_cancelled, _MAX_DOUBLINGS) * step_s)
            if not search.done():  # else its seconds are counted by now
                took_s = self._clock() - started
                asked.counted_s += took_s
                self._stats.optimise_s += took_s

    def _is_held(self, token: TappedToken, sequences: Mapping[str, SequenceState]) -> bool:
        sequence = sequences.get(token.sequence_id)
        return sequence is not None and self._scheduler.kv.holds_window(sequence, token.position)

    def _drop_taps(self, sequence: SequenceState | None) -> None:
        for at, token in enumerate(self._taps):
            if token is not None and (sequence is None or token.sequence_id == sequence.sequence_id):
                self._taps[at] = None

    def _search(self, question: Question, sequence_id: str | None = None) -> Future[Answer] | None:
        """Search over the last tapped tokens; None if they are too few. Their sequences must keep their places until
        then."""
        sequences = {sequence.sequence_id: sequence for sequence in self._scheduler.running}
        tokens = [
            token
            for token in self.tapped
            if sequence_id in (None, token.sequence_id) and self._is_held(token, sequences)
        ]
        if len(tokens) < question.num_tokens:
            return None
        chosen = tokens[-question.num_tokens :]
        rows = [sequences[token.sequence_id].rows(token.position, 1) for token in chosen]
        searching, asked = self._stages.search(chosen, rows, question), _Searching(chosen)
        self._searching[searching] = asked

        def count(search: Future[Answer]) -> None:
            self._num_cancelled = self._num_cancelled + 1 if search.cancelled() else 0
            if not search.cancelled() and search.exception() is None:
                self._searched_s += max(0.0, search.result().seconds - asked.counted_s)

        searching.add_done_callback(count)
        return searching

    def _entry(self, sequence: SequenceState, proposal: Proposal, num_looked_up: int, plan: Plan) -> RoundEntry:
        num_free = sequence.table.capacity - sequence.num_tokens
        drafts = sequence.constraint is None or not sequence.constraint.is_slow
        max_tree_tokens = min(MAX_TREE_TOKENS, num_free)
        num_looked_up = min(num_looked_up, num_free)
        looked_up: Sequence[int] = proposal.token_ids[:num_looked_up]
        parents: Sequence[int] = proposal.parents[:num_looked_up]
        num_probes = 0
        if plan.lookahead:
            guess = sequence.guess(max_tree_tokens)
            looked_up, parents, num_probes = guess.token_ids, guess.parents, guess.num_probes
        return RoundEntry(
            sequence_id=sequence.sequence_id,
            runs=sequence.table.runs,
            length=sequence.num_tokens,
            last_token=sequence.token_ids[-1],
            max_draft_tokens=min(plan.num_draft_tokens, sequence.num_remaining - 1, num_free) if drafts else 0,
            end_tokens=() if sequence.params.ignore_eos and sequence.constraint is None else sequence.eos_token_ids,
            looked_up=looked_up,
            parents=parents,
            num_probes=num_probes,
            max_tree_tokens=max_tree_tokens,
            windowed=sequence.windowed_table.runs,
            adapter=sequence.adapter,
        )
