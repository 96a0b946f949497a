import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayspec.decode.requests import SequenceState
from rayspec.decode.scheduler import Scheduler, Step
from rayspec.model.kv_cache import PAGE_SIZE, WindowedPages
from rayspec.model.rows import slots_between
from rayspec.types import NonFiniteLogitsError
from tests.decode.samplers import sequence_of


def _sequence(
    name: int,
    num_prompt: int,
    max_tokens: int,
    prompt: Sequence[int] | None = None,
    *,
    client: str = "",
    background: bool = False,
) -> SequenceState:
    """Prompts differ from the first token on, unless said otherwise."""
    own = prompt or [name] * num_prompt
    return sequence_of(own, max_tokens, sequence_id=str(name), client=client, background=background)


class _World:
    """Carries out steps as the engine does, on lists that stand for the stores of the cache, and checks what was
    promised. A slot holds all tokens up to its own, as keys and values depend on them. window: how many tokens the rows
    of windowed layers see."""

    def __init__(
        self, scheduler: Scheduler, lookahead: int, seed: int, num_beside: int = 0, window: int | None = None
    ) -> None:
        self.scheduler = scheduler
        self.window = window
        self.windowed_slots: dict[int, tuple[int, ...]] = {}
        self.slots: list[tuple[int, ...] | None] = [None] * scheduler.kv.num_slots
        self.lookahead = lookahead
        self.num_beside = num_beside
        self.rng = random.Random(seed)
        self.finished: list[str] = []
        self.num_preemptions = 0
        self.num_prefilled = 0

    def add(self, sequence: SequenceState) -> None:
        self.scheduler.add(sequence)

    def step(self) -> Step:
        before = list(self.scheduler.running)
        step = self.scheduler.schedule()
        self._check_preempted(before, step)
        self._check_pages()
        assert not {id(sequence) for sequence in step.prefill} & {id(sequence) for sequence in step.decode}
        assert not {id(sequence) for sequence in step.preempted} & {id(sequence) for sequence in step.admitted}
        for sequence in step.admitted:
            self._require_cached(sequence, sequence.num_computed)
        for sequence, chunk in zip(step.prefill, step.chunks, strict=True):
            first, num_tokens = chunk.rows.context, chunk.rows.num_rows
            assert chunk.sequence_id == sequence.sequence_id
            assert chunk.rows.runs == sequence.table.runs
            assert first == sequence.num_computed
            assert 0 < num_tokens <= sequence.num_tokens - first
            assert chunk.token_ids == sequence.token_ids[first : first + num_tokens]
            assert chunk.replay == (first >= sequence.num_prompt_tokens)
            self._write(sequence, first, first + num_tokens)
            self.num_prefilled += num_tokens
            sequence.num_computed += num_tokens
            assert chunk.sample == (sequence.num_computed == sequence.num_tokens)
            if chunk.sample:
                self._commit(sequence, 1)
        for sequence in step.decode:
            self._require_cached(sequence, sequence.num_tokens - 1)
            room = min(1 + self.lookahead, sequence.num_remaining)
            first = sequence.num_tokens - 1
            num_rows = room + self.num_beside
            self._write(sequence, first, min(first + num_rows, self.scheduler.kv.num_slots))
            self._commit(sequence, self.rng.randint(1, room))
        return step

    def run(self) -> None:
        while has_work(self.scheduler):
            self.step()

    def _check_preempted(self, before: list[SequenceState], step: Step) -> None:
        self.num_preemptions += len(step.preempted)
        if step.preempted and len({one.client for one in [*before, *step.admitted]}) == 1:
            ranked = sorted(before, key=lambda sequence: sequence.background)
            youngest = ranked[len(before) - len(step.preempted) :]
            assert step.preempted == youngest[::-1], "the youngest go first, those of the background before all"
            back = [one for one in youngest if one not in self.scheduler.running and not one.background]
            assert list(self.scheduler.waiting)[: len(back)] == back, "they wait before all others"

    def _check_pages(self) -> None:
        running = self.scheduler.running
        taken = {page for sequence in running for page in sequence.table.pages}
        assert self.scheduler.kv.num_used_slots == len(taken) * PAGE_SIZE
        for sequence in running:
            own = sequence.table.pages[sequence.num_computed // PAGE_SIZE :]
            others = {page for other in running if other is not sequence for page in other.table.pages}
            assert not others & set(own), "what is yet to be written is nobody else's"
        assert not any(sequence.table.pages for sequence in self.scheduler.waiting)

    def _write(self, sequence: SequenceState, first: int, end: int) -> None:
        assert end <= sequence.table.capacity, "a round writes behind its pages"
        self._require_cached(sequence, first)
        tokens = sequence.token_ids + [-1] * end  # what is drafted
        for position, slot in enumerate(slots_between(sequence.table.runs, first, end), first):
            self.slots[slot] = tuple(tokens[: position + 1])
        if self.window is not None:
            self._write_windowed(sequence, tokens, first, end)

    def _write_windowed(self, sequence: SequenceState, tokens: Sequence[int], first: int, end: int) -> None:
        """Write the rows, and require that each row finds the keys in its window."""
        assert self.window is not None
        slots = slots_between(sequence.windowed_table.runs, 0, end)
        for position in range(first, end):
            self.windowed_slots[slots[position]] = tuple(tokens[: position + 1])
            for seen in range(max(0, position + 1 - self.window), position + 1):
                assert self.windowed_slots[slots[seen]] == tuple(tokens[: seen + 1])

    def _require_cached(self, sequence: SequenceState, count: int) -> None:
        for position, slot in enumerate(slots_between(sequence.table.runs, 0, count)):
            assert self.slots[slot] == tuple(sequence.token_ids[: position + 1])

    def _commit(self, sequence: SequenceState, count: int) -> None:
        """The round has written the keys and values of what it commits."""
        first = sequence.num_tokens
        sequence.commit([self.rng.randint(0, 1) for _ in range(count)])
        slots = slots_between(sequence.table.runs, first, sequence.num_tokens - 1)
        for position, slot in enumerate(slots, first):
            self.slots[slot] = tuple(sequence.token_ids[: position + 1])
        if self.window is not None:
            self._write_windowed(sequence, sequence.token_ids, first, sequence.num_tokens - 1)
        sequence.num_computed = sequence.num_tokens - 1
        if sequence.finished:
            self.scheduler.remove(sequence)
            self.finished.append(sequence.sequence_id)


def _world(num_slots: int, max_num_seqs: int, max_prefill_tokens: int = 500) -> _World:
    scheduler = Scheduler(num_slots, max_num_seqs=max_num_seqs, max_prefill_tokens=max_prefill_tokens, lookahead=0)
    return _World(scheduler, 0, seed=0)


def has_work(scheduler: Scheduler) -> bool:
    return bool(scheduler.waiting or scheduler.running)


SIZES = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=12)


