"""Anchors of text domains (KNN-SSD): features of typical text of each domain, with which new text is compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]

_SEED = 42
_NUM_STARTS = 10
# Smallest radius of a domain, as a multiple of the largest distance of its samples.
_SLACK = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """The domain of the nearest anchor, and the cosine distance to it: 0 (same direction) to 2."""

    domain: str
    distance: float


def unit_rows(vectors: ArrayLike) -> Floats:
    """Return [count, size], each row scaled to length 1. Raises ValueError for a row of zeros."""
    rows = np.atleast_2d(np.asarray(vectors, float))
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    if not (lengths > 0).all():
        raise ValueError("a feature of zeros has no direction")
    return np.asarray(rows / lengths)


def nearest(anchors: Mapping[str, Sequence[Sequence[float]]], feature: Sequence[float]) -> Nearest | None:
    """Return the domain of the nearest anchor; None without anchors. anchors: unit vectors, by domain.

    Raises ValueError for a feature of zeros, or of another size than the anchors.
    """
    (direction,) = unit_rows(feature)
    found = None
    for domain, vectors in anchors.items():
        if not vectors:
            continue
        distance = float(1 - (np.asarray(vectors) @ direction).max())
        if found is None or distance < found.distance:
            found = Nearest(domain=domain, distance=distance)
    return found


def representatives(features: ArrayLike, count: int) -> Floats:
    """Return [up to count, size]: unit vectors of the samples nearest to the centres of `count` clusters (KNN-SSD,
    eq. 2); all distinct samples if there are at most `count`. features: [num_samples, size]."""
    rows = np.unique(unit_rows(features), axis=0)
    if len(rows) <= count:
        return rows
    # Imported here: the import takes a second, which only users of anchors should wait for.
    from sklearn.cluster import KMeans  # noqa: PLC0415

    distances = KMeans(count, n_init=_NUM_STARTS, random_state=_SEED).fit_transform(rows)  # to each centre
    return np.asarray(rows[np.unique(distances.argmin(axis=0))])


def radius(features: ArrayLike, anchors: Floats, others: Sequence[Floats] = ()) -> float:
    """Return the cosine distance from the anchors within which text belongs to the domain.

    It is half of the distance to the nearest anchor of the `others`, but at least twice the largest distance of a
    sample to its nearest anchor other than itself. A few samples lie closer together than other text of their domain,
    hence twice. Distances for the demo model's four domains: 12 samples each within 0.05, 12 other texts within 0.04,
    text of another domain beyond 0.42, and text of no domain beyond 0.26.
    """
    rows = unit_rows(features)
    distances = 1 - rows @ anchors.T
    distances[np.isclose(distances, 0.0, atol=1e-9)] = np.inf
    nearest_anchor = distances.min(axis=1)
    spread = float(nearest_anchor[np.isfinite(nearest_anchor)].max(initial=0.0))
    gap = min((float((1 - anchors @ other.T).min()) for other in others), default=0.0)
    return max(_SLACK * spread, gap / 2)
