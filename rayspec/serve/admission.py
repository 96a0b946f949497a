"""How many requests an endpoint takes at once. The others get 429 at once, instead of a wait without end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rayspec.openai.errors import ApiError
from rayspec.serve.replies import BUSY, Refused


class Admission:
    """Counts what is under way. most: how much may be before the next is refused; None: no limit.

    A request is admitted while less than `most` is under way, whatever the request itself weighs: so a large request is
    refused no more often than a small one.
    """

    def __init__(self, most: int | None = None, refusal: ApiError = BUSY) -> None:
        self._most, self._refusal = most, refusal
        self.under_way = 0

    @contextmanager
    def admit(self, weight: int = 1) -> Iterator[None]:
        """While the request is under way. Raises Refused."""
        if self._most is not None and self.under_way >= self._most:
            raise Refused(self._refusal)
        self.under_way += weight
        try:
            yield
        finally:
            self.under_way -= weight
