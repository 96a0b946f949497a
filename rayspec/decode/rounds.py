"""The work that the engine gives to the stages, and its script of passes, the same for one process and for many.

A script yields the passes that it needs and receives the hidden states before the head. `LocalStages` runs each pass
directly. In a pipeline the stage with the head runs the script, and the passes travel through the stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rayspec.decode.drafting.skip_draft import DROPPED, draft, draft_pass, drafting_entries
from rayspec.decode.head import Head
from rayspec.decode.noise import integers
from rayspec.decode.sampling import Rows
from rayspec.decode.stopwatch import Stopwatch, queued_s, seconds
from rayspec.decode.verify import verify_coupled
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
    Work,
)


def first_pass(work: Work) -> Pass:
    """Return the first pass of the work's script. It depends only on the work, so the first stage need not wait for the
    head."""
    if isinstance(work, Prefill):
        return _prefill_pass(work)
    active = drafting_entries(work.entries)
    drafts = [entry.draft() for entry in work.entries]
    if active:
        return draft_pass(work.id, work.entries, drafts, active, work.plan, work.save_at)
    return _verify_pass(work, drafts, [])


def script(work: Work, head: Head, stopwatch: Stopwatch) -> Generator[Pass, Tensor, Result]:
    """Yield passes, receive the states [1, N, hidden_size] of each pass, and return the result."""
    if isinstance(work, Prefill):
        return _prefill(work, head)
    return _round(work, head, stopwatch)


def _prefill(work: Prefill, head: Head) -> Generator[Pass, Tensor, PrefillResult]:
    hidden = yield _prefill_pass(work)
    last_rows = _last_rows(work.chunks, 0)
    logits = head.logits(hidden[:, integers(last_rows, hidden.device)]) if last_rows else hidden.new_zeros(0, 0)
    return PrefillResult(_chosen(head, work.chunks, logits))


def _last_rows(chunks: Sequence[Chunk], first: int) -> list[int]:
    """Return the last row of each chunk that samples; all chunks are contiguous from row `first` on."""
    ends = itertools.accumulate((chunk.rows.num_rows for chunk in chunks), initial=first)
    return [end - 1 for end, chunk in zip(itertools.islice(ends, 1, None), chunks, strict=True) if chunk.sample]


def _chosen(head: Head, chunks: Sequence[Chunk], logits: Tensor) -> list[Committed | None]:
    """Choose and commit the token after each chunk that samples. logits: one row for each of these chunks. On a GPU,
    the host indexes the chunks while the device still computes."""
    for chunk in chunks:
        head.note_computed(chunk.sequence_id, chunk.rows.end)
    sampling = [chunk for chunk in chunks if chunk.sample]
    if not sampling:
        return [None] * len(chunks)
    rows = [Rows(head.sampler(chunk.sequence_id), at, ()) for at, chunk in enumerate(sampling)]
    committed = iter(head.commit(logits, rows, verify_coupled(logits, rows)))
    return [next(committed) if chunk.sample else None for chunk in chunks]


def _round(work: Round, head: Head, stopwatch: Stopwatch) -> Generator[Pass, Tensor, RoundResult]:
    started = stopwatch.mark()
    drafted = yield from draft(head, work.id, work.entries, work.plan, work.keep_drafting, work.save_at)
    drafted_at = stopwatch.mark()
    verify = _verify_pass(work, drafted.drafts, drafted.owners)
    logits, chunk_logits = yield from _logits(head, work, verify)
    rows, start = [], 0
    for entry, one in zip(work.entries, drafted.drafts, strict=True):
        rows.append(Rows(head.sampler(entry.sequence_id), start, one.token_ids, one.parents))
        start = rows[-1].end + entry.num_probes
    draft_logits = [torch.stack(logits) if logits else None for logits in drafted.logits]
    verdicts = head.accept(logits, rows, draft_logits)
    if len(logits) > len(work.entries) and not all(verdict.is_finite for verdict in verdicts):
        # A drafted token may be the cause, and its row spoils the other rows of its sequence: verify without drafts.
        entries = [replace(entry, max_draft_tokens=0, looked_up=(), parents=(), num_probes=0) for entry in work.entries]
        return (yield from _round(replace(work, entries=entries, num_taps=0), head, stopwatch))
    head.note_taps(verify.taps, logits)
    committed = head.commit(logits, rows, verdicts)
    ended = stopwatch.mark()
    verify_s = seconds(drafted_at, ended)
    prefill_s = verify_s * sum(chunk.rows.num_rows for chunk in work.chunks) / len(verify.token_ids)
    return RoundResult(
        committed=committed,
        drafts=drafted.drafts,
        num_accepted=[verdict.num_accepted for verdict in verdicts],
        num_draft_steps=drafted.num_steps,
        draft_s=seconds(started, drafted_at),
        verify_s=verify_s - prefill_s,
        prefill_s=prefill_s,
        queued_s=queued_s(started, ended),
        paths=[verdict.path for verdict in verdicts],
        probed=_probed(logits, rows, work.entries),
        prefilled=_chosen(head, work.chunks, chunk_logits),
    )


def _logits(head: Head, work: Round, verify: Pass) -> Generator[Pass, Tensor, tuple[Tensor, Tensor]]:
    """Run the verify pass. Return the logits of all verify rows, and of the last rows of the chunks that sample."""
    hidden = yield verify
    if not work.chunks:
        logits = head.logits(hidden)
        return logits, logits[:0]
    num_verified = hidden.shape[1] - sum(chunk.rows.num_rows for chunk in work.chunks)
    wanted = integers([*range(num_verified), *_last_rows(work.chunks, num_verified)], hidden.device)
    logits = head.logits(hidden[:, wanted])
    return logits[:num_verified], logits[num_verified:]


def _probed(logits: Tensor, rows: Sequence[Rows], entries: Sequence[RoundEntry]) -> list[list[int]]:
    """Return, for each entry, the target's likeliest token after each probe. The probes' rows follow the draft's
    rows."""
    if not any(entry.num_probes for entry in entries):
        return [[] for _ in entries]
    pairs = list(zip(rows, entries, strict=True))
    probes = [at for row, entry in pairs for at in range(row.end, row.end + entry.num_probes)]
    likeliest = iter(logits[integers(probes, logits.device)].argmax(-1).tolist())
    return [list(itertools.islice(likeliest, entry.num_probes)) for entry in entries]


def _prefill_pass(work: Prefill) -> Pass:
    return Pass(
        round_id=work.id,
        token_ids=[token for chunk in work.chunks for token in chunk.token_ids],
        rows=[chunk.rows for chunk in work.chunks],
        fixed_shape=any(chunk.replay for chunk in work.chunks),
    )


def _verify_pass(work: Round, drafts: Sequence[Draft], owners: Sequence[int]) -> Pass:
    """Return the pass that runs all sublayers over every entry's newest token, draft and probes, then over the chunks.
    The i-th saved row of an entry is the entry's i-th row here; saved rows join the others at `work.save_at`."""
    pairs = list(zip(work.entries, drafts, strict=True))
    tokens = [[entry.last_token, *one.token_ids, *_probes(entry)] for entry, one in pairs]
    parents = [_parents(entry, one) for entry, one in pairs]
    rows = [
        entry.rows(entry.length - 1, len(each), tree)
        for entry, each, tree in zip(work.entries, tokens, parents, strict=True)
    ]
    chunk_tokens = [token for chunk in work.chunks for token in chunk.token_ids]
    chunk_rows = [chunk.rows for chunk in work.chunks]
    scores_pages = work.plan.uses_page_scores or work.num_taps > 0
    if owners and work.save_at:
        num_saved = [owners.count(index) for index in range(len(pairs))]
        left = [each[saved:] for each, saved in zip(tokens, num_saved, strict=True)]
        return Pass(
            round_id=work.id,
            token_ids=[*(token for each in left for token in each), *chunk_tokens],
            rows=[*(span.rest(saved) for span, saved in zip(rows, num_saved, strict=True)), *chunk_rows],
            merge=Merge(
                at=work.save_at,
                order=_merged_order(owners, [*map(len, left), len(chunk_tokens)]),
                rows=[*rows, *chunk_rows],
            ),
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
    )


def _probes(entry: RoundEntry) -> Sequence[int]:
    return entry.looked_up[len(entry.looked_up) - entry.num_probes :]


def _parents(entry: RoundEntry, drafted: Draft) -> tuple[int, ...]:
    """Return the parent of each verify row of the entry; empty for a chain."""
    probes = entry.parents[len(entry.looked_up) - entry.num_probes :]
    return (-1, *drafted.parents, *probes) if drafted.parents or probes else ()


def _merged_order(owners: Sequence[int], num_left: Sequence[int]) -> list[int]:
    """Return the order that sorts the saved rows, then the remaining rows, by entry. The chunks, the last item of
    `num_left`, come last."""
    rows_of: list[list[int]] = [[] for _ in num_left]
    for row, owner in enumerate(owners):
        if owner != DROPPED:
            rows_of[owner].append(row)
    first = len(owners)
    for rows, count in zip(rows_of, num_left, strict=True):
        rows.extend(range(first, first + count))
        first += count
    return [row for rows in rows_of for row in rows]
