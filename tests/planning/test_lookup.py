from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from rayspec.planning.acceptance import expected_tokens
from rayspec.planning.lookup import LookupRecord, best_lookup


def test_acceptance_is_learned_by_how_much_matched() -> None:
    record, rng = LookupRecord(), random.Random(0)
    before = record.acceptance(20)
    for _ in range(2000):
        for num_matched, right in ((3, 0.2), (20, 0.95)):
            committed = [1 if rng.random() < right else 2 for _ in range(6)]
            first_wrong = committed.index(2) if 2 in committed else 5
            record.observe(num_matched, [1] * 8, committed[: first_wrong + 1])
    assert record.acceptance(3) == pytest.approx(0.2, abs=0.08)
    assert record.acceptance(20) == pytest.approx(0.95, abs=0.03)
    assert record.acceptance(20) > before
    assert record.acceptance(10**6) == record.acceptance(20)


def test_only_what_is_known_counts() -> None:
    """Of a plain round one token is known: it says nothing of the tokens after it."""
    record, other = LookupRecord(), LookupRecord()
    for _ in range(50):
        record.observe(5, [1, 2, 3], [1])
        other.observe(5, [1, 2, 3], [1, 9])
    assert record.acceptance(5) > 0.9
    assert other.acceptance(5) == pytest.approx(0.5, abs=0.1)
    nothing = LookupRecord()
    nothing.observe(5, [1], [])
    assert nothing.acceptance(5) == LookupRecord().acceptance(5)


def test_a_change_of_text_is_noticed() -> None:
    record = LookupRecord()
    for _ in range(1000):
        record.observe(8, [1] * 4, [1] * 4)
    for _ in range(1000):
        record.observe(8, [1] * 4, [2])
    assert record.acceptance(8) < 0.1


@pytest.mark.parametrize("row_s", [0.001, 0.03, 0.2, 2.0])
def test_the_number_of_tokens_is_the_best_there_is(row_s: float) -> None:
    acceptance, available = [0.9, 0.5, 0.0, 0.7], [16, 3, 0, 10]

    def seconds(taken: Sequence[int]) -> float:
        return 1.0 + row_s * sum(taken)

    found = best_lookup(acceptance, available, seconds, num_tokens_beside=1.5)
    rates = {}
    for length in range(17):
        taken = [min(length, one) for one in available]
        tokens = sum(float(expected_tokens(a, g)) for a, g in zip(acceptance, taken, strict=True)) + 1.5
        rates[length] = tokens / seconds(taken)
    assert found.rate == pytest.approx(rates[found.num_tokens])
    powers = [1, 2, 4, 8, 16]
    assert found.rate == pytest.approx(max(rates[length] for length in powers))
    assert found.rate >= 0.9 * max(rates.values()) or found.num_tokens == 1
    assert all(rates[a] <= found.rate + 1e-9 for a in powers), list(itertools.islice(rates.items(), 5))
