"""When to search for a new plan: the events that justify a search."""

from __future__ import annotations

import math

from rayspec.planning.learning import (
    COOLDOWN_TOKENS,
    MAX_PATIENCE_TOKENS,
    MAX_RATIO,
    NUM_ERRORS,
    TOKENS_HALF_LIFE,
    Discounted,
)


class Trigger:
    """Requests the first search, and another one when context or batch changed by more than the factor MAX_RATIO, when
    observed acceptance differs from the expectation by more than NUM_ERRORS standard errors, and after
    `patience_tokens` of one sequence. At least `cooldown_tokens` lie between two searches. Each search that leaves the
    decision unchanged doubles both numbers, up to `max_patience_tokens`."""

    def __init__(
        self,
        *,
        cooldown_tokens: int = COOLDOWN_TOKENS,
        patience_tokens: int = round(TOKENS_HALF_LIFE),
        max_patience_tokens: int = MAX_PATIENCE_TOKENS,
    ) -> None:
        self._cooldown_tokens = cooldown_tokens
        self._patience_tokens = patience_tokens
        self._max_patience_tokens = max_patience_tokens
        # Context and batch of the last decision (a plan, or no draft), and the acceptance that was expected then.
        self._decided: tuple[float, float, float | None] | None = None
        self._num_unchanged = 0
        self._num_tokens = 0.0
        self._acceptance = Discounted(TOKENS_HALF_LIFE)

    def observe(self, *, num_tokens: float, num_accepted: int = 0, num_tested: int = 0) -> None:
        """Record a round. num_tokens: committed per sequence. num_accepted, num_tested: draft tokens over the batch; a
        token is tested if no token before it in its draft was rejected."""
        self._acceptance.observe(num_accepted, num_tested)
        self._num_tokens += num_tokens

    def planned(self, *, changed: bool, context: float, batch: float, expected_acceptance: float | None = None) -> None:
        """Record the end of a search. changed: the decision differs from the one before. expected_acceptance: of the
        plan; None for no draft."""
        self._decided = (context, batch, expected_acceptance)
        self._num_unchanged = 0 if changed else self._num_unchanged + 1
        self._num_tokens = 0.0
        self._acceptance = Discounted(TOKENS_HALF_LIFE)

    def reason(self, *, context: float, batch: float) -> str | None:
        """Return why a search is due now; None if no search is due."""
        if self._decided is None:
            return "no plan yet"
        if self._num_tokens < self._backed_off(self._cooldown_tokens):
            return None
        context_then, batch_then, expected = self._decided
        for name, now, then in (("context", context, context_then), ("batch", batch, batch_then)):
            if max(now, then) > MAX_RATIO * max(min(now, then), 1.0):
                return f"{name} has gone from {then:g} to {now:g}"
        if expected is not None and self._acceptance.is_known:
            inside = self._acceptance.with_prior(0.5, 2.0)
            error = math.sqrt(inside * (1 - inside) / self._acceptance.weight)
            if abs(self._acceptance.value - expected) > NUM_ERRORS * error:
                return f"acceptance is {self._acceptance.value:.2f}, not {expected:.2f} as expected"
        if self._num_tokens >= self._backed_off(self._patience_tokens):
            return f"{self._num_tokens:.0f} tokens since the last search"
        return None

    def _backed_off(self, num_tokens: int) -> float:
        return min(num_tokens * 2.0 ** min(self._num_unchanged, 30), self._max_patience_tokens)
