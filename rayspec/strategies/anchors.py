"""Domains of text as points: features of typical text of each, and which of them new text is nearest to (KNN-SSD)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]

_SEED = 42
_NUM_STARTS = 10
# How much farther than the farthest sample text of the domain may be, where no other domain is known.
_SLACK = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """The domain of the nearest anchor, and the cosine distance to it: 0 (same direction) to 2."""

    domain: str
    distance: float


def unit_rows(vectors: ArrayLike) -> Floats:
    """[count, size], each row at length 1. Raises ValueError for a row of zeros, which has no direction."""
    rows = np.atleast_2d(np.asarray(vectors, float))
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    if not (lengths > 0).all():
        raise ValueError("a feature of zeros has no direction")
    return np.asarray(rows / lengths)


def nearest(anchors: Mapping[str, Sequence[Sequence[float]]], feature: Sequence[float]) -> Nearest | None:
    """anchors: unit vectors, by domain. None where there are none. Raises ValueError for a feature of another size."""
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
    """[up to count, size]: unit vectors of the samples nearest to the centres of `count` clusters (KNN-SSD, eq. 2);
    all samples where there are no more than that. features: [num_samples, size]."""
    rows = np.unique(unit_rows(features), axis=0)
    if len(rows) <= count:
        return rows
    # Imported here: it takes a second, which nobody should wait for who makes no anchors.
    from sklearn.cluster import KMeans  # noqa: PLC0415

    distances = KMeans(count, n_init=_NUM_STARTS, random_state=_SEED).fit_transform(rows)  # to each centre
    return np.asarray(rows[np.unique(distances.argmin(axis=0))])


def radius(features: ArrayLike, anchors: Floats, others: Sequence[Floats] = ()) -> float:
    """The cosine distance from the anchors within which text is of the domain: half of that to the nearest anchor of
    the `others`, and at least twice the largest of a sample to its nearest anchor, itself not counted.

    A few samples lie closer together than other text of their domain: of the demo model's four domains 12 samples each
    were within 0.05, 12 other texts within 0.04, text of another domain beyond 0.42, and text of none beyond 0.26.
    """
    rows = unit_rows(features)
    distances = 1 - rows @ anchors.T
    distances[np.isclose(distances, 0.0, atol=1e-9)] = np.inf
    nearest_anchor = distances.min(axis=1)
    spread = float(nearest_anchor[np.isfinite(nearest_anchor)].max(initial=0.0))
    gap = min((float((1 - anchors @ other.T).min()) for other in others), default=0.0)
    return max(_SLACK * spread, gap / 2)
