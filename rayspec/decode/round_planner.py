"""Plans the rounds of an engine: asks the strategy, proposes tokens that no pass has to draft, and reports what came.

Proposed tokens are copied from the sequence's own text or from finished outputs, recycled from verifies, or forced by
the form of the output. Recycled tokens are what the target itself found likely before, as in Token Recycling (Luo et
al. 2025): each row that the target verifies gives the likeliest tokens after it, whether the row was accepted or not.
They are kept, and become candidates wherever the same token stands again, in any text. Ours: they are kept for pairs of
tokens, too, which are right more often; their probabilities are kept, by which their acceptance is learned; and the
tree has no fixed template, but grows where it is likeliest to be right.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from msgspec import structs

from rayspec.config import MAX_TREE_TOKENS, SpeculationOptions
from rayspec.decode.drafting.lookup import (
    FORCED,
    NOTHING,
    UNVERIFIED,
    Corpus,
    LookupIndex,
    LookupRecord,
    OwnedText,
    Proposal,
    index_of,
    newest_of,
    recycled_classes,
    source_of,
)
from rayspec.decode.requests import SequenceState
from rayspec.decode.scheduler import Scheduler
from rayspec.decode.search import Answer, Question
from rayspec.decode.stages import Stages
from rayspec.decode.strategy import BatchState, RoundPlan, Strategy
from rayspec.decode.work import Chunk, Draft, Round, RoundEntry, RoundResult, TappedToken
from rayspec.forms.grammar import Constraint
from rayspec.planning.acceptance import survival
from rayspec.planning.learning import AnswerLength
from rayspec.types import EngineStats, Plan, no_draft

_MAX_PLAN_RECORDS = 1024
# Between two rounds, a search in this process takes at most the time of so many steps of the last round. After a search
# that was cancelled, which sequences too short for it cause, the next one may take twice the time, and so on.
SEARCH_STEPS, _MAX_DOUBLINGS = 3.0, 8

_NGRAM = 3  # tokens that must match where a draft is looked up
# Tokens that must match in `auto`, which learns the acceptance for each length of match.
_SHORTEST_MATCH = 1
_MOST_GROWN = 16  # sequences of a round for which `auto` grows trees: in larger batches every row costs
_LEAST_SURVIVAL = 0.02  # of a token in a tree
# Without a recycled token in any draft for so many rounds, the likeliest tokens are asked for in one round of a few;
# without a copied token, matches of less than an n-gram are looked up in one round of a few.
_IDLE_ROUNDS, _IDLE_INTERVAL = 32, 8
_FORCING = ("auto", "knapspec", "lookup", "recycling", "static")  # strategies that take forced tokens as drafts
_MAX_OWNERS = 8  # whose texts are remembered: those with the newest requests
_NUM_PROMPT_TOKENS = 3  # of the prompt's end, which are remembered with an output, so that its beginning is found
_MAX_PASSED, _MAX_PASSED_TOKENS = 256, 8192  # texts that wait to be passed on or taken in, and tokens of each

NUM_SUCCESSORS = 8
_NUM_SLOTS = 1 << 17
_NONE = -1

# Of one row of a verify: the likeliest next tokens, best first, and their probabilities.
Likeliest: TypeAlias = tuple[Sequence[int], Sequence[float]]


class Successors:
    """The likeliest successors of each token and of each pair of tokens, at their last verify, 6 MB in all. A hash
    table in which the newer of two keys with one slot stays. It begins with the bigrams of prompts."""

    def __init__(self) -> None:
        self._keys = np.full(_NUM_SLOTS, _NONE, np.int64)
        self._token_ids = np.full((_NUM_SLOTS, NUM_SUCCESSORS), _NONE, np.int32)
        self._classes = np.zeros((_NUM_SLOTS, NUM_SUCCESSORS), np.uint8)

    def note(self, pairs: Sequence[tuple[int, int]], likeliest: Sequence[Likeliest]) -> None:
        """Note what the target found likeliest after the second token of each pair. Of a shorter one, what is beyond
        the pairs or the likeliest counts for nothing."""
        num_rows = min(len(pairs), len(likeliest))
        if not num_rows:
            return
        text = np.array(pairs[:num_rows], np.int64)
        token_ids = np.array([one for one, _ in likeliest[:num_rows]], np.int32)
        probabilities = np.array([one for _, one in likeliest[:num_rows]])
        count = token_ids.shape[1]
        for is_pair, keys in ((True, _keys(text[:, 0], text[:, 1])), (False, text[:, 1])):
            slots = keys % _PRIME
            self._keys[slots] = keys
            self._token_ids[slots, :count] = token_ids
            self._token_ids[slots, count:] = _NONE
            self._classes[slots, :count] = recycled_classes(probabilities, is_pair=is_pair)

    def note_text(self, token_ids: Sequence[int]) -> None:
        """Note the bigrams of a text for the tokens after which nothing is noted yet."""
        text = np.array(token_ids, np.int64)
        tokens, following = text[:-1], text[1:]
        slots = tokens % _PRIME
        is_new = self._keys[slots] != tokens
        slots, tokens, following = slots[is_new], tokens[is_new], following[is_new]
        self._keys[slots] = tokens
        self._token_ids[slots] = _NONE
        self._token_ids[slots, 0] = following
        self._classes[slots, 0] = UNVERIFIED

    def after(self, before: int, token: int) -> tuple[list[int], list[int]]:
        """Return the candidates after `token`, which follows `before`, and their classes."""
        for key in (int(_keys(before, token)), token):
            slot = key % _PRIME
            if self._keys[slot] == key:
                found = [one for one in self._token_ids[slot].tolist() if one != _NONE]
                return found, self._classes[slot, : len(found)].tolist()
        return [], []


_PRIME = 131_071  # the largest below the number of slots: the remainder is the hash


def _keys(before: Any, token: Any) -> Any:
    return (before + 1) << 32 | token


@dataclass(frozen=True, slots=True)
class _Memory:
    """What is kept of an owner's texts. Nobody can see by the speed of own requests what stands in another's."""

    corpus: Corpus | None
    successors: Successors | None


class Proposer:
    """Grows a tree for each sequence: the copy, with recycled tokens next to and behind it. takes_trees: False for a
    model that verifies chains only. given_texts: tokens of texts that all owners may copy, END_OF_TEXT between them.

    One for all sequences of an engine: what it learns of one text serves the next. finished: the newest finished
    texts, for other engines. received: texts of other engines or runs, taken in when a sequence begins.
    """

    def __init__(
        self, options: SpeculationOptions, *, takes_trees: bool = True, given_texts: Sequence[int] = ()
    ) -> None:
        self._options = options
        self._takes_trees = takes_trees
        self._strategy = options.strategy
        self._recycles = options.strategy in ("auto", "recycling")
        self._most_grown = _MOST_GROWN if options.strategy == "auto" else float("inf")
        self.record = LookupRecord()
        self._given = index_of(given_texts)
        # Any thread may take from the first, and add to the second.
        self.finished: deque[OwnedText] = deque(maxlen=_MAX_PASSED)
        self.received: deque[OwnedText] = deque(maxlen=_MAX_PASSED)
        self.forget_texts()

    def forget_texts(self) -> None:
        """Forget finished outputs and what was likely in them; what was learned of acceptance stays."""
        self._memories: OrderedDict[str, _Memory] = OrderedDict()  # by owner, the newest last
        self._num_unrecycled = self._num_uncopied = 0  # rounds since the last draft with such a token

    def _memory(self, owner: str) -> _Memory:
        if owner not in self._memories:
            tokens = self._options.corpus_tokens if self._strategy == "auto" else 0
            self._memories[owner] = _Memory(
                Corpus(tokens, self._given) if tokens else None, Successors() if self._recycles else None
            )
            if len(self._memories) > _MAX_OWNERS:
                self._memories.popitem(last=False)
        return self._memories[owner]

    def num_likeliest(self, batch: int) -> int:
        """Return how many of the target's likeliest tokens are wanted after each row of the round that begins. They
        cost a look at all logits, so they are wanted rarely while no draft has recycled tokens."""
        if not self._recycles:
            return 0
        self._num_unrecycled += 1
        self._num_uncopied += 1
        return NUM_SUCCESSORS if _is_due(self._num_unrecycled, _IDLE_ROUNDS * (batch <= self._most_grown)) else 0

    def begin(self, sequence: SequenceState) -> None:
        """Prepare a new sequence, unless that is done. Nothing is proposed, learned or kept of one without drafts."""
        if not sequence.params.use_drafts:
            return
        if sequence.lookup is None and self._strategy in ("auto", "lookup"):
            sequence.lookup = LookupIndex(_NGRAM, _SHORTEST_MATCH if self._strategy == "auto" else None)
        memory = self._memory(sequence.owner)
        self._memories.move_to_end(sequence.owner)
        while self.received:
            owner, text = self.received.popleft()
            if owner in self._memories or len(self._memories) < _MAX_OWNERS:  # no owner is forgotten for it
                self._add(owner, text)
        if memory.successors is not None and sequence.index == 0:  # the other sequences of a request have its prompt
            memory.successors.note_text(sequence.token_ids)

    def propose(self, sequence: SequenceState, num_tokens: int, *, batch: int = 1) -> Proposal:
        """Return at most `num_tokens` tokens that may come next, the likeliest first. batch: sequences of the round."""
        is_idle = sequence.lookup is None and sequence.constraint is None and not self._recycles
        if is_idle or not sequence.params.use_drafts:
            return NOTHING
        num_tokens = min(num_tokens, sequence.num_remaining - 1)
        by_class, constraint = self.record.by_class, sequence.constraint
        if constraint is not None:
            constraint.extend_to(sequence.token_ids)
            forced = tuple(constraint.forced(num_tokens)) if self._strategy in _FORCING else ()
            if forced:
                proposal = Proposal(forced, (FORCED,) * len(forced))
                if sequence.lookup is not None:
                    sequence.lookup.extend_to(sequence.token_ids)
                    copied = sequence.lookup.propose(num_tokens - len(forced), forced).cut_by(constraint, forced)
                    proposal = Proposal(forced + copied.token_ids, proposal.match_classes + copied.match_classes)
                return proposal.with_survival(survival(by_class, proposal.match_classes))
        copied = self._copied(sequence, num_tokens, by_class)
        successors = self._memory(sequence.owner).successors
        if successors is None or batch > self._most_grown:
            return copied.with_survival(survival(by_class, copied.match_classes))
        text, trees = sequence.token_ids, self._takes_trees
        grown = _grown(copied, successors, text, num_tokens, by_class, takes_trees=trees)
        return grown if constraint is None else _pruned(grown, constraint)

    def remember(self, sequence: SequenceState) -> None:
        """Keep the output of a finished sequence for others to copy."""
        text = sequence.token_ids[max(0, sequence.num_prompt_tokens - _NUM_PROMPT_TOKENS) :]
        if sequence.params.use_drafts and sequence.output_token_ids and self._add(sequence.owner, text):
            self.finished.append((sequence.owner, array("i", text[:_MAX_PASSED_TOKENS])))

    def _add(self, owner: str, text: Sequence[int]) -> bool:
        """Return whether there is a corpus."""
        if (corpus := self._memory(owner).corpus) is not None:
            corpus.add(text)
        return corpus is not None

    def _copied(self, sequence: SequenceState, num_tokens: int, by_class: Sequence[float]) -> Proposal:
        """Return the copy with the most tokens that are expected to be right. Own text wins ties."""
        shorter, found = _is_due(self._num_uncopied), list[Proposal]()
        if sequence.lookup is not None:
            sequence.lookup.extend_to(sequence.token_ids, shorter=shorter)
            found.append(sequence.lookup.propose(num_tokens, shorter=shorter))
        corpus = self._memory(sequence.owner).corpus
        if corpus is not None:
            found += corpus.proposals(newest_of(sequence.token_ids), num_tokens, shorter=shorter)
        if sequence.constraint is not None:
            found = [one.cut_by(sequence.constraint) for one in found]
        found = [one for one in found if one.token_ids] or [NOTHING]
        return found[0] if len(found) == 1 else max(found, key=lambda one: sum(survival(by_class, one.match_classes)))

    def learn(
        self,
        sequence: SequenceState,
        entry: RoundEntry,
        proposal: Proposal,
        draft: Draft,
        committed: Sequence[int],
        likeliest: Sequence[Likeliest],
    ) -> None:
        """Compare what was proposed with what came, and note what the target found likely. sequence: with the committed
        tokens. likeliest: of the newest token's row and of each row of the draft."""
        if not (self._recycles or proposal.token_ids or draft.match_classes) or not sequence.params.use_drafts:
            return
        copied = proposal.copied or proposal
        self.record.observe(copied.match_classes, copied.token_ids, committed)
        if draft.match_classes and list(committed[: draft.num_drafted]) == draft.token_ids[: draft.num_drafted]:
            added = draft.token_ids[draft.num_drafted :]
            self.record.observe(draft.match_classes, added, committed[draft.num_drafted :])
        sources = sources_of(draft, proposal, range(1, len(draft.token_ids) + 1))
        if "recycled" in sources:
            self._num_unrecycled = 0
        if not {"own text", "corpus"}.isdisjoint(sources):
            self._num_uncopied = 0
        successors, text = self._memory(sequence.owner).successors, sequence.token_ids
        if successors is None or not likeliest:
            return
        first = entry.length - 1
        before, token, is_copied = text[first - 1] if first else -1, text[first], True
        for at, one in enumerate(committed):
            is_copied = is_copied and copied.token_ids[at : at + 1] == (one,)
            if not is_copied:
                for candidate, its_class in zip(*successors.after(before, token), strict=True):
                    self.record.observe_one(its_class, candidate == one)
            before, token = token, one
        rows = [text[first], *draft.token_ids]
        parents = draft.parents or range(len(draft.token_ids))
        befores = [text[first - 1] if first else -1, *(rows[parent] for parent in parents)]
        successors.note(list(zip(befores, rows, strict=True)), likeliest)


