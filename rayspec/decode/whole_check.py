"""Checks and measurements of an undivided model at load: whether sequences decode as `generate` decodes them, whether
rows of drafts can be taken back, and how long passes of several rows take.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from rayspec.decode.generate_state import Cuts, GenerateState
from rayspec.model.architecture import max_positions
from rayspec.model.configs import in_one_line
from rayspec.model.load_check import boundaries
from rayspec.planning.latency import HEAD, Curve, LatencyModel, Measurement
from rayspec.types import CheckpointError, UnsupportedModelError

_NUM_CHECK_TOKENS = 32
_NUM_CHECK_STEPS = 1
_MODEL_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)
# Of the check of cuts: how many of so many rows are kept, pass by pass; and rows before a border that the passes cross.
_KEPT, _NUM_TRIED, _NUM_BEFORE = (1, 2, 3, 2, 1), 3, 4
# A prompt of the check is no longer. Behind it, a cache is filled without passes.
_LONGEST_CHECK_PROMPT = 256
# Borders of the config beyond so many tokens are not checked, except windows: filling a cache takes memory.
_FARTHEST = 8192
# Largest difference between two computations of the same logits, as a share of their spread.
_TOLERANCE, _TOLERANCE_OF_CUTS, _TOLERANCE_IN_HALF = 1e-3, 1e-4, 5e-2
# Rows of a measured pass, repeats, and seconds of measuring; and a number of sequences.
_ROW_COUNTS, _NUM_REPEATS, _BUDGET_S, _NUM_SEQUENCES = (1, 2, 4, 8, 16), 20, 1.0, 8
# The latency model of an undivided model has one sublayer, the whole.
_WHOLE = "attention and all else"


@torch.inference_mode()
def check_generation(model: PreTrainedModel) -> None:
    """Require that sequences that run in turns compute what `generate` computes for each alone, on random tokens.
    Raises UnsupportedModelError if they do not, and CheckpointError for weights that compute NaN or infinity."""
    prompt = _random_tokens(model, _NUM_CHECK_TOKENS)
    options = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=_NUM_CHECK_STEPS + 1, return_dict_in_generate=True, output_logits=True, do_sample=False
    )
    generate: Any = model.generate
    try:
        states = [GenerateState(model, each) for each in (prompt[:1], prompt)]
        inputs = [torch.tensor([state.prompt], device=model.device) for state in states]
        outputs = [generate(each, generation_config=options) for each in inputs]
        if not all(bool(logits.isfinite().all()) for output in outputs for logits in output.logits):
            raise CheckpointError(
                f"the model computes NaN or infinity on plain input in {model.dtype}: "
                "its weights are damaged, or overflow; try bfloat16 or float32"
            )
        for step in range(_NUM_CHECK_STEPS + 1):
            for state, output in zip(states, outputs, strict=True):
                at = len(state.prompt) + step
                actual = state.run(output.sequences[0, at - 1 : at].tolist() if step else state.prompt)
                difference = _difference(actual, output.logits[step])
                if not difference <= (_TOLERANCE if actual.dtype == torch.float32 else _TOLERANCE_IN_HALF):
                    raise UnsupportedModelError(
                        f"{model.config.model_type}: two sequences that decode in turns differ from generate's (by "
                        f"{difference:.1e}): the model keeps their state in its modules, or is not deterministic"
                    )
    except _MODEL_ERRORS as error:
        raise UnsupportedModelError(
            f"{model.config.model_type}: generate of transformers cannot continue a text with this model "
            f"({type(error).__name__}: {in_one_line(error)})"
        ) from error


@torch.inference_mode()
def find_cuts(model: PreTrainedModel) -> Cuts:
    """Return how rows of a pass are taken back. Raises UnsupportedModelError if neither way works."""
    try:
        check_cuts(model, "crop")
    except UnsupportedModelError:
        check_cuts(model, "copy")
        return "copy"
    return "crop"


@torch.inference_mode()
def check_cuts(model: PreTrainedModel, cuts: Cuts) -> None:
    """Require that rows that run in one pass, and of which only the first are kept, compute what rows one by one
    compute. Random tokens begin after a prompt, and shortly before each border: sliding windows, and other lengths that
    the config names, if they are not far. Raises UnsupportedModelError."""
    end, num_tested = max_positions(model.config), sum(_KEPT) + _NUM_TRIED
    named = boundaries(model.config.get_text_config(decoder=True), end)[:-1]
    near = [each for each in named if each <= _FARTHEST]
    tokens = _random_tokens(model, num_tested, seed=2)
    try:
        layers = getattr(_prefilled(model, 1, None).cache, "layers", ())
        windows = {each.sliding_window for each in layers if getattr(each, "is_sliding", False)}
        borders = sorted({each for each in windows if each < (end or math.inf)}.union(near))
        starts = [_NUM_CHECK_TOKENS, *(max(1, each - _NUM_BEFORE) for each in borders)]
        for start in dict.fromkeys(int(max(1, min(each, (end or math.inf) - num_tested))) for each in starts):
            plain, cut = _prefilled(model, start, None), _prefilled(model, start, cuts)
            try:
                expected = torch.cat([plain.run([token]) for token in tokens[: sum(_KEPT)]])
            except _MODEL_ERRORS:
                if end is None and start > starts[0]:
                    continue  # the context ends here
                raise
            _require_cuts(cut, tokens, expected, f"after {start} tokens")
    except _MODEL_ERRORS as error:
        raise UnsupportedModelError(
            f"rows of a pass cannot be taken back ({type(error).__name__}: {in_one_line(error)})"
        ) from error


def _prefilled(model: PreTrainedModel, num_tokens: int, cuts: Cuts | None) -> GenerateState:
    """Return the state of a sequence after so many random tokens."""
    prompt = _random_tokens(model, min(num_tokens, _LONGEST_CHECK_PROMPT), seed=1)
    state = GenerateState(model, prompt, cuts=cuts)
    state.run(prompt)
    if cuts == "crop" and state.cache is not None and not getattr(state.cache, "is_croppable", False):
        raise UnsupportedModelError("its cache cannot be cut")
    if num_tokens > len(prompt):
        state.fill(num_tokens - len(prompt))
    return state


def _require_cuts(state: GenerateState, tokens: list[int], expected: Tensor, where: str) -> None:
    """Require these logits [N, V] of passes of several rows, of which the last are wrong and taken back."""
    at, is_exact = 0, expected.dtype == torch.float32
    for num_kept in _KEPT:
        right, others = tokens[at : at + num_kept], tokens[at + num_kept : at + _NUM_TRIED]
        actual = state.try_rows([*right, *((token + 1) % expected.shape[1] for token in others)])[:num_kept]
        state.keep(num_kept)
        wanted = expected[at : at + num_kept]
        difference = _difference(actual, wanted)
        if is_exact and bool((actual.argmax(-1) != wanted.argmax(-1)).any()):
            difference = math.inf
        if not difference <= (_TOLERANCE_OF_CUTS if is_exact else _TOLERANCE_IN_HALF):
            raise UnsupportedModelError(f"rows of one pass differ from rows of several (by {difference:.1e}, {where})")
        at += num_kept


@torch.inference_mode()
def measured_passes(model: PreTrainedModel, cuts: Cuts) -> LatencyModel:
    """Time passes of one and of several rows, within about a second; of each number at least once. In the latency
    model, the whole model is one sublayer."""
    prompt = _random_tokens(model, _NUM_CHECK_TOKENS)
    state, times = GenerateState(model, prompt, cuts=cuts), defaultdict[int, list[float]](list)
    state.run(prompt)
    until, tokens = time.perf_counter() + _BUDGET_S, _random_tokens(model, max(_ROW_COUNTS), seed=3)
    for repeat, rows in itertools.product(range(_NUM_REPEATS), _ROW_COUNTS):
        if not repeat or time.perf_counter() < until:
            times[rows].append(_pass_seconds(state, tokens[:rows]))
    # Whatever else runs only makes a pass slower.
    seconds = {rows: min(took) for rows, took in times.items()}
    curve = Curve.fit(
        [Measurement(kind=_WHOLE, rows=rows, context=0, batch=1, seconds=seconds[rows]) for rows in seconds]
    )
    # Sequences run one after another, so that several take the sum of their times.
    beside_s = (_NUM_SEQUENCES * seconds[1] - curve.seconds(rows=_NUM_SEQUENCES)) / (_NUM_SEQUENCES - 1)
    curve = replace(curve, sequence_s=max(0.0, beside_s))
    return LatencyModel(
        sublayers=(_WHOLE,),
        curves={_WHOLE: curve, HEAD: Curve(rows=(1,), base_s=(0.0,))},
        head=HEAD,
        stages=(0,),
        transfer_s=(0.0,),
    )


def _pass_seconds(state: GenerateState, token_ids: list[int]) -> float:
    """Return the seconds until a pass over these rows is read and taken back."""
    started = time.perf_counter()
    state.try_rows(token_ids).argmax(-1).tolist()
    state.keep(0)
    return time.perf_counter() - started


def _difference(actual: Tensor, expected: Tensor) -> float:
    """Return the root mean square of the difference of logits [N, V] in the row where it is largest, as a share of the
    expected logits' own spread; NaN if there is any."""
    expected, actual = expected.float(), actual.float()
    spread = expected.std(-1).clamp(min=1e-30)
    return float(((expected - actual).square().mean(-1).sqrt() / spread).max())


def _random_tokens(model: PreTrainedModel, count: int, seed: int = 0) -> list[int]:
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    tokens: list[int] = torch.randint(vocab_size, [count], generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens
