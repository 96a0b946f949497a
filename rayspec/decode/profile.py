"""Measure the latency model of a model on a device, with the same forward that decoding uses."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch
import transformers

from rayspec.choices import FULL, SKIP, Choice, choices_of, combined, keys_of, weights_of
from rayspec.decode.load_lock import LoadLock
from rayspec.decode.runner import Runner
from rayspec.machine import cpu_name, user_folder
from rayspec.model.kv_cache import PAGE_SIZE, KVCache, whole_pages
from rayspec.model.offload import OffloadedWeights
from rayspec.model.rows import RowSpan, one_run, runs_of_pages
from rayspec.planning.latency import (
    HEAD,
    OVERHEAD,
    WAKE,
    Curve,
    LatencyModel,
    Measurement,
    StaleProfileError,
    kind_of,
)

logger = logging.getLogger(__name__)

_Work: TypeAlias = tuple[Measurement, Callable[[], object]]

ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)
CONTEXTS = (32, 1024, 4096)
BATCHES = (8, 4, 2)  # numbers of sequences: the first number that the cache can hold is measured
_WIDE_ROWS = (1, 8, 32)
_ROWS_EACH = (1, 4)  # rows per sequence in a batch of several sequences
_COARSE_ROWS = (1, 2, 8, 128)  # rows that are measured even if the time is over
_NUM_REPEATS = 6
# Seconds of measuring when an engine starts for the first time, and while other processes load next to it.
BUDGET_S, _DISTURBED_BUDGET_S = 5.0, 1.0
# Of a run of one row with a time limit: only so many sublayers of a kind run. They fill the caches all the same.
_SAMPLE_S = 0.02
# More bytes than the last-level cache of one core complex holds; and a pause like that between two passes of a stage.
_CACHE_BYTES, _PAUSE_S = 64 * 2**20, 0.005


def load_or_measure(
    runner: Runner,
    folder: str | None,
    *,
    lock: LoadLock,
    offloaded: OffloadedWeights | None = None,
    remeasure: bool = False,
) -> LatencyModel:
    """Load the latency model that was saved for exactly this model, dtype, device, threads and versions.

    Measure and save it if none is saved, or if the cache can hold longer contexts or more sequences than the saved
    model covers: for about `BUDGET_S` seconds, while no other process loads or measures. If others do so for longer
    than `lock` waits, a coarse model is measured next to them and not saved. With `remeasure`, measure without a limit.
    """
    key = profile_key(runner) | {"offloaded": list(offloaded.sublayers) if offloaded else []}
    path = cache_file(folder, "latency", key)
    saved = None if remeasure else _saved(path, key, runner.cache.num_slots, tell=logger.warning)
    if saved is not None:
        return saved
    is_alone = lock.take()
    saved = None if remeasure else _saved(path, key, runner.cache.num_slots)  # others may have measured meanwhile
    if saved is not None:
        return saved
    if not is_alone:
        logger.warning("other processes still load or measure a model: the latency profile is coarse and not saved")
        return measure(runner, offloaded, _DISTURBED_BUDGET_S)
    limit = "" if remeasure else f" for about {BUDGET_S:.0f} s"
    logger.warning("measuring how fast this machine runs the model%s; the profile is kept in %s", limit, path)
    model = measure(runner, offloaded, None if remeasure else BUDGET_S)
    try:
        model.save(path, key)
    except OSError as error:
        logger.warning(
            "the latency profile could not be saved (%s), so each start measures it: set option profile_cache to a "
            "folder that can be written",
            error,
        )
    return model


def cache_file(folder: str | None, what: str, key: Mapping[str, Any]) -> Path:
    """Return the file in which measurements with this key are saved."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return user_folder(folder) / f"{what}-{name}.json"


