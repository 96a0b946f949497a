"""A run whose consumer is slow, on a Ray with a small object store: `slow_consumer.py FOLDER`."""

from __future__ import annotations

import sys
import time

import ray
import ray.data

from rayspec.batch.job import Source
from rayspec.batch.ray_backend import RayBackend

_TIMEOUT_S = 20.0
_NUM_CPUS = 4  # of Ray: reading has half a CPU a task

if __name__ == "__main__":
    ray.init(address="local", num_cpus=_NUM_CPUS, object_store_memory=100 * 2**20, include_dashboard=False)
    ray.data.DataContext.get_current().execution_no_progress_timeout_s = _TIMEOUT_S
    rows = RayBackend().rows(Source(inputs=[sys.argv[1]]), None, "input")
    assert next(rows).error_kind is None
    time.sleep(2 * _TIMEOUT_S)
    print(f"{1 + sum(1 for _ in rows)} rows")
    ray.shutdown()