@given(
    SIZES,
    st.integers(112, 260),
    st.integers(1, 6),
    st.tuples(st.integers(0, 9), st.sampled_from([0, 0, 7, 64])),
    st.sampled_from([16, 24, 500]),
    st.tuples(st.booleans(), st.booleans(), st.sampled_from([None, 1, 16, 33])),
    st.integers(0, 2**20),
)
def test_everyone_finishes_and_nobody_writes_elsewhere(
    sizes: list[tuple[int, int]],
    num_slots: int,
    max_num_seqs: int,
    rows: tuple[int, int],
    max_prefill: int,
    how: tuple[bool, bool, int | None],
    seed: int,
) -> None:
    """Prompts are the beginning of one of a few texts."""
    (lookahead, num_beside), (on_grid, shares_pages, window) = rows, how
    windowed = None
    if window is not None:
        needed = WindowedPages.num_slots_needed(
            window, 5, max_num_seqs=max_num_seqs, max_rows=lookahead + num_beside, max_prefill_tokens=max_prefill,
            num_cohorts=1,
        )  # fmt: skip
        windowed = WindowedPages(needed, window, 5)
    scheduler = Scheduler(
        num_slots,
        windowed=windowed,
        max_num_seqs=max_num_seqs,
        max_prefill_tokens=max_prefill,
        lookahead=lookahead,
        num_beside=num_beside,
        chunk_grid=max_prefill if on_grid else None,
        shares_pages=shares_pages,
    )
    world = _World(scheduler, lookahead, seed, num_beside, window)
    texts = [[index % 2] * 20 + [index] * 40 for index in range(3)]
    arriving = [_sequence(index, *size, prompt=world.rng.choice(texts)[: size[0]]) for index, size in enumerate(sizes)]
    share_of_background = world.rng.choice([0, 0.5, 1])
    num_clients = world.rng.choice([1, 3])
    for sequence in arriving:
        sequence.client = str(world.rng.randrange(num_clients))
        sequence.background = world.rng.random() < share_of_background
        assert sequence.max_total_tokens <= scheduler.kv.num_slots
    for _ in range(4000):
        if arriving and world.rng.random() < 0.4:
            world.add(arriving.pop(0))
        elif scheduler.running and world.rng.random() < 0.02:
            aborted = world.rng.choice([*scheduler.running, *scheduler.waiting])
            scheduler.remove(aborted)
            world.finished.append(aborted.sequence_id)
        elif world.rng.random() < 0.01:
            world.slots = [None] * scheduler.kv.num_slots
            world.windowed_slots.clear()
            scheduler.restart()
        step = world.step()
        assert len(scheduler.running) <= max_num_seqs
        assert sum(len(chunk.token_ids) for chunk in step.chunks) <= max_prefill
        if on_grid:
            _check_grid(step, max_prefill)
        if not arriving and not has_work(scheduler):
            break
    assert sorted(world.finished, key=int) == [str(index) for index in range(len(sizes))]
    for pool in (scheduler.kv.pool, windowed.pool if windowed else scheduler.kv.pool):
        assert pool.num_free == pool.num_pages
        assert not pool._num_users.any()
        assert not pool._claimed.any()
        assert sorted(pool._hash_of) == sorted(pool._page_of.values()) == pool._released.nonzero()[0].tolist()
    assert not scheduler.kv._in_work


