"""A round as a script: draft, verify, accept. The same script serves one process and many: it yields the passes that it
needs and receives the hidden states before the head. `LocalStages` runs each pass directly. In a pipeline the stage
with the head runs the script, and the passes travel through the stages.

The target drafts for itself, with each sublayer run by the plan's choice. A draft is a chain of tokens, or a tree: a
*main chain* with alternatives to its tokens, which have no successors (SWIFT, Xia et al. 2025). Looked-up drafts may be
any tree. If the drafted tokens occur earlier in the text, what followed there may extend the draft, without a draft
step.

Two rules decide which draft tokens to accept, and which token follows. Both give exactly the target's distribution.

**Coupled.** The target's token is a function of the committed tokens and the noise (seed, position); drafts are only
compared with it. So the text equals plain decoding token for token, regardless of the drafts and of how often a
position was evaluated.

**Rejection** (Leviathan et al. 2023, "Fast inference from Transformers via speculative decoding", theorem 1): a draft
token x, sampled from q, is accepted with probability min(1, p(x) / q(x)). A rejected token is replaced by a sample of
norm(max(p - q, 0)). After the last draft token a bonus token is sampled from p. A draft token that was not sampled
counts as certain: q is one-hot at x.

Noise that is a function of the position does not bias the rejection rule. Proof: let s be a position and F the noise of
all positions before s. Given the committed tokens before s, which F determines, the token at s is exactly p-distributed
if (a) q at s, and whether s is drafted at all in the round that decides it, do not depend on the noise of s, and (b)
the numbers used at s are independent of F and of each other. (b) holds: a position is *decided* in one round only, by
ACCEPT and then RECOVER, or by TARGET, each used at s for nothing else. A round that rejects a token before s also
evaluates s, but its ACCEPT and RECOVER numbers there influence nothing. Only the token drafted there does: it affects
the rest of that round's draft, its confidences and statistics, and through these perhaps the next round. So DRAFT
noise is also a function of the round's origin (the number of committed tokens when it began, larger in every round),
and a later round drafts s with unused numbers. The code that ends a draft must ensure (a) within a round:
**drop a drafted token, or stop before it, only by facts known before it was drawn** (earlier draft tokens, the
confidence, which is a property of q), **never by which token it is.** Stopping after a token is always fine.

**Trees.** Under the coupled rule the target's token at every row of a tree is known. The longest path on which every
token equals the target's token is accepted. Branches share the noise of a position, so the text still equals plain
decoding. Under the rejection rule a tree that was not sampled (looked up) is compared in the same way: the target's
token is a sample of p by TARGET noise, on which the candidates do not depend. Numbers outside the accepted path
influence nothing. A draft that was sampled is never a tree.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import torch
from msgspec import structs
from torch import Tensor

from rayspec.config import Verification
from rayspec.decode.processing import TokenSampler, process
from rayspec.decode.runner import Operators, Stopwatch, integers, queued_s, seconds
from rayspec.decode.sampling import (
    Drafts,
    DraftSteps,
    Noise,
    PlainSteps,
    Rows,
    Stream,
    argmax,
    finite_rows,
    logit_rows,
    row_keys,
    target_tokens,
    top_logprobs,
)
from rayspec.decode.work import (
    Chunk,
    Committed,
    Draft,
    Merge,
    Pass,
    Prefill,
    PrefillResult,
    Result,
    Round,
    RoundEntry,
    RoundResult,
    SamplerSpec,
    TappedToken,
    TapsGoneError,
    Work,
    num_rows,
)
from rayspec.forms.grammar import Grammars
from rayspec.model.cuda import reference
from rayspec.model.noise import gumbel, uniform
from rayspec.planning.acceptance import DraftUntilFound
from rayspec.types import Logprob

# The owner of a saved row whose token was drawn after its draft's end.
DROPPED = -1

# Above these confidences a drafted token is one of `Plan.tree_widths[0]`, [1], [2] alternatives; else of [3] (SWIFT).
SURENESS = (0.95, 0.8, 0.5)
_LOGPROB_ROWS = 64  # of a prompt, whose logits are computed at once


@dataclass(kw_only=True, eq=False)
class Head:
    """The last step of a pass, next to the LM head: turns logits into tokens with each sequence's own sampler. Keeps
    the samplers of the open sequences and the target's most likely tokens after tapped tokens.

    logits: maps [1, N, hidden_size] before the final norm to [N, V]. draft_logits: does so for drafts, for less; None:
    `logits`. operators: of sampling. draft_look_interval: draft steps between two copies of the drawn tokens to the
    host; it must be 1 if another process embeds the tokens. grammars: of a head that is not in the engine's process.
    drawn: the last drawn tokens, int64 [S], on the device.
    """

    logits: Callable[[Tensor], Tensor] = field(kw_only=False)
    draft_logits: Callable[[Tensor], Tensor] | None = None
    operators: Operators = reference
    vocab_size: int
    device: torch.device
    verification: Verification
    num_taps: int
    draft_look_interval: int = 1
    grammars: Grammars | None = None
    drawn: Tensor | None = field(default=None, init=False)
    samplers: dict[str, TokenSampler] = field(default_factory=dict, init=False)  # of the open sequences
    _next_tokens: dict[TappedToken, Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.stopwatch = Stopwatch(self.device)

    def open(self, spec: SamplerSpec) -> None:
        form = spec.params.structured_outputs
        if form is not None and spec.constraint is None and self.grammars is not None:  # the engine's is elsewhere
            spec = replace(spec, constraint=self.grammars.constraint(form, len(spec.prompt_token_ids)))
        self.samplers[spec.sequence_id] = TokenSampler(
            spec, vocab_size=self.vocab_size, device=self.device, operators=self.operators
        )

    def close(self, sequence_id: str) -> None:
        del self.samplers[sequence_id]

    def forget(self) -> None:
        self.samplers.clear()
        self._next_tokens.clear()

    def note_taps(self, taps: Sequence[tuple[int, TappedToken]], logits: Tensor) -> None:
        """Remember the target's most likely token after each of the last `num_taps` tapped tokens. logits: [N, V]."""
        for row, token in taps:
            self._next_tokens.pop(token, None)
            self._next_tokens[token] = argmax(logits[row])
        for token in list(self._next_tokens)[: -self.num_taps]:
            del self._next_tokens[token]

    def next_tokens(self, tokens: Sequence[TappedToken]) -> Tensor:
        """Return the target's most likely token after each tapped token, [T]. Raises TapsGoneError."""
        if any(token not in self._next_tokens for token in tokens):
            raise TapsGoneError("what followed some captured tokens is not kept any more")
        return torch.stack([self._next_tokens[token] for token in tokens])


