"""The first passes on a GPU: the largest ones, whose memory is measured before the KV cache takes the rest, and a test
of the loaded weights: by plain PyTorch, in static buffers, and by graphs."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from rayspec.decode.processing import TokenSampler
from rayspec.decode.runner import Runner
from rayspec.decode.sampling import Rows, target_tokens
from rayspec.decode.work import DecodingParams, SamplerSpec
from rayspec.errors import reason_of
from rayspec.model.kv_cache import KVCache, bytes_per_slot, whole_pages
from rayspec.model.load_check import lack_of_memory
from rayspec.model.row_counts import has_experts
from rayspec.model.rows import RowSpan, one_run
from rayspec.model.sublayers import Decomposition
from rayspec.types import CheckpointError

logger = logging.getLogger(__name__)

_LEAST_ROWS = 64  # shorter passes are not tried
# Of the test of the weights. By pass, the rows of two sequences: two chunks of prompts, three decodes, a verify.
_ROWS = ((70, 30), (10, 50), (1, 1), (1, 1), (1, 1), (5, 5))
_NUM_PLACES = whole_pages(sum(rows for rows, _ in _ROWS))
_RUNS = [one_run(at * _NUM_PLACES, _NUM_PLACES) for at in range(2)]  # of both stores of the cache
# Largest difference between buffers and plain PyTorch, relative to a row's largest. Rounding adds up over the layers.
_ALLOWED = {torch.float32: 1e-2, torch.bfloat16: 1e-1, torch.float16: 1e-1}
PeakBytes = Callable[[torch.device, Callable[[], object]], int]


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """Run the work, and return by how much it raises this process's memory on a GPU. On a CPU, do nothing: 0."""
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
    may_divide: bool = True,
    peak: PeakBytes = peak_bytes,
) -> int:
    """Run a chunk of a prompt, then a verify of all sequences with its logits and sampling. Return the bytes that they
    and the static buffers take at their peak, without weights and KV cache. Passes that do not fit are halved, as the
    engine does later; not if ranks run them together, because it may fit on the others. make_runner: for a small cache.
    Raises CheckpointError if no pass fits."""
    device, longest = parts.device, min(num_prompt_rows, max_model_len)
    lengths = [longest] * (num_prompt_rows // longest) + [num_prompt_rows % longest] * (num_prompt_rows % longest > 0)
    num_slots = whole_pages(max(longest, rows_each))
    try:
        taken = peak(device, partial(_run_passes, parts, make_runner, num_slots, lengths, [rows_each] * num_sequences))
    except Exception as error:
        if (lack := lack_of_memory(error)) is None:
            raise
        if not may_divide or num_prompt_rows < 2 * _LEAST_ROWS:
            raise CheckpointError(
                f"a pass of {num_prompt_rows} rows does not fit into the memory that the weights leave on {device} "
                f"({lack}): lower max_num_batched_tokens or max_num_seqs"
            ) from error
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
                size = int(parts.config.get_text_config().hidden_size)
                states = torch.zeros(1, num_rows, size, dtype=parts.dtype, device=parts.device)
                hidden = states if parts.embedding is None else runner.embed(batch)
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


@torch.inference_mode()
def self_test(runner: Runner) -> None:
    """Give up the static buffers if their passes differ from plain PyTorch's by more than rounding, or the graphs if
    replays have other bits than launches; with one warning. The KV cache must hold no sequences. With experts, rounding
    may choose others for a row; then most rows have to agree, else all."""
    cache, parts = runner.cache, runner.parts
    num_slots = min(cache.num_slots, cache.num_windowed_slots or cache.num_slots)
    if runner.buffers is None or num_slots < 2 * _NUM_PLACES:
        return
    plain, eager = (
        Runner(parts, cache, device=runner.device, row_counts=counts, buffers=buffers)
        for counts, buffers in ((None, None), (runner.row_counts, runner.buffers))
    )
    ways, fault, expected, launched = list[str | None](), None, _outputs(plain), Tensor()
    try:
        launched = _outputs(eager)
        differences = (expected - launched).abs().amax(-1) / expected.abs().amax(-1)
        largest = float(differences.median() if has_experts(parts) else differences.max())
        if not largest <= _ALLOWED[parts.dtype]:
            fault = f"they differ from plain PyTorch by {largest:.1e} of the largest output"
    except Exception as error:  # noqa: BLE001 - Triton, CUDA and libraries raise errors of many types
        runner.note_loss(error)
        fault = reason_of(error)
    if fault is not None:
        ways = [runner.give_up() for _ in range(1 + (runner.graphs is not None))]
    elif runner.graphs is not None:
        try:
            if not torch.equal(_outputs(runner), launched):
                fault = "replays have other bits than launches"
        except Exception as error:  # noqa: BLE001
            runner.note_loss(error)
            fault = reason_of(error)
        ways = [runner.give_up()] if fault is not None else []
    if fault is not None:
        logger.warning("passes run %s, after a test of the loaded weights: %s", " and ".join(filter(None, ways)), fault)
    for tensor in (*cache.keys.values(), *cache.values.values()):
        tensor[:, : 2 * _NUM_PLACES].zero_()


def _outputs(runner: Runner) -> Tensor:
    """Return the logits of all rows, or the states where the head is not: float32 [rows, numbers]. With graphs, each
    pass runs twice, because the first time captures it."""
    parts, graphs, found = runner.parts, runner.graphs, list[Tensor]()
    text, generator, contexts = parts.config.get_text_config(), torch.Generator().manual_seed(0), [0, 0]
    with graphs.trial() if graphs is not None else nullcontext():
        for counts in _ROWS:
            tokens = torch.randint(text.vocab_size, (sum(counts),), generator=generator).tolist()
            states = torch.randn(1, sum(counts), text.hidden_size, generator=generator)
            for _ in range(1 if graphs is None else 2):
                spans = [
                    RowSpan(runs, context, count, windowed=runs)
                    for runs, context, count in zip(_RUNS, contexts, counts, strict=True)
                ]
                batch = runner.batch(spans, token_ids=tokens)
                entering = states.to(runner.device, parts.dtype) if parts.embedding is None else runner.embed(batch)
                left = runner.run(batch, entering)[:, : len(tokens)]
                outputs = left[0] if parts.lm_head is None else runner.head(left)
            found.append(outputs.float().clone())
            contexts = [context + count for context, count in zip(contexts, counts, strict=True)]
    return torch.cat(found)
