import itertools

from hypothesis import given
from hypothesis import strategies as st

from rayspec.model.rows import joined, runs_between, runs_of_pages, slots_between

PAGES = st.lists(st.integers(0, 12), unique=True, max_size=9)


@given(PAGES, st.integers(0, 9))
def test_pages_side_by_side_are_one_run(pages: list[int], cut: int) -> None:
    runs = runs_of_pages(pages, 4)
    slots = [4 * page + offset for page in pages for offset in range(4)]
    assert [slot for run in runs for slot in run.slots] == slots
    assert all(run.end != other.start for run, other in itertools.pairwise(runs))
    assert joined(runs_of_pages(pages[:cut], 4), runs_of_pages(pages[cut:], 4)) == runs


@given(PAGES, st.integers(0, 40), st.integers(0, 40))
def test_positions_are_found(pages: list[int], first: int, end: int) -> None:
    runs = runs_of_pages(pages, 4)
    slots = [slot for run in runs for slot in run.slots]
    assert slots_between(runs, first, end) == slots[first:end]
    assert all(run.length > 0 for run in runs_between(runs, first, end))
