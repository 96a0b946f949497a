"""What is learned from what was seen lately: the one estimator for everything that fades."""

from __future__ import annotations


class Discounted:
    """The mean of what was seen, where weights halve every `half_life` of further weight.

    prior: the value before anything was seen, which counts as `strength` beside what was. With a strength of 0 the
    first observation replaces it. Raises ValueError if half_life is not above 0, or strength is negative.
    """

    def __init__(self, half_life: float, *, prior: float, strength: float = 0.0) -> None:
        if half_life <= 0 or strength < 0:
            raise ValueError(f"half_life ({half_life}) must be above 0, strength ({strength}) 0 or more")
        self._half_life = half_life
        self._prior = prior
        self._strength = strength
        self._total = 0.0
        self.weight = 0.0  # of what was seen

    @property
    def value(self) -> float:
        weight = self.weight + self._strength
        return (self._total + self._strength * self._prior) / weight if weight else self._prior

    @property
    def is_known(self) -> bool:
        """Whether anything was seen."""
        return self.weight > 0

    def observe(self, value: float, weight: float = 1.0) -> None:
        """value: the mean of what has this weight together."""
        fade = 0.5 ** (weight / self._half_life)
        self._total = self._total * fade + value * weight
        self.weight = self.weight * fade + weight
