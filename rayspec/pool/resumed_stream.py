"""Removes repeated parts from a stream that starts again from its beginning."""

from __future__ import annotations

import dataclasses
from collections import Counter

from rayspec.types import CompletionOutput, RequestOutput


class ResumedStream:
    """Counts the tokens and characters of a streaming request that were passed on, by index of the completion."""

    def __init__(self) -> None:
        self._tokens_given: Counter[int] = Counter()
        self._characters_given: Counter[int] = Counter()
        self._tokens_heard: Counter[int] = Counter()
        self._characters_heard: Counter[int] = Counter()

    def again(self) -> ResumedStream:
        """Return a ResumedStream for a new run, from the start and with the same seed."""
        other = ResumedStream()
        other._tokens_given, other._characters_given = self._tokens_given.copy(), self._characters_given.copy()
        return other

    def new_part(self, output: RequestOutput) -> RequestOutput | None:
        """Return the new part of an output; None if nothing is new."""
        part = self.last_part(output)
        return part if part.outputs else None

    def last_part(self, output: RequestOutput) -> RequestOutput:
        """Return the new part of the last output. It includes every finished completion, even without new text."""
        parts = [self._rest(one) for one in output.outputs]
        return dataclasses.replace(output, outputs=[one for one in parts if one.token_ids or one.text or one.finished])

    def _rest(self, piece: CompletionOutput) -> CompletionOutput:
        index = piece.index
        num_tokens = max(0, self._tokens_given[index] - self._tokens_heard[index])
        num_characters = max(0, self._characters_given[index] - self._characters_heard[index])
        self._tokens_heard[index] += len(piece.token_ids)
        self._characters_heard[index] += len(piece.text)
        self._tokens_given[index] = max(self._tokens_given[index], self._tokens_heard[index])
        self._characters_given[index] = max(self._characters_given[index], self._characters_heard[index])
        return dataclasses.replace(
            piece,
            text=piece.text[num_characters:],
            token_ids=tuple(piece.token_ids[num_tokens:]),
            logprobs=piece.logprobs[num_tokens:] or None if piece.logprobs is not None else None,
        )
