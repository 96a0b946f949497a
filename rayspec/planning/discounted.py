"""What is learned from what was seen lately: the one estimator for everything that fades."""

from __future__ import annotations


class Discounted:
    """A ratio of two sums, of what was seen: totals over weights. Both halve every `half_life` of further weight, or of
    the age that an observation brings.

    prior: the value before anything was seen, which counts as `strength` of weight beside what was. With a strength of
    0 the first observation replaces it. Raises ValueError if half_life is not above 0, or strength is negative.
    """

    def __init__(self, half_life: float, *, prior: float = 0.0, strength: float = 0.0) -> None:
        if half_life <= 0 or strength < 0:
            raise ValueError(f"half_life ({half_life}) must be above 0, strength ({strength}) 0 or more")
        self._half_life = half_life
        self._prior = prior
        self._strength = strength
        self.total = 0.0  # of what was seen, without the prior
        self.weight = 0.0

    @property
    def value(self) -> float:
        return self.with_prior(self._prior, self._strength)

    @property
    def is_known(self) -> bool:
        """Whether anything was seen."""
        return self.weight > 0

    def with_prior(self, prior: float, strength: float) -> float:
        """The value, had it this prior."""
        weight = self.weight + strength
        return (self.total + strength * prior) / weight if weight else prior

    def observe(self, total: float, weight: float = 1.0, *, age: float | None = None) -> None:
        """total: the sum of what has this weight together. age: by how much everything before gets older; None: by the
        weight."""
        fade = 0.5 ** ((weight if age is None else age) / self._half_life)
        self.total = self.total * fade + total
        self.weight = self.weight * fade + weight
