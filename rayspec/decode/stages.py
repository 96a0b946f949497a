"""Where the model runs. The engine speaks to `Stages`, one message a round; `LocalStages` is the whole model here."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from rayspec.config import SamplingParams, Verification
from rayspec.decode.drafting.skip_draft import Draft, DraftRound, KeepDrafting, Turn, draft
from rayspec.decode.plan_search import PlanSearch, TappedToken
from rayspec.decode.runner import Batch, RowSpan, Runner
from rayspec.decode.sampling import Rows, TokenSampler, finite_rows, target_tokens, top_logprobs
from rayspec.decode.scheduler import Move
from rayspec.decode.verify import Verdict, verify_coupled, verify_rejection
from rayspec.types import Logprob, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A sequence as the stages must know it: how it samples, from which seed, and what is committed."""

    sequence_id: str
    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    eos_token_ids: Sequence[int]

    def sampler(self, vocab_size: int, device: torch.device) -> TokenSampler:
        """For whoever holds the LM head."""
        return TokenSampler(
            self.params,
            seed=self.seed,
            prompt_token_ids=self.prompt_token_ids,
            output_token_ids=self.output_token_ids,
            eos_token_ids=self.eos_token_ids,
            vocab_size=vocab_size,
            device=device,
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """Committed tokens to be run at positions `first`, `first` + 1, ...; `sample`: choose the token after them."""

    sequence_id: str
    start: int
    first: int
    token_ids: Sequence[int]
    sample: bool
    replay: bool = False


@dataclass(frozen=True, slots=True)
class Committed:
    """Tokens the target chose for one sequence. `finite` is False when its logits were not: the tokens are void."""

    token_ids: Sequence[int]
    logprobs: Sequence[dict[int, Logprob]]
    finite: bool


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What a round did, by turn. Draft and verify times in seconds."""

    committed: Sequence[Committed]
    drafts: Sequence[Draft]
    num_accepted: Sequence[int]
    num_draft_steps: int
    draft_s: float
    verify_s: float


class Stages(Protocol):
    """The model, wherever it lives. Sequences are opened once, then prefilled and taken through rounds."""

    @property
    def num_sublayers(self) -> int: ...

    def open(self, opening: Opening) -> None: ...

    def close(self, sequence_id: str) -> None: ...

    def move(self, moves: Sequence[Move]) -> None: ...

    def prefill(self, pieces: Sequence[Piece]) -> list[Committed | None]:
        """Run pieces; for each that samples, the token after it."""

    def round(self, turns: Sequence[Turn], plan: Plan, keep_drafting: KeepDrafting | None, *, tap: bool) -> RoundResult:
        """Draft, verify, accept. With `tap` the hidden states of committed tokens are kept for the plan search."""

    def search(self, starts: Mapping[str, int]) -> PlanSearch | None:
        """A plan search over the tapped tokens of the sequences at those arena starts, or None when there are none."""


class LocalStages:
    """The whole model in this process."""

    def __init__(self, runner: Runner, *, vocab_size: int, verification: Verification, num_tap_tokens: int) -> None:
        self.runner = runner
        self._vocab_size = vocab_size
        self._verification: Verification = verification
        self._samplers: dict[str, TokenSampler] = {}
        self._taps: deque[TappedToken] = deque(maxlen=num_tap_tokens)

    @property
    def num_sublayers(self) -> int:
        return self.runner.num_sublayers

    def open(self, opening: Opening) -> None:
        self._samplers[opening.sequence_id] = opening.sampler(self._vocab_size, self.runner.device)

    def close(self, sequence_id: str) -> None:
        del self._samplers[sequence_id]
        kept = [tap for tap in self._taps if tap.sequence_id != sequence_id]
        self._taps = deque(kept, maxlen=self._taps.maxlen)

    @torch.inference_mode()
    def move(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self.runner.arena.move(move.source, move.destination, move.length)

    @torch.inference_mode()
    def prefill(self, pieces: Sequence[Piece]) -> list[Committed | None]:
        replays = any(piece.replay for piece in pieces)
        batch = self.runner.batch([_row_span(piece) for piece in pieces], fixed_shape=replays)
        tokens = torch.tensor([token for piece in pieces for token in piece.token_ids], device=self.runner.device)
        hidden = self.runner.run(batch, self.runner.embed(tokens))
        ends = torch.tensor([len(piece.token_ids) for piece in pieces]).cumsum(0) - 1
        sampling = [index for index, piece in enumerate(pieces) if piece.sample]
        results: list[Committed | None] = [None] * len(pieces)
        if sampling:
            logits = self.runner.head(hidden[:, ends[sampling].to(hidden.device)])
            rows = [Rows(self._samplers[pieces[index].sequence_id], at, ()) for at, index in enumerate(sampling)]
            chosen = target_tokens(logits, rows).tolist()
            verdicts = [Verdict(token_ids=[token], num_accepted=0) for token in chosen]
            for index, committed in zip(
                sampling, self._commit(logits, rows, verdicts, finite_rows(logits).tolist()), strict=True
            ):
                results[index] = committed
        return results

    @torch.inference_mode()
    def round(self, turns: Sequence[Turn], plan: Plan, keep_drafting: KeepDrafting | None, *, tap: bool) -> RoundResult:
        started = time.perf_counter()
        samplers = [self._samplers[turn.sequence_id] for turn in turns]
        drafted = draft(
            self.runner, turns, samplers, plan, verification=self._verification, keep_drafting=keep_drafting
        )
        drafted_at = time.perf_counter()
        boundaries: list[Tensor] | None = [] if tap else None
        logits = self._verify(turns, plan, drafted, boundaries)
        finite = finite_rows(logits).tolist()
        if drafted.num_steps and not all(finite):
            # A drafted token may have done it, and its row spoils the others of its sequence: verify without drafts.
            return self.round([replace(turn, max_draft_tokens=0) for turn in turns], plan, None, tap=False)
        rows, start = [], 0
        for sampler, one in zip(samplers, drafted.drafts, strict=True):
            rows.append(Rows(sampler, start, one.token_ids))
            start = rows[-1].end
        verdicts = self._accept(logits, rows, drafted.drafts)
        if boundaries is not None:
            self._keep_taps(turns, rows, verdicts, boundaries, logits)
        return RoundResult(
            committed=self._commit(logits, rows, verdicts, finite),
            drafts=drafted.drafts,
            num_accepted=[verdict.num_accepted for verdict in verdicts],
            num_draft_steps=drafted.num_steps,
            draft_s=drafted_at - started,
            verify_s=time.perf_counter() - drafted_at,
        )

    def search(self, starts: Mapping[str, int]) -> PlanSearch | None:
        live = [tap for tap in self._taps if tap.sequence_id in starts]
        return PlanSearch(self.runner, live, [starts[tap.sequence_id] for tap in live]) if live else None

    def _verify(
        self, turns: Sequence[Turn], plan: Plan, drafted: DraftRound, boundaries: list[Tensor] | None
    ) -> Tensor:
        """Logits [N, V] of every turn's newest token and drafts. Rows that the draft took through the plan's unskipped
        prefix are not run there again, except for taps, which need those states too."""
        spans = [
            RowSpan(turn.start, turn.length - 1, 1 + len(one.token_ids))
            for turn, one in zip(turns, drafted.drafts, strict=True)
        ]
        batch = self.runner.batch(spans)
        reuse = plan.prefix if drafted.owners and boundaries is None else 0
        hidden = self._rejoin(turns, drafted, reuse) if reuse else self._embed_rows(turns, drafted.drafts)
        if boundaries is not None:
            boundaries.append(hidden)
        hidden = self._run_tapped(batch, hidden, reuse, boundaries)
        return self.runner.head(hidden)

    def _run_tapped(self, batch: Batch, hidden: Tensor, first: int, boundaries: list[Tensor] | None) -> Tensor:
        if boundaries is None:
            return self.runner.run(batch, hidden, first=first)
        pieces: dict[int, list[Tensor]] = {}
        hidden = self.runner.run(batch, hidden, tap=lambda index, states: pieces.setdefault(index, []).append(states))
        boundaries.extend(torch.cat(states, 1) if len(states) > 1 else states[0] for states in pieces.values())
        return hidden

    def _embed_rows(self, turns: Sequence[Turn], drafts: Sequence[Draft]) -> Tensor:
        tokens = [token for turn, one in zip(turns, drafts, strict=True) for token in (turn.last_token, *one.token_ids)]
        return self.runner.embed(torch.tensor(tokens, device=self.runner.device))

    def _rejoin(self, turns: Sequence[Turn], drafted: DraftRound, prefix: int) -> Tensor:
        """States before the first skipped sublayer, turn by turn: the draft's own, and those of each newest token."""
        newest = [
            RowSpan(turn.start, turn.length - 1 + len(one.token_ids), 1)
            for turn, one in zip(turns, drafted.drafts, strict=True)
        ]
        tokens = [
            one.token_ids[-1] if one.token_ids else turn.last_token
            for turn, one in zip(turns, drafted.drafts, strict=True)
        ]
        embedded = self.runner.embed(torch.tensor(tokens, device=self.runner.device))
        tails = self.runner.run(self.runner.batch(newest), embedded, last=prefix)
        rows_of: list[list[int]] = [[] for _ in turns]
        for row, owner in enumerate(drafted.owners):
            rows_of[owner].append(row)
        for index in range(len(turns)):
            rows_of[index].append(len(drafted.owners) + index)
        order = torch.tensor([row for rows in rows_of for row in rows], device=self.runner.device)
        return torch.cat([*drafted.prefix_hidden, tails], 1)[:, order]

    def _accept(self, logits: Tensor, rows: Sequence[Rows], drafts: Sequence[Draft]) -> list[Verdict]:
        if self._verification == "coupled":
            return verify_coupled(logits, rows)
        return verify_rejection(logits, rows, [torch.stack(one.logits) if one.logits else None for one in drafts])

    def _commit(
        self, logits: Tensor, rows: Sequence[Rows], verdicts: Sequence[Verdict], finite: Sequence[bool]
    ) -> list[Committed]:
        """Everything is computed before the first sampler moves on."""
        results = []
        for row, verdict in zip(rows, verdicts, strict=True):
            is_finite = all(finite[row.start : row.end])
            count = row.sampler.params.logprobs
            logprobs: Sequence[dict[int, Logprob]] = ()
            if is_finite and count is not None:
                used = logits[row.start : row.start + len(verdict.token_ids)]
                logprobs = top_logprobs(used, verdict.token_ids, count)
            results.append(Committed(verdict.token_ids, logprobs, is_finite))
        for row, committed in zip(rows, results, strict=True):
            if committed.finite:
                row.sampler.commit(committed.token_ids)
        return results

    def _keep_taps(
        self,
        turns: Sequence[Turn],
        rows: Sequence[Rows],
        verdicts: Sequence[Verdict],
        boundaries: Sequence[Tensor],
        logits: Tensor,
    ) -> None:
        """Of every committed input token: its states at all sublayer boundaries, and what the target made of it."""
        best = logits.argmax(-1)
        states = torch.stack([boundary[0] for boundary in boundaries])
        for turn, row, verdict in zip(turns, rows, verdicts, strict=True):
            for offset in range(verdict.num_accepted + 1):
                at = row.start + offset
                self._taps.append(
                    TappedToken(turn.sequence_id, turn.length - 1 + offset, states[:, at].clone(), best[at])
                )


def _row_span(piece: Piece) -> RowSpan:
    return RowSpan(piece.start, piece.first, len(piece.token_ids))