class Verdict(msgspec.Struct, frozen=True):
    """The tokens to commit for one sequence: the accepted draft tokens, then one recovered or bonus token. path: rows
    of the accepted tokens, counted from the sequence's first row 0; empty if they are rows 1, 2, ... is_finite: False
    if the logits of its rows cannot be sampled from; the tokens are then void."""

    token_ids: list[int]
    num_accepted: int
    path: tuple[int, ...] = ()
    is_finite: bool = True


def before_late(row: Rows, verdict: Verdict) -> Verdict:
    """Leave out the tokens from the first row on whose mask was late. Row 0's never is."""
    constraint, token_ids = row.sampler.constraint, verdict.token_ids
    if constraint is None:
        return verdict
    for at in range(1, len(token_ids)):
        if constraint.is_late(token_ids[:at]):
            return structs.replace(verdict, token_ids=token_ids[:at], num_accepted=at, path=verdict.path[:at])
    return verdict


def commit(logits: Tensor, rows: Sequence[Rows], verdicts: Sequence[Verdict]) -> list[Committed]:
    """Commit the accepted tokens to the samplers and return them with the log-probabilities that their parameters ask
    for, which take one host synchronisation for each number of them. An error changes no sampler."""
    pairs = list(zip(rows, verdicts, strict=True))
    results: list[Sequence[dict[int, Logprob]]] = [()] * len(rows)
    asked = [row.sampler.params.logprobs if verdict.is_finite else None for row, verdict in pairs]
    for count in {count for count in asked if count is not None}:
        chosen = [index for index, its_count in enumerate(asked) if its_count == count]
        where = []  # the rows whose logits chose the tokens
        for row, verdict in (pairs[index] for index in chosen):
            path = (0, *(verdict.path or range(1, len(verdict.token_ids))))
            where += [row.start + at for at in path[: len(verdict.token_ids)]]
        tokens = [token for index in chosen for token in pairs[index][1].token_ids]
        table = iter(top_logprobs(logits[integers(where, logits.device)], tokens, count))
        for index in chosen:
            results[index] = list(itertools.islice(table, len(pairs[index][1].token_ids)))
    for row, verdict in pairs:
        if verdict.is_finite:
            row.sampler.commit(verdict.token_ids)
    return [
        Committed(verdict.token_ids, each, verdict.is_finite, row.sampler.problem)
        for (row, verdict), each in zip(pairs, results, strict=True)
    ]


