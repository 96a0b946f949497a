from __future__ import annotations

import itertools

import numpy as np
import pytest

from rayspec.strategies.mask_search import Keep, MaskSearch, upper_bound


def _similarity(keep: Keep, wanted: Keep) -> float:
    return sum(one == other for one, other in zip(keep, wanted, strict=True)) / len(wanted)


def _skipped(keep: Keep) -> set[int]:
    return {index for index, kept in enumerate(keep) if not kept}


@pytest.mark.parametrize("suggest_every", [1, 4, 1000])
def test_every_set_has_the_size_and_leaves_alone_what_must_be_kept(suggest_every: int) -> None:
    free = [2, 3, 4, 6, 7]
    search = MaskSearch(9, free, num_skipped=3, suggest_every=suggest_every, seed=0)
    seen = set()
    for _ in range(30):
        keep = search.propose()
        assert len(keep) == 9
        assert len(_skipped(keep)) == 3
        assert _skipped(keep) <= set(free)
        search.observe(keep, len(seen) / 30)
        seen.add(keep)
    assert len(seen) == 10, "5 over 3: as none is drawn twice while others are easily found"


def test_of_any_size_means_small_and_large_but_never_none() -> None:
    search = MaskSearch(12, range(12), num_skipped=None, suggest_every=10_000, seed=0)
    sizes = []
    for _ in range(300):
        keep = search.propose()
        search.observe(keep, 0.0)
        sizes.append(len(_skipped(keep)))
    assert min(sizes) == 1
    assert max(sizes) >= 11
    assert 4 < np.mean(sizes) < 8


@pytest.mark.parametrize("num_skipped", [None, 6])
def test_suggestions_find_the_best_of_many_sets_with_few_trials(num_skipped: int | None) -> None:
    wanted = tuple(index % 3 != 0 for index in range(18))
    by_suggestions = MaskSearch(18, range(18), num_skipped=num_skipped, suggest_every=1, seed=3)
    at_random = MaskSearch(18, range(18), num_skipped=num_skipped, suggest_every=10_000, seed=3)
    for search in (by_suggestions, at_random):
        for _ in range(60):
            keep = search.propose()
            search.observe(keep, _similarity(keep, wanted))
    assert by_suggestions.best == (wanted, 1.0)
    assert at_random.best is not None
    assert at_random.best[1] < 1.0


def test_the_bound_is_mean_and_deviations_of_the_process_by_the_book() -> None:
    """Gaussian process regression, eq. 2.25 and 2.26 of Rasmussen and Williams, scores at mean 0 and variance 1."""
    rng = np.random.default_rng(0)
    observed = np.unique(rng.random((12, 6)) < 0.5, axis=0)
    scores = rng.random(len(observed))
    candidates = np.asarray(list(itertools.product([False, True], repeat=6)))

    def kernel(a: np.ndarray, b: np.ndarray, length: float) -> np.ndarray:
        r = np.sqrt(5) * np.sqrt((a[:, None] != b).sum(axis=2)) / length
        return (1 + r + r**2 / 3) * np.exp(-r)

    normal, results = (scores - scores.mean()) / scores.std(), []
    for length in np.sqrt(6) * np.asarray([0.5, 1.0, 2.0, 4.0]):
        matrix = kernel(observed, observed, length) + 0.01 * np.eye(len(observed))
        across = kernel(candidates, observed, length)
        mean = across @ np.linalg.solve(matrix, normal)
        variance = 1 - np.einsum("ij,ji->i", across, np.linalg.solve(matrix, across.T))
        likelihood = -0.5 * normal @ np.linalg.solve(matrix, normal) - 0.5 * np.linalg.slogdet(matrix)[1]
        results.append((likelihood, (mean + 2.5 * np.sqrt(variance)) * scores.std() + scores.mean()))
    expected = max(results, key=lambda result: result[0])[1]
    np.testing.assert_allclose(upper_bound(observed, scores, candidates), expected, atol=1e-6)
