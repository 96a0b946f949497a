"""A forward pass as data, and the runner that takes it through a span of sublayers in one process or pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayspec.choices import SKIP, Choices
from rayspec.decode.noise import integers
from rayspec.decode.plan_search import PlanSearch, TappedToken
from rayspec.decode.runner import Batch, Runner
from rayspec.decode.scheduler import Move
from rayspec.model.rows import RowSpan
from rayspec.types import RayspecError

_MAX_ROUNDS_SAVED = 256


class TapsGoneError(RayspecError):
    """The taps of some tokens are no longer kept: later taps have replaced them."""

    kind = "taps_gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """Before sublayer `at`, concatenate the rows saved there earlier in the round and the rows of this pass, and sort
    them by `order`. The result continues as `rows`."""

    at: int
    order: Sequence[int]
    rows: Sequence[RowSpan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward over packed rows: `token_ids` enter at the embedding as `rows`. A pass is self-contained: it carries
    the positions of its rows, so a stage needs no data about its sequences. Empty `token_ids` mean that the tokens were
    drawn in this process and are still on the device.

    round_id: the round that owns the saved rows. choices: one for each sublayer of the whole model; None runs all in
    full. save_at: sublayer before which the states are saved for a later pass of the round; 0 saves nothing. taps:
    pairs of a row and its token; every stage keeps these rows' states at its sublayer boundaries for the plan search.
    fixed_shape, scores_pages: see `Runner.batch`.
    """

    round_id: int
    token_ids: Sequence[int]
    rows: Sequence[RowSpan]
    choices: Choices | None = None
    save_at: int = 0
    merge: Merge | None = None
    taps: Sequence[tuple[int, TappedToken]] = ()
    scores_pages: bool = False
    fixed_shape: bool = True

    def needs(self, first: int, last: int) -> bool:
        """Return whether the pass runs any of the sublayers `first` .. `last` (exclusive)."""
        return self.choices is None or any(choice != SKIP for choice in self.choices[first:last])


class SpanRunner:
    """Runs passes through the sublayers of one process. The first span embeds; the output of the last span goes to the
    head.

    The saved rows of an abandoned round are dropped once 256 later rounds have saved rows.
    """

    def __init__(self, runner: Runner, *, num_taps: int) -> None:
        self.runner = runner
        self._num_taps = num_taps
        self._saved: dict[int, list[Tensor]] = {}
        self._taps: dict[TappedToken, Tensor] = {}

    @torch.inference_mode()
    def run(self, work: Pass, hidden: Tensor | None = None, *, drawn: Tensor | None = None) -> Tensor:
        """Run the pass through this span. Return the states after it, [1, N', hidden_size]; N' differs from N if rows
        are merged here. hidden: [1, N, hidden_size] from the previous span; None at the embedding. drawn: the tokens of
        a pass without `token_ids`, int64 [N]."""
        runner = self.runner
        cut = work.merge.at if work.merge else work.save_at
        is_merged = work.merge is not None and work.merge.at <= runner.first_sublayer
        batch = self._batch(work, work.merge.rows if is_merged and work.merge else work.rows, drawn)
        if hidden is None:
            hidden = runner.embed(batch)
        if not runner.first_sublayer < cut <= runner.end_sublayer:
            return self._through(work, batch, hidden, runner.first_sublayer, runner.end_sublayer)
        hidden = self._through(work, batch, hidden, runner.first_sublayer, cut)
        if work.merge is None:
            self._save(work.round_id, hidden)
        else:
            hidden = self._merge(work.round_id, work.merge, hidden)
            batch = self._batch(work, work.merge.rows, None)
        return self._through(work, batch, hidden, cut, runner.end_sublayer)

    @torch.inference_mode()
    def move(self, moves: Sequence[Move]) -> None:
        """Copy keys and values in the KV cache."""
        for move in moves:
            self.runner.arena.move(move.source, move.destination, move.length, in_windowed_store=move.in_windowed_store)

    def forget(self) -> None:
        """Drop the saved rows of all rounds, and all taps."""
        self._saved.clear()
        self._taps.clear()

    def search(self, tokens: Sequence[TappedToken], rows: Sequence[RowSpan], next_tokens: Tensor | None) -> PlanSearch:
        """Return the plan search over this span's taps. rows: the row of each token. Raises TapsGoneError."""
        if any(token not in self._taps for token in tokens):
            raise TapsGoneError("the states of some tapped tokens are not kept any more")
        states = torch.stack([self._taps[token] for token in tokens], 1)
        return PlanSearch(self.runner, states, rows, next_tokens)

    def _batch(self, work: Pass, rows: Sequence[RowSpan], drawn: Tensor | None) -> Batch:
        own = work.token_ids if drawn is None else drawn
        token_ids = own if rows is work.rows else ()
        return self.runner.batch(
            rows, token_ids=token_ids, fixed_shape=work.fixed_shape, scores_pages=work.scores_pages
        )

    def _through(self, work: Pass, batch: Batch, hidden: Tensor, begin: int, end: int) -> Tensor:
        if not work.taps:
            return self.runner.run(batch, hidden, begin=begin, end=end, choices=work.choices)
        hidden = hidden.clone()  # it may lie in the buffer that the sublayers add to
        boundaries: dict[int, list[Tensor]] = {}
        out = self.runner.run(
            batch, hidden, begin=begin, end=end, choices=work.choices,
            tap=lambda index, states: boundaries.setdefault(index, []).append(states),
        )  # fmt: skip
        self._keep_taps(work, [hidden, *(torch.cat(pieces, 1) for pieces in boundaries.values())])
        return out

    def _keep_taps(self, work: Pass, boundaries: Sequence[Tensor]) -> None:
        rows = integers([row for row, _ in work.taps], self.runner.device)
        states = torch.stack([boundary[0, rows] for boundary in boundaries])
        for at, (_, token) in enumerate(work.taps):
            self._taps.pop(token, None)
            self._taps[token] = states[:, at]
        for token in list(self._taps)[: -self._num_taps]:
            del self._taps[token]

    def _save(self, round_id: int, hidden: Tensor) -> None:
        self._saved.setdefault(round_id, []).append(hidden.clone())  # it may lie in a buffer
        for abandoned in sorted(self._saved)[:-_MAX_ROUNDS_SAVED]:
            del self._saved[abandoned]

    def _merge(self, round_id: int, merge: Merge, hidden: Tensor) -> Tensor:
        rows = torch.cat([*self._saved.pop(round_id), hidden], 1)
        return rows[:, integers(merge.order, hidden.device)]
