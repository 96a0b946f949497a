"""The data type that `dtype: auto` takes on a CPU."""

from __future__ import annotations

import logging
import time
from functools import cache

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

from rayspec.config import EngineConfig
from rayspec.machine import bytes_available, cpu_class

logger = logging.getLogger(__name__)

# Rows of a chunk of a prompt, and columns of a matrix that fits the caches.
_ROWS, _COLUMNS = 128, 512
_NUM_REPEATS = 4
# Times as fast must float32 be. Processors with AVX2 only are above 3, those with AVX-512 below 1.3.
CLEARLY_FASTER = 1.5


def in_fast_dtype(model: PreTrainedModel, config: EngineConfig) -> PreTrainedModel:
    """Convert a model in half precision to float32, in place, if that makes it clearly faster on this CPU: if matrix
    products are, with `dtype: auto` and enough memory. Say so. Values do not change.

    Shards do not call this: all stages of a model need the same data type, wherever they run.
    """
    dtype = model.dtype
    is_quantised = getattr(model, "hf_quantizer", None) is not None
    if config.dtype != "auto" or model.device.type != "cpu" or config.offload is not None or is_quantised:
        return model
    if dtype not in (torch.bfloat16, torch.float16) or (gain := gain_of_float32(dtype)) < CLEARLY_FASTER:
        return model
    name = str(dtype).removeprefix("torch.")
    found = f"this CPU ({cpu_class()}) multiplies matrices {gain:.1f} times as fast in float32 as in {name}"
    more_bytes = sum(parameter.nbytes for parameter in model.parameters() if parameter.dtype == dtype)
    if 2 * more_bytes > bytes_available():
        logger.warning("%s, but the memory is too small for that: the model runs in %s", found, name)
        return model
    logger.warning("%s: the model runs in float32; dtype %s keeps the checkpoint's data type", found, name)
    model.config.dtype = torch.float32
    return model.float()  # type: ignore[no-any-return, no-untyped-call]


@cache
def gain_of_float32(dtype: torch.dtype) -> float:
    """Return how many times as fast this CPU multiplies matrices in float32 as in `dtype`, by a product of a prompt's
    shape. The thread's own CPU time counts, so other programs have little effect."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _product_s(dtype) / _product_s(torch.float32)
    finally:
        torch.set_num_threads(num_threads)


@torch.inference_mode()
def _product_s(dtype: torch.dtype) -> float:
    rows = torch.ones(_ROWS, _COLUMNS, dtype=dtype)
    weight = torch.ones(4 * _COLUMNS, _COLUMNS, dtype=dtype)
    times = []
    for _ in range(1 + _NUM_REPEATS):
        started = time.thread_time()
        linear(rows, weight)
        times.append(time.thread_time() - started)
    return min(times[1:])
