"""The expected length and accepted tokens of drafts that a confidence rule ends early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from rayspec.planning.constants import DETECTS, MISFIRES, PRIOR_TOKENS, TOKENS_HALF_LIFE
from rayspec.planning.discounted import Discounted

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """A rule that ends drafts early, by its two probabilities. detects: the draft ends after a token that will be
    rejected. misfires: the draft ends after a token that will be accepted. (0, 0): drafts always reach their length."""

    detects: float = 0.0
    misfires: float = 0.0


NEVER = StopRule()


@dataclass(frozen=True, slots=True)
class ExpectedDraft:
    """Expected drafted and accepted tokens: [num_candidates, max_length] each, by the maximum draft length (1, 2, ...).

    With StopRule(), drafts of maximum length g and acceptance a have num_drafted = g and num_accepted = a + a^2 + ...
    + a^g (Leviathan et al., eq. 1, without the bonus token).
    """

    num_drafted: Floats
    num_accepted: Floats


def expected_draft(acceptance: ArrayLike, max_length: int, rule: StopRule) -> ExpectedDraft:
    """Return the expected drafts. acceptance: [num_candidates], of a token whose predecessors were accepted.

    The computation tracks two probabilities: that a draft is sound (all tokens so far are accepted), and that it is
    lost (a token was rejected, but the rule did not end the draft). Otherwise the draft has ended.
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


class DraftWhileSure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Continue a draft until its last token's probability is below `threshold`: the rule of other self-speculative
    decoders. The rule is serializable, and can be sent to the process that drafts."""

    threshold: float

    def __call__(self, confidences: Sequence[Sequence[float]]) -> list[bool]:
        """Return for each sequence whether it drafts one more token. confidences: of its drafted tokens so far."""
        return [one[-1] >= self.threshold for one in confidences]


class StopRecord:
    """Estimates the stop rule's probabilities from use. Old tokens fade; the priors are DETECTS and MISFIRES."""

    def __init__(self) -> None:
        self._detects = Discounted(TOKENS_HALF_LIFE, prior=DETECTS, strength=PRIOR_TOKENS)
        self._misfires = Discounted(TOKENS_HALF_LIFE, prior=MISFIRES, strength=PRIOR_TOKENS)

    def observe(self, *, num_accepted: int, num_tested: int, ended: bool) -> None:
        """Record one draft.

        num_tested: its tokens up to and including the first rejected token. ended: whether the rule ended the draft at
        the last of these (False: the draft continued, or reached its length).
        """
        num_rejected = num_tested - num_accepted
        self._detects.observe(ended and num_rejected > 0, num_rejected, age=num_tested)
        self._misfires.observe(ended and num_rejected == 0, num_accepted, age=num_tested)

    @property
    def rule(self) -> StopRule:
        return StopRule(detects=self._detects.value, misfires=self._misfires.value)
