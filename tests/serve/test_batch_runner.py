"""Batches as they run: what is stored is never lost or doubled, whenever the run is lost; endings; lost lines."""

import asyncio
import errno
import json
import os
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from rayspec.command.locations import Location
from rayspec.openai.batch import Batch, BatchLine, BatchRequest, BatchResult, FileObject, Page, PageRequest
from rayspec.openai.protocol import ApiError, InvalidRequestError
from rayspec.serve.access import GONE
from rayspec.serve.batch_routes import add_batch_routes
from rayspec.serve.batch_runner import BatchRun, BatchRunner
from rayspec.serve.batch_store import BatchStore, new_id
from rayspec.serve.description import Description
from rayspec.serve.options import LLMConfig, ModelLoadingConfig, ServeOptions
from rayspec.serve.unread import Unread
from rayspec.types import ConfigError

Answer = Callable[[BatchLine], Awaitable[BatchResult | ApiError]]


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    return BatchStore(Location.parse(str(tmp_path / "kept")))


def new_batch(store: BatchStore, names: list[str], client: str = "", **body: str) -> Batch:
    rows = (
        {"custom_id": one, "method": "POST", "url": "/v1/completions", "body": {"prompt": one} | body} for one in names
    )
    return batch_of(store, (json.dumps(row).encode() + b"\n" for row in rows), client)


def batch_of(store: BatchStore, lines: Iterable[bytes], client: str = "") -> Batch:
    with store.new_file(file_id := new_id("file-"), "in.jsonl", "batch") as content:
        content.writelines(lines)
    asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    return store.new_batch(BatchRequest.parse(asked), client)


async def answered(line: BatchLine) -> BatchResult:
    await asyncio.sleep(0)
    return line.result(400 if line.custom_id.startswith("bad") else 200, json.dumps({"text": line.custom_id}).encode())


def run_of(store: BatchStore, batch: Batch, answer: Answer = answered) -> BatchRun:
    return BatchRun(store.saved(batch.id), store, 10_000, answer)


def rows_of(store: BatchStore, *file_ids: str | None) -> list[str]:
    """The custom_ids."""
    contents = [store.open_file(one) for one in file_ids if one is not None]
    return [json.loads(line)["custom_id"] for file in contents for line in file]


NAMES = [f"{'bad' if number % 7 == 0 else 'good'} {number}" for number in range(300)]


@pytest.mark.parametrize("num_lost", [0, 8])
def test_often_lost_it_goes_on_where_it_stood(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch, num_lost: int
) -> None:
    """The disk is full; some runs are cancelled, each at another moment; at last two run at the same time."""
    batch = new_batch(store, NAMES)
    asked: Counter[str] = Counter()

    async def slowly(line: BatchLine) -> BatchResult:
        await asyncio.sleep(0.002)
        asked[line.custom_id] += 1
        return await answered(line)

    async def lost_after(seconds: float) -> None:
        task = asyncio.create_task(run_of(store, batch, slowly).run())
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def twice() -> None:
        await asyncio.gather(run_of(store, batch, slowly).run(), run_of(store, batch, slowly).run())

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="no space"):
        patched.setattr(BatchStore, "add_results", full)
        asyncio.run(run_of(store, batch, slowly).run())
    assert store.batch(batch.id).status == "in_progress"
    for number in range(num_lost):
        asyncio.run(lost_after(0.004 * number))
    asyncio.run(twice())
    batch = store.batch(batch.id)
    assert batch.status == "completed"
    assert sorted(rows_of(store, batch.output_file_id, batch.error_file_id)) == sorted(NAMES)
    assert set(asked) == set(NAMES)


@pytest.mark.parametrize("num_answered", [None, 20])
def test_answers_outlive_the_input_file(store: BatchStore, num_answered: int | None) -> None:
    """It is deleted while the batch runs, which ends by itself or is cancelled after some answers."""
    batch = new_batch(store, NAMES)

    async def answer(line: BatchLine) -> BatchResult:
        if line.custom_id == NAMES[0]:
            store.delete_file(batch.input_file_id)
        if num_answered is not None and NAMES.index(line.custom_id) >= num_answered:
            store.cancel(batch.id)
            await asyncio.sleep(60.0)
        return await answered(line)

    asyncio.run(run_of(store, batch, answer).run())
    ended = store.batch(batch.id)
    assert ended.status == ("completed" if num_answered is None else "failed")
    assert sorted(rows_of(store, ended.output_file_id, ended.error_file_id)) == sorted(NAMES[:num_answered])
    assert ended.request_counts.completed == len(rows_of(store, ended.output_file_id))