def first_pass(work: Work) -> Pass:
    """Return the first pass of the work's script, which depends only on the work: no stage need wait for the head."""
    if isinstance(work, Prefill):
        return Pass(
            round_id=work.id,
            token_ids=[token for chunk in work.chunks for token in chunk.token_ids],
            rows=[chunk.rows for chunk in work.chunks],
            fixed_shape=any(chunk.replay for chunk in work.chunks),
        )
    active = drafting_entries(work.entries)
    drafts = [entry.draft() for entry in work.entries]
    if active:
        return draft_pass(work, drafts, active)
    return _verify_pass(work, drafts, [])


def script(work: Work, head: Head) -> Generator[Pass, Tensor, Result]:
    """Yield passes, receive the states [1, N, hidden_size] of each pass, and return the result."""
    if isinstance(work, Round):
        return (yield from _round(work, head))
    hidden = yield first_pass(work)
    last_rows = _last_rows(work.chunks, 0)
    logits = head.logits(hidden[:, integers(last_rows, hidden.device)]) if last_rows else hidden.new_zeros(0, 0)
    of_prompts = _prompt_logprobs(head, work.chunks, hidden)
    return PrefillResult(choose(head, work.chunks, logits), of_prompts)


def _last_rows(chunks: Sequence[Chunk], first: int) -> list[int]:
    """Return the last row of each chunk that samples; all chunks are contiguous from row `first` on."""
    ends = itertools.accumulate((chunk.rows.num_rows for chunk in chunks), initial=first)
    return [end - 1 for end, chunk in zip(itertools.islice(ends, 1, None), chunks, strict=True) if chunk.sample]


def _prompt_logprobs(head: Head, chunks: Sequence[Chunk], hidden: Tensor) -> list[list[dict[int, Logprob]]]:
    """Return, for each chunk, the log-probabilities of the prompt's tokens after its rows, if its sequence wants them.
    hidden: the last rows of these states are the chunks'."""
    if all(head.samplers[chunk.sequence_id].params.prompt_logprobs is None for chunk in chunks):
        return []
    found, first = list[list[dict[int, Logprob]]](), hidden.shape[1] - num_rows(chunks)
    for chunk in chunks:
        sampler, rows = head.samplers[chunk.sequence_id], list[dict[int, Logprob]]()
        if (count := sampler.params.prompt_logprobs) is not None:
            following = sampler.token_ids[chunk.rows.context + 1 : min(chunk.rows.end + 1, sampler.num_prompt_tokens)]
            for at in range(0, len(following), _LOGPROB_ROWS):
                tokens = following[at : at + _LOGPROB_ROWS]
                states = hidden[:, first + at : first + at + len(tokens)].clone()
                rows += top_logprobs(head.logits(states), tokens, count)
        found.append(rows)
        first += chunk.rows.num_rows
    return found


def choose(head: Head, chunks: Sequence[Chunk], logits: Tensor) -> list[Committed | None]:
    """Choose and commit the token after each chunk that samples. logits: one row for each of these chunks. On a GPU,
    the host indexes the chunks while the device still computes."""
    return _by_chunk(chunks, commit(logits, *_chosen(head, chunks, logits)))


def _chosen(head: Head, chunks: Sequence[Chunk], logits: Tensor, *, first: int = 0) -> tuple[list[Rows], list[Verdict]]:
    """Do as `choose`, without the commit. Return the rows, counted from `first` on, and the token after each."""
    for chunk in chunks:
        sampler = head.samplers[chunk.sequence_id]
        if sampler.lookup is not None:
            sampler.lookup.extend_to(sampler.token_ids, chunk.rows.end)
    sampling = [head.samplers[chunk.sequence_id] for chunk in chunks if chunk.sample]
    rows = [Rows(sampler, at, ()) for at, sampler in enumerate(sampling)]
    verdicts = verify_coupled(logits, rows) if rows else []
    return [structs.replace(row, start=first + row.start) for row in rows], verdicts


def _by_chunk(chunks: Sequence[Chunk], committed: Sequence[Committed]) -> list[Committed | None]:
    left = iter(committed)
    return [next(left) if chunk.sample else None for chunk in chunks]