def _is_due(num_idle: int, num_always: int = _IDLE_ROUNDS) -> bool:
    return num_idle <= num_always or num_idle % _IDLE_INTERVAL == 0


def _grown(
    copied: Proposal,
    successors: Successors,
    text: Sequence[int],
    num_tokens: int,
    by_class: Sequence[float],
    *,
    takes_trees: bool,
) -> Proposal:
    """Grow a tree from its root, the newest token, by the token that is likeliest to be reached and right; or a chain.
    A token stands for (probability that it is reached and right, its class, the row that it follows, the token of that
    row, its place in the copy). Recycled tokens count for the case that the copy is wrong."""
    ties = itertools.count()
    heap: list[tuple[float, int, int, int, int, int, int | None]] = []
    token_ids: list[int] = []
    classes: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    row, before, token, reached = 0, text[-2] if len(text) > 1 else -1, text[-1], 1.0
    at: int | None = 0
    while len(token_ids) < num_tokens:
        following = None
        if at is not None and at < len(copied.token_ids):
            following, its_class = copied.token_ids[at], copied.match_classes[at]
            heapq.heappush(heap, (-reached * by_class[its_class], next(ties), its_class, row, token, following, at + 1))
            reached *= 1 - by_class[its_class]
        for other, its_class in zip(*successors.after(before, token), strict=True):
            if other != following and (chance := reached * by_class[its_class]) >= _LEAST_SURVIVAL:
                heapq.heappush(heap, (-chance, next(ties), its_class, row, token, other, None))
        if not heap:
            break
        chance, _, its_class, parent, before, token, at = heapq.heappop(heap)
        if not takes_trees:
            heap.clear()
        reached = -chance
        if reached < _LEAST_SURVIVAL:
            break
        token_ids.append(token)
        classes.append(its_class)
        parents.append(parent)
        chances.append(reached)
        row = len(token_ids)
    is_chain = parents == list(range(len(parents)))
    return Proposal(tuple(token_ids), tuple(classes), () if is_chain else tuple(parents), tuple(chances), copied)


