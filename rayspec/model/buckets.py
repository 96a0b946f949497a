"""Shapes of passes. Passes of one bucket launch the same kernels with the same arguments, so they share one graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayspec.model.rows import Path, RowSpan

# Up to this number, the bits of a row's result do not depend on how many rows its sequence has. Rows of a tree are bits
# of one int64.
MAX_TREE_ROWS = 63
_MAX_PADDED_ROWS = 512


@dataclass(frozen=True, slots=True)
class Bucket:
    """Shape of a pass. num_rows, num_sequences: numbers with padding. max_rows: the most rows of one sequence. is_tree:
    each row has bits for the rows that it sees."""

    num_rows: int
    num_sequences: int
    max_rows: int
    is_tree: bool


def bucket_of(spans: Sequence[RowSpan], paths: Sequence[Sequence[Path]]) -> Bucket:
    """Return the smallest bucket for these rows. Above 512 rows, as in prompt chunks, the number of rows is not padded.

    Three kinds of passes have separate buckets: single rows (decoding, drafting), chains and trees (verifying).
    """
    num_rows = sum(span.num_rows for span in spans)
    longest = max((span.num_rows for span in spans), default=1)
    return Bucket(
        num_rows=padded_rows(num_rows),
        num_sequences=padded_sequences(len(spans)),
        max_rows=1 if longest == 1 else MAX_TREE_ROWS if longest <= MAX_TREE_ROWS else padded_rows(longest),
        is_tree=any(paths),
    )


def decode_and_verify_buckets(max_sequences: int, max_draft_tokens: int) -> list[Bucket]:
    """Return the buckets of decoding and drafting with up to `max_sequences` sequences, then those of verifying chains.
    Buckets for drafts of more than 62 tokens are left out."""
    sizes = dict.fromkeys(padded_sequences(number) for number in range(1, max_sequences + 1))
    decode = dict.fromkeys(
        Bucket(padded_rows(number), padded_sequences(number), 1, False) for number in range(1, max_sequences + 1)
    )
    if max_draft_tokens == 0:
        return list(decode)
    max_rows = min(max_draft_tokens + 1, MAX_TREE_ROWS)
    verify = dict.fromkeys(
        Bucket(padded_rows(number), size, MAX_TREE_ROWS, False)
        for size in sizes
        for number in range(size // 2 + 2, min(size, max_sequences) * max_rows + 1)
    )
    return [*decode, *verify]


def padded_rows(num_rows: int) -> int:
    """Round up to 1, 2, 4, 8, a multiple of 8 up to 64, then in steps of an eighth to a quarter of the number.

    Numbers above 512 stay as they are.
    """
    if num_rows > _MAX_PADDED_ROWS:
        return num_rows
    if num_rows <= 8:
        return _power_of_two(num_rows)
    step = max(_power_of_two(num_rows) // 8, 8)
    return -(-num_rows // step) * step


def padded_sequences(num_sequences: int) -> int:
    """Round up to a power of two."""
    return _power_of_two(num_sequences)


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()
