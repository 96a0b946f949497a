"""Run the largest passes once on a GPU, and measure the memory that they take, before the KV cache takes the rest."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from rayspec.decode.processing import TokenSampler
from rayspec.decode.runner import Runner
from rayspec.decode.sampling import Rows, target_tokens
from rayspec.decode.work import DecodingParams, SamplerSpec
from rayspec.model.kv_cache import KVCache, bytes_per_slot, whole_pages
from rayspec.model.load_check import lack_of_memory
from rayspec.model.rows import RowSpan, one_run
from rayspec.model.sublayers import Decomposition
from rayspec.types import CheckpointError

logger = logging.getLogger(__name__)

_LEAST_ROWS = 64  # shorter passes are not tried
PeakBytes = Callable[[torch.device, Callable[[], object]], int]


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """Run the work, and return by how much it raises this process's memory on the GPU at its peak. On a CPU, return 0
    and run nothing."""
    if device.type != "cuda":
        return 0
    empty_caches()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device) - before


def empty_caches() -> None:
    """Give blocks that torch caches back to the GPUs."""
    gc.collect()
    torch.cuda.empty_cache()


def rehearse(
    parts: Decomposition,
    make_runner: Callable[[KVCache], Runner],
    *,
    num_prompt_rows: int,
    num_sequences: int,
    rows_each: int,
    max_model_len: int,
    peak: PeakBytes = peak_bytes,
) -> int:
    """Run a chunk of a prompt, then a verify of all sequences with its logits and sampling. Return the bytes that they
    and the static buffers take at their peak, without weights and KV cache.

    make_runner: makes the runner of a small cache. Passes that do not fit are halved, as the engine does later. Raises
    CheckpointError if no pass fits.
    """
    device, longest = parts.device, min(num_prompt_rows, max_model_len)
    lengths = [longest] * (num_prompt_rows // longest) + [num_prompt_rows % longest] * (num_prompt_rows % longest > 0)
    num_slots = whole_pages(max(longest, rows_each))
    try:
        taken = peak(device, partial(_run_passes, parts, make_runner, num_slots, lengths, [rows_each] * num_sequences))
    except Exception as error:
        if (lack := lack_of_memory(error)) is None:
            raise
        if num_prompt_rows < 2 * _LEAST_ROWS:
            raise CheckpointError(f"no pass fits into the memory that the weights leave on {device}: {lack}") from error
    else:
        return max(0, taken - bytes_per_slot(list(parts.shapes.values()), parts.dtype) * (num_slots + 1))
    logger.warning(
        "a pass of %d rows does not fit into the memory that the weights leave on %s: passes will be divided. "
        "Lower max_num_batched_tokens or max_num_seqs",
        num_prompt_rows, device,
    )  # fmt: skip
    return rehearse(
        parts, make_runner, num_prompt_rows=num_prompt_rows // 2, num_sequences=-(-num_sequences // 2),
        rows_each=rows_each, max_model_len=max_model_len, peak=peak,
    )  # fmt: skip


@torch.inference_mode()
def _run_passes(
    parts: Decomposition,
    make_runner: Callable[[KVCache], Runner],
    num_slots: int,
    chunks: Sequence[int],
    verified: Sequence[int],
) -> None:
    """Run the passes. All sequences share their slots, because only sizes count."""
    cache = KVCache(parts.shapes, num_slots, dtype=parts.dtype, device=parts.device, num_spare=1)
    runner, runs = make_runner(cache), one_run(0, num_slots)
    for lengths in (chunks, verified):
        spans, num_rows = [RowSpan(runs, 0, length, windowed=runs) for length in lengths], sum(lengths)
        while True:
            try:
                batch = runner.batch(spans, token_ids=[0] * num_rows, fixed_shape=False)
                hidden = runner.embed(batch) if parts.embedding is not None else _states(parts, num_rows)
                left = runner.run(batch, hidden)
                break
            except Exception as error:
                if lack_of_memory(error) is None:
                    runner.note_loss(error)
                    if runner.give_up() is not None:  # the test of the loaded weights says so
                        continue
                raise
    if parts.lm_head is not None:
        logits = runner.head(left)
        params = DecodingParams(top_p=0.5)  # in float64, which takes more memory than what others ask for
        spec = SamplerSpec(sequence_id="", params=params, seed=0, prompt_token_ids=(), eos_token_ids=())
        sampler = TokenSampler(spec, vocab_size=logits.shape[1], device=parts.device)
        starts = range(0, len(logits), verified[0])
        target_tokens(logits, [Rows(sampler, start, [0] * (verified[0] - 1)) for start in starts])


def _states(parts: Decomposition, num_rows: int) -> torch.Tensor:
    size = int(parts.config.get_text_config().hidden_size)
    return torch.zeros(1, num_rows, size, dtype=parts.dtype, device=parts.device)
