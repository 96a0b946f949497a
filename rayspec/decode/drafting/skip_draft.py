"""The target drafts for itself with the sublayers its plan keeps.

A draft is a chain of tokens, or a tree: a *main chain* with alternatives to its tokens, which nothing follows (SWIFT,
Xia et al. 2025). What was found elsewhere may be any tree. Where the tokens drafted so far stand in the text already,
what followed them there may go on the draft: it costs no step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rayspec.decode.head import Head
from rayspec.decode.passes import Pass
from rayspec.decode.sampling import Drafts, Rows, depths_of, draft_tokens
from rayspec.model.rows import RowSpan, Runs
from rayspec.planning.lookup import DraftUntilFound
from rayspec.types import Plan

# Given each drafting sequence's confidences so far, says which of them draft one more token. It must depend on nothing
# else: where the head is in another process, a copy of the rule travels there.
KeepDrafting = Callable[[Sequence[Sequence[float]]], Sequence[bool]]

# The owner of a saved row whose token was drawn after its draft's end.
DROPPED = -1

# Above these confidences a drafted token is one of `Plan.tree_widths[0]`, [1], [2] alternatives; else of [3] (SWIFT's).
SURENESS = (0.95, 0.8, 0.5)


@dataclass(frozen=True, slots=True)
class RoundEntry:
    """One sequence's part in a round: its newest token sits at position `length` - 1 and is not in the KV cache yet.

    `end_tokens`: a draft that reaches one of them (end of sequence) ends. `looked_up`: the draft, where it was found
    elsewhere; the model then drafts nothing. parents: of each of these tokens the row that it follows, where row 0 is
    the newest token and row i + 1 the i-th of these; empty for a chain. The last `num_probes` of them are no draft: the
    target is only asked what it finds likeliest after each. max_tree_tokens: the most rows besides the newest token.
    """

    sequence_id: str
    runs: Runs
    length: int
    last_token: int
    max_draft_tokens: int
    end_tokens: Collection[int] = ()
    looked_up: Sequence[int] = ()
    parents: Sequence[int] = ()
    num_probes: int = 0
    max_tree_tokens: int = 0

    def draft(self) -> Draft:
        """What it has to begin with."""
        num_drafted = len(self.looked_up) - self.num_probes
        return Draft(list(self.looked_up[:num_drafted]), parents=list(self.parents[:num_drafted]))


@dataclass(slots=True)
class Draft:
    """What was drafted for one entry. confidences: of each token of the main chain that the model has drafted; these
    come first. parents: see `RoundEntry`; a chain has none. match_classes: of the others, which were looked up."""

    token_ids: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    match_classes: list[int] = field(default_factory=list)

    @property
    def looked_up(self) -> bool:
        return bool(self.token_ids) and not self.confidences

    @property
    def num_drafted(self) -> int:
        """Tokens of the main chain that the model has drafted."""
        return len(self.confidences)

    @property
    def length(self) -> int:
        """Tokens of its longest path."""
        return max(depths_of(self.parents)) if self.parents else len(self.token_ids)

    def branch(self, siblings: Sequence[Sequence[int]]) -> None:
        """Adds alternatives to each token of what was a chain."""
        if any(siblings):
            self.parents = list(range(len(self.token_ids)))
            for parent, tokens in enumerate(siblings):
                self.token_ids.extend(tokens)
                self.parents.extend([parent] * len(tokens))


@dataclass(slots=True)
class DraftRound:
    """Drafts by entry. Where rows are saved for verify, the r-th saved row is one of entry `owners[r]`, or DROPPED.

    logits: processed, of each entry's tokens that the model has drafted, [V] each; kept for rejection only.
    """

    drafts: list[Draft]
    logits: list[list[Tensor]]
    owners: list[int] = field(default_factory=list)
    num_steps: int = 0


def draft_pass(
    round_id: int,
    entries: Sequence[RoundEntry],
    drafts: Sequence[Draft],
    active: Sequence[int],
    plan: Plan,
    save_at: int,
    *,
    ahead: int = 0,
) -> Pass:
    """The next step of the active entries' drafts: one row each. ahead: of what the host knows, by so many tokens; the
    last ones are still on the device."""
    chosen = [(entries[index], drafts[index].token_ids) for index in active]
    return Pass(
        round_id=round_id,
        token_ids=[] if ahead else [tokens[-1] if tokens else entry.last_token for entry, tokens in chosen],
        rows=[RowSpan(entry.runs, entry.length - 1 + len(tokens) + ahead, 1) for entry, tokens in chosen],
        choices=plan.choices,
        save_at=save_at,
    )


def drafting_entries(entries: Sequence[RoundEntry]) -> list[int]:
    """For which entries the model drafts."""
    return [index for index, entry in enumerate(entries) if entry.max_draft_tokens > 0 and not entry.looked_up]


def draft(
    head: Head,
    round_id: int,
    entries: Sequence[RoundEntry],
    plan: Plan,
    keep_drafting: KeepDrafting | None,
    save_at: int,
) -> Generator[Pass, Tensor, DraftRound]:
    """Draft for every entry until its length is reached, it drafts a stop token, or `keep_drafting` ends it, be it that
    what follows is looked up. What was looked up before is a draft already.

    Yields passes and is sent the states before the head. Keys and values of drafted rows go to the positions that
    verify overwrites. One host synchronisation for every few steps, as the head says: rules are applied step by step
    when the host has looked, and what was drawn after a draft's end is dropped.
    """
    result = DraftRound([entry.draft() for entry in entries], [[] for _ in entries])
    siblings: list[list[list[int]]] = [[] for _ in entries]  # of each entry's drafted tokens
    active = drafting_entries(entries)
    while active:
        drawing = list(active)
        steps = yield from _drawn(head, round_id, entries, result.drafts, drawing, plan, save_at)
        for step, table in zip(steps, _tables(steps), strict=True):
            result.num_steps += 1
            result.owners.extend(index if index in active else DROPPED for index in drawing)
            for at, index in enumerate(drawing):
                if index in active:
                    siblings[index].append(_append(result.drafts[index], table[at]))
                    if step.logits is not None:
                        result.logits[index].append(step.logits[at])
            active = _unfinished(active, entries, result.drafts)
            if isinstance(keep_drafting, DraftUntilFound):
                active = _look_up(head, active, entries, result.drafts, keep_drafting)
            active = _worth_drafting(active, result.drafts, keep_drafting)
    if plan.tree_widths:
        for entry, one, others in zip(entries, result.drafts, siblings, strict=True):
            if others and (head.verification == "coupled" or head.sampler(entry.sequence_id).greedy):
                one.branch(_siblings(one, others, plan.tree_widths, entry.max_tree_tokens))
    return result


def _drawn(
    head: Head,
    round_id: int,
    entries: Sequence[RoundEntry],
    drafts: Sequence[Draft],
    active: Sequence[int],
    plan: Plan,
    save_at: int,
) -> Generator[Pass, Tensor, list[Drafts]]:
    """The next tokens of the active entries, as many steps as the host need not look. All is on the device."""
    steps: list[Drafts] = []
    for ahead in range(_num_unseen(head, entries, drafts, active)):
        logits = head.logits((yield draft_pass(round_id, entries, drafts, active, plan, save_at, ahead=ahead)))
        rows = [
            # Nobody reads the tokens that are not known yet; their number counts.
            Rows(head.sampler(entries[index].sequence_id), at, [*drafts[index].token_ids, *[0] * ahead])
            for at, index in enumerate(active)
        ]
        steps.append(draft_tokens(logits, rows, head.verification, num_ranked=max(plan.tree_widths, default=0)))
        head.drawn = steps[-1].token_ids
    return steps


def _num_unseen(head: Head, entries: Sequence[RoundEntry], drafts: Sequence[Draft], active: Sequence[int]) -> int:
    """Steps until the host must look: at the latest when a draft has its length."""
    if any(head.sampler(entries[index].sequence_id).reads_history for index in active):
        return 1
    return min(
        head.draft_look_interval,
        *(entries[index].max_draft_tokens - len(drafts[index].token_ids) for index in active),
    )


def _tables(steps: Sequence[Drafts]) -> list[list[list[float]]]:
    """By step and entry: the token, its confidence, and the ranked tokens, if any. One copy to the host."""
    columns = [
        [step.token_ids.double()[:, None], step.confidence.double()[:, None]]
        + ([] if step.ranked is None else [step.ranked.double()])
        for step in steps
    ]
    tables: list[list[list[float]]] = torch.stack([torch.cat(each, 1) for each in columns]).tolist()
    return tables


def _append(draft: Draft, row: Sequence[float]) -> list[int]:
    """row: of a table. Returns the ranked tokens, if any."""
    token, sure, *ranked = row
    draft.token_ids.append(int(token))
    draft.confidences.append(sure)
    return [int(other) for other in ranked]


def _siblings(chain: Draft, ranked: Sequence[Sequence[int]], widths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Alternatives to each token that the model has drafted: the tokens nearest to it, more of them the less sure it
    was. Together with the chain no more than `max_tokens`; the earlier ones come first, which are the likelier to be
    reached."""
    num_left = max(0, max_tokens - len(chain.token_ids))
    siblings = []
    for token, confidence, best in zip(chain.token_ids, chain.confidences, ranked, strict=False):
        width = widths[sum(confidence <= bound for bound in SURENESS)]
        others = [other for other in best if other != token][: min(width - 1, num_left)]
        num_left -= len(others)
        siblings.append(others)
    return siblings


