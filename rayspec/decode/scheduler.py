"""Which sequences do what in the next step. Decides only: no tensors, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from rayspec.decode.sequence import SequenceState
from rayspec.model.kv_arena import Span, SpanAllocator
from rayspec.model.rows import RowSpan


@dataclass(frozen=True, slots=True)
class Move:
    """Copy `length` arena slots before anything else happens in the step."""

    source: int
    destination: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Committed tokens of a sequence to be prefilled, one a row. sample: choose the token after them. replay: they were
    generated, and are computed again."""

    sequence_id: str
    rows: RowSpan
    token_ids: Sequence[int]
    sample: bool
    replay: bool = False


@dataclass(slots=True)
class Step:
    """What to do, in this order. prefill: the sequences of the `chunks`."""

    moves: list[Move] = field(default_factory=list)
    prefill: list[SequenceState] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    decode: list[SequenceState] = field(default_factory=list)
    preempted: list[SequenceState] = field(default_factory=list)


class Scheduler:
    """Continuous batching over one arena: first come, first served; when it is full the youngest is preempted.

    Running sequences are dealt to `num_cohorts` cohorts, which are scheduled one at a time and travel independently: a
    cohort in flight is left alone. `lookahead` is how many tokens beyond its newest one a sequence may write in a
    round, and `num_beside` how many rows more, behind them, whatever its length: branches of a tree. For these there
    may be less room where the arena has no more. With `chunk_grid` a sequence's prompt is cut at multiples of it and
    chunks run alone, so that their shapes do not depend on other sequences.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        max_num_seqs: int,
        max_prefill_tokens: int,
        lookahead: int,
        num_beside: int = 0,
        chunk_grid: int | None = None,
        num_cohorts: int = 1,
    ) -> None:
        self.allocator = SpanAllocator(num_slots)
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self._fair_share = num_slots // max_num_seqs
        self._max_num_seqs = max_num_seqs
        self._max_prefill_tokens = max_prefill_tokens
        self._lookahead = lookahead
        self._num_beside = num_beside
        self._chunk_grid = chunk_grid
        self._max_cohort_seqs = -(-max_num_seqs // num_cohorts)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def fits(self, sequence: SequenceState) -> bool:
        """Whether the arena can hold the sequence to its end when it is alone."""
        return sequence.max_total_tokens <= self.allocator.num_slots

    def add(self, sequence: SequenceState) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Forget a finished or aborted sequence and free its span."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release(sequence)

    def members(self, cohort: int) -> list[SequenceState]:
        return [sequence for sequence in self.running if sequence.cohort == cohort]

    def schedule(self, cohort: int = 0, in_flight: Collection[int] = ()) -> Step:
        """The next step of a cohort, while those `in_flight` are under way."""
        step = Step()
        self._make_room(cohort, in_flight, step)
        self._admit(cohort)
        members = self.members(cohort)
        self._cut_chunks(members, step)
        step.decode = [sequence for sequence in members if sequence.prefilled]
        return step

    def restart(self) -> None:
        """Nothing is in the arena any more: every running sequence is computed again from its committed tokens."""
        for sequence in self.running:
            sequence.num_computed = 0

    def _make_room(self, cohort: int, in_flight: Collection[int], step: Step) -> None:
        """Every sequence of the cohort gets the slots of its next round, at the cost of the youngest ones at rest."""
        for sequence in self.members(cohort):
            while sequence.span is not None and not self._grow(sequence, step):
                self._preempt(next(s for s in reversed(self.running) if s.cohort not in in_flight), step)

    def _admit(self, cohort: int) -> None:
        num_members = len(self.members(cohort))
        while self.waiting and len(self.running) < self._max_num_seqs and num_members < self._max_cohort_seqs:
            sequence = self.waiting[0]
            wanted = max(self._needed(sequence), min(sequence.max_total_tokens, self._fair_share))
            span = self.allocator.allocate(wanted)
            if span is None:
                return
            sequence.span, sequence.cohort = span, cohort
            self.running.append(self.waiting.popleft())
            num_members += 1

    def _cut_chunks(self, members: Sequence[SequenceState], step: Step) -> None:
        budget = self._max_prefill_tokens
        for sequence in members:
            num_left = sequence.num_tokens - sequence.num_computed
            if sequence.prefilled or num_left <= 0:
                continue
            num_tokens = min(num_left, budget)
            if self._chunk_grid is not None:
                if step.chunks:
                    return
                num_tokens = self._on_grid(sequence, num_left)
            step.prefill.append(sequence)
            step.chunks.append(_chunk(sequence, num_tokens))
            budget -= num_tokens
            if budget <= 0:
                return

    def _on_grid(self, sequence: SequenceState, num_left: int) -> int:
        """Up to the next grid line of the prompt; generated tokens are replayed as the decode rows they were."""
        assert self._chunk_grid is not None
        num_prompt_left = sequence.num_prompt_tokens - sequence.num_computed
        if num_prompt_left > 0:
            return min(num_prompt_left, self._chunk_grid - sequence.num_computed % self._chunk_grid)
        return min(num_left, self._chunk_grid)

    def _needed(self, sequence: SequenceState) -> int:
        num_tokens = min(sequence.num_tokens + self._lookahead, sequence.max_total_tokens)
        return min(num_tokens + self._num_beside, self.allocator.num_slots)

    def _grow(self, sequence: SequenceState, step: Step) -> bool:
        span, needed = sequence.span, self._needed(sequence)
        assert span is not None
        if needed <= span.capacity:
            return True
        for capacity in (max(needed, min(2 * span.capacity, sequence.max_total_tokens)), needed):
            grown = self.allocator.extend(span, capacity)
            if grown is None and (grown := self.allocator.allocate(capacity)) is not None:
                step.moves.append(Move(span.start, grown.start, sequence.num_computed))
                self.allocator.release(span)
            if grown is not None:
                sequence.span = grown
                return True
        return False

    def _preempt(self, sequence: SequenceState, step: Step) -> None:
        self._release(sequence)
        sequence.num_computed = 0
        sequence.metrics.num_preemptions += 1
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        step.preempted.append(sequence)

    def _release(self, sequence: SequenceState) -> None:
        if sequence.span is not None:
            self.allocator.release(sequence.span)
            sequence.span = None


def moves_to_path(first: int, path: Sequence[int]) -> list[Move]:
    """Bring rows `path` behind the newest token's, in whose slot `first` the rows begin: a move for each run of rows
    that lie side by side. In this order nothing is overwritten that is yet to be moved, for no row moves up."""
    moves: list[Move] = []
    for at, row in enumerate(path, 1):
        if moves and moves[-1].source + moves[-1].length == first + row:
            moves[-1] = replace(moves[-1], length=moves[-1].length + 1)
        else:
            moves.append(Move(first + row, first + at, 1))
    return [move for move in moves if move.source != move.destination]


def _chunk(sequence: SequenceState, num_tokens: int) -> Chunk:
    """The next tokens that are not in the arena yet."""
    first = sequence.num_computed
    return Chunk(
        sequence_id=sequence.sequence_id,
        rows=RowSpan(span_of(sequence).start, first, num_tokens),
        token_ids=sequence.token_ids[first : first + num_tokens],
        sample=first + num_tokens == sequence.num_tokens,
        replay=first >= sequence.num_prompt_tokens,
    )


def span_of(sequence: SequenceState) -> Span:
    """The span of a running sequence."""
    assert sequence.span is not None
    return sequence.span
