"""Measurements of a loaded model on its device, with the forward that decoding uses: latency, and thread numbers."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO, Any, TypeAlias

import numpy as np
import torch
import transformers
from msgspec import structs
from typing_extensions import Self

from rayspec.choices import FULL, SKIP, Choice
from rayspec.decode.runner import Runner, Threads
from rayspec.decode.sampling import argmax
from rayspec.decode.search import PlanSearch
from rayspec.machine import boot_id, cpu_name, num_cores, user_folder, write_at_once
from rayspec.model.kv_cache import PAGE_SIZE, KVCache, whole_pages
from rayspec.model.offload import OffloadedWeights
from rayspec.model.rows import RowSpan, one_run, runs_of_pages
from rayspec.planning.latency import (
    DRAFT_HEAD,
    HEAD,
    OVERHEAD,
    SEARCH,
    WAKE,
    Curve,
    LatencyModel,
    Measurement,
    StaleProfileError,
    kind_of,
)

logger = logging.getLogger(__name__)

_Work: TypeAlias = tuple[Measurement, Callable[[], object], Callable[[], object]]
"""What is measured, what comes before each of its runs and is not timed, and the run."""

ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)
CONTEXTS = (32, 1024, 4096)
BATCHES = (8, 4, 2)  # numbers of sequences: the first number that the cache can hold is measured
_WIDE_ROWS = (1, 8, 32)
_ROWS_EACH = (1, 4)  # rows per sequence in a batch of several sequences
_COARSE_ROWS = (1, 2, 8, 128)  # rows that are measured even if the time is over
# A GPU is disturbed by nobody, so few repeats are enough.
_NUM_REPEATS = {"cpu": 6, "cuda": 3}
# Seconds of measuring when an engine starts for the first time, and while other processes load next to it.
BUDGET_S = {"cpu": 5.0, "cuda": 2.0}
_DISTURBED_BUDGET_S = 1.0
# Of a run of one row with a time limit: only so many sublayers of a kind run. They fill the caches all the same.
_SAMPLE_S = {"cpu": 0.02, "cuda": 0.004}
# More bytes than the last-level cache of one core complex holds; and a pause like that between two passes of a stage.
_CACHE_BYTES, _PAUSE_S = 64 * 2**20, 0.005
_NUM_PASSES = 8  # one after another
_SEARCHED = (8, 16)  # tokens and states of a search
_LOCK_POLL_S, _SILENT_S = 0.05, 5.0  # of waiting for other processes: between two looks, until a line says so

# Of the number of threads: repeats, seconds of a measured pass (of a large model the first sublayers), and of all.
_NUM_THREAD_REPEATS, _PASS_S, _THREADS_BUDGET_S = 8, 0.01, 0.3
_CLEARLY_SLOWER = 2.0  # times as long as the fastest number: it is not measured again
_WORTH_MORE = 1.1  # times as fast must a larger number be


class LoadLock:
    """A file lock: loads share it, and a measurement has it alone. The file is in the folder of the profiles, one for
    each machine, for all its processes and containers. Every wait has a limit, because a process may be stopped while
    it has the lock. Where there can be no such file, nobody waits."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"loading-{boot_id()[:13]}.lock"
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        with suppress(OSError):  # the folder cannot be written
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def share(self, timeout_s: float = 30.0) -> bool:
        """Wait until nobody measures, and keep others from measuring. Return False after the timeout."""
        return self._locked(fcntl.LOCK_SH, timeout_s)

    def take(self, timeout_s: float = 60.0) -> bool:
        """Wait until nobody else loads or measures, and keep all others waiting. Return False after the timeout."""
        return self._locked(fcntl.LOCK_EX, timeout_s)

    def _locked(self, kind: int, timeout_s: float) -> bool:
        began, is_told = time.monotonic(), False
        while self._file is not None:
            try:
                fcntl.flock(self._file, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited_s = time.monotonic() - began
            except OSError:  # a file system without locks
                break
            if waited_s > timeout_s:
                return False
            if waited_s > _SILENT_S and not is_told:
                is_told = True
                logger.warning("waiting up to %.0f s for processes that load or measure (%s)", timeout_s, self._path)
            time.sleep(_LOCK_POLL_S)
        return True


def load_or_measure(
    runner: Runner,
    folder: str | None,
    *,
    lock: LoadLock,
    offloaded: OffloadedWeights | None = None,
    remeasure: bool = False,
) -> LatencyModel:
    """Load the latency model that was saved for exactly this model, dtype, device, threads and versions.

    Measure and save it if none is saved that covers this cache: for about `BUDGET_S` seconds, while no other process
    loads or measures. If others do so for longer than `lock` waits, a coarse model is measured next to them and not
    saved. With `remeasure`, measure without a limit.
    """
    key = profile_key(runner) | {"offloaded": list(offloaded.sublayers) if offloaded else []}
    path = cache_file(folder, "latency", key)
    if not remeasure and (saved := _saved(path, key, runner.cache.num_slots)) is not None:
        return saved
    is_alone = lock.take()  # others may have measured meanwhile
    if not remeasure and (saved := _saved(path, key, runner.cache.num_slots)) is not None:
        return saved
    if not is_alone:
        logger.warning("other processes still load or measure a model: the latency profile is coarse and not saved")
        return measure(runner, offloaded, _DISTURBED_BUDGET_S)
    budget_s = BUDGET_S[runner.device.type]
    limit = "" if remeasure else f" for about {budget_s:.0f} s"
    logger.warning("measuring how fast this machine runs the model%s; the profile is kept in %s", limit, path)
    model = measure(runner, offloaded, None if remeasure else budget_s)
    try:
        model.save(path, key)
    except OSError as error:
        logger.warning(
            "the latency profile could not be saved (%s), so each start measures it: set option profile_cache to a "
            "folder that can be written",
            error,
        )
    return model


def chosen_threads(runner: Runner, folder: str | None, *, remeasure: bool = False) -> Threads:
    """Return the numbers of threads that were saved for exactly this model, processor and versions. Measure and save
    them if none are saved, or with `remeasure`. Passes of many rows use all cores."""
    cores = num_cores()
    if cores == 1:
        return Threads(1, 1)
    key = model_key(runner) | {"cores": cores}
    path = cache_file(folder, "threads", key)
    few = None
    with suppress(OSError, ValueError, RecursionError):
        few = None if remeasure else json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(few, int) or not 1 <= few <= cores:
        powers = [2**power for power in range(cores.bit_length()) if 2**power < cores]
        few = fastest_number(runner, [*powers, cores])
        try:
            write_at_once(path, str(few).encode())
        except OSError as error:
            logger.info("the number of threads could not be saved (%s): it is measured again next time", error)
    logger.info("decoding uses %d of %d CPU threads, as measured (kept in %s)", few, cores, path)
    return Threads(few=few, many=cores)


def fastest_number(runner: Runner, numbers: Sequence[int], clock: Callable[[], float] = time.perf_counter) -> int:
    """Return the smallest number of threads whose decode pass is nearly as fast as the fastest. The shortest of several
    passes counts, because whatever else runs only makes a pass slower. The cache must hold no sequences."""
    with torch.inference_mode():
        batch, hidden = runner.batch([span_at(runner.cache, 0, 0, 1)]), random_states(runner, 1)

        def seconds(number: int, end: int) -> float:
            torch.set_num_threads(number)
            runner.run(batch, hidden, end=end)  # starts the threads
            started = clock()
            runner.run(batch, hidden, end=end)
            return clock() - started

        first_layer = runner.first_sublayer + 2
        layer_s = min(seconds(numbers[-1], first_layer) for _ in range(3)) or _PASS_S
        end = min(runner.end_sublayer, runner.first_sublayer + 2 * max(1, round(_PASS_S / layer_s)))
        best = dict.fromkeys(numbers, float("inf"))
        began, tried = clock(), list(numbers)
        for repeat in range(_NUM_THREAD_REPEATS):
            for number in tried:
                best[number] = min(best[number], seconds(number, end))
            tried = [number for number in tried if best[number] < _CLEARLY_SLOWER * min(best.values())]
            if len(tried) == 1 or (repeat > 0 and clock() - began > _THREADS_BUDGET_S):
                break
    return next(number for number in numbers if best[number] <= _WORTH_MORE * min(best.values()))


def cache_file(folder: str | None, what: str, key: Mapping[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return user_folder(folder) / f"{what}-{name}.json"


def _saved(path: Path, key: dict[str, Any], num_slots: int) -> LatencyModel | None:
    """Return the saved model if it has this key and covers a KV cache of `num_slots` slots."""
    try:
        saved = LatencyModel.load(path, key)
    except OSError:
        return None
    except StaleProfileError as error:
        logger.info("%s; this is done now", error)
        return None
    if saved.covers(_grid(num_slots)):
        return saved
    logger.info("the latency profile %s is of a smaller KV cache: it is measured again", path)
    return None


def profile_key(runner: Runner) -> dict[str, Any]:
    """Return everything that changes the cost of a forward. A profile with another key is not used."""
    many = runner.threads.many if runner.threads is not None else torch.get_num_threads()
    few = runner.threads.few if runner.threads is not None else many
    return model_key(runner) | {"num_threads": [few, many] if runner.device.type == "cpu" else 0}


def model_key(runner: Runner) -> dict[str, Any]:
    device = runner.device
    config = {k: v for k, v in runner.parts.config.to_dict().items() if not k.startswith("_")}
    return {
        "model": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest(),
        "dtype": str(runner.parts.dtype),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "row_counts": str(runner.row_counts),
        "choices": {kind: list(ways) for kind, ways in runner.choices_by_kind.items()},
        "fused": [sublayer.index for sublayer in runner.parts.sublayers if sublayer.body is not None],
        "matrices": sorted({type(getattr(each.body, "first", None)).__name__ for each in runner.parts.sublayers}),
        "graphs": "passes" if runner.graphs is not None else "none",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def measure(runner: Runner, offloaded: OffloadedWeights | None = None, budget_s: float | None = None) -> LatencyModel:
    """Measure the latency model of a whole model on this device; see `measurements`."""
    found = measurements(runner, offloaded, budget_s=budget_s)
    transfer_s = offloaded.transfer_seconds() if offloaded else None
    return LatencyModel.fit(found, runner.parts.curve_names, transfer_s=transfer_s)


def measurements(
    runner: Runner,
    offloaded: OffloadedWeights | None = None,
    *,
    device: str = "",
    budget_s: float | None = None,
) -> list[Measurement]:
    """Time each kind of sublayer over rows, context and batch, the head over rows if this process has it, and the fixed
    cost of a forward. In a stage on a CPU, also time how much a pause with cold caches slows a forward.

    All sublayers of a kind run one after another, and the other kinds run between two repeats. So weights come from the
    same caches or memory as in use. The transfer of offloaded weights is not timed. The cache must hold no sequences;
    it is overwritten. device: of a stage, its name to store in the measurements.

    budget_s: after so many seconds, only a coarse grid is completed, once: few row counts, but every context, batch and
    choice. None: everything, as often as it takes; the ranks of a stage need that, because they run the same passes.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        if offloaded is not None:
            stack.enter_context(offloaded.without_transfers())
        if runner.graphs is not None:
            stack.enter_context(runner.graphs.trial())
        _fill(runner.cache)
        sample = Counter(runner.parts.curve_names) if budget_s is None else _sample(runner)
        works = list(_works(runner, device, sample))
        until = float("inf") if budget_s is None else time.perf_counter() + budget_s
        times = _times(works, runner.device, until)
        # If the repeats of an item followed one another, a slow second of the machine would slow them all. The fastest
        # runs of two items may come from different moments, so the median is used.
        found = [replace(works[at][0], seconds=median(took) / works[at][0].seconds) for at, took in times.items()]
        if runner.device.type == "cuda":
            found += [_fixed_cost(runner, found, device), _of_search(runner, device)]
        if runner.device.type == "cpu" and device:
            wake_s = _wake_seconds(runner)
            found.append(Measurement(kind=WAKE, rows=1, context=0, batch=1, seconds=wake_s, device=device))
        return found


def _times(works: Sequence[_Work], device: torch.device, until: float) -> dict[int, list[float]]:
    """Return the seconds of each work's runs but the first. The coarse grid runs at least twice, others to `until`."""
    coarse = [at for at, (one, _, _) in enumerate(works) if _is_coarse(one)]
    others = [at for at in range(len(works)) if at not in set(coarse)]
    times: dict[int, list[float]] = defaultdict(list)
    num_repeats = _NUM_REPEATS[device.type]
    for repeat, at in [(repeat, at) for repeat in range(1 + num_repeats) for at in (*coarse, *others)]:
        one, prepare, work = works[at]
        if time.perf_counter() <= until or (repeat < 2 and _is_coarse(one)):
            prepare()
            times[at].append(_timed(work, device))
    return {at: seconds[1:] for at, seconds in sorted(times.items()) if len(seconds) > 1}


def _is_coarse(one: Measurement) -> bool:
    return one.rows == one.batch or (one.batch == 1 and one.rows in _COARSE_ROWS)


def _sample(runner: Runner) -> dict[str, int]:
    """Return how many sublayers of each kind a timed run has: as many as take `_SAMPLE_S` for one row."""
    batch, hidden = runner.batch([span_at(runner.cache, 0, 0, 1)]), random_states(runner, 1)
    found = {}
    for name, num_sublayers in Counter(runner.parts.curve_names).items():
        run = partial(runner.run, batch, hidden, choices=_only(runner, name, 1))
        seconds = min([_timed(run, runner.device) for _ in range(3)][1:])  # the first run warms up
        found[name] = min(num_sublayers, max(1, math.ceil(_SAMPLE_S[runner.device.type] / max(seconds, 1e-9))))
    return found


def _only(runner: Runner, name: str, number: int, choice: Choice = FULL) -> list[Choice]:
    """Return the choices of a run in which only the first `number` sublayers of a kind do not skip."""
    places = [at for at, own in enumerate(runner.parts.curve_names) if own == name][:number]
    mine = [choice if at in places else SKIP for at in range(len(runner.parts.curve_names))]
    return [SKIP] * runner.first_sublayer + mine


def _fill(cache: KVCache) -> None:
    """Write random keys and values to all slots that timed runs read: the system may map a cache that was never written
    to a single page of zeros, which is always in the processor's cache."""
    num_slots = max(batch * whole_pages(context + rows // batch) for rows, context, batch in _grid(cache.num_slots))
    for tensor in (*cache.keys.values(), *cache.values.values()):
        tensor[:, :num_slots].normal_(generator=torch.Generator(tensor.device).manual_seed(0))


def _works(runner: Runner, device: str, sample: Mapping[str, int]) -> Iterator[_Work]:
    """Yield each measurement and what to run for it. `seconds` holds how many sublayers one run of it times. Passes
    with static shapes are written to the buffers before, which is part of the fixed cost of a forward."""
    cells = _grid(runner.cache.num_slots)
    short = cells[0][1]
    if runner.row_counts is not None:  # one row more takes another pass
        above = runner.row_counts.most + 1
        cells += [(above, short, 1)] if short + above <= runner.cache.num_slots and above not in ROW_COUNTS else []
    known: set[tuple[object, ...]] = set()
    for rows, context, batch_size in cells:
        spans = [span_at(runner.cache, at, context, rows // batch_size) for at in range(batch_size)]
        if runner.cache.looked_at is not None and context >= PAGE_SIZE:
            # Two rows before each span note the pages to read: drafts that read few pages then read as many as in use.
            before = [structs.replace(span, context=context - 1, num_rows=2) for span in spans]
            runner.run(runner.batch(before, scores_pages=True), random_states(runner, 2 * batch_size))
        batch, hidden = runner.batch(spans), random_states(runner, rows)
        for name, choice in [(name, choice) for name, ways in runner.choices_by_kind.items() for choice in ways]:
            kind = kind_of(name, choice)
            place = (kind, rows, context, batch_size) if Curve.reads_context(name) else (kind, rows)
            if place in known or (choice != FULL and rows != batch_size):  # drafts have one row for each sequence
                continue
            known.add(place)
            yield (
                Measurement(
                    kind=kind, rows=rows, context=context, batch=batch_size, seconds=sample[name], device=device
                ),
                partial(runner.hold, batch),
                partial(runner.run, batch, hidden, choices=_only(runner, name, sample[name], choice)),
            )
        if runner.parts.lm_head is not None and context == short and batch_size == 1:
            heads = {HEAD: False} if runner.parts.draft_head is None else {HEAD: False, DRAFT_HEAD: True}
            for kind, drafting in heads.items():
                head = Measurement(kind=kind, rows=rows, context=0, batch=1, seconds=1, device=device)
                yield head, lambda: None, partial(runner.head, hidden, drafting=drafting)
    if runner.device.type == "cpu":  # see `_fixed_cost` for others
        fixed = Measurement(kind=OVERHEAD, rows=1, context=0, batch=1, seconds=1, device=device)
        yield fixed, lambda: None, lambda: runner.hold(runner.batch([span_at(runner.cache, 0, 0, 1)]))


def _fixed_cost(runner: Runner, found: Sequence[Measurement], device: str) -> Measurement:
    """Measure whole passes of one row, without a wait between, and subtract their sublayers and head."""
    context, number = _contexts(runner.cache.num_slots, num_beside=1)[0], Counter([*runner.parts.curve_names, HEAD])

    def run() -> None:
        for _ in range(_NUM_PASSES):
            batch = runner.batch([span_at(runner.cache, 0, context, 1)], token_ids=[0])
            hidden = random_states(runner, 1) if runner.parts.embedding is None else runner.embed(batch)
            left = runner.run(batch, hidden)
            if runner.parts.lm_head is not None:
                argmax(runner.head(left))

    whole_s = median([_timed(run, runner.device) for _ in range(2 + _NUM_REPEATS["cuda"])][2:]) / _NUM_PASSES
    alike = {one.kind: one for one in found if (one.rows, one.batch) == (1, 1) and one.context in (0, context)}
    parts_s = sum(number[kind] * one.seconds for kind, one in alike.items() if kind in number)
    fixed_s = max(0.0, whole_s - parts_s)
    return Measurement(kind=OVERHEAD, rows=1, context=context, batch=1, seconds=fixed_s, device=device)


def _of_search(runner: Runner, device: str) -> Measurement:
    """Measure a sublayer in a plan search, which a GPU's host launches part by part. The first run compiles kernels."""
    span, names = span_at(runner.cache, 0, min(CONTEXTS[0], runner.cache.num_slots // 2), 1), runner.parts.curve_names
    num_tokens, num_states = _SEARCHED
    tokens, chosen = [span] * num_tokens, runner.parts.sublayers[:2]
    targets = random_states(runner, num_tokens).expand(len(chosen) + 1, -1, -1)
    search = PlanSearch(runner, targets, tokens, None)
    states = search.gather([search.start()], np.zeros(num_states, np.int64))

    def run() -> None:
        for name, sublayer in zip(names, chosen, strict=False):
            ways = itertools.cycle((*runner.choices_by_kind[name], SKIP))
            left = search.run(sublayer.index, FULL, states)
            varied = search.vary(sublayer.index, list(itertools.islice(ways, num_states)), left)
            search.similarity(sublayer.index, varied)
            search.gather([varied], np.arange(num_states))

    took = [_timed(run, runner.device) / len(chosen) for _ in range(1 + _NUM_REPEATS["cuda"])]
    return Measurement(
        kind=SEARCH, rows=num_tokens * num_states, context=span.context, batch=num_tokens, seconds=median(took[1:]),
        device=device,
    )  # fmt: skip


def span_at(cache: KVCache, at: int, context: int, num_rows: int) -> RowSpan:
    """Return the rows of sequence number `at` of a batch of sequences of equal length. In a windowed store, sequences
    lie one after another and start again at the beginning, because a row reads only its end."""
    length = whole_pages(context + num_rows)
    span = RowSpan(one_run(at * length, length), context, num_rows)
    if not cache.windowed_layers:
        return span
    num_pages = cache.num_windowed_slots // PAGE_SIZE
    pages = [(at * length // PAGE_SIZE + page) % num_pages for page in range(length // PAGE_SIZE)]
    return structs.replace(span, windowed=runs_of_pages(pages, PAGE_SIZE))


def _wake_seconds(runner: Runner) -> float:
    """Return the extra seconds of one row through all sublayers after a pause and with cold caches."""
    batch, hidden = runner.batch([span_at(runner.cache, 0, 0, 1)]), random_states(runner, 1)
    others, fastest_s = bytearray(_CACHE_BYTES), []
    for is_cold in (False, True):
        times = []
        for _ in range(1 + _NUM_REPEATS["cpu"]):
            if is_cold:
                others[:] = bytes(len(others))
                time.sleep(_PAUSE_S)
            times.append(_timed(partial(runner.run, batch, hidden), runner.device))
        fastest_s.append(min(times[1:]))  # disturbances only make a run slower
    return max(fastest_s[1] - fastest_s[0], 0.0)


def random_states(runner: Runner, rows: int) -> torch.Tensor:
    """Return random states, [1, rows, hidden_size]. Rows differ, so that experts are chosen as in use."""
    generator = torch.Generator().manual_seed(0)
    size = runner.parts.config.get_text_config().hidden_size
    return torch.randn(1, rows, size, generator=generator).to(runner.device, runner.parts.dtype)


def _grid(num_slots: int) -> list[tuple[int, int, int]]:
    """Return the cells (rows, context, sequences) to measure, without those that the cache cannot hold."""
    short, *others = _contexts(num_slots, num_beside=max(_WIDE_ROWS))
    cells = [(rows, short, 1) for rows in ROW_COUNTS] + [(rows, far, 1) for far in others for rows in _WIDE_ROWS]
    cells = [(rows, context, 1) for rows, context, _ in cells if context + rows <= num_slots]
    # With several sequences: the first number that the cache can hold.
    holds = [count for count in BATCHES if count * whole_pages(short + max(_ROWS_EACH)) <= num_slots]
    if not holds:
        return cells
    num_slots_each = num_slots // holds[0] // PAGE_SIZE * PAGE_SIZE
    contexts = _contexts(num_slots_each, num_beside=max(_ROWS_EACH))[:2]
    return cells + [(holds[0] * each, context, holds[0]) for context in contexts for each in _ROWS_EACH]


def _contexts(num_slots: int, *, num_beside: int) -> list[int]:
    """Return the short context and longer contexts; the longest that fits in place of one that does not fit into
    `num_slots`, so that costs of long contexts are not extrapolated."""
    short, longest = min(CONTEXTS[0], num_slots // 2), num_slots - num_beside
    return [short, *sorted({min(context, longest) for context in CONTEXTS[1:] if longest > 2 * short})]


def _timed(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
