"""The estimator behind every quantity that is learned from recent observations."""

from __future__ import annotations


class Discounted:
    """An exponentially discounted mean: the sum of observed totals over the sum of observed weights. Both sums halve
    whenever `half_life` of further weight, or of explicit age, has been added.

    prior: the value before the first observation, which counts as an observation of weight `strength`. With strength 0
    the first observation replaces it. Raises ValueError if half_life is not above 0, or strength is negative.
    """

    def __init__(self, half_life: float, *, prior: float = 0.0, strength: float = 0.0) -> None:
        if half_life <= 0 or strength < 0:
            raise ValueError(f"half_life ({half_life}) must be above 0, strength ({strength}) 0 or more")
        self._half_life = half_life
        self._prior = prior
        self._strength = strength
        self.total = 0.0  # of all observations, without the prior
        self.weight = 0.0

    @property
    def value(self) -> float:
        return self.with_prior(self._prior, self._strength)

    @property
    def is_known(self) -> bool:
        """Whether anything was observed."""
        return self.weight > 0

    def with_prior(self, prior: float, strength: float) -> float:
        """Return the value that results from another prior."""
        weight = self.weight + strength
        return (self.total + strength * prior) / weight if weight else prior

    def observe(self, total: float, weight: float = 1.0, *, age: float | None = None) -> None:
        """Add observations with this summed value and weight. age: by how much all earlier observations get older;
        None: by the weight."""
        fade = 0.5 ** ((weight if age is None else age) / self._half_life)
        self.total = self.total * fade + total
        self.weight = self.weight * fade + weight
