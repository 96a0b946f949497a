"""Lookahead: drafts are n-grams that the model generates in parallel with the text, by Jacobi iteration.

As in Fu et al. 2024, "Break the sequential dependency of LLM inference using lookahead decoding": in addition to the
newest token, a *window* of guessed tokens goes through the verify. The window has W columns of N - 1 levels; the token
at (level l, column w) stands 1 + l + w positions after the newest. The target's likeliest tokens after the last level
complete one n-gram per column. The n-grams enter the *pool*, and become drafts whenever the text reaches their first
token. As in the public implementation, the window advances by one position per round, regardless of the committed
tokens. Ours: a guess that matches to its end counts in full (the public implementation loses a token). N-grams that
contain one of the window's random initial tokens are not kept.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Guess:
    """A tree of tokens after the newest token. parents, num_probes: see `RoundEntry`."""

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    num_probes: int = 0

    def add(self, token_id: int, parent: int) -> int:
        """Append a token and return its row."""
        self.token_ids.append(token_id)
        self.parents.append(parent)
        return len(self.token_ids)


class Lookahead:
    """One sequence's window, and its pool. token_ids: the text so far; the window starts with random tokens of it."""

    # Of the published runs: tokens of an n-gram; n-grams that are made at the same time; n-grams kept for each token
    # that begins one, and verified.
    num_levels, num_columns, max_guesses = 5, 7, 7

    def __init__(self, token_ids: Sequence[int]) -> None:
        chance = random.Random(0)
        self._num_random_levels = self.num_levels - 1
        self._levels = [[chance.choice(token_ids) for _ in range(self.num_columns)] for _ in range(self.num_levels - 1)]
        self._continuations: dict[int, dict[tuple[int, ...], None]] = {}  # of each token, the latest last

    def guess(self, newest: int, *, max_tokens: int, max_depth: int) -> Guess:
        """Return the tree to verify after the newest token: at most `max_tokens` tokens, at most `max_depth` deep. The
        window has priority over drafts, because it makes the n-grams; it is left out if it does not fit."""
        guess = Guess()
        num_probes = self.num_columns * len(self._levels)
        if num_probes > max_tokens or self.num_columns + len(self._levels) - 1 > max_depth:
            num_probes = 0
        for continuation in reversed(self._continuations.get(newest, {})):
            row = 0
            for token in continuation[:max_depth]:  # a branch, which shares the tokens that are already there
                known = list(zip(guess.token_ids, guess.parents, strict=True))
                if (token, row) in known:
                    row = known.index((token, row)) + 1
                elif len(known) < max_tokens - num_probes:
                    row = guess.add(token, row)
                else:
                    break
        if num_probes:
            # The window: its first level is a chain; other tokens follow the token above them in their column.
            above = [0] * self.num_columns
            for level, tokens in enumerate(self._levels):
                for column, token in enumerate(tokens):
                    parent = above[column] if level else (above[column - 1] if column else 0)
                    above[column] = guess.add(token, parent)
            guess.num_probes = num_probes
        return guess

    def observe(self, probed: Sequence[int]) -> None:
        """Advance the window. probed: the target's likeliest token after each of its tokens; () if not verified."""
        if not probed:
            return
        newest = list(probed[-self.num_columns :])
        if self._num_random_levels:
            self._num_random_levels -= 1
        else:
            for ngram in zip(*self._levels, newest, strict=True):
                self.keep(ngram)
        self._levels = [*self._levels[1:], newest]

    def keep(self, ngram: Sequence[int]) -> None:
        """Add an n-gram to the pool."""
        continuations = self._continuations.setdefault(ngram[0], {})
        rest = tuple(ngram[1:])
        continuations.pop(rest, None)
        continuations[rest] = None
        if len(continuations) > self.max_guesses:
            del continuations[next(iter(continuations))]
