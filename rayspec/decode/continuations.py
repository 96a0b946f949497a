"""Which next tokens would complete a sequence of tokens: one of a list, or one that the text already has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Continuations:
    """A list of sequences, each with a number, looked up by the end of a text. Sequences may have any length from 1."""

    def __init__(self, sequences: Iterable[tuple[Sequence[int], float]]) -> None:
        self._last: dict[tuple[int, ...], dict[int, float]] = {}
        for sequence, number in sequences:
            *before, last = sequence
            ends = self._last.setdefault(tuple(before), {})
            ends[last] = ends.get(last, 0.0) + number
        self._lengths = sorted({len(before) for before in self._last})

    def __bool__(self) -> bool:
        return bool(self._last)

    def after(self, token_ids: Sequence[int], pending: Sequence[int]) -> list[tuple[int, float]]:
        """Return the tokens that complete a sequence after `token_ids` and `pending`, with the sequences' numbers."""
        end = _end(token_ids, pending, max(self._lengths, default=0))
        fitting = (self._last.get(end[len(end) - length :]) for length in self._lengths if length <= len(end))
        return [each for ends in fitting if ends is not None for each in ends.items()]


class NgramsOfText:
    """The n-grams of a growing text. size: 0 for none."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._last: dict[tuple[int, ...], set[int]] = {}

    def __bool__(self) -> bool:
        return self._size > 0

    def extend(self, token_ids: Sequence[int], num_new: int) -> None:
        """Add the n-grams that end in the last `num_new` tokens of the text."""
        for at in range(max(len(token_ids) - num_new, self._size - 1), len(token_ids)):
            self._last.setdefault(tuple(token_ids[at + 1 - self._size : at]), set()).add(token_ids[at])

    def after(self, token_ids: Sequence[int], pending: Sequence[int]) -> set[int]:
        """Return the tokens that would repeat an n-gram after `token_ids`, which is the text, and `pending`."""
        if not self._size:
            return set()
        length = self._size - 1
        end = _end(token_ids, pending, length + len(pending))
        before = end[len(end) - length :]
        repeated = {
            end[at] for at in range(max(len(end) - len(pending), length), len(end)) if end[at - length : at] == before
        }
        return repeated | self._last.get(before, set())


def _end(token_ids: Sequence[int], pending: Sequence[int], length: int) -> tuple[int, ...]:
    """Return the last `length` tokens of both, or all if there are fewer."""
    num_committed = max(0, length - len(pending))
    both = (*token_ids[len(token_ids) - min(num_committed, len(token_ids)) :], *pending)
    return both[max(0, len(both) - length) :]