def _unfinished(active: Sequence[int], entries: Sequence[RoundEntry], drafts: Sequence[Draft]) -> list[int]:
    """Which may have one more token."""
    return [
        index
        for index in active
        if len(drafts[index].token_ids) < entries[index].max_draft_tokens
        and drafts[index].token_ids[-1] not in entries[index].end_tokens
    ]


def _look_up(
    head: Head, active: Sequence[int], entries: Sequence[RoundEntry], drafts: Sequence[Draft], rule: DraftUntilFound
) -> list[int]:
    """Goes on with what followed the drafted tokens before, where that is worth more than to draft on; returns those
    that draft on."""
    drafting = []
    for index in active:
        entry, one = entries[index], drafts[index]
        num_left = entry.max_draft_tokens - len(one.token_ids)
        found = head.lookup(entry.sequence_id, rule.ngram, rule.shortest).propose(num_left, one.token_ids)
        num_taken = rule.num_looked_up(one.confidences, found.match_classes)
        if num_taken:
            one.token_ids.extend(found.token_ids[:num_taken])
            one.match_classes.extend(found.match_classes[:num_taken])
        else:
            drafting.append(index)
    return drafting


def _worth_drafting(active: list[int], drafts: Sequence[Draft], keep_drafting: KeepDrafting | None) -> list[int]:
    if keep_drafting is None or not active:
        return active
    worth = keep_drafting([drafts[index].confidences for index in active])
    return [index for index, keep in zip(active, worth, strict=True) if keep]
