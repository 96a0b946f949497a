"""The size of prompt chunks that run together with sequences whose readers wait for the next token."""

from __future__ import annotations

from rayspec.planning.discounted import Discounted

# A chunk takes as long as the round it shares: the gap between tokens doubles, and the prompt gets half of the time.
_CHUNK_PER_ROUND = 1.0
# Rows of the first chunk, and of the smallest: in smaller chunks each row costs more.
_SMALLEST_CHUNK = 32
_HALF_LIFE = 1.0  # rounds, or chunks


class PrefillPace:
    """Learns the seconds of a round without a chunk, and of a row of a chunk, from the rounds and chunks that ran."""

    def __init__(self) -> None:
        self._round_s = Discounted(_HALF_LIFE)
        self._row_s = Discounted(_HALF_LIFE)

    def observe(self, seconds: float, *, num_chunk_rows: int, has_round: bool) -> None:
        """Record the seconds of a round, of chunks, or of both together. num_chunk_rows: 0 without chunks."""
        if num_chunk_rows == 0:
            self._round_s.observe(seconds)
        else:
            chunk_s = max(seconds - self._round_s.value * has_round, 0.0)
            self._row_s.observe(chunk_s / num_chunk_rows)

    def num_rows(self, most: int) -> int:
        """Return the number of rows of the next chunk, `most` at most."""
        if not self._round_s.value or not self._row_s.value:
            return min(_SMALLEST_CHUNK, most)
        return min(max(int(_CHUNK_PER_ROUND * self._round_s.value / self._row_s.value), _SMALLEST_CHUNK), most)
