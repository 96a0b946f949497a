"""The last step of a pass, next to the LM head: turn logits into tokens with each sequence's own sampler."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rayspec.config import Verification
from rayspec.decode.drafting.lookup import LookupIndex
from rayspec.decode.noise import integers
from rayspec.decode.processing import TokenSampler
from rayspec.decode.sampling import Rows, top_logprobs
from rayspec.decode.verify import Verdict, verify_coupled, verify_rejection
from rayspec.decode.work import Committed, SamplerSpec, TappedToken, TapsGoneError
from rayspec.types import Logprob


class Head:
    """Keeps the samplers of the open sequences and the target's most likely tokens after tapped tokens, and applies the
    acceptance rule.

    logits: maps [1, N, hidden_size] before the final norm to [N, V]. draft_look_interval: draft steps between two
    copies of the drawn tokens to the host; it must be 1 if another process embeds the tokens. drawn: the last drawn
    tokens, int64 [S], on the device.
    """

    drawn: Tensor | None = None

    def __init__(
        self,
        logits: Callable[[Tensor], Tensor],
        *,
        vocab_size: int,
        device: torch.device,
        verification: Verification,
        num_taps: int,
        draft_look_interval: int = 1,
    ) -> None:
        self.draft_look_interval = draft_look_interval
        self.verification: Verification = verification
        self._logits = logits
        self._vocab_size = vocab_size
        self._device = device
        self._num_taps = num_taps
        self._samplers: dict[str, TokenSampler] = {}
        self._lookups: dict[str, LookupIndex] = {}
        self._next_tokens: dict[TappedToken, Tensor] = {}

    def open(self, spec: SamplerSpec) -> None:
        self._samplers[spec.sequence_id] = TokenSampler(spec, vocab_size=self._vocab_size, device=self._device)
        if spec.lookup is not None:
            self._lookups[spec.sequence_id] = spec.lookup

    def close(self, sequence_id: str) -> None:
        del self._samplers[sequence_id]
        self._lookups.pop(sequence_id, None)

    def forget(self) -> None:
        """Close all sequences and forget all taps."""
        self._samplers.clear()
        self._lookups.clear()
        self._next_tokens.clear()

    def sampler(self, sequence_id: str) -> TokenSampler:
        return self._samplers[sequence_id]

    def note_computed(self, sequence_id: str, num_tokens: int) -> None:
        """Index this many leading tokens of the sequence for lookups, if there are any: they have been prefilled."""
        if sequence_id in self._lookups:
            self._lookups[sequence_id].extend_to(self._samplers[sequence_id].token_ids, num_tokens)

    def lookup(self, sequence_id: str) -> LookupIndex:
        """Return the lookup index of the sequence's committed tokens, up to date."""
        index = self._lookups[sequence_id]
        index.extend_to(self._samplers[sequence_id].token_ids)
        return index

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits(hidden)

    def note_taps(self, taps: Sequence[tuple[int, TappedToken]], logits: Tensor) -> None:
        """Remember the target's most likely token after each tapped token, and only the last `num_taps` of them.
        logits: [N, V]; taps: pairs of a row and its token."""
        for row, token in taps:
            self._next_tokens.pop(token, None)
            self._next_tokens[token] = logits[row].argmax(-1)
        for token in list(self._next_tokens)[: -self._num_taps]:
            del self._next_tokens[token]

    def next_tokens(self, tokens: Sequence[TappedToken]) -> Tensor:
        """Return the target's most likely token after each tapped token, [T]. Raises TapsGoneError."""
        if any(token not in self._next_tokens for token in tokens):
            raise TapsGoneError("what followed some tapped tokens is not kept any more")
        return torch.stack([self._next_tokens[token] for token in tokens])

    def accept(self, logits: Tensor, rows: Sequence[Rows], draft_logits: Sequence[Tensor | None]) -> list[Verdict]:
        if self.verification == "coupled":
            return verify_coupled(logits, rows)
        return verify_rejection(logits, rows, draft_logits)


def commit(logits: Tensor, rows: Sequence[Rows], verdicts: Sequence[Verdict]) -> list[Committed]:
    """Commit the verdicts' tokens to the samplers and return them with as many log-probabilities as their parameters
    ask for. Everything is computed before any sampler changes. One host synchronisation per distinct number of
    log-probabilities."""
    pairs = list(zip(rows, verdicts, strict=True))
    results: list[Sequence[dict[int, Logprob]]] = [()] * len(rows)
    asked = [row.sampler.params.logprobs if verdict.is_finite else None for row, verdict in pairs]
    for count in {count for count in asked if count is not None}:
        chosen = [index for index, its_count in enumerate(asked) if its_count == count]
        where = []  # the rows whose logits chose the tokens
        for row, verdict in ((rows[index], verdicts[index]) for index in chosen):
            path = verdict.path or range(1, len(verdict.token_ids))
            where += [row.start, *(row.start + at for at in path)]
        tokens = [token for index in chosen for token in verdicts[index].token_ids]
        table = iter(top_logprobs(logits[integers(where, logits.device)], tokens, count))
        for index in chosen:
            results[index] = list(itertools.islice(table, len(verdicts[index].token_ids)))
    for row, verdict in pairs:
        if verdict.is_finite:
            row.sampler.commit(verdict.token_ids)
    return [
        Committed(verdict.token_ids, each, verdict.is_finite) for verdict, each in zip(verdicts, results, strict=True)
    ]
