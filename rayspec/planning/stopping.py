"""How long drafts get, and what comes of them, when a confidence rule ends them early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """What the rule makes of a token: it ends the draft after one that will be rejected with probability `detects`,
    after one that will be accepted with probability `misfires`. (0, 0): drafts always reach their length."""

    detects: float = 0.0
    misfires: float = 0.0


NEVER = StopRule()


@dataclass(frozen=True, slots=True)
class ExpectedDraft:
    """[num_candidates, max_length] each, by acceptance and by the most tokens a draft may have (1, 2, ...).

    num_drafted: draft steps. num_accepted: of these. With StopRule() that is the length g and a + a^2 + ... + a^g
    (Leviathan et al., eq. 1, without the bonus token).
    """

    num_drafted: Floats
    num_accepted: Floats


def expected_draft(acceptance: ArrayLike, max_length: int, rule: StopRule) -> ExpectedDraft:
    """acceptance: [num_candidates], of a token whose predecessors were accepted.

    A draft is sound (all accepted so far), lost (one was not, and nobody noticed) or over.
    """
    accepted = np.asarray(acceptance, float)
    sound, lost = np.ones_like(accepted), np.zeros_like(accepted)
    drafted, kept = [], []
    for _ in range(max_length):
        drafted.append(sound + lost)
        kept.append(sound * accepted)
        lost = (1 - rule.detects) * (lost + sound * (1 - accepted))
        sound = (1 - rule.misfires) * sound * accepted
    return ExpectedDraft(np.cumsum(drafted, 0).T, np.cumsum(kept, 0).T)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWhileSure:
    """Draft on until a token's probability was below `threshold`: the fixed rule of other self-speculative decoders. It
    can be sent to wherever drafts are made."""

    threshold: float

    def __call__(self, confidences: Sequence[Sequence[float]]) -> list[bool]:
        """confidences: of the tokens drafted so far, by sequence. Which sequences draft one more."""
        return [one[-1] >= self.threshold for one in confidences]


class StopRecord:
    """The rule as observed in use. Old tokens fade; until there are some, the rule is taken to be a middling one."""

    def __init__(self, *, half_life_tokens: float = 512.0, strength: float = 16.0) -> None:
        self._half_life_tokens = half_life_tokens
        self._strength = strength
        self._prior = StopRule(detects=0.6, misfires=0.05)
        self._counts = np.zeros((2, 2))  # [accepted or not, draft went on or ended]

    def observe(self, *, num_accepted: int, num_tested: int, ended: bool) -> None:
        """One draft: its tokens up to and with the first rejected one, and whether the rule ended it at the last of
        these (False: it went on, or reached its length)."""
        self._counts *= 0.5 ** (num_tested / self._half_life_tokens)
        outcomes = [True] * num_accepted + [False] * (num_tested - num_accepted)
        for position, outcome in enumerate(outcomes):
            self._counts[int(outcome), int(ended and position == num_tested - 1)] += 1

    @property
    def rule(self) -> StopRule:
        def share(counts: Floats, prior: float) -> float:
            return float((counts[1] + prior * self._strength) / (counts.sum() + self._strength))

        return StopRule(
            detects=share(self._counts[0], self._prior.detects), misfires=share(self._counts[1], self._prior.misfires)
        )