@pytest.mark.parametrize(("num_losses", "num_asked", "fails"), [(3, 4, False), (100, 4, True)])
def test_only_a_line_that_is_often_lost_fails(store: BatchStore, num_losses: int, num_asked: int, fails: bool) -> None:
    """A line that ends its replica takes with it the lines that run beside it."""
    batch = new_batch(store, [f"line {number}" for number in range(40)])
    running, struck, asked = set[str](), set[str](), Counter[str]()

    async def answer(line: BatchLine) -> BatchResult | ApiError:
        asked[line.custom_id] += 1
        running.add(line.custom_id)
        await asyncio.sleep(0.001)
        if line.custom_id == "line 17" and asked["line 17"] <= num_losses:
            struck.update(running)
        running.discard(line.custom_id)
        if line.custom_id in struck:
            struck.discard(line.custom_id)
            return GONE
        return await answered(line)

    asyncio.run(run_of(store, batch, answer).run())
    batch = store.batch(batch.id)
    assert rows_of(store, batch.error_file_id) == ["line 17"] * fails
    assert len(rows_of(store, batch.output_file_id)) == 40 - fails
    assert asked["line 17"] == num_asked


def test_results_written_slowly_are_not_lost_at_the_end(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line is answered while results of earlier lines are still being written."""
    batch = new_batch(store, NAMES[:4])
    add_results, is_writing = BatchStore.add_results, threading.Event()

    def slow_at_first(*args: Any) -> None:
        if not is_writing.is_set():
            is_writing.set()
            time.sleep(0.5)
        add_results(*args)

    async def last_during_write(line: BatchLine) -> BatchResult:
        while line.custom_id == NAMES[3] and not is_writing.is_set():
            await asyncio.sleep(0.01)
        return await answered(line)

    monkeypatch.setattr(BatchStore, "add_results", slow_at_first)
    monkeypatch.setattr("rayspec.serve.batch_runner._SAVE_AFTER_S", 0.01)
    asyncio.run(run_of(store, batch, last_during_write).run())
    batch = store.batch(batch.id)
    assert batch.status == "completed"
    assert rows_of(store, batch.output_file_id) == NAMES[1:4]
    assert rows_of(store, batch.error_file_id) == NAMES[:1]


def options_of(tmp_path: Path, **deployment: Any) -> ServeOptions:
    model = {"model_loading_config": {"model_id": "demo"}, "engine_kwargs": {"max_num_seqs": 4}}
    model["deployment_config"] = deployment
    return ServeOptions(llm_configs=(model,), batches=str(tmp_path / "kept"), max_batch_lines=1000)


class Model:
    """Stands for Serve's handle of a model. go: lines wait for it."""

    app_name, deployment_name = "app", "model"

    def __init__(self) -> None:
        self.answer = self
        self.go = asyncio.Event()
        self.asked: list[BatchLine] = []

    async def remote(self, line: BatchLine, _batch: str) -> BatchResult:
        self.asked.append(line)
        await self.go.wait()
        return await answered(line)


async def until(reached: Callable[[], bool]) -> None:
    for _ in range(400):
        if reached():
            return
        await asyncio.sleep(0.02)
    raise AssertionError


def statuses(store: BatchStore) -> Counter[str]:
    return Counter(store.batch(name).status for name in store.batch_ids())


def test_few_batches_run_at_once_and_a_second_runner_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = BatchStore.at(str(tmp_path / "kept"))
    batches = [new_batch(store, NAMES[:3]) for _ in range(12)]

    async def work() -> None:
        lock, model = store.lock(), Model()
        assert lock is not None
        with pytest.raises(ConfigError, match="another server"):
            store.lock()
        runner = BatchRunner(options_of(tmp_path), {"demo": model})
        for _ in range(5):
            await runner.wake()
            await asyncio.sleep(0.05)
        assert statuses(store) == {"validating": 12}
        assert caplog.text.count("another server") == 1
        lock.close()
        await runner.wake()
        await until(lambda: statuses(store)["in_progress"] == 4)
        for _ in range(20):
            await runner.wake()
            await asyncio.sleep(0.01)
        assert statuses(store) == {"in_progress": 4, "validating": 8}
        others = [new_batch(store, NAMES[:3], client="other") for _ in range(3)]
        await runner.wake()
        await until(lambda: store.batch(others[0].id).status == "in_progress")
        assert statuses(store) == {"in_progress": 5, "validating": 10}
        store.cancel(batches[-1].id)
        await runner.wake()
        await until(lambda: statuses(store)["cancelled"] == 1)
        model.go.set()
        await until(lambda: statuses(store)["completed"] == 14)
        runner.__del__()

    asyncio.run(work())


class FailedModel(Model):
    """Of a deployment that has failed, until each line was asked for once."""

    def remote(self, line: BatchLine, _batch: str) -> Any:
        return asyncio.ensure_future(self._answer(line))

    async def _answer(self, line: BatchLine) -> BatchResult:
        self.asked.append(line)
        if self.asked.count(line) == 1:
            raise DeploymentUnavailableError(DeploymentID("model", "app"))
        return await answered(line)


def test_lines_wait_for_a_deployment_that_has_failed_and_a_failed_sweep_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("stale file handle")

    store = BatchStore.at(str(tmp_path / "kept"))
    monkeypatch.setattr(BatchStore, "sweep", fail)
    batch = new_batch(store, [f"line {number}" for number in range(6)])

    async def work() -> None:
        model = FailedModel()
        runner = BatchRunner(options_of(tmp_path), {"demo": model})
        while store.batch(batch.id).status != "completed":
            await runner.wake()
            await asyncio.sleep(0.1)
        assert len(model.asked) == 12
        runner.__del__()

    asyncio.run(asyncio.wait_for(work(), 60))
    assert store.batch(batch.id).request_counts.completed == 6


def test_lines_are_those_of_the_replicas_that_run_now_and_batches_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, running = BatchStore.at(str(tmp_path / "kept")), {"one"}
    monkeypatch.setattr("rayspec.serve.batch_runner.replicas_of", lambda *_: running)
    first = new_batch(store, [f"first {number}" for number in range(50)])
    options = options_of(tmp_path, autoscaling_config={"min_replicas": 1, "max_replicas": 8})

    async def work() -> None:
        model = Model()
        runner = BatchRunner(options, {"demo": model})
        await until(lambda: len(model.asked) == 4)
        new_batch(store, [f"second {number}" for number in range(50)])
        await runner.wake()
        await until(lambda: statuses(store)["in_progress"] == 2)
        await asyncio.sleep(0.5)
        assert len(model.asked) == 6, "as many as a replica decodes at once, and the share of the second batch"
        running.add("another")
        model.go.set()
        await until(lambda: statuses(store)["completed"] == 2)
        asked = [line.custom_id.partition(" ")[0] for line in model.asked]
        assert asked[:6] == 4 * ["first"] + 2 * ["second"]
        assert Counter(asked[6:14])["second"] >= 4
        runner.__del__()

    asyncio.run(work())
    assert store.batch(first.id).request_counts.completed == 50


def test_large_lines_of_all_batches_run_within_one_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of 16 MB with an emoji, one of each batch, took 640 MB in a replica."""
    monkeypatch.setattr("rayspec.serve.batch_runner.LARGE_LINE", 1000)
    monkeypatch.setattr("rayspec.serve.batch_runner._BYTES_AT_ONCE", 3000)
    store = BatchStore.at(str(tmp_path / "kept"))
    for name in "abc":
        new_batch(store, [f"large {name}"], prompt="x" * 2000)
    new_batch(store, ["small"])

    async def work() -> None:
        model = Model()
        runner = BatchRunner(options_of(tmp_path), {"demo": model})
        await until(lambda: len(model.asked) == 2)
        await asyncio.sleep(0.2)
        assert sorted(line.custom_id[:5] for line in model.asked) == ["large", "small"]
        model.go.set()
        await until(lambda: statuses(store)["completed"] == 4)
        runner.__del__()

    asyncio.run(work())


def test_long_lines_are_read_as_they_run(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more of them are in memory than their bytes allow."""
    monkeypatch.setattr("rayspec.serve.batch_runner._BYTES_AT_ONCE", 2**20)
    names = [f"{number} {'x' * 400}" for number in range(100)]
    batch = new_batch(store, names, prompt="y" * 2**17)
    under_way = most = 0
    is_full = asyncio.Event()

    async def slowly(line: BatchLine) -> BatchResult:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        if under_way == 8:  # a MiB
            is_full.set()
        await asyncio.wait_for(is_full.wait(), timeout=60)
        await asyncio.sleep(0.005)
        under_way -= 1
        return line.result(200, b'{"text": "%s"}' % (b"z" * 2**15))

    tracemalloc.start()
    asyncio.run(run_of(store, batch, slowly).run())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most == 8
    assert peak < 8 * 2**20
    assert len(rows_of(store, store.batch(batch.id).output_file_id)) == len(names)


def test_of_a_large_result_little_is_read(store: BatchStore) -> None:
    batch = new_batch(store, NAMES[:1])
    line = BatchLine(digest="a", custom_id="a", url="/v1/completions", model=None, text=b"")
    store.add_results(batch.id, [line.result(200, b"[%s{}]" % (b"{}," * 100_000)).json_line().encode()])
    tracemalloc.start()
    assert [(name, failed) for name, failed, _ in store.results(batch.id)] == [(line.id, False)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 2**20


def test_broken_entries_are_named_once(store: BatchStore, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    batches = [new_batch(store, NAMES[:3]) for _ in range(3)]
    kept = tmp_path / "kept"
    (kept / "files" / batches[0].input_file_id / "file.json").write_bytes(b"{")
    (kept / "batches" / batches[0].id / "batch.json").write_bytes(b'{"id": 1}')
    (kept / "files" / "notes.txt").write_text("mine")
    results = kept / "batches" / batches[1].id / "results"
    results.mkdir()
    (results / "0-a.jsonl").write_bytes(b'{"id": "x"}\n[]\n{"id')
    (kept / "batches" / batches[2].id / "cancel").write_bytes(b"")
    for _ in range(3):
        assert len(store.files(PageRequest(limit=10)).data) == 2
        assert [one.id for one in store.batches(PageRequest(limit=10)).data] == [batches[2].id, batches[1].id]
        assert store.batch(batches[2].id).status == "cancelling"
        with pytest.raises(InvalidRequestError, match="no object"):
            store.file(batches[0].input_file_id)
    with pytest.raises(InvalidRequestError, match="cancel it first"):
        store.delete_batch(batches[1].id)
    for one in batches[1:]:
        asyncio.run(run_of(store, one).run())
        assert store.batch(one.id).status in {"completed", "cancelled"}
        store.delete_batch(one.id)
        with pytest.raises(InvalidRequestError, match="no object"):
            store.delete_batch(one.id)
    assert Counter(record.args[0].rpartition("/")[2] for record in caplog.records) == {  # type: ignore[index, union-attr]
        "file.json": 1,
        "batch.json": 1,
        "0-a.jsonl": 1,
    }


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"\n" * 20_000, "too_many_lines"),
        (b"1\n" * 9_000, "invalid_value"),
        (b'{"custom_id":"a","' + b"a" * 20 * 2**20 + b'":1}\n', "request_too_large"),
        (b'{"custom_id":"a","' + b"a" * 10 * 2**20 + b'":1}\n', "unknown_parameter"),
    ],
)
def test_a_hostile_file_has_short_errors(store: BatchStore, tmp_path: Path, content: bytes, code: str) -> None:
    batch = batch_of(store, [content])
    start_s = time.process_time()
    asyncio.run(run_of(store, batch).run())
    assert time.process_time() - start_s < 20
    batch = store.batch(batch.id)
    assert (batch.status, batch.errors and batch.errors.data[0].code) == ("failed", code)
    assert (tmp_path / "kept" / "batches" / batch.id / "batch.json").stat().st_size < 200_000


