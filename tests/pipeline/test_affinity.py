from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rayspec.decode.pages import page_hashes
from rayspec.pipeline.affinity import PrefixAffinity

PROMPT = page_hashes(list(range(80)))
OTHER = page_hashes(list(range(40, 120)))


def _affinity(*num_cached: int) -> PrefixAffinity:
    """Of replicas that have so many pages of every prompt."""
    engines: Any = [SimpleNamespace(num_cached_pages=lambda hashes, count=count: count) for count in num_cached]
    return PrefixAffinity(engines)


def test_the_engine_that_has_the_pages_gets_the_prompt() -> None:
    assert _affinity(0, 3, 2).choose(PROMPT, {0: 0, 1: 2, 2: 0}) == 1


def test_a_busy_engine_does_not() -> None:
    assert _affinity(0, 3).choose(PROMPT, {0: 0, 1: 4}) == 1
    assert _affinity(0, 3).choose(PROMPT, {0: 0, 1: 5}) == 0
    assert _affinity(0, 3).choose(PROMPT, {0: 10, 1: 24}) == 1


def test_without_pages_the_least_busy_gets_it() -> None:
    assert _affinity(0, 0, 0).choose(PROMPT, {0: 3, 1: 2, 2: 9}) == 1
    assert _affinity(0, 0, 0).choose([], {0: 3, 2: 1}) == 2


def test_a_prompt_that_was_given_out_counts_before_it_is_computed() -> None:
    affinity = _affinity(0, 0)
    assert affinity.choose(PROMPT, {0: 1, 1: 0}) == 1
    assert affinity.choose(PROMPT, {0: 1, 1: 3}) == 1
    assert affinity.choose(OTHER, {0: 1, 1: 3}) == 0


def test_a_lost_replica_is_not_chosen() -> None:
    affinity = _affinity(0, 5)
    assert affinity.choose(PROMPT, {0: 7}) == 0
