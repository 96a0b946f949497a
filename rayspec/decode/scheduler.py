"""Which sequences do what in the next step. Decides only: no tensors, no clock."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from rayspec.decode.pages import PagePool
from rayspec.decode.prefix_cache import PrefixCache
from rayspec.decode.sequence import SequenceState
from rayspec.model.kv_arena import PAGE_SIZE
from rayspec.model.rows import RowSpan

# Of the pages, that stay free when a sequence comes in beside others; as vLLM does.
_SPARE_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Move:
    """Copy `length` slots of the KV cache."""

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
    """What to do. prefill: the sequences of the `chunks`. admitted: those that were waiting."""

    admitted: list[SequenceState] = field(default_factory=list)
    prefill: list[SequenceState] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    decode: list[SequenceState] = field(default_factory=list)
    preempted: list[SequenceState] = field(default_factory=list)


class Scheduler:
    """Continuous batching over the pages of one KV cache: first come, first served; when no page is left the youngest
    sequence is preempted.

    Running sequences are dealt to `num_cohorts` cohorts, which are scheduled one at a time and travel independently: a
    cohort in flight is left alone. `lookahead` is how many tokens beyond its newest one a sequence may write in a
    round, and `num_beside` how many rows more, behind them, whatever its length: branches of a tree. For these there
    may be less room where no more pages are left. With `chunk_grid` a sequence's prompt is cut at multiples of it and
    chunks run alone, so that their shapes do not depend on other sequences.

    With `shares_pages` sequences that begin alike share the full pages of what is alike. Of several that are to begin
    at the same time one computes the pages and the others wait for it.
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
        shares_pages: bool = True,
    ) -> None:
        self.pool = PagePool(num_slots // PAGE_SIZE)
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self._max_num_seqs = max_num_seqs
        self._max_prefill_tokens = max_prefill_tokens
        self._lookahead = lookahead
        self._num_beside = num_beside
        self._chunk_grid = chunk_grid
        self._max_cohort_seqs = -(-max_num_seqs // num_cohorts)
        self._prefixes = PrefixCache(self.pool, enabled=shares_pages, chunk_grid=chunk_grid)

    @property
    def num_slots(self) -> int:
        return self.pool.num_pages * PAGE_SIZE

    @property
    def num_used_slots(self) -> int:
        """Of pages that sequences have; others may be full of tokens, too."""
        return self.num_slots - self.pool.num_free * PAGE_SIZE

    def fits(self, sequence: SequenceState) -> bool:
        """Whether the cache can hold the sequence to its end when it is alone."""
        return sequence.max_total_tokens <= self.num_slots

    def add(self, sequence: SequenceState) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Forget a finished or aborted sequence and free its pages. What a failed one holds is of no use to others."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence.error is not None:
            self.pool.forget(sequence.table.pages)
        else:
            self._prefixes.register(sequence)
        self._release(sequence)

    def members(self, cohort: int) -> list[SequenceState]:
        return [sequence for sequence in self.running if sequence.cohort == cohort]

    def schedule(
        self, cohort: int = 0, in_flight: Collection[int] = (), num_beside: Callable[[int, bool], int] | None = None
    ) -> Step:
        """The next step of a cohort, while those `in_flight` are under way. num_beside: how many of so many prompt
        tokens may be run beside a round, of which somebody reads a text as it grows, or nobody does; None: all."""
        step = Step()
        for sequence in self.running:
            self._prefixes.register(sequence)
        self._make_room(cohort, in_flight, step)
        self._admit(cohort, step)
        members = self.members(cohort)
        step.decode = [sequence for sequence in members if sequence.prefilled]
        budget = self._max_prefill_tokens
        if num_beside is not None and step.decode:
            budget = num_beside(budget, any(sequence.streams for sequence in step.decode))
        self._cut_chunks(members, step, budget)
        return step

    def restart(self) -> None:
        """Nothing is in the cache any more: every running sequence is computed again from its committed tokens."""
        for sequence in self.running:
            self._release(sequence)
        self.pool.forget_all()
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()

    def _make_room(self, cohort: int, in_flight: Collection[int], step: Step) -> None:
        """Every sequence of the cohort gets the pages of its next round, at the cost of the youngest ones at rest."""
        for sequence in self.members(cohort):
            while sequence in self.running and not self._grow(sequence):
                self._preempt(next(s for s in reversed(self.running) if s.cohort not in in_flight), step)

    def _admit(self, cohort: int, step: Step) -> None:
        """Who waits for pages that another one is filling lets some others pass."""
        num_members = len(self.members(cohort))
        for sequence in list(itertools.islice(self.waiting, self._max_num_seqs)):
            if len(self.running) >= self._max_num_seqs or num_members >= self._max_cohort_seqs:
                return
            if self._prefixes.is_in_work(sequence):
                continue
            pages = self._prefixes.find(sequence)
            if not self._has_room(sequence, pages):
                return
            self._begin(sequence, pages)
            sequence.cohort = cohort
            num_members += 1
            step.admitted.append(sequence)

    def _has_room(self, sequence: SequenceState, shared: Sequence[int]) -> bool:
        """For its next round; and, beside others, a few more, for who has just come in would be the first to go."""
        num_new = self._num_pages_needed(sequence) - len(shared)
        num_spare = int(_SPARE_SHARE * self.pool.num_pages) if self.running else 0
        return num_new + num_spare <= self.pool.num_free_without(shared)

    def _begin(self, sequence: SequenceState, shared: Sequence[int]) -> None:
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.pool.share(sequence.table, shared)
        sequence.num_computed = sequence.table.capacity
        self._grow(sequence)
        self._prefixes.begin(sequence)

    def _cut_chunks(self, members: Sequence[SequenceState], step: Step, budget: int) -> None:
        for sequence in members:
            num_left = sequence.num_tokens - sequence.num_computed
            if sequence.prefilled or num_left <= 0:
                continue
            if budget <= 0:
                return
            num_tokens = min(num_left, budget)
            if self._chunk_grid is not None:
                if step.chunks:
                    return
                num_tokens = self._on_grid(sequence, num_left)
            step.prefill.append(sequence)
            step.chunks.append(_chunk(sequence, num_tokens))
            budget -= num_tokens

    def _on_grid(self, sequence: SequenceState, num_left: int) -> int:
        """Up to the next grid line of the prompt; generated tokens are replayed as the decode rows they were."""
        assert self._chunk_grid is not None
        num_prompt_left = sequence.num_prompt_tokens - sequence.num_computed
        if num_prompt_left > 0:
            return min(num_prompt_left, self._chunk_grid - sequence.num_computed % self._chunk_grid)
        return min(num_left, self._chunk_grid)

    def _num_pages_needed(self, sequence: SequenceState) -> int:
        """For its next round."""
        num_tokens = min(sequence.num_tokens + self._lookahead, sequence.max_total_tokens)
        return min(_num_pages(num_tokens + self._num_beside), self.pool.num_pages)

    def _grow(self, sequence: SequenceState) -> bool:
        room = min(_num_pages(sequence.max_total_tokens + self._num_beside), self.pool.num_pages)
        return self.pool.grow(sequence.table, self._num_pages_needed(sequence), room)

    def _preempt(self, sequence: SequenceState, step: Step) -> None:
        self._release(sequence)
        sequence.metrics.num_preemptions += 1
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        step.preempted.append(sequence)

    def _release(self, sequence: SequenceState) -> None:
        self._prefixes.end(sequence)
        self.pool.release(sequence.table)
        sequence.num_computed = 0


def moves_to_path(slots: Sequence[int], path: Sequence[int]) -> list[Move]:
    """Bring rows `path` behind the newest token's. slots: of the rows, the newest token's first. A move for each run of
    rows that lie side by side. In this order nothing is overwritten that is yet to be moved, for no row moves up."""
    moves: list[Move] = []
    for at, row in enumerate(path, 1):
        source, destination = slots[row], slots[at]
        if moves and _goes_on(moves[-1], source, destination):
            moves[-1] = replace(moves[-1], length=moves[-1].length + 1)
        else:
            moves.append(Move(source, destination, 1))
    return [move for move in moves if move.source != move.destination]


def _goes_on(move: Move, source: int, destination: int) -> bool:
    return (move.source + move.length, move.destination + move.length) == (source, destination)


def _num_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)


def _chunk(sequence: SequenceState, num_tokens: int) -> Chunk:
    """The next tokens that are not in the cache yet."""
    first = sequence.num_computed
    return Chunk(
        sequence_id=sequence.sequence_id,
        rows=RowSpan(sequence.table.runs, first, num_tokens),
        token_ids=sequence.token_ids[first : first + num_tokens],
        sample=first + num_tokens == sequence.num_tokens,
        replay=first >= sequence.num_prompt_tokens,
    )