@pytest.mark.parametrize("num_answered", [None, 20])
def test_a_lower_limit_of_lines_ends_no_batch_that_has_begun(store: BatchStore, num_answered: int | None) -> None:
    """As after a restart with another `max_batch_lines`; the batch ends by itself or is cancelled."""
    batch = new_batch(store, NAMES)

    async def answer(line: BatchLine) -> BatchResult:
        if num_answered is not None and NAMES.index(line.custom_id) >= num_answered:
            store.cancel(batch.id)
            await asyncio.sleep(60.0)
        return await answered(line)

    run = run_of(store, batch, answer)
    asyncio.run(run._save(**run._validated()))
    asyncio.run(BatchRun(store.saved(batch.id), store, 10, answer).run())
    ended = store.batch(batch.id)
    assert (ended.status, ended.errors) == ("completed" if num_answered is None else "cancelled", None)
    assert sorted(rows_of(store, ended.output_file_id, ended.error_file_id)) == sorted(NAMES)


def test_a_list_has_the_order_that_is_asked_for(store: BatchStore) -> None:
    made = [new_batch(store, NAMES[:1]).id for _ in range(3)]
    for order, names in (("asc", made), ("desc", made[::-1]), (None, made[::-1])):
        page = store.batches(PageRequest.parse({"order": order, "limit": "2"}))
        assert ([one.id for one in page.data], page.has_more) == (names[:2], True)
        assert page.last_id is not None
        (last,) = store.batches(PageRequest.parse({"order": order, "after": page.last_id})).data
        assert last.id == names[2]
    with pytest.raises(InvalidRequestError, match="purpose: only files have one"):
        store.batches(PageRequest.parse({"purpose": "batch"}))


