"""Questions about recently tapped tokens: which drafts would have been right, and what the target's states are.

A tap is a token's hidden states at all sublayer boundaries. `answer` computes partial plans on them, which `PlanSearch`
runs in one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from rayspec.choices import FULL, SKIP, Choice, Choices, combined, keys_of, weights_of
from rayspec.decode.runner import Runner, integers
from rayspec.model.attention import PackedRows, pack_branches
from rayspec.model.rows import RowSpan
from rayspec.planning.knapsack import Expansion, Steps, follow, solve

_SUBLAYERS = 2  # sublayers per layer


class Knapsack(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks which drafts are most similar to the target, by `knapsack.solve`. also: drafts to try. Answered by Found."""

    num_tokens: int
    savings: Sequence[Mapping[Choice, int]]
    max_saved: int
    min_similarity: float
    max_states: int
    also: Sequence[Choices] = ()


class LayerKnapsack(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks for the most similar draft without n layers, for each n up to `num_skipped` (CLaSp). Answered by Found."""

    num_tokens: int
    num_skipped: int


class Trial(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks how these drafts would have done. Answered by Found, in the order of `patterns`."""

    num_tokens: int
    patterns: Sequence[Choices]


class Cosine(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks for the cosine between the target's states before and after each sublayer. Answered by Values."""

    num_tokens: int


class Feature(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks for a vector that describes the text: the mean of the target's last states. Answered by Values."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class FoundDraft:
    """A draft of one token after each tapped token. similarity: mean cosine between its last states and the target's.
    num_agreed: tapped tokens after which its most likely token equals the target's. confidence: its mean top-1
    probability after these; missed_confidence: after the others; None if there are none."""

    choices: tuple[Choice, ...]
    similarity: float
    num_agreed: int
    confidence: float | None = None
    missed_confidence: float | None = None


class Found(msgspec.Struct, frozen=True, tag=True):
    """Drafts judged on `num_tokens` tapped tokens. seconds: that the answer took."""

    drafts: Sequence[FoundDraft]
    num_tokens: int
    seconds: float


class Values(msgspec.Struct, frozen=True, tag=True):
    """The numbers that Cosine and Feature ask for. seconds: that the answer took."""

    values: Sequence[float]
    seconds: float


Question: TypeAlias = Knapsack | LayerKnapsack | Trial | Cosine | Feature
Answer: TypeAlias = Found | Values


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of draft states with the target, [num_states] each. num_agreed: tapped tokens, of `num_tokens`, after
    which the most likely next token equals the target's. confidence, missed_confidence: sums of the state's top-1
    probabilities after these tokens, and after the others."""

    num_tokens: int
    num_agreed: NDArray[np.int64]
    confidence: NDArray[np.float64]
    missed_confidence: NDArray[np.float64]


class TappedStates(Expansion, Protocol):
    """The states of tapped tokens, on one process or on several. One state is the hidden states of all tokens."""

    def agreement(self, states: Any) -> Agreement:
        """Return the agreement of each terminal state with the target, [num_states]."""

    def cosines(self) -> Sequence[float]:
        """Return, for each sublayer, the mean cosine between the target's states before and after it."""

    def feature(self) -> Sequence[float]:
        """Return the mean of the target's states after the final norm, [hidden_size]."""


def answer(question: Question, tapped: TappedStates, *, num_sublayers: int) -> Steps[Answer]:
    """Answer a question, in steps. The caller sets the seconds of the answer. tapped: the states of
    `question.num_tokens` tokens. Raises ValueError if the question does not match the model's sublayers."""
    num_each = 1  # sublayers of an item
    match question:
        case Cosine():
            return Values(tapped.cosines(), 0.0)
        case Feature():
            return Values(tapped.feature(), 0.0)
        case Trial():
            if any(len(pattern) != num_sublayers for pattern in question.patterns):
                raise ValueError(f"each of the tested patterns needs {num_sublayers} choices, one for each sublayer")
            states = yield from follow(question.patterns, tapped)
            similarity = tapped.similarity(num_sublayers - 1, states)
            drafts = _judged(question.patterns, similarity.tolist(), tapped.agreement(states))
            return Found(drafts, question.num_tokens, 0.0)
        case LayerKnapsack():
            num_each = _SUBLAYERS
            solution = yield from solve(
                [{SKIP: 1}] * (num_sublayers // _SUBLAYERS),
                _Layers(tapped),
                max_saved=question.num_skipped,
                min_similarity=-np.inf,
                max_states=question.num_skipped + 1,
                band=None,
                drop_dominated=False,
            )
        case Knapsack():
            solution = yield from solve(
                question.savings,
                tapped,
                max_saved=question.max_saved,
                min_similarity=question.min_similarity,
                max_states=question.max_states,
                others=question.also,
            )
    found = [*solution.candidates, *solution.others]
    patterns = [tuple(choice for choice in one.choices for _ in range(num_each)) for one in found]
    drafts = _judged(patterns, [one.similarity for one in found], tapped.agreement(solution.states))
    best, others = drafts[: len(solution.candidates)], drafts[len(solution.candidates) :]
    known = {one.choices for one in best}
    return Found([*best, *(one for one in others if one.choices not in known)], question.num_tokens, 0.0)


def _judged(patterns: Sequence[Choices], similarity: Sequence[float], agreement: Agreement) -> list[FoundDraft]:
    def mean(total: float, count: int) -> float | None:
        return float(total / count) if count else None

    num_others = agreement.num_tokens - agreement.num_agreed
    return [
        FoundDraft(
            choices=tuple(pattern),
            similarity=similarity[index],
            num_agreed=int(agreement.num_agreed[index]),
            confidence=mean(agreement.confidence[index], agreement.num_agreed[index]),
            missed_confidence=mean(agreement.missed_confidence[index], num_others[index]),
        )
        for index, pattern in enumerate(patterns)
    ]


class _Layers:
    """An `Expansion` with whole layers as its items."""

    def __init__(self, tapped: TappedStates) -> None:
        self._tapped = tapped

    def start(self) -> Any:
        return self._tapped.start()

    def run(self, layer: int, choice: Choice, states: Any) -> Any:
        for sublayer in range(_SUBLAYERS * layer, _SUBLAYERS * (layer + 1)):
            states = self._tapped.run(sublayer, choice, states)
        return states

    def vary(self, layer: int, choices: Sequence[Choice], states: Any) -> Any:
        raise NotImplementedError("whole layers run in full or not at all")

    def similarity(self, layer: int, states: Any) -> NDArray[np.float64]:
        return self._tapped.similarity(_SUBLAYERS * (layer + 1) - 1, states)

    def gather(self, batches: Sequence[Any], index: NDArray[np.int64]) -> Any:
        return self._tapped.gather(batches, index)

    def keep(self, batches: Sequence[Any]) -> None:
        self._tapped.keep(batches)


# The most rows whose logits are in memory at the same time.
_HEAD_ROWS = 128
# The most numbers of states whose packed rows are kept. Their masks take memory, and later sublayers use few numbers.
_MAX_PACKED = 4


class PlanSearch:
    """`TappedStates` for the sublayers of one span. A batch of S states is a tensor [T, S, hidden_size]: the hidden
    state of each of the T tokens under S partial plans. Attention sees the sequence's true context and the state's own
    key, so a state is equal to that of a draft of one token (KnapSpec, section 4).

    boundaries: [sublayers + 1, T, hidden_size], the target's states before the span and after each of its sublayers.
    tokens: the row of each token. next_tokens: [T], the target's most likely next tokens; None without a head.
    """

    def __init__(
        self, runner: Runner, boundaries: Tensor, tokens: Sequence[RowSpan], next_tokens: Tensor | None
    ) -> None:
        self._runner = runner
        self.tokens = list(tokens)
        self._positions = integers([token.context for token in tokens], runner.device)
        self._targets = boundaries[:, :, None]
        self._next_tokens = next_tokens
        self._packed: dict[int, PackedRows] = {}  # by number of states, the newest last

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @torch.inference_mode()
    def start(self) -> Tensor:
        return self._targets[0]

    @torch.inference_mode()
    def run(self, sublayer: int, choice: Choice, states: Any) -> Tensor:
        num_tokens, num_states, size = states.shape
        rows = self._rows(num_states, states)
        module = self._runner.parts.sublayers[sublayer - self._runner.first_sublayer]
        states = states.reshape(1, num_tokens * num_states, size)
        hidden = module(states, rows.seeing(keys_of(choice)), weights_of(choice))
        return hidden.view(num_tokens, num_states, size)

    @torch.inference_mode()
    def vary(self, sublayer: int, choices: Sequence[Choice], states: Any) -> Tensor:
        """Add to each state the change that its choice makes on the target's own states."""
        names = [FULL, *{choice: None for choice in choices if choice not in (FULL, SKIP)}]
        known: dict[Choice, Tensor] = {FULL: torch.zeros_like(self._targets[0])}
        changes = torch.cat([self._change(sublayer, choice, known) for choice in names], 1)
        index = integers([names.index(choice) if choice != SKIP else 0 for choice in choices], states.device)
        return states + changes.index_select(1, index)  # type: ignore[no-any-return]

    def _change(self, sublayer: int, choice: Choice, known: dict[Choice, Tensor]) -> Tensor:
        """Return the change that a choice makes on the target's states, [T, 1, hidden_size]. Other weights and fewer
        keys together make the sum of both changes. known: changes of this sublayer; those of this choice are added."""
        if choice not in known:
            parts = combined(weights_of(choice), "all"), combined("full", keys_of(choice))
            if FULL in parts:
                at = sublayer - self._runner.first_sublayer
                known[choice] = self.run(sublayer, choice, self._targets[at]) - self._targets[at + 1]
            else:
                by_weights, by_keys = (self._change(sublayer, one, known) for one in parts)
                known[choice] = by_weights + by_keys
        return known[choice]

    def _rows(self, num_states: int, like: Tensor) -> PackedRows:
        """Return the packed rows of so many states, which all sublayers share; those of few numbers are kept."""
        rows = self._packed.pop(num_states, None)
        if rows is None:
            positions = self._positions.repeat_interleave(num_states)
            rows = pack_branches(self._runner.cache, self.tokens, num_states, positions)
            self._runner.parts.rotate(like, rows)
        self._packed[num_states] = rows
        for oldest in list(self._packed)[:-_MAX_PACKED]:
            del self._packed[oldest]
        return rows

    @torch.inference_mode()
    def similarity(self, sublayer: int, states: Any) -> NDArray[np.float64]:
        target = self._directions[sublayer - self._runner.first_sublayer + 1]
        numbers = states.float()
        cosine = (numbers @ target)[..., 0] / torch.linalg.vector_norm(numbers, dim=-1)
        found: NDArray[np.float64] = cosine.mean(0).cpu().numpy().astype(np.float64)
        return found

    @cached_property
    def _directions(self) -> Tensor:
        """The target's states as vectors of length 1: [sublayers + 1, T, hidden_size, 1]."""
        return normalize(self._targets.float(), dim=-1).transpose(-1, -2)

    @torch.inference_mode()
    def gather(self, batches: Sequence[Any], index: NDArray[np.int64]) -> Tensor:
        joined = torch.cat(list(batches), 1) if len(batches) > 1 else batches[0]
        return joined.index_select(1, integers(np.asarray(index).tolist(), joined.device))

    def keep(self, batches: Sequence[Any]) -> None:
        """A tensor is freed with its last reference."""

    @torch.inference_mode()
    def agreement(self, states: Any) -> Agreement:
        assert self._next_tokens is not None
        num_tokens, num_states, size = states.shape
        drafted, sure = self._drafted(states.reshape(num_tokens * num_states, size))
        agrees = drafted.view(num_tokens, num_states) == self._next_tokens[:, None]
        sure = sure.view(num_tokens, num_states)
        sums = torch.stack([agrees.double(), sure * agrees, sure * ~agrees]).sum(1).cpu().numpy()
        return Agreement(num_tokens, sums[0].astype(np.int64), sums[1], sums[2])

    @torch.inference_mode()
    def cosines(self) -> list[float]:
        states = self._targets[:, :, 0].float()
        cosines: list[float] = cosine_similarity(states[:-1], states[1:], dim=-1).mean(1).tolist()
        return cosines

    @torch.inference_mode()
    def feature(self) -> list[float]:
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
