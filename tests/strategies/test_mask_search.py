import pytest

from rayspec.strategies.mask_search import Keep, MaskSearch


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