def _round(work: Round, head: Head) -> Generator[Pass, Tensor, RoundResult]:
    samplers = [head.samplers[entry.sequence_id] for entry in work.entries]
    if work.num_steps > 1 and not any(one.reads_history or one.params.logprobs is not None for one in samplers):
        return (yield from _steps(work, head, samplers))
    started = head.stopwatch.mark()
    num_at_once = 1 + (head.draft_look_interval if drafting_entries(work.entries) else 0)
    noise = Noise(samplers, num_at_once)
    drafted = yield from draft(head, work, noise)
    drafted_at = head.stopwatch.mark()
    verify = _verify_pass(work, drafted.drafts, drafted.owners)
    hidden = yield verify
    num_chunk_rows = num_rows(work.chunks)
    num_verified = hidden.shape[1] - num_chunk_rows
    of_prompts = _prompt_logprobs(head, work.chunks, hidden)
    if work.chunks:  # of a chunk, only the row before a token that is to be chosen
        wanted = integers([*range(num_verified), *_last_rows(work.chunks, num_verified)], hidden.device)
        hidden = hidden[:, wanted]
    both = head.logits(hidden)
    logits, chunk_logits = both[:num_verified], both[num_verified:]
    rows: list[Rows] = []
    probes: list[range] = []  # by entry, the rows of its probes, which follow those of its draft
    for entry, one in zip(work.entries, drafted.drafts, strict=True):
        rows.append(
            Rows(head.samplers[entry.sequence_id], probes[-1].stop if probes else 0, one.token_ids, one.parents)
        )
        probes.append(range(rows[-1].end, rows[-1].end + entry.num_probes))
    if head.verification == "coupled":
        verdicts = verify_coupled(logits, rows, noise)
    else:
        verdicts = verify_rejection(logits, rows, [torch.stack(each) if each else None for each in drafted.logits])
    if len(logits) > len(work.entries) and not all(verdict.is_finite for verdict in verdicts):
        # A drafted token may be the cause, and its row spoils the other rows of its sequence: verify without drafts.
        bare = {"max_draft_tokens": 0, "looked_up": (), "parents": (), "num_probes": 0}
        entries = [structs.replace(entry, **bare) for entry in work.entries]
        return (yield from _round(structs.replace(work, entries=entries, num_taps=0), head))
    head.note_taps(verify.taps, logits)
    verdicts = list(map(before_late, rows, verdicts))
    probed: list[list[int]] = [[] for _ in probes]
    if any(probes):
        found = argmax(logits).tolist()
        probed = [found[each.start : each.stop] for each in probes]
    ended = head.stopwatch.mark()
    verify_s = seconds(drafted_at, ended)
    prefill_s = verify_s * num_chunk_rows / len(verify.token_ids)
    likeliest = _likeliest(logits, rows, work.num_likeliest)
    # Last, and all at once: if memory runs out, no sampler has changed, and the round may run again.
    chunk_rows, chosen = _chosen(head, work.chunks, chunk_logits, first=num_verified)
    committed = commit(both, [*rows, *chunk_rows], [*verdicts, *chosen])
    return RoundResult(
        committed=committed[: len(rows)],
        drafts=drafted.drafts,
        num_accepted=[verdict.num_accepted for verdict in verdicts],
        num_draft_steps=drafted.num_steps,
        draft_s=seconds(started, drafted_at),
        verify_s=verify_s - prefill_s,
        prefill_s=prefill_s,
        queued_s=queued_s(started, ended),
        paths=[verdict.path for verdict in verdicts],
        probed=probed,
        prefilled=_by_chunk(work.chunks, committed[len(rows) :]),
        likeliest=likeliest,
        prompt_logprobs=of_prompts,
    )


def _steps(work: Round, head: Head, samplers: Sequence[TokenSampler]) -> Generator[Pass, Tensor, RoundResult]:
    """Decode several tokens of each entry without a draft. Their passes follow one another on the device, and the host
    looks once, at the end: so it prepares each pass while the device runs the one before."""
    started = head.stopwatch.mark()
    drawn, largest, steps = [], [], PlainSteps(samplers, work.num_steps)
    for ahead in range(work.num_steps):
        step = Pass(
            round_id=work.id,
            token_ids=[] if ahead else [entry.last_token for entry in work.entries],
            rows=[entry.rows(entry.length - 1 + ahead, 1) for entry in work.entries],
        )
        logits = head.logits((yield step))
        head.drawn = steps.tokens(logits, ahead)
        drawn.append(head.drawn)
        largest.append(logits.amax(-1))  # finite as in `finite_rows`
    verdicts = []
    table = torch.stack((torch.stack(drawn, 1), torch.stack(largest, 1).isfinite()), 1)
    for tokens, finite in table.tolist():
        num_good = finite.index(0) if 0 in finite else len(finite)
        verdicts.append(Verdict(tokens[: max(num_good, 1)], 0, is_finite=num_good > 0))
    committed = commit(logits, [Rows(one, at, ()) for at, one in enumerate(samplers)], verdicts)
    ended = head.stopwatch.mark()
    return RoundResult(
        committed=committed,
        drafts=[Draft() for _ in committed],
        num_accepted=[0] * len(committed),
        num_draft_steps=0,
        draft_s=0.0,
        verify_s=seconds(started, ended),
        queued_s=queued_s(started, ended),
        num_steps=work.num_steps,
    )


