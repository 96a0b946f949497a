from __future__ import annotations

import itertools

import numpy as np
import pytest

from rayspec.strategies.anchors import nearest, radius, representatives, unit_rows


def test_the_nearest_anchor_is_the_one_of_the_highest_cosine() -> None:
    rng = np.random.default_rng(0)
    anchors = {name: unit_rows(rng.normal(size=(5, 8))) for name in ("news", "code", "law")}
    for feature in rng.normal(size=(50, 8)) * rng.uniform(0.1, 50, size=(50, 1)):
        cosines = {
            name: max(float(row @ feature) / float(np.linalg.norm(feature)) for row in rows)
            for name, rows in anchors.items()
        }
        found = nearest({name: rows.tolist() for name, rows in anchors.items()}, feature.tolist())
        assert found is not None
        assert found.domain == max(cosines, key=lambda name: cosines[name])
        assert found.distance == pytest.approx(1 - max(cosines.values()))


def test_without_anchors_nothing_is_near() -> None:
    assert nearest({"news": []}, [1.0, 0.0]) is None


def test_zeros_have_no_direction() -> None:
    with pytest.raises(ValueError, match="direction"):
        nearest({"news": [[1.0, 0.0]]}, [0.0, 0.0])


def test_representatives_are_the_samples_nearest_to_the_centres() -> None:
    """Three tight clusters: the sample nearest to each cluster's mean, found by trying."""
    rng = np.random.default_rng(1)
    clusters = [unit_rows(centre + 0.05 * rng.normal(size=(7, 3))) for centre in np.eye(3)]
    expected = {
        tuple(cluster[np.linalg.norm(cluster - cluster.mean(axis=0), axis=1).argmin()].round(9).tolist())
        for cluster in clusters
    }
    rows = representatives(np.concatenate(clusters) * 3.0, 3)
    assert {tuple(row.round(9).tolist()) for row in rows} == expected


def test_few_samples_all_represent_themselves() -> None:
    rows = representatives([[2.0, 0.0], [0.0, 3.0], [4.0, 0.0]], 5)
    assert rows.tolist() == [[0.0, 1.0], [1.0, 0.0]]


def test_the_radius_is_twice_the_farthest_that_a_sample_lies_from_an_anchor_not_itself() -> None:
    rng = np.random.default_rng(2)
    samples = unit_rows(rng.normal(size=(6, 4)))
    farthest = max(
        min(1 - float(one @ other) for j, other in enumerate(samples[:3]) if i != j) for i, one in enumerate(samples)
    )
    assert radius(samples * 2.0, samples[:3]) == pytest.approx(2 * farthest)
    assert radius(samples[:1], samples[:1]) == 0.0
    assert all(radius(samples, samples[list(some)]) > 0 for some in itertools.combinations(range(6), 2))


def test_where_other_domains_are_known_it_is_half_way_to_the_nearest_of_their_anchors() -> None:
    rng = np.random.default_rng(3)
    centres = np.eye(5)[:3]
    domains = [unit_rows(centre + 0.02 * rng.normal(size=(6, 5))) for centre in centres]
    own, others = domains[0], [rows[:4] for rows in domains[1:]]
    gap = min(1 - float(one @ other) for one in own[:3] for rows in others for other in rows)
    assert radius(own * 3.0, own[:3], others) == pytest.approx(gap / 2)
    near = unit_rows(centres[0] + 0.02 * rng.normal(size=(6, 5)))
    assert radius(own, own[:3], [near]) == radius(own, own[:3]), "never less than the samples need"
