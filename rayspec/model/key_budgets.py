"""How many keys the attention of a draft reads if it does not read all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from rayspec.choices import Keys


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBudget:
    """Numbers of pages of the KV cache that a row reads. sink: the first pages of the sequence. newest: pages right
    before the row's own page. looked_at: pages between these that got most attention in the last verify. The row's own
    page is read up to the row, in addition to these.

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
        """Number of pages that a row reads, its own page included."""
        return self.sink + self.looked_at + self.newest + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBudgets:
    """Budget of each way to read few keys. `window` has more of the newest pages, because it has no scored ones."""

    window: KeyBudget = field(default=KeyBudget(newest=16))
    pages: KeyBudget = field(default=KeyBudget(newest=4, looked_at=16))

    def of(self, keys: Keys) -> KeyBudget | None:
        """Return the budget of these keys, or None for `all`."""
        return {"all": None, "window": self.window, "pages": self.pages}[keys]
