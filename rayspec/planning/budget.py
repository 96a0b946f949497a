"""When to search for a new plan: how much that may take, and what makes it worth while."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rayspec.planning.constants import COOLDOWN_TOKENS, MAX_PATIENCE_TOKENS, MAX_RATIO, NUM_ERRORS, TOKENS_HALF_LIFE
from rayspec.planning.discounted import Discounted


class Budget:
    """Plan search may take `share` of all time. Spending is bounded in advance, by predicted cost."""

    def __init__(self, share: float) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"share is {share}; it must lie between 0 and 1")
        self._share = share
        self._spent_s = 0.0

    @property
    def spent_s(self) -> float:
        return self._spent_s

    def allows(self, predicted_cost_s: float, *, elapsed_s: float, expected_remaining_s: float = 0.0) -> bool:
        """Whether a search of that cost keeps within the share of the time gone by and, with fair certainty, to come.

        Without `expected_remaining_s` the first search has to be earned first; with it, it can come early, when it
        still pays back.
        """
        return self._spent_s + predicted_cost_s <= self._share * (elapsed_s + expected_remaining_s)

    def spend(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"cannot spend {seconds} s")
        self._spent_s += seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """Under what circumstances the plan in use, or the decision not to draft, was made."""

    context: float
    batch: float
    expected_acceptance: float | None


class Trigger:
    """Wants a search when there was none, and when what the last one went by has changed.

    That is: the context or the batch by more than MAX_RATIO; observed acceptance from the plan's expectation by more
    than NUM_ERRORS standard errors; or `patience_tokens` (of one sequence) have gone by. Each search
    that leaves the decision as it was doubles the tokens that must go by before the next, up to `max_patience_tokens`;
    one that changes it starts from `cooldown_tokens` again.
    """

    def __init__(
        self,
        *,
        cooldown_tokens: int = COOLDOWN_TOKENS,
        patience_tokens: int = round(TOKENS_HALF_LIFE),
        max_patience_tokens: int = MAX_PATIENCE_TOKENS,
    ) -> None:
        if not 0 < cooldown_tokens <= patience_tokens <= max_patience_tokens:
            raise ValueError("need 0 < cooldown_tokens <= patience_tokens <= max_patience_tokens")
        self._cooldown_tokens = cooldown_tokens
        self._patience_tokens = patience_tokens
        self._max_patience_tokens = max_patience_tokens
        self._made: _Made | None = None
        self._num_unchanged = 0
        self._num_tokens = 0.0
        self._acceptance = Discounted(TOKENS_HALF_LIFE)

    def observe(self, *, num_tokens: float, num_accepted: int = 0, num_tested: int = 0) -> None:
        """A round: tokens committed per sequence; over the batch, draft tokens tested (up to and with the first
        rejected one of each draft) and accepted."""
        if not 0 <= num_accepted <= num_tested:
            raise ValueError(f"{num_accepted} of {num_tested} tokens accepted cannot be")
        self._acceptance.observe(num_accepted, num_tested)
        self._num_tokens += num_tokens

    def planned(self, *, changed: bool, context: float, batch: float, expected_acceptance: float | None = None) -> None:
        """A search has ended. changed: with another decision than before; expected_acceptance: None for no draft."""
        self._made = _Made(context=context, batch=batch, expected_acceptance=expected_acceptance)
        self._num_unchanged = 0 if changed else self._num_unchanged + 1
        self._num_tokens = 0.0
        self._acceptance = Discounted(TOKENS_HALF_LIFE)

    def reason(self, *, context: float, batch: float) -> str | None:
        """Why a search is wanted now; None if it is not."""
        if self._made is None:
            return "no plan yet"
        if self._num_tokens < self._backed_off(self._cooldown_tokens):
            return None
        for name, now, then in (("context", context, self._made.context), ("batch", batch, self._made.batch)):
            if max(now, then) > MAX_RATIO * max(min(now, then), 1.0):
                return f"{name} has gone from {then:g} to {now:g}"
        if self._drifted(self._made.expected_acceptance):
            return f"acceptance is {self._acceptance.value:.2f}, not {self._made.expected_acceptance:.2f} as expected"
        if self._num_tokens >= self._backed_off(self._patience_tokens):
            return f"{self._num_tokens:.0f} tokens since the last search"
        return None

    def _drifted(self, expected: float | None) -> bool:
        if expected is None or not self._acceptance.is_known:
            return False
        inside = self._acceptance.with_prior(0.5, 2.0)
        error = math.sqrt(inside * (1 - inside) / self._acceptance.weight)
        return abs(self._acceptance.value - expected) > NUM_ERRORS * error

    def _backed_off(self, num_tokens: int) -> float:
        return min(num_tokens * 2.0 ** min(self._num_unchanged, 30), self._max_patience_tokens)
