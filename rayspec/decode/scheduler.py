"""Choose the sequences that the next step admits, prefills, decodes or preempts. No tensors, no clock."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from rayspec.decode.kv_manager import KVManager
from rayspec.decode.pages import WindowedPages
from rayspec.decode.sequence import SequenceState
from rayspec.decode.work import Chunk, Move
from rayspec.model.kv_cache import PAGE_SIZE

# Share of the pages that must stay free when a sequence is admitted while others run; as in vLLM.
_SPARE_SHARE = 0.01
_BACKGROUND_SHARE = 0.75  # of the sequences; the rest stays free for the next interactive request


@dataclass(slots=True)
class Step:
    """The work for one step of a cohort. prefill: the sequences of the `chunks`. admitted: sequences that were waiting
    before this step."""

    admitted: list[SequenceState] = field(default_factory=list)
    prefill: list[SequenceState] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    decode: list[SequenceState] = field(default_factory=list)
    preempted: list[SequenceState] = field(default_factory=list)


class Scheduler:
    """Continuous batching over the pages of one KV cache: first come, first served. When no page is left, the youngest
    sequence is preempted.

    Sequences of background requests wait behind the others, and are preempted first. They are admitted while less than
    three quarters of `max_num_seqs` run. At least one of them goes on under any load: while none runs, the first keeps
    its place among the others.

    Running sequences are divided into `num_cohorts` cohorts. Cohorts are scheduled one at a time and run independently;
    a cohort with work under way is not changed. lookahead: how many tokens after its newest token a sequence may write
    in a round. num_beside: how many further rows, the branches of a tree, it may write in addition, regardless of its
    length; fewer if the pages run out. chunk_grid: prompts are cut at its multiples and each chunk runs alone, so that
    chunk shapes do not depend on other sequences.

    shares_pages: sequences with a common prefix share the full pages of that prefix. If several such sequences wait,
    one computes the pages and the others wait for it.

    windowed: the pages of the windowed store, if the cache has one.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        windowed: WindowedPages | None = None,
        max_num_seqs: int,
        max_prefill_tokens: int,
        lookahead: int,
        num_beside: int = 0,
        chunk_grid: int | None = None,
        num_cohorts: int = 1,
        shares_pages: bool = True,
    ) -> None:
        self.kv = KVManager(num_slots, windowed, shares_pages=shares_pages, chunk_grid=chunk_grid)
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self._max_num_seqs = max_num_seqs
        self._max_beside_background = max(1, int(_BACKGROUND_SHARE * max_num_seqs))
        self._max_prefill_tokens = max_prefill_tokens
        self._lookahead = lookahead
        self._num_beside = num_beside
        self._chunk_grid = chunk_grid
        self._max_cohort_seqs = -(-max_num_seqs // num_cohorts)

    def fits(self, sequence: SequenceState) -> bool:
        """Return whether the cache can hold the sequence to its end if no other sequence runs."""
        return sequence.max_total_tokens <= self.kv.num_slots

    def add(self, sequence: SequenceState) -> None:
        place = len(self.waiting)
        if not sequence.background:
            place = self._first_of_background
            earlier = itertools.chain(self.running, itertools.islice(self.waiting, place))
            if place < len(self.waiting) and not any(one.background for one in earlier):
                place += 1
        self.waiting.insert(place, sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Forget a finished or aborted sequence and free its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.kv.release(sequence)

    def members(self, cohort: int) -> list[SequenceState]:
        return [sequence for sequence in self.running if sequence.cohort == cohort]

    def schedule(
        self,
        cohort: int = 0,
        in_flight: Collection[int] = (),
        most_with_round: int | None = None,
        most_with_streams: int | None = None,
    ) -> Step:
        """Return the next step of a cohort, while the cohorts `in_flight` have work under way. most_with_round,
        most_with_streams: how many prompt tokens may run together with a round, and with a round in which a sequence
        streams. None: as many as without a round."""
        step = Step()
        for sequence in self.running:
            self.kv.register(sequence)
        # Every sequence of the cohort gets the pages of its next round. If they run out, the youngest sequence that has
        # no work under way is preempted, of background requests first.
        for sequence in self.members(cohort):
            while sequence in self.running and not self._grow(sequence):
                free = [one for one in self.running if one.cohort not in in_flight]
                self._preempt(next((one for one in reversed(free) if one.background), free[-1]), step)
        self._admit(cohort, step)
        members = self.members(cohort)
        step.decode = [sequence for sequence in members if sequence.prefilled]
        most = None
        if step.decode:
            most = most_with_streams if any(sequence.streams for sequence in step.decode) else most_with_round
        self._cut_chunks(members, step, self._max_prefill_tokens if most is None else most)
        return step

    def restart(self) -> None:
        """Move all running sequences back to `waiting` and forget all pages, because the content of the cache is
        lost."""
        for sequence in self.running:
            self.kv.release(sequence)
        self.kv.forget_all()
        for sequence in reversed(self.running):
            self._put_back(sequence)
        self.running.clear()

    def _admit(self, cohort: int, step: Step) -> None:
        """Admit waiting sequences in order. A sequence whose shared pages are still being filled is passed over, and
        later ones may be admitted before it."""
        num_members = len(self.members(cohort))
        for sequence in list(itertools.islice(self.waiting, self._max_num_seqs)):
            if len(self.running) >= self._max_num_seqs or num_members >= self._max_cohort_seqs:
                return
            if self.kv.is_in_work(sequence) or not self._has_room_for(sequence):
                continue
            pages = self.kv.find(sequence)
            # While others run, a few more must be free, because the newest sequence would be preempted first.
            num_spare = int(_SPARE_SHARE * self.kv.pool.num_pages) if self.running else 0
            num_new = self._num_pages_needed(sequence) - len(pages)
            if num_new + num_spare > self.kv.pool.num_free_without(pages):
                return
            self.waiting.remove(sequence)
            self.running.append(sequence)
            self.kv.begin(sequence, pages)
            self._grow(sequence)
            sequence.cohort = cohort
            num_members += 1
            step.admitted.append(sequence)

    def _has_room_for(self, sequence: SequenceState) -> bool:
        return (
            not sequence.background
            or len(self.running) < self._max_beside_background
            or not any(one.background for one in self.running)
        )

    @property
    def _first_of_background(self) -> int:
        """The place in `waiting` behind which only background requests wait."""
        place = len(self.waiting)
        while place and self.waiting[place - 1].background:
            place -= 1
        return place

    def _put_back(self, sequence: SequenceState) -> None:
        """Let a sequence that has run wait before its equals."""
        self.waiting.insert(self._first_of_background if sequence.background else 0, sequence)

    def _cut_chunks(self, members: Sequence[SequenceState], step: Step, budget: int) -> None:
        for sequence in members:
            num_left = sequence.num_tokens - sequence.num_computed
            if sequence.prefilled or num_left <= 0:
                continue
            if budget <= 0:
                return
            num_tokens = min(num_left, budget)
            first = sequence.num_computed
            if self._chunk_grid is not None:
                if step.chunks:
                    return
                # Up to the prompt's next multiple of the grid. Generated tokens are replayed in the shapes of decode
                # rows.
                num_prompt_left = sequence.num_prompt_tokens - first
                to_grid = self._chunk_grid - (first % self._chunk_grid if num_prompt_left > 0 else 0)
                num_tokens = min(num_prompt_left if num_prompt_left > 0 else num_left, to_grid)
            self.kv.grow_window(sequence, first + num_tokens)
            step.prefill.append(sequence)
            step.chunks.append(
                Chunk(
                    sequence_id=sequence.sequence_id,
                    rows=sequence.rows(first, num_tokens),
                    token_ids=sequence.token_ids[first : first + num_tokens],
                    sample=first + num_tokens == sequence.num_tokens,
                    replay=first >= sequence.num_prompt_tokens,
                )
            )
            budget -= num_tokens

    def _num_pages_needed(self, sequence: SequenceState) -> int:
        """Return how many pages the sequence needs for its next round."""
        num_tokens = min(sequence.num_tokens + self._lookahead, sequence.max_total_tokens)
        return min(_num_pages(num_tokens + self._num_beside), self.kv.pool.num_pages)

    def _grow(self, sequence: SequenceState) -> bool:
        room = min(_num_pages(sequence.max_total_tokens + self._num_beside), self.kv.pool.num_pages)
        return self.kv.grow(sequence, self._num_pages_needed(sequence), room)

    def _preempt(self, sequence: SequenceState, step: Step) -> None:
        self.kv.release(sequence)
        sequence.metrics.num_preemptions += 1
        self.running.remove(sequence)
        self._put_back(sequence)
        step.preempted.append(sequence)


def moves_to_path(slots: Sequence[int], path: Sequence[int]) -> list[Move]:
    """Return the moves that place the rows `path` directly after the newest token's row. slots: the slots of all rows;
    row 0 is the newest token's. Contiguous rows are one move. The order is safe: no row moves to a later place, so no
    unmoved row is overwritten."""
    moves: list[Move] = []
    for at, row in enumerate(path, 1):
        source, destination = slots[row], slots[at]
        last = moves[-1] if moves else None
        if last and (last.source + last.length, last.destination + last.length) == (source, destination):
            moves[-1] = replace(moves[-1], length=moves[-1].length + 1)
        else:
            moves.append(Move(source, destination, 1))
    return [move for move in moves if move.source != move.destination]


def _num_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)