def _pruned(tree: Proposal, constraint: Constraint) -> Proposal:
    """Return the tree without the tokens that break the form of the output, and without what follows them."""
    kept = constraint.allowed(tree.token_ids, tree.parents)
    rows = {0: 0} | {at + 1: row for row, at in enumerate(kept, start=1)}
    parents = [rows[tree.parents[at]] if tree.parents else rows[at] for at in kept]
    return structs.replace(
        tree,
        token_ids=tuple(tree.token_ids[at] for at in kept),
        match_classes=tuple(tree.match_classes[at] for at in kept),
        parents=() if parents == list(range(len(kept))) else tuple(parents),
        survival=tuple(tree.survival[at] for at in kept),
    )


def sources_of(draft: Draft, proposal: Proposal, rows: Sequence[int]) -> list[str]:
    """Return where each of the accepted tokens in these rows comes from, see `EngineStats`. proposal: of the round.
    Row i is the draft's token i - 1."""
    classes = proposal.match_classes if draft.looked_up else draft.match_classes
    first = draft.num_drafted + 1
    return [source_of(classes[row - first]) if 0 <= row - first < len(classes) else "model" for row in rows]


@dataclass(frozen=True, slots=True)
class PlannedRound:
    """A round, and the strategy's choice for it in this batch state. started: when planning began."""

    work: Round
    sequences: Sequence[SequenceState]
    state: BatchState
    chosen: RoundPlan
    started: float


