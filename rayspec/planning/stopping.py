"""How long drafts get, and what comes of them, when a confidence rule ends them early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rayspec.planning.constants import DETECTS, MISFIRES, PRIOR_TOKENS, TOKENS_HALF_LIFE
from rayspec.planning.discounted import Discounted

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

    def __init__(self) -> None:
        self._detects = Discounted(TOKENS_HALF_LIFE, prior=DETECTS, strength=PRIOR_TOKENS)
        self._misfires = Discounted(TOKENS_HALF_LIFE, prior=MISFIRES, strength=PRIOR_TOKENS)

    def observe(self, *, num_accepted: int, num_tested: int, ended: bool) -> None:
        """One draft: its tokens up to and with the first rejected one, and whether the rule ended it at the last of
        these (False: it went on, or reached its length)."""
        num_rejected = num_tested - num_accepted
        self._detects.observe(ended and num_rejected > 0, num_rejected, age=num_tested)
        self._misfires.observe(ended and num_rejected == 0, num_accepted, age=num_tested)

    @property
    def rule(self) -> StopRule:
        return StopRule(detects=self._detects.value, misfires=self._misfires.value)
