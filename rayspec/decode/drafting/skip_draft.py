"""The target drafts for itself with the sublayers its plan keeps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rayspec.config import Verification
from rayspec.decode.runner import RowSpan, Runner
from rayspec.decode.sampling import Rows, TokenSampler, draft_tokens
from rayspec.types import Plan

# Given each drafting sequence's confidences so far, says which of them draft one more token.
KeepDrafting = Callable[[Sequence[Sequence[float]]], Sequence[bool]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One sequence's part in a round: its newest token sits at position `length` - 1 and is not in the arena yet.

    `end_tokens`: a draft that reaches one of them (end of sequence) ends.
    """

    sequence_id: str
    start: int
    length: int
    last_token: int
    max_draft_tokens: int
    end_tokens: Collection[int] = ()


@dataclass(slots=True)
class Draft:
    """What was drafted for one turn. `logits`: processed, [num_tokens, V], kept for rejection verification only."""

    token_ids: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class DraftRound:
    """Drafts by turn, and the hidden states [1, rows, hidden_size] that verify need not compute again: row r is the
    state before the plan's first skipped sublayer of turn `owners[r]`, in drafting order."""

    drafts: list[Draft]
    owners: list[int] = field(default_factory=list)
    prefix_hidden: list[Tensor] = field(default_factory=list)
    num_steps: int = 0


def draft(
    runner: Runner,
    turns: Sequence[Turn],
    samplers: Sequence[TokenSampler],
    plan: Plan,
    *,
    verification: Verification,
    keep_drafting: KeepDrafting | None,
) -> DraftRound:
    """Draft for every turn until its length is reached, it drafts a stop token, or `keep_drafting` ends it.

    Keys and values of drafted rows go to the positions that verify overwrites. One host synchronisation a step.
    """
    result = DraftRound([Draft() for _ in turns])
    active = [index for index, turn in enumerate(turns) if turn.max_draft_tokens > 0]
    while active:
        drafts = [result.drafts[index] for index in active]
        inputs = [d.token_ids[-1] if d.token_ids else turns[i].last_token for i, d in zip(active, drafts, strict=True)]
        batch = runner.batch(
            [
                RowSpan(turns[i].start, turns[i].length - 1 + len(d.token_ids), 1)
                for i, d in zip(active, drafts, strict=True)
            ]
        )
        hidden = runner.run(batch, runner.embed(torch.tensor(inputs, device=runner.device)), last=plan.prefix)
        result.owners.extend(active)
        result.prefix_hidden.append(hidden)
        result.num_steps += 1
        logits = runner.head(runner.run(batch, hidden, first=plan.prefix, keep=plan.keep))
        rows = [Rows(samplers[i], at, d.token_ids) for at, (i, d) in enumerate(zip(active, drafts, strict=True))]
        drawn = draft_tokens(logits, rows, verification)
        _append(drafts, drawn.token_ids, drawn.confidence, drawn.logits)
        active = _still_drafting(active, turns, result.drafts, keep_drafting)
    return result


def _append(drafts: Sequence[Draft], token_ids: Tensor, confidence: Tensor, logits: Tensor | None) -> None:
    tokens, confidences = torch.stack([token_ids.double(), confidence.double()]).tolist()
    for index, one in enumerate(drafts):
        one.token_ids.append(int(tokens[index]))
        one.confidences.append(confidences[index])
        if logits is not None:
            one.logits.append(logits[index])


def _still_drafting(
    active: Sequence[int],
    turns: Sequence[Turn],
    drafts: Sequence[Draft],
    keep_drafting: KeepDrafting | None,
) -> list[int]:
    open_ended = [
        i
        for i in active
        if len(drafts[i].token_ids) < turns[i].max_draft_tokens and drafts[i].token_ids[-1] not in turns[i].end_tokens
    ]
    if keep_drafting is None or not open_ended:
        return open_ended
    worth = keep_drafting([drafts[i].confidences for i in open_ended])
    return [i for i, keep in zip(open_ended, worth, strict=True) if keep]
