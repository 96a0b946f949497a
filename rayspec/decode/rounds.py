"""What the stages are asked to do, and how it goes: a script of passes, told once for one process and for many.

A script yields the passes it needs and is sent the hidden states before the head. `LocalStages` runs them on the spot;
in a pipeline the stage with the head keeps the script and the passes travel.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from rayspec.decode.drafting.skip_draft import (
    Draft,
    KeepDrafting,
    Turn,
    draft,
    draft_pass,
    drafting_turns,
)
from rayspec.decode.head import Committed, Head
from rayspec.decode.passes import Join, Pass
from rayspec.decode.plan_search import TappedToken
from rayspec.decode.sampling import Rows, finite_rows, target_tokens
from rayspec.decode.scheduler import Chunk
from rayspec.decode.stopwatch import Stopwatch, queued_s, seconds
from rayspec.decode.verify import Verdict
from rayspec.model.rows import RowSpan
from rayspec.types import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Run chunks; for each that samples, choose the token after it."""

    id: int
    chunks: Sequence[Chunk]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Draft, verify, accept, for some sequences at once. The newest tokens of the first `num_taps` turns are tapped:
    they are committed whatever comes of the draft."""

    id: int
    turns: Sequence[Turn]
    plan: Plan
    keep_drafting: KeepDrafting | None = None
    num_taps: int = 0

    @property
    def hold_at(self) -> int:
        """The draft's rows before the first skipped sublayer are the verify's, which need not run them there again;
        except for taps, which need those states too."""
        return 0 if self.num_taps else self.plan.prefix

    @property
    def taps(self) -> list[TappedToken]:
        return [TappedToken(turn.sequence_id, turn.length - 1) for turn in self.turns[: self.num_taps]]


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """By chunk: the token after it, or None where it does not sample."""

    committed: Sequence[Committed | None]


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What a round did, by turn. draft_s, verify_s: seconds of the device.

    paths: the rows of the accepted tokens, where row 0 is the newest token's, of drafts of which a branch was accepted:
    its keys and values do not lie where their positions are. probed: the likeliest token after each probe. queued_s:
    how long the device was still busy with the work before, a piece of a prompt, when the host began the round.
    """

    committed: Sequence[Committed]
    drafts: Sequence[Draft]
    num_accepted: Sequence[int]
    num_draft_steps: int
    draft_s: float
    verify_s: float
    paths: Sequence[Sequence[int]] = ()
    probed: Sequence[Sequence[int]] = ()
    queued_s: float = 0.0


Work: TypeAlias = Prefill | Round
Result: TypeAlias = PrefillResult | RoundResult


def opening_pass(work: Work) -> Pass:
    """The first pass of the work's script. It depends on the work alone: the first stage can begin without the head."""
    if isinstance(work, Prefill):
        return _prefill_pass(work)
    active = drafting_turns(work.turns)
    drafts = [turn.draft() for turn in work.turns]
    if active:
        return draft_pass(work.id, work.turns, drafts, active, work.plan, work.hold_at)
    return _verify_pass(work, drafts, [])


def script(work: Work, head: Head, stopwatch: Stopwatch) -> Generator[Pass, Tensor, Result]:
    """Yields passes, is sent [1, N, hidden_size] of each, returns the result."""
    if isinstance(work, Prefill):
        return _prefill(work, head)
    return _round(work, head, stopwatch)


def _prefill(work: Prefill, head: Head) -> Generator[Pass, Tensor, PrefillResult]:
    hidden = yield _prefill_pass(work)
    ends = torch.tensor([chunk.rows.num_rows for chunk in work.chunks]).cumsum(0) - 1
    sampling = [index for index, chunk in enumerate(work.chunks) if chunk.sample]
    results: list[Committed | None] = [None] * len(work.chunks)
    if sampling:
        logits = head.logits(hidden[:, ends[sampling].to(hidden.device)])
        rows = [Rows(head.sampler(work.chunks[index].sequence_id), at, ()) for at, index in enumerate(sampling)]
        verdicts = [Verdict(token_ids=[token], num_accepted=0) for token in target_tokens(logits, rows).tolist()]
        committed = head.commit(logits, rows, verdicts, finite_rows(logits).tolist())
        for index, one in zip(sampling, committed, strict=True):
            results[index] = one
    return PrefillResult(results)


