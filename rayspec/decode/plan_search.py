"""The knapsack's states on the device: hidden states of recently committed tokens under every partial plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity

from rayspec.decode.runner import Runner
from rayspec.model.attention import pack_branches
from rayspec.model.sublayers import run


@dataclass(frozen=True, slots=True)
class TappedToken:
    """A committed token whose hidden states the target's stages have kept."""

    sequence_id: str
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Knapsack:
    """What is to be searched: `knapsack.solve`'s arguments, over `num_tokens` tapped tokens."""

    num_tokens: int
    weights: Sequence[int]
    max_weight: int
    min_similarity: float
    max_states: int


@dataclass(frozen=True, slots=True)
class FoundDraft:
    """A draft the search has found: its similarity to the target, and on how many tapped tokens they agree."""

    keep: tuple[bool, ...]
    similarity: float
    num_agreed: int


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search over `num_tokens` tokens, and the seconds it took."""

    drafts: Sequence[FoundDraft]
    num_tokens: int
    seconds: float


class PlanSearch:
    """`planning.knapsack.Expansion` over tapped tokens, for the sublayers of one span. A batch of S states is a tensor
    [T, S, hidden_size]: what each of the T tokens' hidden state has become. Attention sees the sequence's true context
    and the branch's own key, so a state is what a draft of one token would compute (KnapSpec, section 4).

    boundaries: [sublayers + 1, T, hidden_size], the target's states before the span and after each sublayer of it.
    tokens: (arena start, position) of each. next_tokens: [T], the target's most likely; None without a head.
    """

    def __init__(
        self, runner: Runner, boundaries: Tensor, tokens: Sequence[tuple[int, int]], next_tokens: Tensor | None
    ) -> None:
        self._runner = runner
        self._tokens = list(tokens)
        self._positions = torch.tensor([position for _, position in tokens], device=runner.device)
        self._targets = boundaries[:, :, None]
        self._next_tokens = next_tokens

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @torch.inference_mode()
    def start(self) -> Tensor:
        return self._targets[0]

    @torch.inference_mode()
    def run(self, sublayer: int, states: Any) -> Tensor:
        num_tokens, num_states, size = states.shape
        positions = self._positions.repeat_interleave(num_states)
        rows = pack_branches(self._runner.arena, self._tokens, num_states, positions)
        module = self._runner.parts.sublayers[sublayer - self._runner.first]
        if module.kind == "attention":
            self._runner.parts.rotate(states, rows)
        hidden = run((module,), states.reshape(1, num_tokens * num_states, size), rows)
        return hidden.view(num_tokens, num_states, size)

    @torch.inference_mode()
    def similarity(self, sublayer: int, states: Any) -> NDArray[np.float64]:
        """Mean cosine over the tokens, [S]."""
        target = self._targets[sublayer - self._runner.first + 1]
        cosine = cosine_similarity(states.float(), target.float(), dim=-1)
        return cosine.mean(0).double().cpu().numpy()

    @torch.inference_mode()
    def gather(self, batches: Sequence[Any], index: NDArray[np.int64]) -> Tensor:
        return torch.cat(list(batches), 1)[:, torch.from_numpy(np.asarray(index)).to(self._runner.device)]

    @torch.inference_mode()
    def agreement(self, states: Any) -> NDArray[np.int64]:
        """In how many of the T tokens the draft's most likely next token is the target's, [S]."""
        assert self._next_tokens is not None
        num_tokens, num_states, size = states.shape
        logits = self._runner.head(states.reshape(1, num_tokens * num_states, size))
        drafted = logits.argmax(-1).view(num_tokens, num_states)
        return (drafted == self._next_tokens[:, None]).sum(0).cpu().numpy()
