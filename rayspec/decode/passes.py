"""One forward as data, and what runs it through a span of sublayers: here, or stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayspec.decode.plan_search import PlanSearch, TappedToken
from rayspec.decode.runner import Batch, Runner
from rayspec.decode.scheduler import Move
from rayspec.model.rows import RowSpan
from rayspec.types import RayspecError

_MAX_ROUNDS_HELD = 256


class TapsGoneError(RayspecError):
    """Tokens were tapped too long ago: later ones have taken their place."""

    kind = "taps_gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Before sublayer `at`, the rows held there earlier in the round and then the rows of this pass, put in `order`,
    go on as `rows`."""

    at: int
    order: Sequence[int]
    rows: Sequence[RowSpan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward over packed rows: `token_ids` enter at the embedding as `rows`. It says all there is to know, so a
    stage needs no memory of the sequences it serves: positions ride with the rows.

    round_id: whose held rows are meant. keep: flag per sublayer of the whole model; None runs all. hold_at: the states
    before that sublayer are held for a later pass of the round; 0 holds nothing. taps: of these rows (row r is the
    token taps[r]) every stage keeps its boundary states for the plan search. fixed_shape: see `Runner.batch`.
    """

    round_id: int
    token_ids: Sequence[int]
    rows: Sequence[RowSpan]
    keep: tuple[bool, ...] | None = None
    hold_at: int = 0
    join: Join | None = None
    taps: Sequence[tuple[int, TappedToken]] = ()
    fixed_shape: bool = True

    def needs(self, first: int, last: int) -> bool:
        """Whether sublayers `first` .. `last` (exclusive) have anything to do."""
        return self.keep is None or any(self.keep[first:last])


class SpanRunner:
    """Runs passes through the sublayers of one process; the first span embeds, the last one's output is the head's.

    A round that was given up leaves its held rows behind until enough later ones have held some.
    """

    def __init__(self, runner: Runner, *, num_taps: int) -> None:
        self.runner = runner
        self._num_taps = num_taps
        self._held: dict[int, list[Tensor]] = {}
        self._taps: dict[TappedToken, Tensor] = {}

    @torch.inference_mode()
    def run(self, work: Pass, hidden: Tensor | None = None) -> Tensor:
        """hidden: [1, N, hidden_size] from the span before; None at the embedding. Returns the states after the span,
        [1, N', hidden_size], where N' differs from N if rows are joined here."""
        runner = self.runner
        if hidden is None:
            hidden = runner.embed(torch.tensor(work.token_ids, device=runner.device))
        cut = work.join.at if work.join else work.hold_at
        if not runner.first < cut <= runner.last:
            joined = work.join is not None and work.join.at <= runner.first
            rows = work.join.rows if joined and work.join else work.rows
            return self._through(work, self._batch(work, rows), hidden, runner.first, runner.last)
        batch = self._batch(work, work.rows)
        hidden = self._through(work, batch, hidden, runner.first, cut)
        if work.join is None:
            self._hold(work.round_id, hidden)
        else:
            hidden = self._rejoin(work.round_id, work.join, hidden)
            batch = self._batch(work, work.join.rows)
        return self._through(work, batch, hidden, cut, runner.last)

    @torch.inference_mode()
    def move(self, moves: Sequence[Move]) -> None:
        """Copy keys and values in the arena."""
        for move in moves:
            self.runner.arena.move(move.source, move.destination, move.length)

    def forget(self) -> None:
        """Drop what rounds in flight have left here, and all taps."""
        self._held.clear()
        self._taps.clear()

    def search(self, tokens: Sequence[TappedToken], starts: Sequence[int], next_tokens: Tensor | None) -> PlanSearch:
        """The plan search's states in this span. Raises TapsGoneError."""
        if any(token not in self._taps for token in tokens):
            raise TapsGoneError("the states of some tapped tokens are not kept any more")
        states = torch.stack([self._taps[token] for token in tokens], 1)
        rows = [RowSpan(start, token.position, 1) for start, token in zip(starts, tokens, strict=True)]
        return PlanSearch(self.runner, states, rows, next_tokens)

    def _batch(self, work: Pass, rows: Sequence[RowSpan]) -> Batch:
        return self.runner.batch(rows, fixed_shape=work.fixed_shape)

    def _through(self, work: Pass, batch: Batch, hidden: Tensor, first: int, last: int) -> Tensor:
        if not work.taps:
            return self.runner.run(batch, hidden, first=first, last=last, keep=work.keep)
        boundaries: dict[int, list[Tensor]] = {}
        out = self.runner.run(
            batch, hidden, first=first, last=last, keep=work.keep,
            tap=lambda index, states: boundaries.setdefault(index, []).append(states),
        )  # fmt: skip
        self._keep_taps(work, [hidden, *(torch.cat(pieces, 1) for pieces in boundaries.values())])
        return out

    def _keep_taps(self, work: Pass, boundaries: Sequence[Tensor]) -> None:
        rows = torch.tensor([row for row, _ in work.taps], device=self.runner.device)
        states = torch.stack([boundary[0, rows] for boundary in boundaries])
        for at, (_, token) in enumerate(work.taps):
            self._taps.pop(token, None)
            self._taps[token] = states[:, at]
        for token in list(self._taps)[: -self._num_taps]:
            del self._taps[token]

    def _hold(self, round_id: int, hidden: Tensor) -> None:
        self._held.setdefault(round_id, []).append(hidden)
        for abandoned in sorted(self._held)[:-_MAX_ROUNDS_HELD]:
            del self._held[abandoned]

    def _rejoin(self, round_id: int, join: Join, hidden: Tensor) -> Tensor:
        rows = torch.cat([*self._held.pop(round_id), hidden], 1)
        return rows[:, torch.tensor(join.order, device=hidden.device)]