def _likeliest(logits: Tensor, rows: Sequence[Rows], count: int) -> list[list[tuple[Sequence[int], Sequence[float]]]]:
    if not count:
        return []
    count = min(count, logits.shape[-1])
    scores = logits.to(torch.float32, copy=True)
    best = scores.topk(count)
    highest = best.values[:, :1]
    chances = (best.values - highest).exp() / scores.sub_(highest).exp_().sum(-1, keepdim=True)
    table: list[list[float]] = torch.cat((best.indices.double(), chances.double()), 1).tolist()
    found: list[tuple[Sequence[int], Sequence[float]]] = [
        ([int(token) for token in each[:count]], each[count:]) for each in table
    ]
    return [found[row.start : row.end] for row in rows]


def _verify_pass(work: Round, drafts: Sequence[Draft], owners: Sequence[int]) -> Pass:
    """Return the pass that runs all sublayers over every entry's newest token, draft and probes, then over the chunks.
    The i-th saved row of an entry is the entry's i-th row here; saved rows join the others at `work.save_at`."""
    pairs = list(zip(work.entries, drafts, strict=True))
    tokens, rows = [], []
    for entry, drafted in pairs:
        first_probe = len(entry.looked_up) - entry.num_probes
        tokens.append([entry.last_token, *drafted.token_ids, *entry.looked_up[first_probe:]])
        probes = entry.parents[first_probe:]
        parents = (-1, *drafted.parents, *probes) if drafted.parents or probes else ()
        rows.append(entry.rows(entry.length - 1, len(tokens[-1]), parents))
    chunk_tokens = [token for chunk in work.chunks for token in chunk.token_ids]
    chunk_rows = [chunk.rows for chunk in work.chunks]
    scores_pages = work.plan.uses_page_scores or work.num_taps > 0
    if owners and work.save_at:
        counts = Counter(owners)
        num_saved = [counts[index] for index in range(len(pairs))]
        left = [each[saved:] for each, saved in zip(tokens, num_saved, strict=True)]
        # Saved and remaining rows, sorted by entry; the chunks come last.
        of_rows = [*owners, *(index for index, each in enumerate([*left, chunk_tokens]) for _ in each)]
        kept = (row for row, owner in enumerate(of_rows) if owner != DROPPED)
        return Pass(
            round_id=work.id,
            token_ids=[*(token for each in left for token in each), *chunk_tokens],
            rows=[*(span.rest(saved) for span, saved in zip(rows, num_saved, strict=True)), *chunk_rows],
            merge=Merge(at=work.save_at, order=sorted(kept, key=of_rows.__getitem__), rows=[*rows, *chunk_rows]),
            scores_pages=scores_pages,
        )
    taps, at = [], 0
    for token, span in zip(work.taps, rows, strict=False):
        taps.append((at, token))
        at += span.num_rows
    return Pass(
        round_id=work.id,
        token_ids=[*(token for each in tokens for token in each), *chunk_tokens],
        rows=[*rows, *chunk_rows],
        taps=taps,
        scores_pages=scores_pages,
        sequence_ids=[entry.sequence_id for entry in work.entries],
    )


@dataclass(slots=True)
class DraftRound:
    """Drafts by entry. owners: if rows are saved for the verify, the entry of each saved row, or DROPPED. logits:
    processed logits of each token that the model drafted, [V] each, by entry; for verification "rejection" only."""

    drafts: list[Draft]
    logits: list[list[Tensor]]
    owners: list[int] = field(default_factory=list)
    num_steps: int = 0


def draft_pass(work: Round, drafts: Sequence[Draft], active: Sequence[int], *, ahead: int = 0) -> Pass:
    """Return the pass of the next draft step: one row for each active entry. ahead: number of drafted tokens that the
    host does not know yet; the newest tokens are then read on the device."""
    chosen = [(work.entries[index], drafts[index].token_ids) for index in active]
    return Pass(
        round_id=work.id,
        token_ids=[] if ahead else [tokens[-1] if tokens else entry.last_token for entry, tokens in chosen],
        rows=[entry.rows(entry.length - 1 + len(tokens) + ahead, 1) for entry, tokens in chosen],
        choices=work.plan.choices,
        save_at=work.save_at,
        fixed_shape=work.fixes_drafts or work.save_at > 0,
    )