def _check_grid(step: Step, grid: int) -> None:
    assert len(step.chunks) <= 1
    for sequence, chunk in zip(step.prefill, step.chunks, strict=True):
        num_prompt, first = sequence.num_prompt_tokens, chunk.rows.context
        if first < num_prompt:
            assert first % grid == 0
            assert first + chunk.rows.num_rows == min(first + grid, num_prompt)


def test_of_a_prompt_with_another_length_only_whole_chunks_are_shared() -> None:
    """On a grid, the bits of the other pages depend on the length."""
    scheduler, text = Scheduler(400, max_num_seqs=1, max_prefill_tokens=64, lookahead=0, chunk_grid=64), [*range(112)]
    world = _World(scheduler, 0, 0)
    world.add(_sequence(0, 112, 1, prompt=text))
    world.run()
    preempted = _sequence(1, 80, 40, prompt=text[:80])
    preempted.commit(text[80:100])
    world.add(preempted)
    assert scheduler.schedule().admitted == [preempted]
    assert preempted.num_computed == 64


def test_what_a_failed_sequence_leaves_is_not_shared() -> None:
    world, failed = _world(400, 2), _sequence(0, 100, 5)
    world.add(failed)
    world.step()
    world.step()
    failed.error = NonFiniteLogitsError("NaN")
    world.scheduler.remove(failed)
    world.add(_sequence(1, 100, 5, prompt=failed.token_ids[:100]))
    assert world.step().chunks[0].rows.context == 0


def test_a_sequence_that_was_preempted_can_be_removed() -> None:
    world = _world(5 * PAGE_SIZE, 2, 512)
    for name in (1, 2):
        world.add(_sequence(name, 2 * PAGE_SIZE - 1, 40))
    while not world.num_preemptions:
        world.step()
    (preempted,) = world.scheduler.waiting
    world.scheduler.remove(preempted)
    world.run()
    assert world.finished == ["1"]


def test_first_come_first_served() -> None:
    scheduler = Scheduler(112, max_num_seqs=4, max_prefill_tokens=500, lookahead=0)
    large, small = _sequence(0, 90, 5), _sequence(2, 5, 5)
    scheduler.add(large)
    scheduler.add(_sequence(1, 80, 5))
    scheduler.add(small)
    step = scheduler.schedule()
    assert step.prefill == [large]
    assert small in scheduler.waiting, "a later one does not overtake one that waits for room"


def test_a_sequence_that_needs_the_whole_cache_is_admitted_once_it_is_alone() -> None:
    world = _world(100 * PAGE_SIZE, 2, 5000)
    for name in range(2):
        world.add(_sequence(name, 100 * PAGE_SIZE - 5, 5))
    world.run()
    assert world.finished == ["0", "1"]


def test_clients_take_turns_and_a_new_one_does_not_wait() -> None:
    world = _world(4000, 4)
    for index in range(60):
        world.add(_sequence(index, 20, 30, client="greedy"))
    world.step()
    assert [one.client for one in world.scheduler.running] == ["greedy"] * 4
    for index in range(5):
        one = _sequence(100 + index, 20, 5, client="other")
        world.add(one)
        step = world.step()
        assert step.admitted[0] is one, "it has no place yet, so the client with four gives one"
        assert len(step.preempted) == (index == 0)
        assert not step.num_out_of_pages
        while not one.finished:
            world.step()
    for index in range(4):
        world.add(_sequence(200 + index, 2, 500, client="other"))
        world.add(_sequence(300 + index, 2, 500, client="third"))
    for _ in range(200):
        world.step()
        held = Counter(one.client for one in world.scheduler.running)
        if held.total() == 4:  # no sequence has ended in this step
            assert sorted(held.values()) == [1, 1, 2], "places that come free go to who has fewest"


