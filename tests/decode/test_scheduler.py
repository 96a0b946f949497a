from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from rayspec.config import SamplingParams
from rayspec.decode.scheduler import Scheduler, Step, span_of
from rayspec.decode.sequence import SequenceState
from rayspec.types import RequestMetrics


def _sequence(name: int, num_prompt: int, max_tokens: int) -> SequenceState:
    return SequenceState(
        sequence_id=str(name),
        index=0,
        params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        token_ids=[0] * num_prompt,
        num_prompt_tokens=num_prompt,
        max_total_tokens=num_prompt + max_tokens,
        eos_token_ids=(),
        detokenizer=None,
        metrics=RequestMetrics(),
    )


class _World:
    """Carries out steps as the engine does, on a list that stands for the arena, and checks what was promised."""

    def __init__(self, scheduler: Scheduler, lookahead: int, seed: int, num_beside: int = 0) -> None:
        self.scheduler = scheduler
        self.slots: list[tuple[str, int] | None] = [None] * scheduler.allocator.num_slots
        self.lookahead = lookahead
        self.num_beside = num_beside
        self.rng = random.Random(seed)
        self.finished: list[str] = []
        self.arrival: dict[str, int] = {}
        self.num_preemptions = 0

    def add(self, sequence: SequenceState) -> None:
        self.arrival[sequence.sequence_id] = len(self.arrival)
        self.scheduler.add(sequence)

    def step(self) -> Step:
        before = list(self.scheduler.running)
        step = self.scheduler.schedule()
        self._check_preempted(before, step)
        for move in step.moves:
            moved = self.slots[move.source : move.source + move.length]
            self.slots[move.destination : move.destination + move.length] = moved
        self._check_spans()
        assert not {id(sequence) for sequence in step.prefill} & {id(sequence) for sequence in step.decode}
        for sequence, chunk in zip(step.prefill, step.chunks, strict=True):
            first, num_tokens = chunk.rows.context, chunk.rows.num_rows
            assert chunk.sequence_id == sequence.sequence_id
            assert chunk.rows.arena_start == span_of(sequence).start
            assert first == sequence.num_computed
            assert 0 < num_tokens <= sequence.num_tokens - first
            assert chunk.token_ids == sequence.token_ids[first : first + num_tokens]
            assert chunk.replay == (first >= sequence.num_prompt_tokens)
            self._write(sequence, first, first + num_tokens)
            sequence.num_computed += num_tokens
            assert chunk.sample == (sequence.num_computed == sequence.num_tokens)
            if chunk.sample:
                self._commit(sequence, 1)
        for sequence in step.decode:
            self._require_cached(sequence, sequence.num_tokens - 1)
            room = min(1 + self.lookahead, sequence.num_remaining)
            first = sequence.num_tokens - 1
            num_rows = room + self.num_beside
            self._write(sequence, first, min(first + num_rows, self.scheduler.allocator.num_slots))
            self._commit(sequence, self.rng.randint(1, room))
        return step

    def _check_preempted(self, before: list[SequenceState], step: Step) -> None:
        self.num_preemptions += len(step.preempted)
        if step.preempted:
            youngest = before[len(before) - len(step.preempted) :]
            assert step.preempted == youngest[::-1], "the youngest go first"
            assert all(sequence.num_computed == 0 or sequence.span for sequence in step.preempted)

    def _check_spans(self) -> None:
        spans = [span_of(sequence) for sequence in self.scheduler.running]
        taken = [slot for span in spans for slot in range(span.start, span.end)]
        assert len(taken) == len(set(taken))
        assert self.scheduler.allocator.num_free == len(self.slots) - len(taken)
        assert all(sequence.span is None for sequence in self.scheduler.waiting)

    def _write(self, sequence: SequenceState, first: int, end: int) -> None:
        span = span_of(sequence)
        assert end <= span.capacity, "a round writes behind its span"
        self._require_cached(sequence, first)
        for position in range(first, end):
            self.slots[span.start + position] = (sequence.sequence_id, position)

    def _require_cached(self, sequence: SequenceState, count: int) -> None:
        start = span_of(sequence).start
        expected = [(sequence.sequence_id, position) for position in range(count)]
        assert self.slots[start : start + count] == expected

    def _commit(self, sequence: SequenceState, count: int) -> None:
        sequence.commit([0] * count)
        sequence.num_computed = sequence.num_tokens - 1
        if sequence.finished:
            self.scheduler.remove(sequence)
            self.finished.append(sequence.sequence_id)


