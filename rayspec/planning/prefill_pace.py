"""How much of a prompt to run beside sequences whose readers wait for the next token."""

from __future__ import annotations

from rayspec.planning.discounted import Discounted

# A chunk takes as long as the round beside it: the gap between tokens doubles, and the prompt gets half of the time.
_CHUNK_PER_ROUND = 1.0
# The first chunk, and the smallest: fewer rows cost more each.
_SMALLEST_CHUNK = 32
_HALF_LIFE = 1.0  # rounds, or chunks


class PrefillPace:
    """Learns from what was run, on whatever it runs: seconds of a round without a chunk, and of a row of a chunk."""

    def __init__(self) -> None:
        self._round_s = Discounted(_HALF_LIFE)
        self._row_s = Discounted(_HALF_LIFE)

    def observe(self, seconds: float, *, num_chunk_rows: int, has_round: bool) -> None:
        """Some work took so long: a round, chunks, or both at once."""
        if num_chunk_rows == 0:
            self._round_s.observe(seconds)
        else:
            chunk_s = max(seconds - self._round_s.value * has_round, 0.0)
            self._row_s.observe(chunk_s / num_chunk_rows)

    def num_rows(self, most: int) -> int:
        """For the next chunk, `most` at most."""
        if not self._round_s.value or not self._row_s.value:
            return min(_SMALLEST_CHUNK, most)
        return min(max(int(_CHUNK_PER_ROUND * self._round_s.value / self._row_s.value), _SMALLEST_CHUNK), most)
