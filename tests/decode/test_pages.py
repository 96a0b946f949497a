import random

import pytest

from rayspec.model.kv_cache import PAGE_SIZE, PagePool, PageTable, extend_hashes, page_hash
from rayspec.model.rows import one_run


def _grown(pool: PagePool, num_pages: int, room: int = 0) -> PageTable:
    table = PageTable()
    assert pool.grow(table, num_pages, max(room, num_pages))
    return table


def _fill(pool: PagePool, table: PageTable, name: int) -> None:
    """Registers all pages of the table."""
    before = b""
    for number in range(len(table.pages)):
        before = page_hash(before, [name, number])
        pool.register(table, before)


def test_sequences_grow_in_place_while_there_is_room() -> None:
    pool = PagePool(24)
    tables = [_grown(pool, 2, room=8) for _ in range(3)]
    for num_pages in range(3, 9):
        for table in tables:
            assert pool.grow(table, num_pages, 8)
    assert [table.runs for table in tables] == [one_run(16 * at, 128) for at in (16, 8, 0)]
    assert pool.num_free == 0
    assert type(pool.num_free) is int, "it is told as JSON"


def test_what_was_freed_is_found_until_it_is_needed() -> None:
    pool = PagePool(10)
    old = _grown(pool, 4)
    _fill(pool, old, 1)
    _grown(pool, 6)
    pages, hashes = list(old.pages), list(pool._page_of)
    pool.release(old)
    assert pool.num_free == 4
    assert pool.find(hashes) == pages
    _grown(pool, 2)
    assert pool.find(hashes) == pages[:2], "the last pages went first"
    assert pool.find(hashes[1:]) == pages[1:2]


def test_a_table_that_moves_on_spares_what_others_have_left() -> None:
    """It goes on in its claim, then in the pages that it has released."""
    pool = PagePool(12, spares_content=True)
    left = [_grown(pool, 4) for _ in range(2)]  # in pages 8 to 11, and 4 to 7
    for name, table in enumerate(left):
        _fill(pool, table, name)
    hashes = list(pool._page_of)
    moving = _grown(pool, 2, room=4)
    for table in left:
        pool.release(table)
    assert (moving.pages, moving.claimed) == ([0, 1], range(2, 4))
    for num_pages in (4, 6):
        assert pool.grow(moving, num_pages, num_pages)
        pool.release_before(moving, num_pages - 2)
    assert len(pool.find(hashes[4:])) == len(pool.find(hashes[:4])) == 4


def test_a_table_that_shares_a_prefix_goes_on_behind_it() -> None:
    """Keys and values in one run are read in place, so the rest of an earlier text gives way."""
    pool = PagePool(12)
    old = _grown(pool, 4)
    _fill(pool, old, 1)
    shared = old.pages[:2]
    pool.release(old)
    table = PageTable()
    pool.share(table, shared)
    assert pool.grow(table, 4, 6)
    assert len(table.runs) == 1


@pytest.mark.parametrize("seed", range(5))
def test_a_full_cache_still_gives_neighbours(seed: int) -> None:
    """Kept pages everywhere: sequences that grow a page at a time still have few runs."""
    rng, pool = random.Random(seed), PagePool(512)
    tables: list[PageTable] = []
    for number in range(200):
        if len(tables) == 6:
            pool.release(tables.pop(rng.randrange(6)))
        tables.append(_grown(pool, rng.randint(5, 40), room=80))
        _fill(pool, tables[-1], number)
        for table in tables:
            num_pages = len(table.pages)
            assert pool.grow(table, num_pages + rng.randint(0, 2), 80)
            while table.num_hashed < num_pages:
                pool.register(table, rng.randbytes(16))
    runs = [len(table.runs) for table in tables]
    assert max(runs) <= 6, runs


def test_equal_pages_after_different_ones_have_different_hashes() -> None:
    """Keys and values of a page depend on all tokens before it."""
    hashes: list[list[bytes]] = [[], [], []]
    for own, pages in zip(hashes, ([1, 2, 3], [1, 4, 3], [1, 2, 3]), strict=True):
        extend_hashes(own, [page for page in pages for _ in range(PAGE_SIZE)], 3)
    first, other, same = hashes
    assert first == same
    assert [one == two for one, two in zip(first, other, strict=True)] == [True, False, False]