def drafting_entries(entries: Sequence[RoundEntry]) -> list[int]:
    return [index for index, entry in enumerate(entries) if entry.max_draft_tokens > 0 and not entry.looked_up]


def draft(head: Head, work: Round, noise: Noise) -> Generator[Pass, Tensor, DraftRound]:
    """Draft for every entry until the draft reaches its length or an end token, or `keep_drafting` ends it, possibly
    with looked-up tokens. Entries with looked-up tokens keep these as their draft.

    Keys and values of drafted rows go to positions that the verify overwrites. The host synchronises at least every
    `head.draft_look_interval` steps. It then applies the rules step by step, and drops tokens that were drawn after the
    end of a draft. noise: the target's in this round.
    """
    entries, plan = work.entries, work.plan
    result = DraftRound([entry.draft() for entry in entries], [[] for _ in entries])
    ranked: list[list[list[float]]] = [[] for _ in entries]  # by entry and drafted token: the tokens that rank best
    active = drafting_entries(entries)
    while active:
        drawing = list(active)
        steps = yield from _drawn(head, work, result.drafts, drawing, noise)
        # One copy to the host. By step and entry: the token, its confidence, and ranked tokens, if any.
        columns = [torch.stack([step.token_ids for step in steps]), torch.stack([step.confidence for step in steps])]
        numbers = torch.stack([column.double() for column in columns], 2)
        if steps[0].ranked is not None:
            ranks = torch.stack([step.ranked for step in steps if step.ranked is not None])
            numbers = torch.cat((numbers, ranks.double()), 2)
        tables: list[list[list[float]]] = numbers.tolist()
        for step, table in zip(steps, tables, strict=True):
            result.num_steps += 1
            still = set(active)
            result.owners.extend([index if index in still else DROPPED for index in drawing])
            for at, index in enumerate(drawing):
                if index in still:
                    token, confidence, *best = table[at]
                    result.drafts[index].token_ids.append(int(token))
                    result.drafts[index].confidences.append(confidence)
                    ranked[index].append(best)
                    if step.logits is not None:
                        result.logits[index].append(step.logits[at])
            active = _still_drafting(head, work, result.drafts, active)
    if plan.tree_widths:
        for entry, one, best_of in zip(entries, result.drafts, ranked, strict=True):
            if best_of and (head.verification == "coupled" or head.samplers[entry.sequence_id].greedy):
                _branch(one, best_of, plan.tree_widths, entry.max_tree_tokens)
    return result


def _drawn(
    head: Head, work: Round, drafts: Sequence[Draft], active: Sequence[int], noise: Noise
) -> Generator[Pass, Tensor, list[Drafts]]:
    """Draw the next tokens of the active entries for as many steps as need no host synchronisation."""
    steps: list[Drafts] = []
    samplers = [head.samplers[work.entries[index].sequence_id] for index in active]
    left = (work.entries[index].max_draft_tokens - len(drafts[index].token_ids) for index in active)
    num_steps = 1 if any(sampler.reads_history for sampler in samplers) else min(head.draft_look_interval, *left)
    drawing = DraftSteps(samplers, head.verification, noise, num_ranked=max(work.plan.tree_widths, default=0))
    pending = [drafts[index].token_ids for index in active]
    for ahead in range(num_steps):
        hidden = yield draft_pass(work, drafts, active, ahead=ahead)
        logits = (head.draft_logits or head.logits)(hidden)
        steps.append(drawing.draw(logits, pending, ahead))
        head.drawn = steps[-1].token_ids
    return steps


def _branch(chain: Draft, ranked: Sequence[Sequence[float]], widths: Sequence[int], max_tokens: int) -> None:
    """Add alternatives to each token that the model drafted: the best-ranked other tokens, and more of them at lower
    confidence; earlier positions first. With the chain there are at most `max_tokens` tokens."""
    siblings: list[tuple[int, int]] = []  # parents and tokens
    for parent, (confidence, best) in enumerate(zip(chain.confidences, ranked, strict=True)):
        width = widths[sum(confidence <= bound for bound in SURENESS)]
        most = max(0, min(width - 1, max_tokens - len(chain.token_ids) - len(siblings)))
        others = [int(other) for other in best if other != chain.token_ids[parent]]
        siblings += [(parent, other) for other in others[:most]]
    if siblings:
        parents, tokens = zip(*siblings, strict=True)
        chain.parents = [*range(len(chain.token_ids)), *parents]
        chain.token_ids += tokens


