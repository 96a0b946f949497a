"""Outputs whose texts are not made yet, so that the engine can go on while another thread makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from typing_extensions import Self

from rayspec.types import CompletionOutput, RequestOutput


@dataclass(frozen=True, slots=True)
class UnreadCompletion:
    """tokens: the completion without its text."""

    tokens: CompletionOutput
    text: Callable[[], str]

    def read(self) -> CompletionOutput:
        return replace(self.tokens, text=self.text())


@dataclass(frozen=True, slots=True)
class UnreadOutput:
    """What is new of a request. `read` makes the texts, on any thread, once; of a stream in the order of its pieces."""

    request_id: str
    finished: bool
    read: Callable[[], RequestOutput]

    @classmethod
    def of(cls, output: RequestOutput) -> Self:
        """An output that has its texts."""
        return cls(output.request_id, output.finished, partial(_same, output))


def _same(output: RequestOutput) -> RequestOutput:
    return output
