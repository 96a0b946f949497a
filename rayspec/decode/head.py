"""Where the LM head is: logits become tokens, by each sequence's own sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayspec.config import SamplingParams, Verification
from rayspec.decode.drafting.lookup import LookupIndex
from rayspec.decode.passes import TapsGoneError
from rayspec.decode.plan_search import TappedToken
from rayspec.decode.sampling import Rows, TokenSampler, top_logprobs
from rayspec.decode.verify import Verdict, verify_coupled, verify_rejection
from rayspec.types import Logprob


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSpec:
    """A sequence as the head must know it: how it samples, from which seed, and what is committed."""

    sequence_id: str
    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    eos_token_ids: Sequence[int]

    def sampler(self, vocab_size: int, device: torch.device) -> TokenSampler:
        return TokenSampler(
            self.params,
            seed=self.seed,
            prompt_token_ids=self.prompt_token_ids,
            output_token_ids=self.output_token_ids,
            eos_token_ids=self.eos_token_ids,
            vocab_size=vocab_size,
            device=device,
        )


@dataclass(frozen=True, slots=True)
class Committed:
    """Tokens the target chose for one sequence. `finite` is False when its logits were not: the tokens are void."""

    token_ids: Sequence[int]
    logprobs: Sequence[dict[int, Logprob]]
    finite: bool


class Head:
    """Samplers of the open sequences, the rule of acceptance, and the target's own choice at tapped tokens.

    logits: [1, N, hidden_size] before the final norm -> [N, V].
    """

    def __init__(
        self,
        logits: Callable[[Tensor], Tensor],
        *,
        vocab_size: int,
        device: torch.device,
        verification: Verification,
        num_taps: int,
    ) -> None:
        self.verification: Verification = verification
        self._logits = logits
        self._vocab_size = vocab_size
        self._device = device
        self._num_taps = num_taps
        self._samplers: dict[str, TokenSampler] = {}
        self._lookups: dict[str, LookupIndex] = {}  # made when something is looked up
        self._next_tokens: dict[TappedToken, Tensor] = {}

    @property
    def num_open(self) -> int:
        return len(self._samplers)

    def open(self, spec: SamplerSpec) -> None:
        self._samplers[spec.sequence_id] = spec.sampler(self._vocab_size, self._device)
        self._lookups.pop(spec.sequence_id, None)

    def close(self, sequence_id: str) -> None:
        del self._samplers[sequence_id]
        self._lookups.pop(sequence_id, None)

    def forget(self) -> None:
        """Close everything."""
        self._samplers.clear()
        self._lookups.clear()
        self._next_tokens.clear()

    def sampler(self, sequence_id: str) -> TokenSampler:
        return self._samplers[sequence_id]

    def lookup(self, sequence_id: str, ngram: int, shortest: int) -> LookupIndex:
        """Of the sequence's committed tokens as they are now. It is made once."""
        if sequence_id not in self._lookups:
            self._lookups[sequence_id] = LookupIndex(ngram, shortest)
        self._lookups[sequence_id].extend_to(self._samplers[sequence_id].token_ids)
        return self._lookups[sequence_id]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits(hidden)

    def note_taps(self, taps: Sequence[tuple[int, TappedToken]], logits: Tensor) -> None:
        """Remember the target's most likely token after each tapped one; logits: [N, V]."""
        for row, token in taps:
            self._next_tokens.pop(token, None)
            self._next_tokens[token] = logits[row].argmax(-1)
        for token in list(self._next_tokens)[: -self._num_taps]:
            del self._next_tokens[token]

    def next_tokens(self, tokens: Sequence[TappedToken]) -> Tensor:
        """[T]. Raises TapsGoneError."""
        if any(token not in self._next_tokens for token in tokens):
            raise TapsGoneError("what followed some tapped tokens is not kept any more")
        return torch.stack([self._next_tokens[token] for token in tokens])

    def accept(self, logits: Tensor, rows: Sequence[Rows], draft_logits: Sequence[Tensor | None]) -> list[Verdict]:
        if self.verification == "coupled":
            return verify_coupled(logits, rows)
        return verify_rejection(logits, rows, draft_logits)

    def commit(
        self, logits: Tensor, rows: Sequence[Rows], verdicts: Sequence[Verdict], finite: Sequence[bool]
    ) -> list[Committed]:
        """Everything is computed before the first sampler moves on."""
        results = []
        for row, verdict in zip(rows, verdicts, strict=True):
            is_finite = all(finite[row.start : row.end])
            count = row.sampler.params.logprobs
            logprobs: Sequence[dict[int, Logprob]] = ()
            if is_finite and count is not None:
                logprobs = top_logprobs(_chosen_at(logits, row, verdict), verdict.token_ids, count)
            results.append(Committed(verdict.token_ids, logprobs, is_finite))
        for row, committed in zip(rows, results, strict=True):
            if committed.finite:
                row.sampler.commit(committed.token_ids)
        return results


def _chosen_at(logits: Tensor, row: Rows, verdict: Verdict) -> Tensor:
    """The rows that the verdict's tokens were chosen at."""
    if not verdict.path:
        return logits[row.start : row.start + len(verdict.token_ids)]
    return logits[[row.start, *(row.start + at for at in verdict.path)]]