def _still_drafting(head: Head, work: Round, drafts: Sequence[Draft], active: Sequence[int]) -> list[int]:
    """Return the entries whose drafts are below their length, have not reached an end token, and are worth another
    token. Others are completed with looked-up tokens where that is worth more than further drafting."""
    rule, entries = work.keep_drafting, work.entries
    left = [index for index in active if len(drafts[index].token_ids) < entries[index].max_draft_tokens]
    left = [index for index in left if drafts[index].token_ids[-1] not in entries[index].end_tokens]
    if not left:
        return left
    if isinstance(rule, DraftUntilFound):
        for index, sound in zip(left, rule.worth.survivals([drafts[at].confidences for at in left]), strict=True):
            entry, one = entries[index], drafts[index]
            if sound <= rule.min_survival:  # then no token after it is worth its row
                continue
            sampler = head.samplers[entry.sequence_id]
            assert sampler.lookup is not None, "a strategy that looks up has an index"
            sampler.lookup.extend_to(sampler.token_ids)
            found = sampler.lookup.propose(entry.max_draft_tokens - len(one.token_ids), one.token_ids)
            if sampler.constraint is not None:
                found = found.cut_by(sampler.constraint, one.token_ids)
            num_taken = rule.num_looked_up(sound, found.match_classes)
            one.token_ids.extend(found.token_ids[:num_taken])
            one.match_classes.extend(found.match_classes[:num_taken])
        left = [index for index in left if not drafts[index].match_classes]
    if rule is None or not left:
        return left
    worth = rule([drafts[index].confidences for index in left])
    return [index for index, keep in zip(left, worth, strict=True) if keep]


def verify_coupled(logits: Tensor, rows: Sequence[Rows], noise: Noise | None = None) -> list[Verdict]:
    """Return verdicts by the coupled rule from raw target logits [N, V], for greedy and sampled sequences. `pending`
    holds the draft. noise: of the round. One copy to the host: the target's tokens, and which rows are finite."""
    tokens, finite = torch.stack((target_tokens(logits, rows, noise), finite_rows(logits))).tolist()
    return [_agreement(row, tokens[row.start : row.end], all(finite[row.start : row.end])) for row in rows]


def verify_rejection(logits: Tensor, rows: Sequence[Rows], draft_logits: Sequence[Tensor | None]) -> list[Verdict]:
    """Return verdicts by the rejection rule from raw target logits [N, V]; `pending` holds the draft, of g_i tokens.

    draft_logits: for each sequence, the processed logits [m_i, V] of its first m_i <= g_i tokens, which were sampled;
    None if no token was sampled. Other tokens (looked up, argmax) are accepted with probability p(x). Greedy sequences
    and trees are compared. An empty draft gives the token of plain decoding. One copy to the host, and one more if some
    drafts are compared and others not.
    """
    if all(row.sampler.greedy or not row.pending for row in rows):
        return verify_coupled(logits, rows)
    pairs = list(zip(rows, draft_logits, strict=True))
    is_compared = [row.sampler.greedy or bool(row.parents) for row in rows]
    if any(is_compared):
        compared = iter(verify_coupled(logits, list(itertools.compress(rows, is_compared))))
        others = [pair for pair, exact in zip(pairs, is_compared, strict=True) if not exact]
        drawn = iter(verify_rejection(logits, [row for row, _ in others], [given for _, given in others]))
        return [next(compared if exact else drawn) for exact in is_compared]
    drafts, draft_rows, num_dense = [0] * len(logits), [-1] * len(logits), 0
    for row, given in pairs:
        drafts[row.start : row.end - 1] = row.pending
        if given is not None:
            draft_rows[row.start : row.start + len(given)] = range(num_dense, num_dense + len(given))
            num_dense += len(given)
    scores = process(logits, logit_rows(rows))
    dense = [given for given in draft_logits if given is not None]
    lengths = [len(row.pending) for row in rows]
    samplers = [row.sampler for row in rows]
    of_rows = integers([*drafts, *draft_rows], scores.device).view(2, -1)
    of_sequences = integers(
        [*(s.seed for s in samplers), *(s.position for s in samplers), *(row.start for row in rows), *lengths],
        scores.device,
    ).view(4, -1)
    accepted, last = decide(
        scores=scores,
        drafts=of_rows[0],
        draft_scores=torch.cat(dense).float() if dense else scores[:0],
        draft_rows=of_rows[1],
        seeds=of_sequences[0],
        positions=of_sequences[1],
        first_rows=of_sequences[2],
        lengths=of_sequences[3],
        longest=max(lengths),
    )
    decided = torch.cat((accepted, last, finite_rows(logits))).tolist()
    num_accepted, tokens, finite = decided[: len(rows)], decided[len(rows) : 2 * len(rows)], decided[2 * len(rows) :]
    return [
        Verdict([*row.pending[:count], token], count, is_finite=all(finite[row.start : row.end]))
        for row, count, token in zip(rows, num_accepted, tokens, strict=True)
    ]