def test_refused_and_interrupted_uploads_leave_nothing(store: BatchStore, tmp_path: Path) -> None:
    for filename in ("a.jsonl", "\ud800"):
        with (
            pytest.raises((RuntimeError, UnicodeEncodeError)),
            store.new_file(new_id("file-"), filename, "batch") as file,
        ):
            file.write(b"x")
            if filename == "a.jsonl":
                raise RuntimeError
    files = tmp_path / "kept" / "files"
    assert not list(files.iterdir())
    kept = new_batch(store, NAMES[:3])
    (files / ("file-" + "0" * 32)).mkdir()
    (files / ("file-" + "0" * 32) / ".content.12345678.partial").write_bytes(b"x")
    (files / kept.input_file_id / ".file.json.12345678.partial").write_bytes(b"x")
    (files / "file-of-mine").mkdir()
    store.sweep(3600)
    assert len(list(files.iterdir())) == 3, "an upload may be under way"
    replace(BatchStore.at((tmp_path / "kept").as_uri()), clock=lambda: time.time() + 7200).sweep(3600)
    assert sorted(path.name for path in files.iterdir()) == sorted([kept.input_file_id, "file-of-mine"])
    assert sorted(path.name for path in (files / kept.input_file_id).iterdir()) == ["content", "file.json"]


