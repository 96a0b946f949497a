"""A test of loaded weights on a GPU, before the first request: by plain PyTorch, in static buffers, and by graphs."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import torch
from torch import Tensor

from rayspec.decode.runner import Runner
from rayspec.errors import reason_of
from rayspec.model.kv_cache import whole_pages
from rayspec.model.row_counts import has_experts
from rayspec.model.rows import RowSpan, one_run

logger = logging.getLogger(__name__)

# By pass, the rows of two sequences: two chunks of prompts, three decodes, a verify.
_ROWS = ((70, 30), (10, 50), (1, 1), (1, 1), (1, 1), (5, 5))
_NUM_PLACES = whole_pages(sum(rows for rows, _ in _ROWS))
_RUNS = [one_run(at * _NUM_PLACES, _NUM_PLACES) for at in range(2)]  # of both stores of the cache
# Largest difference between buffers and plain PyTorch, relative to a row's largest. Rounding adds up over the layers.
_ALLOWED = {torch.float32: 1e-2, torch.bfloat16: 1e-1, torch.float16: 1e-1}


@torch.inference_mode()
def self_test(runner: Runner) -> None:
    """Give up the static buffers if their passes differ from plain PyTorch's by more than rounding, or the graphs if
    replays have other bits than launches; with one warning. The KV cache must hold no sequences.

    With experts, rounding may choose others for a row; then most rows have to agree, else all.
    """
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
