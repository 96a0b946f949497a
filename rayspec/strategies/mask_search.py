"""Search for the sublayers to skip: random sets, and at intervals the set that a Gaussian process rates highest.

SWIFT tries sets of one size on tokens as they are generated; Self-SD tries sets of any size on a calibration set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Keep: TypeAlias = tuple[bool, ...]
Masks: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float64]

_KAPPA = 2.5  # standard deviations above the mean by which candidates are rated (SWIFT, Self-SD)
_NOISE = 1e-2  # variance of the noise of a score, relative to the variance of the scores
_LENGTHS = (0.5, 1.0, 2.0, 4.0)  # of the kernel, in units of sqrt(number of sublayers that may be skipped)
_NUM_RANDOM = 512  # random candidates for a suggestion, in addition to the neighbours of the best mask
_MAX_OBSERVED = 256  # recent scores to fit; a suggestion's time grows with the cube of their number
_MAX_REDRAWS = 16


class MaskSearch:
    """Searches the mask with the highest score. A mask has a flag for each sublayer: True = keep. free: sublayers that
    may be skipped. num_skipped: how many of them; None: any number from 1 on. suggest_every: one of this many proposals
    comes from a Gaussian process; the others are random, redrawn a few times if already tried."""

    def __init__(
        self, num_sublayers: int, free: Sequence[int], *, num_skipped: int | None, suggest_every: int, seed: int
    ) -> None:
        self._num_sublayers = num_sublayers
        self._free = np.asarray(free, np.int64)
        self._num_skipped = num_skipped
        self._suggest_every = suggest_every
        self._rng = np.random.default_rng(seed)
        self._num_proposed = 0
        self._scores: dict[Keep, float] = {}

    @property
    def best(self) -> tuple[Keep, float] | None:
        """The mask with the highest score, and this score; None before the first score."""
        return max(self._scores.items(), key=lambda item: item[1], default=None)

    def propose(self) -> Keep:
        self._num_proposed += 1
        if self._num_proposed % self._suggest_every == 0 and len(self._scores) > 1:
            candidates = np.unique(np.concatenate([self._random(_NUM_RANDOM), self._neighbours()]), axis=0)
            unseen = [mask for mask in candidates if self._keep(mask) not in self._scores]
            if not unseen:
                return self._keep(self._random(1)[0])
            recent = list(self._scores.items())[-_MAX_OBSERVED:]
            observed = np.asarray(self._skips([keep for keep, _ in recent]))
            bound = upper_bound(observed, np.asarray([score for _, score in recent]), np.asarray(unseen))
            return self._keep(unseen[int(bound.argmax())])
        for _ in range(_MAX_REDRAWS):
            drawn = self._keep(self._random(1)[0])
            if drawn not in self._scores:
                break
        return drawn

    def observe(self, keep: Keep, score: float) -> None:
        """Record the score of a mask; it replaces an earlier score of the same mask."""
        self._scores.pop(keep, None)
        self._scores[keep] = score

    def _random(self, count: int) -> Masks:
        """Return `count` random masks over the free sublayers, [count, free], True = skip."""
        size = len(self._free)
        if self._num_skipped is None:
            share = self._rng.random((count, 1))  # so that small and large sets are as frequent as medium ones
            masks = self._rng.random((count, size)) < share
            masks[np.arange(count), self._rng.integers(size, size=count)] |= ~masks.any(axis=1)
            return masks
        order = self._rng.random((count, size)).argsort(axis=1).argsort(axis=1)
        return np.asarray(order < self._num_skipped)

    def _neighbours(self) -> Masks:
        """Return masks one step from the best: two sublayers exchanged, or with a free number, one flag changed."""
        assert self.best is not None
        (best,) = self._skips([self.best[0]])
        if self._num_skipped is None:
            steps = best ^ np.eye(len(best), dtype=bool)
            return np.asarray(steps[steps.any(axis=1)])
        skipped, kept = np.flatnonzero(best), np.flatnonzero(~best)
        steps = np.repeat(best[None], len(skipped) * len(kept), axis=0)
        rows = np.arange(len(steps))
        steps[rows, np.repeat(skipped, len(kept))] = False
        steps[rows, np.tile(kept, len(skipped))] = True
        return steps

    def _skips(self, keeps: Sequence[Keep]) -> Masks:
        """Convert masks to flags of the free sublayers, [len(keeps), free], True = skip."""
        return ~np.asarray(keeps, bool)[:, self._free]

    def _keep(self, skips: Masks) -> Keep:
        keep = np.ones(self._num_sublayers, bool)
        keep[self._free[skips]] = False
        return tuple(keep.tolist())


def upper_bound(observed: Masks, scores: Floats, candidates: Masks) -> Floats:
    """Return [num_candidates]: mean + 2.5 standard deviations of a Gaussian process (Matern 5/2) fitted to the scores
    of `observed` [num_observed, free], with the likeliest of a few lengths. candidates: [num_candidates, free]."""
    # Imported here: the import takes a second, which only users of this search should wait for.
    from sklearn.gaussian_process import GaussianProcessRegressor  # noqa: PLC0415
    from sklearn.gaussian_process.kernels import Matern  # noqa: PLC0415

    unit = np.sqrt(observed.shape[1])
    processes: list[Any] = [
        GaussianProcessRegressor(
            Matern(length_scale=unit * length, nu=2.5), alpha=_NOISE, normalize_y=True, optimizer=None
        ).fit(observed.astype(float), scores)
        for length in _LENGTHS
    ]
    likeliest = max(processes, key=lambda process: process.log_marginal_likelihood_value_)
    mean, deviation = likeliest.predict(candidates.astype(float), return_std=True)
    return np.asarray(mean + _KAPPA * deviation)
