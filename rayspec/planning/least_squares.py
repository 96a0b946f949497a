"""Least squares with coefficients that cannot be negative."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NUM_REWEIGHTINGS = 12
OUTLIER_FLOOR = 1e-3  # relative residuals below this count alike


def nonnegative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """Return the x >= 0 that minimises |matrix x - target|, by Lawson and Hanson's active set method."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    solution = np.zeros(scaled.shape[1])
    free = np.zeros(scaled.shape[1], bool)
    tolerance = 1e-10 * max(float(np.linalg.norm(target)), 1e-300)
    for _ in range(3 * scaled.shape[1]):
        gradient = scaled.T @ (target - scaled @ solution)
        gradient[free] = -np.inf
        if free.all() or gradient.max() <= tolerance:
            break
        free[int(np.argmax(gradient))] = True
        solution = _settle(scaled, target, solution, free)
    return np.asarray(solution / scale)


def _settle(matrix: Floats, target: Floats, solution: Floats, free: NDArray[np.bool_]) -> Floats:
    """Solve for the free coefficients, after fixing those at 0 that would turn negative; `free` changes in place."""
    while free.any():
        trial = np.zeros_like(solution)
        trial[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        negative = free & (trial <= 0)
        if not negative.any():
            return trial
        step = np.min(solution[negative] / np.maximum(solution[negative] - trial[negative], 1e-300))
        solution = solution + step * (trial - solution)
        free &= solution > 1e-15 * max(float(np.abs(solution).max()), 1e-300)
        solution = np.where(free, solution, 0.0)
    return np.zeros_like(solution)


def independent_columns(matrix: Floats) -> NDArray[np.bool_]:
    """Return a flag for each column: whether it is linearly independent of the columns before it. Only the coefficients
    of these columns are determined."""
    norms = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(norms > 0, norms, 1.0)
    ranks = [0, *(int(np.linalg.matrix_rank(scaled[:, : count + 1])) for count in range(matrix.shape[1]))]
    return np.diff(ranks) > 0


def robust_relative_fit(matrix: Floats, target: Floats) -> Floats:
    """Return an x >= 0 that makes the relative errors of matrix x against target > 0 small; outliers hardly count.

    The method is least absolute deviations by iterative reweighting. Each row is scaled by the inverse square root of
    its last error.
    """
    relative = matrix / target[:, None]
    ones = np.ones(len(target))
    solution = nonnegative_least_squares(relative, ones)
    for _ in range(NUM_REWEIGHTINGS):
        error = np.abs(relative @ solution - 1.0)
        weight = 1.0 / np.sqrt(np.maximum(error, OUTLIER_FLOOR))
        solution = nonnegative_least_squares(relative * weight[:, None], weight)
    return solution
