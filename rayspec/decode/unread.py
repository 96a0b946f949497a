"""Outputs without decoded texts, so that the engine can go on while another thread decodes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from typing_extensions import Self

from rayspec.types import CompletionOutput, RequestOutput


@dataclass(frozen=True, slots=True)
class UnreadCompletion:
    """A completion with its text still to decode. tokens: the completion without its text. text: decodes it."""

    tokens: CompletionOutput
    text: Callable[[], str]

    def read(self) -> CompletionOutput:
        return replace(self.tokens, text=self.text())


@dataclass(frozen=True, slots=True)
class UnreadOutput:
    """New output of a request. `read` decodes the texts, on any thread, but once only; for a stream, in the order of
    the outputs."""

    request_id: str
    finished: bool
    read: Callable[[], RequestOutput]

    @classmethod
    def of(cls, output: RequestOutput) -> Self:
        """Wrap an output that already has its texts."""
        return cls(output.request_id, output.finished, partial(_same, output))


def _same(output: RequestOutput) -> RequestOutput:
    return output