def _round(work: Round, head: Head, stopwatch: Stopwatch) -> Generator[Pass, Tensor, RoundResult]:
    started = stopwatch.mark()
    drafted = yield from draft(head, work.id, work.turns, work.plan, work.keep_drafting, work.hold_at)
    drafted_at = stopwatch.mark()
    verify = _verify_pass(work, drafted.drafts, drafted.owners)
    logits = head.logits((yield verify))
    finite = finite_rows(logits).tolist()
    if len(logits) > len(work.turns) and not all(finite):
        # A drafted token may have done it, and its row spoils the others of its sequence: verify without drafts.
        turns = [replace(turn, max_draft_tokens=0, looked_up=(), parents=(), num_probes=0) for turn in work.turns]
        return (yield from _round(replace(work, turns=turns, num_taps=0), head, stopwatch))
    head.note_taps(verify.taps, logits)
    rows, start = [], 0
    for turn, one in zip(work.turns, drafted.drafts, strict=True):
        rows.append(Rows(head.sampler(turn.sequence_id), start, one.token_ids, one.parents))
        start = rows[-1].end + turn.num_probes
    draft_logits = [torch.stack(logits) if logits else None for logits in drafted.logits]
    verdicts = head.accept(logits, rows, draft_logits)
    committed = head.commit(logits, rows, verdicts, finite)
    ended = stopwatch.mark()
    return RoundResult(
        committed=committed,
        drafts=drafted.drafts,
        num_accepted=[verdict.num_accepted for verdict in verdicts],
        num_draft_steps=drafted.num_steps,
        draft_s=seconds(started, drafted_at),
        verify_s=seconds(drafted_at, ended),
        queued_s=queued_s(started, ended),
        paths=[verdict.path for verdict in verdicts],
        probed=_probed(logits, rows, work.turns),
    )


def _probed(logits: Tensor, rows: Sequence[Rows], turns: Sequence[Turn]) -> list[list[int]]:
    """The target's likeliest token after each turn's probes, which come behind its draft."""
    if not any(turn.num_probes for turn in turns):
        return [[] for _ in turns]
    pairs = list(zip(rows, turns, strict=True))
    probes = [at for row, turn in pairs for at in range(row.end, row.end + turn.num_probes)]
    likeliest = iter(logits[probes].argmax(-1).tolist())
    return [list(itertools.islice(likeliest, turn.num_probes)) for turn in turns]


def _prefill_pass(work: Prefill) -> Pass:
    return Pass(
        round_id=work.id,
        token_ids=[token for chunk in work.chunks for token in chunk.token_ids],
        rows=[chunk.rows for chunk in work.chunks],
        fixed_shape=any(chunk.replay for chunk in work.chunks),
    )


def _verify_pass(work: Round, drafts: Sequence[Draft], owners: Sequence[int]) -> Pass:
    """All sublayers over every turn's newest token and drafts. Of rows that were held, the i-th one of a turn is its
    i-th row here; they are joined in where the others have come as far."""
    pairs = list(zip(work.turns, drafts, strict=True))
    tokens = [[turn.last_token, *one.token_ids, *_probes(turn)] for turn, one in pairs]
    parents = [_parents(turn, one) for turn, one in pairs]
    rows = [
        RowSpan(turn.arena_start, turn.length - 1, len(each), tree)
        for turn, each, tree in zip(work.turns, tokens, parents, strict=True)
    ]
    if owners and work.hold_at:
        num_held = [owners.count(index) for index in range(len(pairs))]
        left = [each[held:] for each, held in zip(tokens, num_held, strict=True)]
        return Pass(
            round_id=work.id,
            token_ids=[token for each in left for token in each],
            rows=[span.rest(held) for span, held in zip(rows, num_held, strict=True)],
            join=Join(at=work.hold_at, order=_joined_order(owners, [len(each) for each in left]), rows=rows),
        )
    taps, at = [], 0
    for token, span in zip(work.taps, rows, strict=False):
        taps.append((at, token))
        at += span.num_rows
    return Pass(round_id=work.id, token_ids=[token for each in tokens for token in each], rows=rows, taps=taps)


def _probes(turn: Turn) -> Sequence[int]:
    return turn.looked_up[len(turn.looked_up) - turn.num_probes :]


def _parents(turn: Turn, drafted: Draft) -> list[int]:
    """Of each row of the verify. Empty for a chain."""
    probes = turn.parents[len(turn.looked_up) - turn.num_probes :]
    return [-1, *drafted.parents, *probes] if drafted.parents or probes else []


def _joined_order(owners: Sequence[int], num_left: Sequence[int]) -> list[int]:
    """Held rows, and the rows that are left of each turn, put turn by turn."""
    rows_of: list[list[int]] = [[] for _ in num_left]
    for row, owner in enumerate(owners):
        rows_of[owner].append(row)
    first = len(owners)
    for rows, count in zip(rows_of, num_left, strict=True):
        rows.extend(range(first, first + count))
        first += count
    return [row for rows in rows_of for row in rows]
