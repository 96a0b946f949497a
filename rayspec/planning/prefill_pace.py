"""How much of a prompt to run beside sequences whose readers wait for the next token."""

from __future__ import annotations

# A chunk takes as long as the round beside it: the gap between tokens doubles, and the prompt gets half of the time.
_CHUNK_PER_ROUND = 1.0
# The first chunk, and the smallest: fewer rows cost more each.
_SMALLEST_CHUNK = 32
# Of what was seen last, against all before.
_WEIGHT = 0.5


class PrefillPace:
    """Learns from what was run, on whatever it runs: seconds of a round without a chunk, and of a row of a chunk."""

    def __init__(self) -> None:
        self._round_s: float | None = None
        self._row_s: float | None = None

    def observe(self, seconds: float, *, num_chunk_rows: int, has_round: bool) -> None:
        """Some work took so long: a round, chunks, or both at once."""
        if num_chunk_rows == 0:
            self._round_s = _faded(self._round_s, seconds)
        else:
            chunk_s = max(seconds - (self._round_s or 0.0) * has_round, 0.0)
            self._row_s = _faded(self._row_s, chunk_s / num_chunk_rows)

    def num_rows(self, most: int) -> int:
        """For the next chunk, `most` at most."""
        if not self._round_s or not self._row_s:
            return min(_SMALLEST_CHUNK, most)
        return min(max(int(_CHUNK_PER_ROUND * self._round_s / self._row_s), _SMALLEST_CHUNK), most)


def _faded(before: float | None, seen: float) -> float:
    return seen if before is None else (1 - _WEIGHT) * before + _WEIGHT * seen
