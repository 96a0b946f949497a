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
    """A committed token as the target saw it: states [2L + 1, hidden_size] before the first and after every sublayer,
    and the target's most likely next token (a 0-d tensor)."""

    sequence_id: str
    position: int
    states: Tensor
    next_token: Tensor


class PlanSearch:
    """`planning.knapsack.Expansion` over tapped tokens. A batch of S states is a tensor [T, S, hidden_size]: what each
    of the T tokens' hidden state has become. Attention sees the sequence's true context and the branch's own key, so
    a state is what a draft of one token would compute (KnapSpec, section 4)."""

    def __init__(self, runner: Runner, taps: Sequence[TappedToken], starts: Sequence[int]) -> None:
        self._runner = runner
        self._tokens = [(start, tap.position) for start, tap in zip(starts, taps, strict=True)]
        self._positions = torch.tensor([tap.position for tap in taps], device=runner.device)
        self._targets = torch.stack([tap.states for tap in taps], 1)[:, :, None]
        self._next_tokens = torch.stack([tap.next_token for tap in taps])

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def context(self) -> int:
        """Mean number of tokens before the tapped ones."""
        return int(sum(position for _, position in self._tokens) / len(self._tokens))

    @torch.inference_mode()
    def start(self) -> Tensor:
        return self._targets[0]

    @torch.inference_mode()
    def run(self, sublayer: int, states: Any) -> Tensor:
        num_tokens, num_states, size = states.shape
        positions = self._positions.repeat_interleave(num_states)
        rows = pack_branches(self._runner.arena, self._tokens, num_states, positions)
        module = self._runner.parts.sublayers[sublayer]
        if module.kind == "attention":
            self._runner.parts.rotate(states, rows)
        hidden = run((module,), states.reshape(1, num_tokens * num_states, size), rows)
        return hidden.view(num_tokens, num_states, size)

    @torch.inference_mode()
    def similarity(self, sublayer: int, states: Any) -> NDArray[np.float64]:
        """Mean cosine over the tokens, [S]."""
        cosine = cosine_similarity(states.float(), self._targets[sublayer + 1].float(), dim=-1)
        return cosine.mean(0).double().cpu().numpy()

    @torch.inference_mode()
    def gather(self, batches: Sequence[Any], index: NDArray[np.int64]) -> Tensor:
        return torch.cat(list(batches), 1)[:, torch.from_numpy(np.asarray(index)).to(self._runner.device)]

    @torch.inference_mode()
    def agreement(self, states: Any) -> NDArray[np.int64]:
        """In how many of the T tokens the draft's most likely next token is the target's, [S]."""
        num_tokens, num_states, size = states.shape
        logits = self._runner.head(states.reshape(1, num_tokens * num_states, size))
        drafted = logits.argmax(-1).view(num_tokens, num_states)
        return (drafted == self._next_tokens[:, None]).sum(0).cpu().numpy()
