"""Sequences in the KV cache, and the passes that checks run over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayspec.bench.selfcheck.models import Prepared
from rayspec.choices import Choices
from rayspec.model.buckets import padded_rows, padded_sequences
from rayspec.model.kv_arena import PAGE_SIZE
from rayspec.model.rows import RowSpan, Runs, runs_of_pages

NUM_SEQUENCES = 4
_PAGES_EACH = 16
_WINDOWED_SHIFT = 3  # pages by which sequences are shifted in the windowed store
NUM_SLOTS = NUM_SEQUENCES * _PAGES_EACH * PAGE_SIZE
MAX_PLACES = _PAGES_EACH * PAGE_SIZE
MAX_ROWS = padded_rows(NUM_SEQUENCES * MAX_PLACES)
MAX_SEQUENCES = padded_sequences(NUM_SEQUENCES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """A pass over some sequences. contexts: filled positions of each sequence. num_rows: rows of each sequence, 0 for
    none. parents: of each sequence's rows in a tree, see `RowSpan`. first_page: shifts all sequences in the arena."""

    name: str
    contexts: Sequence[int]
    num_rows: Sequence[int]
    parents: tuple[int, ...] = ()
    first_page: int = 0

    def spans(self) -> list[RowSpan]:
        each = enumerate(zip(self.contexts, self.num_rows, strict=True))
        return [
            RowSpan(
                _runs(index, self.first_page),
                context,
                num_rows,
                self.parents,
                windowed=_runs(index, self.first_page + _WINDOWED_SHIFT),
            )
            for index, (context, num_rows) in each
            if num_rows
        ]

    def token_ids(self, vocab_size: int) -> list[int]:
        """Return random token ids, the same every time."""
        generator = torch.Generator().manual_seed(sum(self.contexts))
        ids: list[int] = torch.randint(3, vocab_size, (sum(self.num_rows),), generator=generator).tolist()
        return ids


# A prompt in two chunks, then each kind of pass in a round.
PARITY_PASSES = (
    PassShape(name="chunk", contexts=(0, 0, 0), num_rows=(80, 70, 33)),
    PassShape(name="later chunk", contexts=(80, 70, 33), num_rows=(20, 0, 0)),
    PassShape(name="single rows", contexts=(100, 70, 33), num_rows=(1, 1, 1)),
    PassShape(name="chain", contexts=(101, 71, 34), num_rows=(5, 3, 1)),
    PassShape(name="tree", contexts=(106, 74, 35), num_rows=(5, 5, 5), parents=(-1, 0, 0, 1, -2)),
)


@torch.no_grad()
def logits_of(prepared: Prepared, shape: PassShape, choices: Choices | None = None) -> Tensor:
    """Run the pass, with all sublayers by default, and return its logits: [rows, vocab_size], float32 on the host."""
    runner = prepared.runner
    batch = runner.batch(shape.spans(), token_ids=shape.token_ids(prepared.vocab_size))
    return runner.head(runner.run(batch, runner.embed(batch), choices=choices)).float().cpu()


def _runs(sequence: int, first_page: int) -> Runs:
    """Return the sequence's pages as two runs: first the second half of its pages, then the first half."""
    num_pages = NUM_SEQUENCES * _PAGES_EACH
    order = [*range(_PAGES_EACH // 2, _PAGES_EACH), *range(_PAGES_EACH // 2)]
    return runs_of_pages([(first_page + sequence * _PAGES_EACH + page) % num_pages for page in order], PAGE_SIZE)