def test_a_client_gets_its_share_although_others_go_on_for_long() -> None:
    """Its second request, too, and beside clients of the background in the same way."""
    for background in (False, True):
        world = _world(4000, 8)
        for index in range(40):
            world.add(_sequence(index, 20, 500, client="greedy", background=background))
        world.step()
        num_running = len(world.scheduler.running)
        for index in range(40, 44):
            world.add(_sequence(index, 20, 500, client="other", background=background))
        world.step()
        held = Counter(one.client for one in world.scheduler.running)
        assert held == {"greedy": num_running // 2, "other": num_running // 2}
        assert not world.step().preempted


def test_a_client_does_not_wait_for_a_common_prompt_that_another_reads() -> None:
    """The other may have many prompts to read before it."""
    world = _world(4000, 8, 64)
    for index in range(4):
        prompt = [0] * 300 if index == 3 else None
        world.add(_sequence(index, 300, 5, client="greedy", prompt=prompt))
    world.step()
    same = [_sequence(index, 300, 5, client="other", prompt=[0] * 300) for index in (5, 6)]
    for sequence in same:
        world.add(sequence)
    assert world.step().admitted == same[:1], "the second one waits for the first"
    world.run()


def test_a_prompt_of_the_background_leaves_others_of_it_their_share_of_a_step() -> None:
    world = _world(4000, 8, 256)
    for name, length in (("long", 1000), ("other", 100)):
        world.add(_sequence(length, length, 5, client=name, background=True))
    assert [len(one.token_ids) for one in world.step().chunks] == [48, 16], "and a request may come while a step runs"


def test_the_only_place_of_a_client_is_not_taken() -> None:
    world = _world(400, 1)
    for index in range(3):
        world.add(_sequence(index, 2, 5, client="first"))
    world.step()
    world.add(_sequence(3, 2, 5, client="second"))
    world.run()
    assert world.finished == ["0", "3", "1", "2"]
    assert not world.num_preemptions


def test_a_long_prompt_leaves_other_clients_their_share_of_a_step() -> None:
    world = _world(4000, 8, 256)
    for index in range(2):
        world.add(_sequence(index, 1000, 5, client="long"))
    assert [len(one.token_ids) for one in world.step().chunks] == [128], "another client's request may come"
    for name, length in (("other", 10), ("third", 100)):
        world.add(_sequence(length, length, 5, client=name))
    chunks = [{one.sequence_id: len(one.token_ids) for one in world.step().chunks} for _ in range(5)]
    assert chunks == [{"0": 43, "10": 10, "100": 11}, *[{"0": 48, "100": 16}] * 4], (
        "equal shares of half, the rest to the first"
    )


def test_background_requests_leave_room_and_wait_behind_others() -> None:
    world = _world(4000, 8)
    for index in range(100):
        world.add(_sequence(index, 2, 5, background=True))
    world.step()
    assert len(world.scheduler.running) == 6
    interactive = [_sequence(index, 2, 20) for index in range(100, 110)]
    for sequence in interactive:
        world.add(sequence)
    step = world.step()
    assert step.admitted == interactive[:7], "all but the last of the background give their places to them"
    assert len(step.preempted) == 5
    while len(world.scheduler.running) == 8:
        world.step()
    world.step()
    assert world.scheduler.running == interactive[:8], "nothing of the background is admitted before them"
    world.run()


def test_background_requests_give_pages_and_steps_to_others() -> None:
    """Prompts of batches fill the cache, and take many steps to be read."""
    world = _world(1024, 8, 64)
    for index in range(3):
        world.add(_sequence(index, 300, 5, background=True))
    world.step()
    interactive = _sequence(3, 150, 5)
    world.add(interactive)
    step = world.step()
    assert [one.sequence_id for one in step.preempted] == ["2"]
    assert [(one.sequence_id, len(one.token_ids)) for one in step.chunks] == [("3", 48), ("0", 16)]
    while not interactive.prefilled:
        world.step()
    step = world.scheduler.schedule(most_with_round=64, most_with_streams=8)
    assert step.decode == [interactive]
    assert sum(len(one.token_ids) for one in step.chunks) == 8, "its text grows fast, also if nobody streams it"


def test_a_background_prompt_gives_the_windows_of_its_last_chunk_back_before_others_grow() -> None:
    """The store has room for the chunks of one step."""
    needed = WindowedPages.num_slots_needed(12, 5, max_num_seqs=2, max_rows=2, max_prefill_tokens=512, num_cohorts=1)
    windowed = WindowedPages(needed, 12, 5)
    scheduler = Scheduler(4000, windowed=windowed, max_num_seqs=2, max_prefill_tokens=512, lookahead=2)
    world = _World(scheduler, 2, 0, window=12)
    world.add(_sequence(0, 1000, 5, background=True))
    world.step()
    world.add(_sequence(1, 1000, 5))
    world.run()
    assert sorted(world.finished) == ["0", "1"]


def test_where_pages_run_out_a_background_request_gives_its_own() -> None:
    world = _world(5 * PAGE_SIZE, 2)
    world.add(_sequence(1, 2 * PAGE_SIZE - 1, 40, background=True))
    world.step()
    world.add(_sequence(2, 2 * PAGE_SIZE - 1, 40))
    while not (step := world.step()).preempted:
        pass
    assert [one.sequence_id for one in step.preempted] == ["1"]
    assert not step.num_out_of_pages, "the cache is not too small for the others"


def test_a_cohort_with_work_under_way_keeps_its_pages() -> None:
    scheduler = Scheduler(4 * PAGE_SIZE, max_num_seqs=2, max_prefill_tokens=500, lookahead=0, num_cohorts=2)
    both = [_sequence(name, 2 * PAGE_SIZE - 1, 40) for name in range(2)]
    for cohort, sequence in enumerate(both):
        scheduler.add(sequence)
        assert scheduler.schedule(cohort).admitted == [sequence]
    both[0].commit([5, 5])
    both[0].num_computed = both[0].num_tokens - 1
    assert scheduler.schedule(0, in_flight=(1,)).preempted == both[:1], "the other one is younger"


def test_beside_background_requests_alone_a_chunk_is_large() -> None:
    world = _world(1024, 8, 64)
    world.add(_sequence(0, 10, 30, background=True))
    world.step()
    world.add(_sequence(1, 300, 5, background=True))
    step = world.scheduler.schedule(most_with_round=64, most_with_streams=8)
    assert [len(chunk.token_ids) for chunk in step.chunks] == [64]


def test_others_do_not_wait_for_a_common_prompt_that_the_background_reads() -> None:
    world, same = _world(4000, 8, 64), _sequence(1, 300, 5, prompt=[0] * 300)
    world.add(_sequence(0, 300, 5, background=True))
    world.step()
    world.add(same)
    assert world.step().admitted == [same]
    world.run()


@pytest.mark.parametrize("max_num_seqs", [1, 2, 4])
def test_one_background_request_goes_on_under_any_load(max_num_seqs: int) -> None:
    world = _world(400, max_num_seqs)
    names = iter(range(10**6))
    for _ in range(10):
        world.add(_sequence(next(names), 2, 5))
    background = [_sequence(next(names), 2, 5, background=True) for _ in range(3)]
    for sequence in background:
        world.add(sequence)
    num_steps = 0
    while not all(sequence.finished for sequence in background):
        while len(world.scheduler.waiting) < 12:
            world.add(_sequence(next(names), 2, 5))
        world.step()
        num_steps += 1
        assert sum(sequence.background for sequence in world.scheduler.running) <= 1
        assert num_steps < 500


def test_beside_texts_that_are_read_as_they_grow_or_are_of_others_chunks_are_small() -> None:
    for streams, client in ((False, ""), (True, ""), (False, "other")):
        scheduler = Scheduler(400, max_num_seqs=2, max_prefill_tokens=64, lookahead=2)
        world = _World(scheduler, 2, 0)
        first = _sequence(0, 10, 30, client=client)
        first.streams = streams
        world.add(first)
        world.step()
        scheduler.add(_sequence(1, 100, 5))
        step = scheduler.schedule(most_with_streams=16)
        assert [chunk.rows.num_rows for chunk in step.chunks] == [16 if streams or client else 64]
        assert not scheduler.schedule(0, (), 0, 0).chunks
        scheduler.remove(first)
        assert [chunk.rows.num_rows for chunk in scheduler.schedule(0, (), 0, 0).chunks] == [64]
