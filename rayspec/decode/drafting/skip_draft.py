"""Drafts by the target itself, with each sublayer run by the plan's choice.

A draft is a chain of tokens, or a tree: a *main chain* with alternatives to its tokens, which have no successors
(SWIFT, Xia et al. 2025). Looked-up drafts may be any tree. If the drafted tokens occur earlier in the text, the tokens
that followed them there may extend the draft, which costs no draft step.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rayspec.decode.head import Head
from rayspec.decode.sampling import Drafts, Rows, draft_tokens
from rayspec.decode.work import Draft, KeepDrafting, Pass, RoundEntry
from rayspec.planning.lookup import DraftUntilFound
from rayspec.types import Plan

# The owner of a saved row whose token was drawn after its draft's end.
DROPPED = -1

# Above these confidences a drafted token is one of `Plan.tree_widths[0]`, [1], [2] alternatives; else of [3] (SWIFT).
SURENESS = (0.95, 0.8, 0.5)


@dataclass(slots=True)
class DraftRound:
    """Drafts by entry. owners: if rows are saved for the verify, the entry of each saved row, or DROPPED.

    logits: processed logits of each token that the model drafted, [V] each, by entry; kept for verification "rejection"
    only.
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
    """Return the pass of the next draft step: one row for each active entry. ahead: number of drafted tokens that the
    host does not know yet; the newest tokens are then read on the device."""
    chosen = [(entries[index], drafts[index].token_ids) for index in active]
    return Pass(
        round_id=round_id,
        token_ids=[] if ahead else [tokens[-1] if tokens else entry.last_token for entry, tokens in chosen],
        rows=[entry.rows(entry.length - 1 + len(tokens) + ahead, 1) for entry, tokens in chosen],
        choices=plan.choices,
        save_at=save_at,
    )


def drafting_entries(entries: Sequence[RoundEntry]) -> list[int]:
    """Return the indices of the entries for which the model drafts."""
    return [index for index, entry in enumerate(entries) if entry.max_draft_tokens > 0 and not entry.looked_up]


def draft(
    head: Head,
    round_id: int,
    entries: Sequence[RoundEntry],
    plan: Plan,
    keep_drafting: KeepDrafting | None,
    save_at: int,
) -> Generator[Pass, Tensor, DraftRound]:
    """Draft for every entry until the draft reaches its length or an end token, or `keep_drafting` ends it, possibly
    with looked-up tokens. Entries with looked-up tokens keep these as their draft.

    The generator yields passes and is sent the states before the head. Keys and values of drafted rows go to positions
    that the verify overwrites. The host synchronises at least every `head.draft_look_interval` steps. It then applies
    the rules step by step, and drops tokens that were drawn after the end of a draft.
    """
    result = DraftRound([entry.draft() for entry in entries], [[] for _ in entries])
    siblings: list[list[list[int]]] = [[] for _ in entries]  # by entry and drafted token
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
    """Draw the next tokens of the active entries, for as many steps as need no host synchronisation. The results stay
    on the device."""
    steps: list[Drafts] = []
    for ahead in range(_num_unseen(head, entries, drafts, active)):
        logits = head.logits((yield draft_pass(round_id, entries, drafts, active, plan, save_at, ahead=ahead)))
        rows = [
            # Placeholders for tokens that the host does not know yet: only their number is used.
            Rows(head.sampler(entries[index].sequence_id), at, [*drafts[index].token_ids, *[0] * ahead])
            for at, index in enumerate(active)
        ]
        steps.append(draft_tokens(logits, rows, head.verification, num_ranked=max(plan.tree_widths, default=0)))
        head.drawn = steps[-1].token_ids
    return steps


def _num_unseen(head: Head, entries: Sequence[RoundEntry], drafts: Sequence[Draft], active: Sequence[int]) -> int:
    """Return the number of steps until the host must synchronise: at the latest when a draft reaches its length."""
    if any(head.sampler(entries[index].sequence_id).reads_history for index in active):
        return 1
    return min(
        head.draft_look_interval,
        *(entries[index].max_draft_tokens - len(drafts[index].token_ids) for index in active),
    )


def _tables(steps: Sequence[Drafts]) -> list[list[list[float]]]:
    """Copy the steps to the host, at once. By step and entry: the token, its confidence, and ranked tokens, if any."""
    columns = [
        [step.token_ids.double()[:, None], step.confidence.double()[:, None]]
        + ([] if step.ranked is None else [step.ranked.double()])
        for step in steps
    ]
    tables: list[list[list[float]]] = torch.stack([torch.cat(each, 1) for each in columns]).tolist()
    return tables


def _append(draft: Draft, row: Sequence[float]) -> list[int]:
    """Append the token of a table's row to the draft, and return the row's ranked tokens, if any."""
    token, sure, *ranked = row
    draft.token_ids.append(int(token))
    draft.confidences.append(sure)
    return [int(other) for other in ranked]


def _siblings(chain: Draft, ranked: Sequence[Sequence[int]], widths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return alternatives to each token that the model drafted: the best-ranked other tokens, and more of them at lower
    confidence. Together with the chain there are at most `max_tokens` tokens. Earlier positions come first, because
    they are more likely to be reached."""
    num_left = max(0, max_tokens - len(chain.token_ids))
    siblings = []
    for token, confidence, best in zip(chain.token_ids, chain.confidences, ranked, strict=False):
        width = widths[sum(confidence <= bound for bound in SURENESS)]
        others = [other for other in best if other != token][: min(width - 1, num_left)]
        num_left -= len(others)
        siblings.append(others)
    return siblings


def _unfinished(active: Sequence[int], entries: Sequence[RoundEntry], drafts: Sequence[Draft]) -> list[int]:
    """Return the entries whose drafts are below their length and have not reached an end token."""
    return [
        index
        for index in active
        if len(drafts[index].token_ids) < entries[index].max_draft_tokens
        and drafts[index].token_ids[-1] not in entries[index].end_tokens
    ]


def _look_up(
    head: Head, active: Sequence[int], entries: Sequence[RoundEntry], drafts: Sequence[Draft], rule: DraftUntilFound
) -> list[int]:
    """Complete drafts with looked-up tokens where that is worth more than further drafting. Return the other entries,
    which continue to draft."""
    drafting = []
    for index in active:
        entry, one = entries[index], drafts[index]
        num_left = entry.max_draft_tokens - len(one.token_ids)
        found = head.lookup(entry.sequence_id).propose(num_left, one.token_ids)
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
