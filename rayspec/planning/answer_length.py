"""How many tokens requests are expected to generate. Their limits say little: most answers end long before."""

from __future__ import annotations

from rayspec.planning.constants import ANSWERS_HALF_LIFE
from rayspec.planning.discounted import Discounted


class AnswerLength:
    """Learns how likely a token is the last of an answer that ends by itself, from the tokens of all requests. Tokens
    of answers that go on, or that reach their limit, count too; so short answers, which end first, do not bias it."""

    def __init__(self) -> None:
        self._ends = Discounted(ANSWERS_HALF_LIFE)  # ends per token

    def observe(self, *, num_tokens: int, num_ends: int) -> None:
        """Record tokens that were generated, and how many of them ended an answer before its limit."""
        self._ends.observe(num_ends, num_tokens, age=num_ends)

    def expected(self, limit: int) -> float:
        """Return how many tokens a request is expected to generate, if `limit` is the most; `limit` until an answer has
        ended by itself."""
        chance = self._ends.value
        return (1 - (1 - chance) ** limit) / chance if chance else float(limit)