def test_what_is_kept_is_for_its_owner_only(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        store = BatchStore.at(str(tmp_path / "kept"))
        batch = new_batch(store, NAMES[:3])
        asyncio.run(run_of(store, batch).run())
        store.cancel(new_batch(store, NAMES[:3]).id)
        lock = store.lock()
        assert lock is not None
        lock.close()
    finally:
        os.umask(before)
    kept = tmp_path / "kept"
    assert {(path.is_dir(), path.stat().st_mode & 0o777) for path in (kept, *kept.rglob("*"))} == {
        (True, 0o700),
        (False, 0o600),
    }


def test_lists_leave_threads_to_other_requests_and_clients_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_read, orders = threading.Event(), []

    def slow_list(_: BatchStore, query: PageRequest) -> Page[FileObject]:
        orders.append(query.order)
        is_read.wait(60)
        return Page.of([], 1)

    async def asked() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://here") as http:
            lists = [asyncio.create_task(http.get("/v1/files")) for _ in range(24)]
            await asyncio.sleep(0.05)
            lists.append(asyncio.create_task(http.get("/v1/files?order=asc", headers={"from": "other"})))
            try:
                await asyncio.wait_for(http.get(f"/v1/files/{file_id}/content"), timeout=30)
            finally:
                is_read.set()
            assert {answer.status_code for answer in await asyncio.gather(*lists)} == {200}
            assert orders.index("asc") <= 2, "a turn of the other client at most"

    store = BatchStore.at(str(tmp_path))
    file_id = new_id("file-")
    with store.new_file(file_id, "a", "batch") as content:
        content.write(b"a")
    monkeypatch.setattr(BatchStore, "files", slow_list)
    app, config = FastAPI(), LLMConfig(model_loading_config=ModelLoadingConfig(model_id="demo"))
    nothing: Any = None
    options = ServeOptions(llm_configs=(config,), batches=str(tmp_path))
    (tmp_path / ".lock").touch()
    given: dict[str, Any] = {"runner": nothing, "bodies": nothing, "unread": Unread()}
    add_batch_routes(app, Description(), options, **given, client_of=lambda request: request.headers.get("from", ""))
    asyncio.run(asked())


def test_a_batch_that_cannot_be_written_leaves_nothing(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk, where each attempt would leave a folder for good."""
    batch = new_batch(store, NAMES)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(BatchStore, "save", fail)
    with pytest.raises(OSError, match="No space"):
        store.new_batch(
            BatchRequest(input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="1h")
        )
    assert store.batch_ids() == [batch.id]
