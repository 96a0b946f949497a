"""Counting the rows of a run: tokens, acceptance, failures by kind, and the exit code they add up to."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from rayspec.batch.rows import Row
from rayspec.command.exit_codes import EXIT_FAILED, EXIT_OK, EXIT_SOME_FAILED

_MAX_KINDS = 4
_PASSING_KINDS = frozenset({"unreadable_file"})


@dataclass(slots=True)
class Tally:
    """Counts over the rows so far. clock: returns seconds."""

    clock: Callable[[], float] = time.perf_counter
    num_rows: int = 0
    num_earlier: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    started_s: float = 0.0

    def __post_init__(self) -> None:
        self.started_s = self.clock()

    def add_earlier(self, kinds: Counter[str | None]) -> None:
        """Add rows of an earlier run, whose tokens do not count for this run. kinds: see `RunFolder.kinds`."""
        self.num_rows += kinds.total()
        self.num_earlier += kinds.total()
        self.errors.update({kind: number for kind, number in kinds.items() if kind is not None})

    def add(self, row: Row) -> None:
        self.num_rows += 1
        if row.error_kind is not None:
            self.errors[row.error_kind] += 1
        self.num_output_tokens += row.num_output_tokens
        self.num_draft_tokens += row.num_draft_tokens
        self.num_accepted_tokens += row.num_accepted_tokens
        if row.error_kind is None:
            self.num_prompt_tokens += row.num_prompt_tokens

    @property
    def num_failed(self) -> int:
        return self.errors.total()

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.started_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def _kinds(self) -> str:
        """The most frequent kinds of errors, with their counts."""
        counts = [f"{kind} {count}" for kind, count in self.errors.most_common(_MAX_KINDS)]
        return ", ".join(counts) + (", ..." if len(self.errors) > _MAX_KINDS else "")

    def exit_code_of(self, *, accepts_failed: bool) -> int:
        """Return the exit code. accepts_failed: it is 0 even if rows failed, unless a file could not be read, because
        another run may succeed in reading it."""
        is_final = not self.errors.keys() & _PASSING_KINDS
        return EXIT_OK if accepts_failed and is_final and self.num_rows > 0 else self.exit_code

    @property
    def exit_code(self) -> int:
        """Exit code: 0 if every row succeeded, 1 if none did, 3 if some failed."""
        if self.num_failed == 0 and self.num_rows > 0:
            return EXIT_OK
        return EXIT_FAILED if self.num_failed == self.num_rows else EXIT_SOME_FAILED

    def __str__(self) -> str:
        acceptance = "" if self.acceptance_rate is None else f", acceptance {self.acceptance_rate:.2f}"
        failed = f", {self.num_failed} failed ({self._kinds})" if self.num_failed else ""
        speed = f"{self.num_output_tokens} tokens, {self.tokens_per_s:.1f} tokens/s"
        earlier = f" ({self.num_earlier} of an earlier run)" if self.num_earlier else ""
        return f"{self.num_rows} rows{earlier}{failed}, {speed}{acceptance}"