def _saved(
    path: Path, key: dict[str, Any], num_slots: int, *, tell: Callable[..., None] = logger.debug
) -> LatencyModel | None:
    """Return the saved model if it has this key and covers a KV cache of `num_slots` slots; otherwise None. tell: logs
    why a file cannot be used."""
    try:
        saved = LatencyModel.load(path, key)
    except OSError:
        return None
    except StaleProfileError as error:
        tell("%s; this is done now", error)
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
    """Return what changes the cost of a forward, without the number of threads."""
    device = runner.device
    config = {k: v for k, v in runner.parts.config.to_dict().items() if not k.startswith("_")}
    return {
        "model": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest(),
        "dtype": str(runner.parts.dtype),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "row_counts": str(runner.row_counts),
        "choices": {kind: list(ways) for kind, ways in runner.choices_by_kind.items()},
        "fused": [sublayer.index for sublayer in runner.parts.sublayers if sublayer.body is not None],
        "graphs": "sublayers" if runner.graphs is not None else "none",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def measure(
    runner: Runner,
    offloaded: OffloadedWeights | None = None,
    budget_s: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> LatencyModel:
    """Measure the latency model of a whole model on this device; see `measurements`."""
    found = measurements(runner, offloaded, budget_s=budget_s, clock=clock)
    transfer_s = offloaded.transfer_seconds(clock) if offloaded else None
    return LatencyModel.fit(found, runner.parts.curve_names, transfer_s=transfer_s)


def measurements(
    runner: Runner,
    offloaded: OffloadedWeights | None = None,
    *,
    device: str = "",
    budget_s: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Measurement]:
    """Time each kind of sublayer over rows, context and batch, the head over rows if this process has it, and the fixed
    cost of a forward. In a stage on a CPU, also time how much a pause in which other work fills the caches slows a
    forward.

    All sublayers of a kind run one after another, and the other kinds run between two repeats. So weights come from the
    same caches or memory as in use. The transfer of offloaded weights is not timed. The cache must hold no sequences;
    it is overwritten. device: of a stage, its name to store in the measurements.

    budget_s: after so many seconds, only a coarse grid is completed, once: few row counts, but every context, batch and
    choice. The more time is left, the more row counts and repeats. None: everything, as often as it takes; the ranks of
    a stage need that, because they run the same passes.
    """
    with torch.inference_mode(), offloaded.without_transfers() if offloaded else nullcontext():
        _fill(runner.cache)
        sample = Counter(runner.parts.curve_names) if budget_s is None else _sample(runner, clock)
        works = list(_works(runner, device, sample))
        until = float("inf") if budget_s is None else clock() + budget_s
        times = _times(works, runner.device, until, clock)
        # If the repeats of an item followed one another, a slow second of the machine would slow them all. The fastest
        # runs of two items may come from different moments, so the median is used.
        found = [replace(works[at][0], seconds=median(took) / works[at][0].seconds) for at, took in times.items()]
        found += [
            one
            for name, ways in runner.choices_by_kind.items()
            for one in _composed(found, name, ways, _shortest(_grid(runner.cache.num_slots)))
        ]
        if runner.device.type == "cpu" and device:
            wake_s = _wake_seconds(runner, clock)
            found.append(Measurement(kind=WAKE, rows=1, context=0, batch=1, seconds=wake_s, device=device))
        return found


def _times(
    works: Sequence[_Work], device: torch.device, until: float, clock: Callable[[], float]
) -> dict[int, list[float]]:
    """Return the seconds of each work item by its place, from its second run on. Items of the coarse grid run first,
    and twice at least; no other run begins after `until`."""
    coarse = [at for at, (one, _) in enumerate(works) if _is_coarse(one)]
    others = [at for at in range(len(works)) if at not in set(coarse)]
    times: dict[int, list[float]] = defaultdict(list)
    for repeat, at in [(repeat, at) for repeat in range(1 + _NUM_REPEATS) for at in (*coarse, *others)]:
        if clock() <= until or (repeat < 2 and _is_coarse(works[at][0])):
            times[at].append(_timed(works[at][1], device, clock))
    return {at: seconds[1:] for at, seconds in sorted(times.items()) if len(seconds) > 1}


def _is_coarse(one: Measurement) -> bool:
    return one.rows == one.batch or (one.batch == 1 and one.rows in _COARSE_ROWS)


def _sample(runner: Runner, clock: Callable[[], float]) -> dict[str, int]:
    """Return how many sublayers of each kind a timed run has: as many as take `_SAMPLE_S` for one row."""
    batch, hidden = runner.batch([span_at(runner.cache, 0, 0, 1)]), random_states(runner, 1)
    found = {}
    for name, num_sublayers in Counter(runner.parts.curve_names).items():
        run = partial(runner.run, batch, hidden, choices=_only(runner, name, 1))
        seconds = min([_timed(run, runner.device, clock) for _ in range(3)][1:])  # the first run warms up
        found[name] = min(num_sublayers, max(1, math.ceil(_SAMPLE_S / max(seconds, 1e-9))))
    return found


def _only(runner: Runner, name: str, number: int, choice: Choice = FULL) -> list[Choice]:
    """Return the choices of a run in which only the first `number` sublayers of a kind do not skip."""
    places = [at for at, own in enumerate(runner.parts.curve_names) if own == name][:number]
    mine = [choice if at in places else SKIP for at in range(len(runner.parts.curve_names))]
    return [SKIP] * runner.first_sublayer + mine


def _fill(cache: KVCache) -> None:
    """Write random keys and values to all slots that timed runs read. The system may map a cache that was never
    written to a single page of zeros, which is always in the cache."""
    num_slots = max(batch * whole_pages(context + rows // batch) for rows, context, batch in _grid(cache.num_slots))
    for tensor in (*cache.keys.values(), *cache.values.values()):
        tensor[:, :num_slots].normal_(generator=torch.Generator(tensor.device).manual_seed(0))


def _works(runner: Runner, device: str, sample: Mapping[str, int]) -> Iterator[_Work]:
    """Yield each measurement and the function to time for it. `seconds` holds a divisor: the sublayers that one run of
    the function times, or 1."""
    cells = _grid(runner.cache.num_slots)
    shortest = _shortest(cells)
    for rows, context, batch_size in cells:
        each = rows // batch_size
        spans = [span_at(runner.cache, at, context, each) for at in range(batch_size)]
        _note_pages(runner, spans)
        batch, hidden = runner.batch(spans), random_states(runner, rows)
        for name, ways in runner.choices_by_kind.items():
            for choice in ways:
                if not _must_be_timed(name, choice, rows, context, batch_size, short_context=shortest[batch_size]):
                    continue
                one = Measurement(
                    kind=kind_of(name, choice),
                    rows=rows,
                    context=context,
                    batch=batch_size,
                    seconds=sample[name],
                    device=device,
                )
                yield one, partial(runner.run, batch, hidden, choices=_only(runner, name, sample[name], choice))
        if runner.parts.lm_head is not None and context == cells[0][1] and batch_size == 1:
            head = Measurement(kind=HEAD, rows=rows, context=0, batch=1, seconds=1, device=device)
            yield head, partial(runner.head, hidden)
    fixed = Measurement(kind=OVERHEAD, rows=1, context=0, batch=1, seconds=1, device=device)
    yield fixed, partial(runner.batch, [span_at(runner.cache, 0, 0, 1)])


def span_at(cache: KVCache, at: int, context: int, num_rows: int) -> RowSpan:
    """Return the rows of sequence number `at` of a batch of sequences of equal length. In a windowed store, sequences
    lie one after another and start again at the beginning, because a row reads only the end of its sequence."""
    length = whole_pages(context + num_rows)
    span = RowSpan(one_run(at * length, length), context, num_rows)
    if not cache.windowed_layers:
        return span
    num_pages = cache.num_windowed_slots // PAGE_SIZE
    pages = [(at * length // PAGE_SIZE + page) % num_pages for page in range(length // PAGE_SIZE)]
    return replace(span, windowed=runs_of_pages(pages, PAGE_SIZE))


def _must_be_timed(name: str, choice: Choice, rows: int, context: int, batch: int, *, short_context: int) -> bool:
    """Return False if a draft never runs the cell or if its time follows from other cells. Drafts have one row per
    sequence. Without context reads, the time is the same for any context. The time that a copy of the weights saves
    does not depend on context or keys, see `_composed`."""
    if choice == FULL:
        return Curve.reads_context(name) or (context == short_context and batch == 1)
    few_keys, copied = keys_of(choice) != "all", weights_of(choice) != FULL
    return rows == batch and not (few_keys and copied) and (few_keys or context == short_context)


def _composed(
    found: Sequence[Measurement], name: str, ways: Sequence[Choice], shortest: Mapping[int, int]
) -> Iterator[Measurement]:
    """Yield estimates for attention with a copy of its weights, for contexts and keys that were timed only with the
    full weights: the full-weight seconds plus the copy's difference from the full weights at the short context."""
    seconds = {(one.kind, one.rows, one.context, one.batch): one.seconds for one in found}
    for choice in ways:
        if weights_of(choice) == FULL or not Curve.reads_context(name):
            continue
        with_full, with_all = (combined("full", keys_of(choice)), combined(weights_of(choice), "all"))
        for one in found:
            if one.kind != kind_of(name, with_full) or one.rows != one.batch:
                continue
            copy_s, full_s = (
                seconds[kind_of(name, each), one.rows, shortest[one.batch], one.batch] for each in (with_all, FULL)
            )
            if (kind_of(name, choice), one.rows, one.context, one.batch) not in seconds:
                composed_s = max(one.seconds + copy_s - full_s, copy_s)
                yield replace(one, kind=kind_of(name, choice), seconds=composed_s)


def _note_pages(runner: Runner, spans: Sequence[RowSpan]) -> None:
    """Run two rows that end where each span begins, and that begin a page, so that they note the pages to read. Drafts
    that read few pages then read as many as in use."""
    if runner.cache.looked_at is not None and spans[0].context >= PAGE_SIZE:
        before = [replace(span, context=span.context - 1, num_rows=2) for span in spans]
        runner.run(runner.batch(before, scores_pages=True), random_states(runner, 2 * len(spans)))


def _wake_seconds(runner: Runner, clock: Callable[[], float]) -> float:
    """Return the extra seconds of one row through all sublayers after a pause and with cold caches."""
    batch, hidden = runner.batch([span_at(runner.cache, 0, 0, 1)]), random_states(runner, 1)
    choices = choices_of([False] * runner.first_sublayer + [True] * len(runner.parts.curve_names))
    others, fastest_s = bytearray(_CACHE_BYTES), []
    for is_cold in (False, True):
        times = []
        for _ in range(1 + _NUM_REPEATS):
            if is_cold:
                others[:] = bytes(len(others))
                time.sleep(_PAUSE_S)
            times.append(_timed(partial(runner.run, batch, hidden, choices=choices), runner.device, clock))
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


def _shortest(cells: Sequence[tuple[int, int, int]]) -> dict[int, int]:
    """Return the shortest context for each number of sequences."""
    return {batch: min(context for _, context, other in cells if other == batch) for _, _, batch in cells}


def _contexts(num_slots: int, *, num_beside: int) -> list[int]:
    """Return the short context and longer contexts. A context that does not fit into `num_slots` becomes the longest
    that fits, so that costs of long contexts are not extrapolated from the short context."""
    short, longest = min(CONTEXTS[0], num_slots // 2), num_slots - num_beside
    return [short, *sorted({min(context, longest) for context in CONTEXTS[1:] if longest > 2 * short})]


def _timed(work: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - started
