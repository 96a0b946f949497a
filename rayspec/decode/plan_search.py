"""Hidden states of recently committed tokens under partial plans, on the device. The plan search reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity

from rayspec.choices import Choice, keys_of, weights_of
from rayspec.decode.questions import Agreement
from rayspec.decode.runner import Runner
from rayspec.model.attention import pack_branches
from rayspec.model.rows import RowSpan

# The most rows whose logits are in memory at the same time.
_HEAD_ROWS = 128


class PlanSearch:
    """`questions.TappedStates` for the sublayers of one span. A batch of S states is a tensor [T, S, hidden_size]: the
    hidden state of each of the T tokens under S partial plans. Attention sees the sequence's true context and the
    state's own key, so a state is equal to that of a draft of one token (KnapSpec, section 4).

    boundaries: [sublayers + 1, T, hidden_size], the target's states before the span and after each of its sublayers.
    tokens: the row of each token. next_tokens: [T], the target's most likely next tokens; None without a head.
    """

    def __init__(
        self, runner: Runner, boundaries: Tensor, tokens: Sequence[RowSpan], next_tokens: Tensor | None
    ) -> None:
        self._runner = runner
        self.tokens = list(tokens)
        self._positions = torch.tensor([token.context for token in tokens], device=runner.device)
        self._targets = boundaries[:, :, None]
        self._next_tokens = next_tokens
        self._changes: dict[tuple[int, Choice], Tensor] = {}  # [T, 1, hidden_size]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @torch.inference_mode()
    def start(self) -> Tensor:
        return self._targets[0]

    @torch.inference_mode()
    def run(self, sublayer: int, choice: Choice, states: Any) -> Tensor:
        num_tokens, num_states, size = states.shape
        positions = self._positions.repeat_interleave(num_states)
        rows = pack_branches(self._runner.arena, self.tokens, num_states, positions)
        module = self._runner.parts.sublayers[sublayer - self._runner.first_sublayer]
        if module.kind == "attention":
            self._runner.parts.rotate(states, rows)
        states = states.reshape(1, num_tokens * num_states, size)
        hidden = module(states, rows.seeing(keys_of(choice)), weights_of(choice))
        return hidden.view(num_tokens, num_states, size)

    @torch.inference_mode()
    def vary(self, sublayer: int, choice: Choice, states: Any) -> Tensor:
        """Add the change that the choice makes on the target's own states; it is assumed to be the same for
        `states`."""
        if (sublayer, choice) not in self._changes:
            at = sublayer - self._runner.first_sublayer
            self._changes[sublayer, choice] = self.run(sublayer, choice, self._targets[at]) - self._targets[at + 1]
        return states + self._changes[sublayer, choice]  # type: ignore[no-any-return]

    @torch.inference_mode()
    def similarity(self, sublayer: int, states: Any) -> NDArray[np.float64]:
        """Return the mean cosine with the target over the tokens, [S]."""
        target = self._targets[sublayer - self._runner.first_sublayer + 1]
        cosine = cosine_similarity(states.float(), target.float(), dim=-1)
        return cosine.mean(0).double().cpu().numpy()

    @torch.inference_mode()
    def gather(self, batches: Sequence[Any], index: NDArray[np.int64]) -> Tensor:
        return torch.cat(list(batches), 1)[:, torch.from_numpy(np.asarray(index)).to(self._runner.device)]

    def keep(self, batches: Sequence[Any]) -> None:
        """Do nothing: a tensor is freed with its last reference."""

    @torch.inference_mode()
    def agreement(self, states: Any) -> Agreement:
        """Return the agreement of each state with the target, [S]. Requires the head in this process."""
        assert self._next_tokens is not None
        num_tokens, num_states, size = states.shape
        drafted, sure = self._drafted(states.reshape(num_tokens * num_states, size))
        agrees = drafted.view(num_tokens, num_states) == self._next_tokens[:, None]
        sure = sure.view(num_tokens, num_states)
        sums = torch.stack([agrees.double(), sure * agrees, sure * ~agrees]).sum(1).cpu().numpy()
        return Agreement(num_tokens, sums[0].astype(np.int64), sums[1], sums[2])

    @torch.inference_mode()
    def cosines(self) -> list[float]:
        """Return the cosines of the span's sublayers; see `TappedStates.cosines`."""
        states = self._targets[:, :, 0].float()
        cosines: list[float] = cosine_similarity(states[:-1], states[1:], dim=-1).mean(1).tolist()
        return cosines

    @torch.inference_mode()
    def feature(self) -> list[float]:
        """Return the feature vector; see `TappedStates.feature`. Requires the last span, which has the final norm."""
        norm = self._runner.parts.final_norm
        assert norm is not None
        vector: list[float] = norm(self._targets[-1, :, 0]).float().mean(0).tolist()
        return vector

    def _drafted(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the most likely tokens, int64 [N], and their probabilities, float64 [N], of rows [N, hidden_size]."""
        tokens, sure = [], []
        for at in range(0, len(rows), _HEAD_ROWS):
            logits = self._runner.head(rows[None, at : at + _HEAD_ROWS]).float()
            best, token = logits.max(-1)
            tokens.append(token)
            sure.append((best - logits.logsumexp(-1)).exp().double())
        return torch.cat(tokens), torch.cat(sure)
