"""The target drafts for itself with the sublayers its plan keeps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rayspec.decode.head import Head
from rayspec.decode.passes import Pass
from rayspec.decode.runner import RowSpan
from rayspec.decode.sampling import Rows, draft_tokens
from rayspec.types import Plan

# Given each drafting sequence's confidences so far, says which of them draft one more token. It must depend on nothing
# else: where the head is in another process, a copy of the rule travels there.
KeepDrafting = Callable[[Sequence[Sequence[float]]], Sequence[bool]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One sequence's part in a round: its newest token sits at position `length` - 1 and is not in the arena yet.

    `end_tokens`: a draft that reaches one of them (end of sequence) ends. `looked_up`: the draft, where it was found
    elsewhere; the model then drafts nothing.
    """

    sequence_id: str
    start: int
    length: int
    last_token: int
    max_draft_tokens: int
    end_tokens: Collection[int] = ()
    looked_up: Sequence[int] = ()


@dataclass(slots=True)
class Draft:
    """What was drafted for one turn. confidences: of each token, where the model has drafted it."""

    token_ids: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)

    @property
    def looked_up(self) -> bool:
        return bool(self.token_ids) and not self.confidences


@dataclass(slots=True)
class DraftRound:
    """Drafts by turn. Where rows are held for verify, the r-th row held is one of turn `owners[r]`.

    logits: processed, of each turn's tokens, [V] each; kept for rejection verification only.
    """

    drafts: list[Draft]
    logits: list[list[Tensor]]
    owners: list[int] = field(default_factory=list)
    num_steps: int = 0


def draft_pass(
    round_id: int, turns: Sequence[Turn], drafts: Sequence[Draft], active: Sequence[int], plan: Plan, hold_at: int
) -> Pass:
    """The next step of the active turns' drafts: one row each."""
    chosen = [(turns[index], drafts[index].token_ids) for index in active]
    return Pass(
        round_id=round_id,
        token_ids=[tokens[-1] if tokens else turn.last_token for turn, tokens in chosen],
        rows=[RowSpan(turn.start, turn.length - 1 + len(tokens), 1) for turn, tokens in chosen],
        keep=plan.keep,
        hold_at=hold_at,
    )


def drafting_turns(turns: Sequence[Turn]) -> list[int]:
    """For which turns the model drafts."""
    return [index for index, turn in enumerate(turns) if turn.max_draft_tokens > 0 and not turn.looked_up]


def draft(
    head: Head,
    round_id: int,
    turns: Sequence[Turn],
    plan: Plan,
    keep_drafting: KeepDrafting | None,
    hold_at: int,
) -> Generator[Pass, Tensor, DraftRound]:
    """Draft for every turn until its length is reached, it drafts a stop token, or `keep_drafting` ends it. What was
    looked up is a draft already.

    Yields passes and is sent the states before the head. Keys and values of drafted rows go to the positions that
    verify overwrites. One host synchronisation a step.
    """
    result = DraftRound([Draft(list(turn.looked_up)) for turn in turns], [[] for _ in turns])
    active = drafting_turns(turns)
    while active:
        logits = head.logits((yield draft_pass(round_id, turns, result.drafts, active, plan, hold_at)))
        result.owners.extend(active)
        result.num_steps += 1
        drafts = [result.drafts[index] for index in active]
        rows = [
            Rows(head.sampler(turns[index].sequence_id), at, one.token_ids)
            for at, (index, one) in enumerate(zip(active, drafts, strict=True))
        ]
        drawn = draft_tokens(logits, rows, head.verification)
        _append(drafts, drawn.token_ids, drawn.confidence)
        if drawn.logits is not None:
            for index, row in zip(active, drawn.logits, strict=True):
                result.logits[index].append(row)
        active = _still_drafting(active, turns, result.drafts, keep_drafting)
    return result


def _append(drafts: Sequence[Draft], token_ids: Tensor, confidence: Tensor) -> None:
    tokens, confidences = torch.stack([token_ids.double(), confidence.double()]).tolist()
    for one, token, sure in zip(drafts, tokens, confidences, strict=True):
        one.token_ids.append(int(token))
        one.confidences.append(sure)


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
