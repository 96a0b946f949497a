"""How many keys a draft's attention reads where it does not read all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from rayspec.choices import Keys


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBudget:
    """In pages of the KV cache. sink: the first ones of the sequence. newest: those before the row's own page, which is
    read up to the row. looked_at: those between, at which the last verify looked most.

    Raises `ValueError` if a number is negative, or `newest` is 0.
    """

    sink: int = 1
    newest: int
    looked_at: int = 0

    def __post_init__(self) -> None:
        if min(self.sink, self.newest - 1, self.looked_at) < 0:
            raise ValueError(f"{self}: newest must be at least 1, sink and looked_at at least 0")

    @property
    def num_pages(self) -> int:
        """All that a row reads, its own page included."""
        return self.sink + self.looked_at + self.newest + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBudgets:
    """Of each way to read few keys. A window needs more of the newest keys, because it has no others."""

    window: KeyBudget = field(default=KeyBudget(newest=16))
    pages: KeyBudget = field(default=KeyBudget(newest=4, looked_at=16))

    def of(self, keys: Keys) -> KeyBudget | None:
        """None where all keys are read."""
        return {"all": None, "window": self.window, "pages": self.pages}[keys]
