"""A forward pass as data, and the runner that takes it through a span of sublayers in one process or pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rayspec.decode.noise import integers
from rayspec.decode.plan_search import PlanSearch
from rayspec.decode.runner import Batch, Runner
from rayspec.decode.work import Merge, Move, Pass, TappedToken, TapsGoneError
from rayspec.model.rows import RowSpan

_MAX_ROUNDS_SAVED = 256


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
