"""Shapes of passes. Passes of one bucket launch the same kernels with the same arguments, so one graph serves all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayspec.model.rows import Path, RowSpan

# Up to here a row's bits do not depend on how many rows its sequence has; and a tree's rows are bits of one number.
MAX_TREE_ROWS = 63
_MAX_PADDED_ROWS = 512


@dataclass(frozen=True, slots=True)
class Bucket:
    """num_rows, num_sequences: of the pass, with padding. max_rows: of one sequence. is_tree: rows carry bits that say
    what they see."""

    num_rows: int
    num_sequences: int
    max_rows: int
    is_tree: bool


def bucket_of(spans: Sequence[RowSpan], paths: Sequence[Sequence[Path]]) -> Bucket:
    """The smallest bucket for these rows. A pass with more than 512 rows, a chunk of a prompt, has a shape of its own.

    Three kinds of passes of a model's rounds have buckets of their own: single rows (decoding, drafting), chains and
    trees (verifying).
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
    """Those of decoding and drafting with up to so many sequences, then those of verifying their chains. Drafts of more
    than 62 tokens are left out."""
    sizes = dict.fromkeys(padded_sequences(number) for number in range(1, max_sequences + 1))
    decode = dict.fromkeys(
        Bucket(padded_rows(number), padded_sequences(number), 1, False) for number in range(1, max_sequences + 1)
    )
    max_rows = min(max_draft_tokens + 1, MAX_TREE_ROWS)
    verify = dict.fromkeys(
        Bucket(padded_rows(number), size, MAX_TREE_ROWS, False)
        for size in sizes
        for number in range(size // 2 + 2, min(size, max_sequences) * max_rows + 1)
    )
    return [*decode, *verify]


def padded_rows(num_rows: int) -> int:
    """1, 2, 4, 8, multiples of 8 up to 64, then in steps of an eighth to a quarter of the number."""
    if num_rows > _MAX_PADDED_ROWS:
        return num_rows
    if num_rows <= 8:
        return _power_of_two(num_rows)
    step = max(_power_of_two(num_rows) // 8, 8)
    return -(-num_rows // step) * step


def padded_sequences(num_sequences: int) -> int:
    """Powers of two."""
    return _power_of_two(num_sequences)


def _power_of_two(number: int) -> int:
    """The smallest that is no less."""
    return 1 << max(number - 1, 0).bit_length()
