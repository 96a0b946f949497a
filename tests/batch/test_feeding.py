"""Rows through a pool that does what their texts say; `test_job.py` has real engines."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from rayspec.batch.documents import input_row
from rayspec.batch.job import CompletedRows
from rayspec.batch.rows import Row
from rayspec.decode.engine_loop import EngineDeadError
from rayspec.pool.dispatch import EngineKilledError
from rayspec.pool.supervisor import DrainingError
from rayspec.types import ConfigError, RequestError
from tests.waiting import wait_until


class Pool:
    """Completes rows on threads of its own."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(8)
        self.begun: list[str] = []
        self.num_inside = self.most_inside = 0
        self._lock = threading.Lock()

    def submit(self, item: Row) -> Future[Row]:
        with self._lock:
            self.begun.append(item.id)
            self.num_inside += 1
            self.most_inside = max(self.most_inside, self.num_inside)
        return self._threads.submit(self._complete, item)

    def _complete(self, row: Row) -> Row:
        time.sleep(0.001)
        with self._lock:
            self.num_inside -= 1
        match row.document:
            case "deadly":
                raise EngineKilledError("engines died of this row")
            case "unsendable":
                raise RequestError("the item cannot be sent")
            case "late":
                raise DrainingError("the job was told to end")
            case "lost":
                raise EngineDeadError("engines died too often")
            case "bug":
                raise TypeError("a bug of the handler's")
        return replace(row.without_input(), text=f"done {row.document}")


def documents(*texts: str) -> list[Row]:
    return [input_row(f"r{number}", source=f"s{number}", text=text) for number, text in enumerate(texts)]


def complete(pool: Pool, rows: Iterator[Row]) -> list[Row]:
    with CompletedRows(pool.submit, rows, num_wanted=10) as results:
        return list(results)


def completed(rows: Sequence[Row], pool: Pool) -> dict[str, Row]:
    results = complete(pool, iter(rows))
    assert len({row.id for row in results}) == len(results)
    return {row.id: row for row in results}


def test_every_row_comes_once_and_no_more_are_under_way_than_are_wanted() -> None:
    pool, bad = Pool(), input_row("bad", source="s", text="t").refused(RequestError("not read"))
    results = completed([*documents(*map(str, range(300))), bad], pool)
    assert results.pop("bad") == bad
    assert {row_id: row.text for row_id, row in results.items()} == {f"r{n}": f"done {n}" for n in range(300)}
    assert 2 <= pool.most_inside <= 10


def test_reading_begins_before_the_first_row_is_taken() -> None:
    pool = Pool()
    with CompletedRows(pool.submit, iter(documents("a", "b")), num_wanted=10) as results:
        wait_until(lambda: len(pool.begun) >= 2)
        assert len(list(results)) == 2


def test_more_rows_are_under_way_when_more_are_wanted() -> None:
    given: list[Row] = []

    def submit(row: Row) -> Future[Row]:
        given.append(row)
        return Future()

    under_way = CompletedRows(submit, iter(documents(*"a" * 40)), num_wanted=4)
    with under_way:
        wait_until(lambda: len(given) == 4)
        assert (under_way.want(2), under_way.want(9)) == (4, 9)
        wait_until(lambda: len(given) == 9)


@pytest.mark.parametrize(("word", "kind"), [("deadly", "engine_killed"), ("unsendable", "request")])
def test_a_row_that_is_at_fault_is_final_and_the_others_go_on(word: str, kind: str) -> None:
    results = completed(documents("a", word, *"b" * 40), Pool())
    assert (results["r1"].error_kind, results["r1"].is_final, len(results)) == (kind, True, 42)
    assert (results["r1"].source, results["r1"].document) == ("s1", None)


@pytest.mark.parametrize("word", ["late", "lost"])
def test_when_the_pool_takes_no_more_rows_those_under_way_are_given_out_and_no_more_are_read(word: str) -> None:
    num_read = 0

    def rows() -> Iterator[Row]:
        nonlocal num_read
        for row in documents(*["a"] * 30, word, *["b"] * 1000):
            num_read += 1
            yield row

    pool = Pool()
    results = complete(pool, rows())
    assert len(results) == len(pool.begun)
    assert [row.error_kind for row in results if not row.is_final] == ["engine_dead"]
    assert num_read < 60


@pytest.mark.parametrize("where", ["reading", "handling"])
def test_what_is_no_rows_fault_is_raised(where: str) -> None:
    def rows() -> Iterator[Row]:
        yield from documents("a", "b")
        if where == "reading":
            raise TypeError("a bug of the reader's")
        yield from documents("bug")

    with pytest.raises(TypeError, match="a bug of the"):
        complete(Pool(), rows())


def test_closed_early_it_reads_no_further_and_leaves_no_thread() -> None:
    rows = iter(documents(*["a"] * 10_000))
    with CompletedRows(Pool().submit, rows, num_wanted=10) as results:
        next(results)
    with pytest.raises(ConfigError), CompletedRows(Pool().submit, rows, num_wanted=10):
        raise ConfigError("no engine can be loaded")
    assert not any(thread.name == "rayspec-feeder" for thread in threading.enumerate())
    assert sum(1 for _ in rows) > 9_000