def decide(
    *,
    scores: Tensor,
    drafts: Tensor,
    draft_scores: Tensor,
    draft_rows: Tensor,
    seeds: Tensor,
    positions: Tensor,
    first_rows: Tensor,
    lengths: Tensor,
    longest: int,
) -> tuple[Tensor, Tensor]:
    """Apply the rejection rule to one round of S sequences, packed. Return how many draft tokens of each sequence are
    accepted and the token after them, int64 [S] each, without host synchronisation.

    Sequence s owns rows first_rows[s] .. first_rows[s] + lengths[s]. Its last row is for the bonus token, and each
    other row has a draft token. scores: float32 [N, V], processed target logits. drafts: int64 [N], the draft token of
    each row; any value in bonus rows. draft_scores: float32 [M, V], processed draft logits. draft_rows: int64 [N], the
    row of draft_scores that a row's token was sampled from, or -1 if it was not sampled. seeds, positions (of the first
    row), first_rows, lengths: int64 [S]. longest: the largest of `lengths`, known on the host.
    """
    target, draft = scores.softmax(-1), draft_scores.softmax(-1)
    ahead = torch.arange(longest, device=target.device)
    drafted = ahead < lengths.unsqueeze(1)
    at = torch.where(drafted, first_rows.unsqueeze(1) + ahead, 0).flatten()  # [S * longest]: rows of draft tokens
    at_drafted = (positions.unsqueeze(1) + ahead).flatten()
    noise = uniform(row_keys(seeds.repeat_interleave(longest), at_drafted, Stream.ACCEPT, target.device))
    tokens, rows = drafts[at], draft_rows[at]
    p = target[at, tokens].double()
    q = torch.where(rows < 0, 1.0, draft[rows.clamp_min(0), tokens].double()) if len(draft) else torch.ones_like(p)
    accepts = _accepts(p, q, noise).view_as(drafted) & drafted
    num_accepted = accepts.long().cumprod(1).sum(1)

    # The recovered or bonus token.
    at = first_rows + num_accepted
    rows = draft_rows[at].unsqueeze(1)
    other = torch.zeros_like(scores[at]).scatter_(1, drafts[at].unsqueeze(1), 1.0)  # q, if it was not sampled
    if len(draft):
        other = torch.where(rows < 0, other, draft[rows.squeeze(1).clamp_min(0)])
    is_bonus = num_accepted == lengths
    stream = torch.where(is_bonus, int(Stream.TARGET), int(Stream.RECOVER))
    last_noise = gumbel(row_keys(seeds, positions + num_accepted, stream, target.device), target.shape[1])
    last_scores = torch.where(is_bonus.unsqueeze(1), scores[at], _residual(target[at], other).log())
    return num_accepted, argmax(last_scores + last_noise)


def _accepts(p: Tensor, q: Tensor, noise: Tensor) -> Tensor:
    """Accept with probability min(1, p / q), in float64; never with p = 0, as noise > 0, nor with q = 0."""
    return (q > 0) & (noise * q <= p)


def _residual(target: Tensor, draft: Tensor) -> Tensor:
    """Return max(p - q, 0), not normalised; p in rows where that is all 0 (p equals q up to rounding)."""
    residual = (target - draft).clamp_min_(0)
    return torch.where(residual.sum(1, keepdim=True) > 0, residual, target)


def _agreement(row: Rows, targets: list[int], is_finite: bool) -> Verdict:
    """Accept the longest path of draft tokens that all equal the target's, and the target's token after it."""
    if not row.parents:
        num_accepted = 0
        while num_accepted < len(row.pending) and row.pending[num_accepted] == targets[num_accepted]:
            num_accepted += 1
        return Verdict(targets[: num_accepted + 1], num_accepted, (), is_finite)
    paths: dict[int, tuple[int, ...]] = {0: ()}  # to the rows on which all tokens equal the target's
    for at, (token, parent) in enumerate(zip(row.pending, row.parents, strict=True), start=1):
        if parent in paths and token == targets[parent]:
            paths[at] = (*paths[parent], at)
    path = max(paths.values(), key=len)
    is_chain = not path or path[-1] == len(path)
    return Verdict([targets[at] for at in (0, *path)], len(path), () if is_chain else path, is_finite)
