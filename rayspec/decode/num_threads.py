"""Choose how many threads decode on a CPU, by short measurements of the loaded model."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rayspec.decode.profile import cache_file, model_key, random_states, span_at
from rayspec.decode.runner import Runner
from rayspec.machine import num_cores
from rayspec.model.threads import Threads

logger = logging.getLogger(__name__)

_NUM_REPEATS = 8
_PASS_S = 0.01  # of a measured pass: a large model runs only its first sublayers
_BUDGET_S = 0.3
_CLEARLY_SLOWER = 2.0  # times as long as the fastest number: it is not measured again
_WORTH_MORE = 1.1  # times as fast must a larger number be


def chosen_threads(runner: Runner, folder: str | None, *, remeasure: bool = False) -> Threads:
    """Return the numbers of threads that were saved for exactly this model, processor and versions. Measure and save
    them if none are saved, or with `remeasure`. Passes of many rows use all cores."""
    cores = num_cores()
    if cores == 1:
        return Threads.of_all_passes(1)
    key = model_key(runner) | {"cores": cores}
    path = cache_file(folder, "threads", key)
    few = None if remeasure else _saved(path, key, cores)
    if few is None:
        powers = [2**power for power in range(cores.bit_length()) if 2**power < cores]
        few = fastest_number(runner, [*powers, cores])
        _save(path, key, few)
    logger.info("decoding uses %d of %d CPU threads, as measured (kept in %s)", few, cores, path)
    return Threads(few=few, many=cores)


def fastest_number(runner: Runner, numbers: Sequence[int], clock: Callable[[], float] = time.perf_counter) -> int:
    """Return the number of threads with the fastest decode pass: the smallest that is nearly as fast as the fastest.

    The shortest of several passes counts, because whatever else runs only makes a pass slower. The cache must hold no
    sequences. It takes well under a second, unless a single layer takes that long.
    """
    with torch.inference_mode():
        batch, hidden = runner.batch([span_at(runner.cache, 0, 0, 1)]), random_states(runner, 1)

        def seconds(number: int, end: int) -> float:
            torch.set_num_threads(number)
            runner.run(batch, hidden, end=end)  # wakes the threads
            started = clock()
            runner.run(batch, hidden, end=end)
            return clock() - started

        first_layer = runner.first_sublayer + 2
        layer_s = min(seconds(numbers[-1], first_layer) for _ in range(3)) or _PASS_S
        end = min(runner.end_sublayer, runner.first_sublayer + 2 * max(1, round(_PASS_S / layer_s)))
        best = dict.fromkeys(numbers, float("inf"))
        began, tried = clock(), list(numbers)
        for repeat in range(_NUM_REPEATS):
            for number in tried:
                best[number] = min(best[number], seconds(number, end))
            tried = [number for number in tried if best[number] < _CLEARLY_SLOWER * min(best.values())]
            if len(tried) == 1 or (repeat > 0 and clock() - began > _BUDGET_S):
                break
    return next(number for number in numbers if best[number] <= _WORTH_MORE * min(best.values()))


def _saved(path: Path, key: dict[str, Any], cores: int) -> int | None:
    """Return the saved number; None if there is none for this key."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        few = content["few"] if content["key"] == json.loads(json.dumps(key)) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return few if isinstance(few, int) and 1 <= few <= cores else None


def _save(path: Path, key: dict[str, Any], few: int) -> None:
    scratch = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps({"few": few, "key": key}, indent=1, sort_keys=True), encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        logger.info("the number of threads could not be saved (%s): it is measured again next time", error)
