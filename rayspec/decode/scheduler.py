"""Choose the sequences that the next step admits, prefills, decodes or preempts, and give them pages of the KV cache.
No tensors, no clock."""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from rayspec.decode.requests import Account, SequenceState
from rayspec.decode.work import Chunk
from rayspec.model.kv_cache import PAGE_SIZE, PageHash, PagePool, PageTable, WindowedPages, extend_hashes

# Share of the pages that must stay free when a sequence is admitted while others run; as in vLLM.
_SPARE_SHARE = 0.01
_BACKGROUND_SHARE = 0.75  # of the sequences; the rest stays free for the next interactive request


class KVManager:
    """Gives the pages of one KV cache to sequences, takes them back, and finds those that they share. windowed: the
    pages of the windowed store, if the cache has one.

    chunk_grid: prompts are cut at its multiples, and the bits in a page depend on the chunk that computed it. So only
    whole chunks are shared. shares_pages: if False, no page is ever found.
    """

    def __init__(
        self, num_slots: int, windowed: WindowedPages | None, *, shares_pages: bool, chunk_grid: int | None
    ) -> None:
        self.pool = PagePool(num_slots // PAGE_SIZE)
        self.windowed = windowed
        self._shares_pages = shares_pages
        self._chunk_grid = chunk_grid
        self._in_work: dict[tuple[Account, PageHash], SequenceState] = {}  # pages that a sequence is about to fill

    @property
    def num_slots(self) -> int:
        return self.pool.num_pages * PAGE_SIZE

    @property
    def num_used_slots(self) -> int:
        """Number of slots in pages that sequences use."""
        return self.num_slots - self.pool.num_free * PAGE_SIZE

    def holds_window(self, sequence: SequenceState, position: int) -> bool:
        """Return whether the cache still has all keys that the sequence's token at this position sees."""
        return self.windowed is None or self.windowed.holds_window(sequence.windowed_table, position)

    def find(self, sequence: SequenceState) -> list[int]:
        """Return pages that hold the sequence's first tokens. At least one token remains to be computed, because its
        logits give the next token; all, if the sequence wants the log-probabilities of its prompt."""
        if sequence.wants_prompt_logprobs:
            return []
        hashes = self._hashes(sequence, (sequence.num_tokens - 1) // PAGE_SIZE)
        pages = self.pool.find(hashes)
        num_usable = self._num_usable(sequence, len(pages))
        while self.windowed is not None and num_usable:
            in_window = self.windowed.longest_prefix(hashes[:num_usable])
            if in_window == num_usable:
                break
            num_usable = self._num_usable(sequence, in_window)
        return pages[:num_usable]

    def is_in_work(self, sequence: SequenceState) -> bool:
        """Return whether another sequence of the account is filling the first page of this sequence that cannot be
        found yet. Those of other accounts may be read much later."""
        if sequence.wants_prompt_logprobs:
            return False
        hashes = self._hashes(sequence, (sequence.num_tokens - 1) // PAGE_SIZE)
        num_found = len(self.pool.find(hashes))
        return num_found < len(hashes) and (sequence.account, hashes[num_found]) in self._in_work

    def begin(self, sequence: SequenceState, pages: Sequence[int]) -> None:
        """Make the pages that `find` returned the sequence's first pages. It is about to fill the other full pages."""
        self.pool.share(sequence.table, pages)
        if self.windowed is not None:
            self.windowed.share(sequence.windowed_table, self._hashes(sequence, len(pages)))
        sequence.num_computed = sequence.table.capacity
        for one in self._hashes(sequence, sequence.num_tokens // PAGE_SIZE):
            self._in_work.setdefault((sequence.account, one), sequence)

    def grow(self, sequence: SequenceState, num_pages: int, room: int) -> bool:
        has_grown = num_pages <= sequence.table.end or self.pool.grow(sequence.table, num_pages, room)
        if has_grown and self.windowed is not None and sequence.prefilled:
            self.grow_window(sequence, sequence.table.capacity)
        return has_grown

    def grow_window(self, sequence: SequenceState, num_tokens: int) -> None:
        """Give the sequence pages of the windowed store up to `num_tokens`, and take back those before its window."""
        if self.windowed is not None:
            self.windowed.grow(sequence.windowed_table, sequence.num_computed, num_tokens)

    def register(self, sequence: SequenceState) -> None:
        """Let other sequences find the pages that this sequence has filled."""
        num_full = sequence.num_computed // PAGE_SIZE
        if num_full > sequence.table.num_hashed:
            new = self._hashes(sequence, num_full)[sequence.table.num_hashed :]
            for pool, table in self._tables(sequence):
                for one in new:
                    pool.register(table, one)
            self._give_up(sequence, new)

    def release(self, sequence: SequenceState) -> None:
        """Take back all pages of the sequence. Others can still find its full pages, unless the sequence has failed."""
        if sequence.error is None:
            self.register(sequence)
        self._give_up(sequence, sequence.page_hashes)
        for pool, table in self._tables(sequence):
            if sequence.error is not None:
                pool.forget(table.pages)
            pool.release(table)
        sequence.num_computed = 0

    def forget_all(self) -> None:
        self.pool.forget_all()
        if self.windowed is not None:
            self.windowed.pool.forget_all()

    def _tables(self, sequence: SequenceState) -> list[tuple[PagePool, PageTable]]:
        both = [(self.pool, sequence.table)]
        return both if self.windowed is None else [*both, (self.windowed.pool, sequence.windowed_table)]

    def _give_up(self, sequence: SequenceState, hashes: Sequence[PageHash]) -> None:
        for one in hashes:
            if self._in_work.get((sequence.account, one)) is sequence:
                del self._in_work[sequence.account, one]

    def _hashes(self, sequence: SequenceState, num_pages: int) -> list[PageHash]:
        """Return the hashes of the first `num_pages` pages of the sequence, which must be full; [] if none are shared.
        With a grid, the bits of the prompt's last chunk and of generated tokens depend on the prompt length, which
        salts them. So does an adapter, on which all keys and values depend."""
        if not self._shares_pages:
            return []
        num_prompt, grid = sequence.num_prompt_tokens, self._chunk_grid

        def salt(end: int) -> bytes:
            adapter = f"{sequence.adapter}:".encode() if sequence.adapter else b""
            return adapter + (b"" if grid is None or end <= num_prompt // grid * grid else str(num_prompt).encode())

        extend_hashes(sequence.prompt_hashes, sequence.token_ids, min(num_pages, num_prompt // PAGE_SIZE), salt)
        sequence.page_hashes += sequence.prompt_hashes[len(sequence.page_hashes) :]
        extend_hashes(sequence.page_hashes, sequence.token_ids, num_pages, salt)
        return sequence.page_hashes[:num_pages]

    def _num_usable(self, sequence: SequenceState, num_pages: int) -> int:
        """Return how many of the found pages can be shared. With a grid, the next prompt chunk must begin at a multiple
        of it; pages after the prompt can all be shared, because generated tokens come one by one."""
        if self._chunk_grid is None or num_pages * PAGE_SIZE >= sequence.num_prompt_tokens:
            return num_pages
        step = math.lcm(self._chunk_grid, PAGE_SIZE) // PAGE_SIZE
        return num_pages // step * step


@dataclass(slots=True)
class Step:
    """The work for one step of a cohort. prefill: the sequences of the `chunks`. admitted: those that were waiting
    before. num_out_of_pages: how many of the preempted show that the cache is too small; the others gave way to
    sequences that wait, or are of the background."""

    admitted: list[SequenceState] = field(default_factory=list)
    prefill: list[SequenceState] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    decode: list[SequenceState] = field(default_factory=list)
    preempted: list[SequenceState] = field(default_factory=list)
    num_out_of_pages: int = 0


class Scheduler:
    """Continuous batching over the pages of one KV cache. When no page is left, the youngest sequence is preempted.

    Clients take turns: the next sequence is the first of the client that has the fewest running; of several, not of the
    last client that got a place. It takes the place of the youngest sequence of the client that has most, if that is at
    least two more than its own client has. Of half the prompt tokens of a step, clients have equal shares. Another
    client's request may come while a step runs: if requests have clients, a step has at most half of
    `max_prefill_tokens`, and a quarter if they have several.

    Sequences of background requests wait behind the others, and are preempted first, also for others that wait. They
    are admitted while less than three quarters of `max_num_seqs` run. The last of them that runs is kept, and while
    none runs, the first keeps its place among the others, so that at least one goes on under any load. Prompts of
    others are read before theirs, which have a quarter of a step then. Their clients take turns in the same way.

    Running sequences are divided into `num_cohorts` cohorts, which are scheduled one at a time and run independently; a
    cohort with work under way is not changed. lookahead: how many tokens after its newest token a sequence may write in
    a round. num_beside: how many further rows, the branches of a tree; fewer if the pages run out. chunk_grid: prompts
    are cut at its multiples and each chunk runs alone, so that chunk shapes do not depend on other sequences.
    shares_pages: if several waiting sequences of a client have a common prefix, one computes its pages and the others
    wait for it.
    A sequence that may not sample yet sits a step out.
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
        self.waiting: deque[SequenceState] = deque()  # by arrival
        self._num_waiting: Counter[Account] = Counter()
        self._newest: Account = False, ""  # the last that got a place
        self.running: list[SequenceState] = []
        self._max_num_seqs = max_num_seqs
        self._max_beside_background = max(1, int(_BACKGROUND_SHARE * max_num_seqs))
        self._max_prefill_tokens = max_prefill_tokens
        self._lookahead = lookahead
        self._num_beside = num_beside
        self._chunk_grid = chunk_grid
        self._max_cohort_seqs = -(-max_num_seqs // num_cohorts)

    def add(self, sequence: SequenceState) -> None:
        place = len(self.waiting)
        if not sequence.background:
            place = self._first_of_background
            earlier = itertools.chain(self.running, itertools.islice(self.waiting, place))
            if place < len(self.waiting) and not any(one.background for one in earlier):
                place += 1
        self._wait(sequence, place)

    def remove(self, sequence: SequenceState) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self._leave(sequence)
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
        streams or which clients share. None: as many as without a round."""
        step = Step()
        for sequence in self.running:
            self.kv.register(sequence)
        # Every sequence of the cohort gets the pages of its next round. If they run out, the youngest sequence that has
        # no work under way is preempted, of background requests first.
        for sequence in self.members(cohort):
            while sequence not in step.preempted and not self._grow(sequence):
                free = [one for one in self.running if one.cohort not in in_flight]
                youngest = next((one for one in reversed(free) if one.background), free[-1])
                step.num_out_of_pages += not youngest.background
                self._preempt(youngest, step)
        self._admit(cohort, step)
        members = self.members(cohort)
        step.decode = [sequence for sequence in members if sequence.prefilled and sequence.may_sample]
        clients = {sequence.client for sequence in members if not sequence.background}
        all_clients = {sequence.client for sequence in members}
        share = 4 if len(all_clients) > 1 else 2 if any(all_clients) else 1
        most = most_of_background = -(-self._max_prefill_tokens // share)
        if step.decode:
            with_round, with_streams = (
                most if one is None else min(one, most) for one in (most_with_round, most_with_streams)
            )
            most = with_streams if len(clients) > 1 or any(sequence.streams for sequence in step.decode) else with_round
            is_alone = all(sequence.background for sequence in step.decode)
            most_of_background = most if is_alone else min(most, with_streams)
        self._cut_chunks(members, step, most, most_of_background)
        return step

    def restart(self) -> None:
        """Move all running sequences back to `waiting` and forget all pages: the content of the cache is lost."""
        for sequence in self.running[::-1]:
            self.put_back(sequence)
        self.kv.forget_all()

    def _admit(self, cohort: int, step: Step) -> None:
        """Admit waiting sequences in turn, up to one that this step has preempted. A sequence whose shared pages are
        still being filled is passed over, and later ones may be admitted before it."""
        for sequence in self._in_turn():
            if sequence in step.preempted:
                return
            if self.kv.is_in_work(sequence):
                continue
            if not self._has_place(sequence, cohort, step):
                if sequence.background:
                    continue
                return
            pages = self.kv.find(sequence)
            while not self._has_pages(sequence, pages):
                if not self._give_way(sequence, cohort, step):
                    return
                pages = self.kv.find(sequence)
            self._leave(sequence)
            self._newest = sequence.account
            self.running.append(sequence)
            self.kv.begin(sequence, pages)
            self._grow(sequence)
            sequence.cohort = cohort
            step.admitted.append(sequence)

    def _has_place(self, sequence: SequenceState, cohort: int, step: Step) -> bool:
        """Return whether one more sequence may run, also after others have given way to it."""
        is_beside = sequence.background and any(one.background for one in self.running)
        most = self._max_beside_background if is_beside else self._max_num_seqs
        while len(self.running) >= most or len(self.members(cohort)) >= self._max_cohort_seqs:
            if not self._give_way(sequence, cohort, step):
                return False
        return True

    def _has_pages(self, sequence: SequenceState, found: Sequence[int]) -> bool:
        """Return whether a sequence with these pages can be admitted. While others run, a few more must be free,
        because the newest sequence would be preempted first."""
        num_spare = int(_SPARE_SHARE * self.kv.pool.num_pages) if self.running else 0
        num_new = self._num_pages_needed(sequence) - len(found)
        return num_new + num_spare <= self.kv.pool.num_free_without(found)

    def _in_turn(self) -> list[SequenceState]:
        """Return the next waiting sequences in the order of their turns. A sequence of the background comes after all
        that waited before it."""
        if len(self._num_waiting) < 2:
            return list(itertools.islice(self.waiting, self._max_num_seqs))
        held, ranked, last = self._num_running, [], (0, False)
        num_ahead = self._first_of_background
        for place, sequence in enumerate(self.waiting):
            rank = held[sequence.account], sequence.account == self._newest
            held[sequence.account] += 1
            if place < num_ahead and sequence.background:
                rank = last
            last = max(last, rank)
            ranked.append((place >= num_ahead, rank, sequence))
        ranked.sort(key=lambda one: one[:2])
        return [one for *_, one in ranked][: self._max_num_seqs]

    @property
    def _num_running(self) -> Counter[Account]:
        return Counter(one.account for one in self.running)

    def _give_way(self, sequence: SequenceState, cohort: int, step: Step) -> bool:
        """Preempt a sequence of the cohort for one that waits: of the background for others, unless no other of it
        would run; or of the client that has most, if that is at least two more than the client that waits has."""
        members, held = self.members(cohort)[::-1], self._num_running
        youngest = [one for one in members if one.background and not sequence.background]
        if not youngest or sum(one.background for one in self.running) == 1:
            least = held[sequence.account] + 2
            youngest = [one for one in members if one.background == sequence.background and held[one.account] >= least]
            youngest.sort(key=lambda one: -held[one.account])
        if youngest:
            self._preempt(youngest[0], step)
        return bool(youngest)

    def put_back(self, sequence: SequenceState) -> None:
        """Let a running sequence begin again, from position 0 on. It waits before its equals."""
        self.kv.release(sequence)
        self.running.remove(sequence)
        self._wait(sequence, self._first_of_background if sequence.background else 0)

    def _preempt(self, sequence: SequenceState, step: Step) -> None:
        self.put_back(sequence)
        sequence.metrics.num_preemptions += 1
        step.preempted.append(sequence)

    @property
    def _first_of_background(self) -> int:
        """The place in `waiting` behind which only background requests wait."""
        place = len(self.waiting)
        while place and self.waiting[place - 1].background:
            place -= 1
        return place

    def _wait(self, sequence: SequenceState, place: int) -> None:
        self.waiting.insert(place, sequence)
        self._num_waiting[sequence.account] += 1

    def _leave(self, sequence: SequenceState) -> None:
        self.waiting.remove(sequence)
        self._num_waiting[sequence.account] -= 1
        self._num_waiting += Counter()  # drops accounts that have none

    def _cut_chunks(self, members: Sequence[SequenceState], step: Step, most: int, most_of_background: int) -> None:
        unread = [one for one in members if not one.prefilled and one.num_computed < one.num_tokens]
        for sequence in unread:  # the windows of its last chunk, before any other grows
            self.kv.grow_window(sequence, sequence.num_computed)
        others, background = ([one for one in unread if one.background == which] for which in (False, True))
        kept = min(most_of_background, most // 4) if background else 0
        self._cut_of(others, step, most - kept)
        num_cut = sum(len(one.token_ids) for one in step.chunks)
        self._cut_of(background, step, min(most_of_background, most - num_cut))

    def _cut_of(self, unread: Sequence[SequenceState], step: Step, room: int) -> None:
        shares = _shares(unread, room)
        for sequence in unread:
            num_left = sequence.num_tokens - sequence.num_computed
            num_tokens = min(num_left, shares[sequence.client])
            if num_tokens <= 0:
                continue
            first = sequence.num_computed
            if self._chunk_grid is not None:
                if step.chunks:
                    return
                # Up to the prompt's next multiple of the grid. Generated tokens are replayed in the shapes of decode
                # rows.
                num_prompt_left = sequence.num_prompt_tokens - first
                to_grid = self._chunk_grid - (first % self._chunk_grid if num_prompt_left > 0 else 0)
                num_tokens = min(num_prompt_left if num_prompt_left > 0 else num_left, to_grid)
            is_last = first + num_tokens == sequence.num_tokens
            if is_last and not sequence.may_sample:
                continue
            self.kv.grow_window(sequence, first + num_tokens)
            step.prefill.append(sequence)
            step.chunks.append(
                Chunk(
                    sequence_id=sequence.sequence_id,
                    rows=sequence.rows(first, num_tokens),
                    token_ids=sequence.token_ids[first : first + num_tokens],
                    sample=is_last,
                    replay=first >= sequence.num_prompt_tokens,
                )
            )
            shares[sequence.client] -= num_tokens

    def _num_pages_needed(self, sequence: SequenceState) -> int:
        num_tokens = min(len(sequence.token_ids) + self._lookahead, sequence.max_total_tokens)
        return min(_num_pages(num_tokens + self._num_beside), self.kv.pool.num_pages)

    def _grow(self, sequence: SequenceState) -> bool:
        room = min(_num_pages(sequence.max_total_tokens + self._num_beside), self.kv.pool.num_pages)
        return self.kv.grow(sequence, self._num_pages_needed(sequence), room)


def _shares(unread: Iterable[SequenceState], room: int) -> dict[str, int]:
    """Divide the prompt tokens of a step among clients. Of one half each gets an equal share, or what it needs if that
    is less; the first to come get the rest, so that many clients with equal prompts do not all wait for the last."""
    needs, shares = Counter[str](), dict[str, int]()
    for sequence in unread:
        needs[sequence.client] += sequence.num_tokens - sequence.num_computed
    half = room // 2
    for num_others, (client, need) in zip(range(len(needs))[::-1], needs.most_common()[::-1], strict=True):
        shares[client] = min(need, -(-half // (num_others + 1)))
        half -= shares[client]
    rest = room - sum(shares.values())
    for client, need in needs.items():
        more = min(need - shares[client], rest)
        shares[client] += more
        rest -= more
    return shares


def _num_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)