# Of a round in which no request wants drafts. It runs no sublayer of a draft, so it has no choices.
_PLAIN = RoundPlan(plan=no_draft(0, "the requests want no drafts"))


@dataclass(kw_only=True, eq=False)
class RoundPlanner:
    """Connects the strategy to the engine. Keeps the last tapped tokens and the plan searches under way over them."""

    strategy: Strategy = field(kw_only=False)
    options: SpeculationOptions
    num_tap_tokens: int
    stages: Stages
    scheduler: Scheduler
    stats: EngineStats
    clock: Callable[[], float]
    given_texts: Sequence[int] = ()

    def __post_init__(self) -> None:
        # The last tapped tokens. None stands for a token whose sequence has left its place in the KV cache, until new
        # tokens push it out, as they do with its states in the stages: so the states of all others are still there.
        self._taps: deque[TappedToken | None] = deque(maxlen=self.num_tap_tokens)
        self.proposer = Proposer(self.options, takes_trees=self.stages.takes_trees, given_texts=self.given_texts)
        self._answer_length = AnswerLength()
        self._searching: dict[Future[Answer], Sequence[TappedToken]] = {}  # over these tokens; the oldest first
        self._num_cancelled = 0  # searches in a row
        self._earlier_s = self._earlier_searched_s = 0.0  # of other strategies, which were replaced

    def replace_strategy(self, strategy: Strategy) -> Strategy:
        """Set the strategy, and return the previous one. The time of earlier strategies pays no search of this one."""
        previous, self.strategy = self.strategy, strategy
        self._earlier_s, self._earlier_searched_s = self.stats.total_s, self.stats.optimise_s
        return previous

    @property
    def tapped(self) -> list[TappedToken]:
        return [token for token in self._taps if token is not None]

    def plan(self, work_id: int, sequences: Sequence[SequenceState], chunks: Sequence[Chunk] = ()) -> PlannedRound:
        """Return the round of these sequences, those with drafts first. The strategy plans it if there are any."""
        started, longest, batch = self.clock(), self.options.max_draft_tokens, len(sequences)
        sequences = sorted(sequences, key=lambda one: not one.params.use_drafts)
        drafting = [one for one in sequences if one.params.use_drafts]
        outstanding = sum(
            self._answer_length.expected(sequence.num_remaining)
            for sequence in (*self.scheduler.running, *self.scheduler.waiting)
            if sequence.params.use_drafts
        )
        state = BatchState(
            context=sum(sequence.num_tokens for sequence in sequences) // batch,
            batch=batch,
            elapsed_s=self.stats.total_s - self._earlier_s,
            searched_s=self.stats.optimise_s - self._earlier_searched_s,
            num_outstanding_tokens=outstanding,
            sequence_ids=[sequence.sequence_id for sequence in drafting],
            proposals=cache(lambda: [self.proposer.propose(one, longest, batch=batch) for one in sequences]),
            by_class=lambda: self.proposer.record.by_class,
            is_observed=not chunks and len(drafting) == batch,
        )
        chosen = self.strategy.choose(state) if drafting else _PLAIN
        plan = chosen.plan
        proposals = state.proposals()  # in any case, because they are compared with what comes
        lengths = plan.lookup_lengths or [plan.num_lookup_tokens] * batch
        if self.options.strategy == "static":  # its proposals are what the forms of the outputs force
            lengths = [len(proposal.token_ids) for proposal in proposals]
        entries = [self._entry(*each, plan) for each in zip(sequences, proposals, lengths, strict=True)]
        num_taps = min(self._taps.maxlen or 0, len(drafting)) if chosen.capture else 0
        num_likeliest = self.proposer.num_likeliest(batch) if drafting else 0
        is_plain = not any(entry.max_draft_tokens or entry.looked_up for entry in entries)
        work = Round(
            id=work_id,
            entries=entries,
            plan=plan,
            fixes_drafts=self.options.verification != "coupled",  # then tokens depend on the draft's probabilities
            keep_drafting=chosen.keep_drafting,
            num_taps=num_taps,
            chunks=chunks,
            num_likeliest=num_likeliest,
            num_steps=self._num_steps(sequences) if is_plain and not (num_taps or chunks or num_likeliest) else 1,
        )
        return PlannedRound(work, sequences, state, chosen, started)

    def _num_steps(self, sequences: Sequence[SequenceState]) -> int:
        lefts = (min(each.num_remaining, each.table.capacity - each.num_tokens + 1) for each in sequences)
        return min(self.stages.num_steps, *lefts)

    def learn(self, planned: PlannedRound, result: RoundResult, num_tokens: int) -> None:
        """Log the taps of a finished round, give the strategy its result, and let the strategy search. The strategy
        learns nothing from a round with chunks, because the round's own time is then unknown, with sequences that
        want no drafts, because the strategy has not chosen for them, or without tokens, whose speed would be 0."""
        step_s = (self.clock() - planned.started - result.queued_s - result.owed_s) / result.num_steps
        taps = zip(planned.sequences, planned.work.taps, strict=False)
        self._taps.extend(None if sequence.finished else token for sequence, token in taps)
        num_ends = sum(sequence.finish_reason == "stop" for sequence in planned.sequences)
        self._answer_length.observe(num_tokens=num_tokens, num_ends=num_ends)
        proposals, by_source = planned.state.proposals(), self.stats.accepted_by_source
        for at, (sequence, entry) in enumerate(zip(planned.sequences, planned.work.entries, strict=True)):
            committed, draft = result.committed[at], result.drafts[at]
            rows = (result.paths[at] if result.paths else ()) or range(1, result.num_accepted[at] + 1)
            for source in sources_of(draft, proposals[at], rows):
                for counts in (by_source, sequence.metrics.accepted_by_source):
                    counts[source] = counts.get(source, 0) + 1
            if committed.finite and not committed.problem and sequence.finish_reason != "abort":
                likeliest = result.likeliest[at] if result.likeliest else ()
                self.proposer.learn(sequence, entry, proposals[at], draft, committed.token_ids, likeliest)
        for sequence, probed in itertools.zip_longest(planned.sequences, result.probed):
            if sequence.lookahead is not None and planned.work.plan.lookahead:
                sequence.lookahead.observe(probed or ())
        if num_tokens and planned.state.is_observed:
            num_a_step = -(-num_tokens // result.num_steps)
            self.strategy.observe(planned.state, planned.chosen, result, num_a_step, step_s)
            if (plain_rate := planned.chosen.plain_rate) is not None:
                self.stats.compared_s += step_s * result.num_steps
                self.stats.plain_s += num_tokens / plain_rate
                num_plain = sum(not draft.token_ids for draft in result.drafts)
                self.stats.num_compared_rounds += num_plain * result.num_steps
        started, is_searching = self.clock(), bool(self._searching)
        self._continue_searches(step_s)
        record = None if planned.chosen is _PLAIN else self.strategy.search(planned.state, self._search)
        if record is not None:
            self.stats.plans = [*self.stats.plans[-_MAX_PLAN_RECORDS + 1 :], record]
        if is_searching or self._searching or record is not None:
            self.stats.optimise_s += self.clock() - started
        self.stats.gate_reason = self.strategy.status

    def forget(self, sequence: SequenceState | None = None) -> None:
        """Drop the taps of the sequence, which leaves its place in the cache, or of all, and cancel their searches."""
        for at, token in enumerate(self._taps):
            if token is not None and (sequence is None or token.sequence_id == sequence.sequence_id):
                self._taps[at] = None
        for search, tokens in self._searching.items():
            if sequence is None or any(token.sequence_id == sequence.sequence_id for token in tokens):
                search.cancel()

    def _continue_searches(self, step_s: float) -> None:
        """Work on the oldest search for the time of a few steps. Cancel searches over tokens without keys."""
        sequences = {sequence.sequence_id: sequence for sequence in self.scheduler.running}
        for search, tokens in list(self._searching.items()):
            if not all(self._is_held(token, sequences) for token in tokens):
                search.cancel()
            if search.done():
                del self._searching[search]
        if self._searching:
            self.stages.continue_search(SEARCH_STEPS * 2 ** min(self._num_cancelled, _MAX_DOUBLINGS) * step_s)

    def _is_held(self, token: TappedToken, sequences: Mapping[str, SequenceState]) -> bool:
        sequence = sequences.get(token.sequence_id)
        return sequence is not None and self.scheduler.kv.holds_window(sequence, token.position)

    def _search(self, question: Question, sequence_id: str | None = None) -> Future[Answer] | None:
        """Search over the last tapped tokens; None if they are too few. Their sequences must keep their places."""
        sequences = {sequence.sequence_id: sequence for sequence in self.scheduler.running}
        tokens = [
            token
            for token in self.tapped
            if sequence_id in (None, token.sequence_id) and self._is_held(token, sequences)
        ]
        if len(tokens) < question.num_tokens:
            return None
        chosen = tokens[-question.num_tokens :]
        rows = [sequences[token.sequence_id].rows(token.position, 1) for token in chosen]
        searching = self.stages.search(chosen, rows, question)
        self._searching[searching] = chosen

        def count(search: Future[Answer]) -> None:
            self._num_cancelled = self._num_cancelled + 1 if search.cancelled() else 0
            if self.stages.searches_apart and not search.cancelled() and search.exception() is None:
                self.stats.optimise_s += search.result().seconds

        searching.add_done_callback(count)
        return searching

    def _entry(self, sequence: SequenceState, proposal: Proposal, num_looked_up: int, plan: Plan) -> RoundEntry:
        num_free = sequence.table.capacity - sequence.num_tokens
        uses_drafts = sequence.params.use_drafts
        drafts = uses_drafts and (sequence.constraint is None or not sequence.constraint.is_slow)
        max_tree_tokens = min(MAX_TREE_TOKENS, num_free)
        num_looked_up = min(num_looked_up, num_free)
        looked_up: Sequence[int] = proposal.token_ids[:num_looked_up]
        parents: Sequence[int] = proposal.parents[:num_looked_up]
        num_probes = 0
        if plan.lookahead and uses_drafts:
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