SIZES = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=12)


@given(
    SIZES,
    st.integers(100, 260),
    st.integers(1, 6),
    st.tuples(st.integers(0, 9), st.sampled_from([0, 0, 7, 64])),
    st.sampled_from([16, 24, 500]),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_everyone_finishes_and_nobody_writes_elsewhere(
    sizes: list[tuple[int, int]],
    num_slots: int,
    max_num_seqs: int,
    rows: tuple[int, int],
    max_prefill: int,
    on_grid: bool,
    seed: int,
) -> None:
    lookahead, num_beside = rows
    scheduler = Scheduler(
        num_slots,
        max_num_seqs=max_num_seqs,
        max_prefill_tokens=max_prefill,
        lookahead=lookahead,
        num_beside=num_beside,
        chunk_grid=max_prefill if on_grid else None,
    )
    world = _World(scheduler, lookahead, seed, num_beside)
    arriving = [_sequence(index, *size) for index, size in enumerate(sizes)]
    for sequence in arriving:
        assert scheduler.fits(sequence)
    for _ in range(4000):
        if arriving and world.rng.random() < 0.4:
            world.add(arriving.pop(0))
        elif scheduler.running and world.rng.random() < 0.02:
            aborted = world.rng.choice([*scheduler.running, *scheduler.waiting])
            scheduler.remove(aborted)
            world.finished.append(aborted.sequence_id)
        step = world.step()
        assert len(scheduler.running) <= max_num_seqs
        assert sum(len(chunk.token_ids) for chunk in step.chunks) <= max_prefill
        if on_grid:
            _check_grid(step, max_prefill)
        if not arriving and not scheduler.has_work:
            break
    assert sorted(world.finished, key=int) == [str(index) for index in range(len(sizes))]
    assert scheduler.allocator.num_free == num_slots


def _check_grid(step: Step, grid: int) -> None:
    assert len(step.chunks) <= 1
    for sequence, chunk in zip(step.prefill, step.chunks, strict=True):
        num_prompt, first = sequence.num_prompt_tokens, chunk.rows.context
        if first < num_prompt:
            assert first % grid == 0
            assert first + chunk.rows.num_rows == min(first + grid, num_prompt)


def test_it_does_preempt_and_replays_what_was_generated() -> None:
    world = _World(Scheduler(60, max_num_seqs=3, max_prefill_tokens=16, lookahead=4), 4, 0)
    for index in range(3):
        world.add(_sequence(index, 15, 30))
    while world.scheduler.has_work:
        world.step()
    assert world.num_preemptions > 0
    assert world.finished[0] == "0", "the oldest is never preempted"


def test_a_sequence_that_fits_its_share_is_never_preempted_or_moved() -> None:
    world = _World(Scheduler(200, max_num_seqs=4, max_prefill_tokens=64, lookahead=8), 8, 0)
    for index in range(12):
        world.add(_sequence(index, 20, 30))
    while world.scheduler.has_work:
        step = world.step()
        assert not step.moves
        assert not step.preempted


def test_first_come_first_served() -> None:
    scheduler = Scheduler(100, max_num_seqs=4, max_prefill_tokens=500, lookahead=0)
    large, small = _sequence(0, 90, 5), _sequence(2, 5, 5)
    scheduler.add(large)
    scheduler.add(_sequence(1, 80, 5))
    scheduler.add(small)
    step = scheduler.schedule()
    assert step.prefill == [large]
    assert small in scheduler.waiting, "a later one does not overtake one that waits for room"


def test_prefill_goes_on_while_others_decode() -> None:
    scheduler = Scheduler(400, max_num_seqs=2, max_prefill_tokens=16, lookahead=2)
    world = _World(scheduler, 2, 0)
    world.add(_sequence(0, 10, 30))
    world.step()
    world.add(_sequence(1, 100, 5))
    step = world.step()
    assert [chunk.rows.num_rows for chunk in step.chunks] == [16]
    assert [sequence.sequence_id for sequence in step.decode] == ["0"]


def test_what_cannot_ever_fit_is_known_in_advance() -> None:
    scheduler = Scheduler(64, max_num_seqs=2, max_prefill_tokens=16, lookahead=2)
    assert scheduler.fits(_sequence(0, 40, 24))
    assert not scheduler.fits(_sequence(0, 40, 25))
