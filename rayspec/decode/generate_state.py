"""Sequences as transformers' `generate` runs them, and the check at load that a model can be run like that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from rayspec.types import CheckpointError, UnsupportedModelError

_NUM_CHECK_TOKENS = 32
_CHECK_CHUNK = 15
_CHECK_WINDOW = 6  # so that the tokens of the check leave it
_NUM_CHECK_STEPS = 2
# `generate` repeats the same operations. Chunks have other shapes, so their sums are rounded in another order.
_SAME, _ROUNDED = 1e-5, {torch.float32: 1e-3}
_ROUNDED_HALF = 5e-2
_WINDOW_NAMES = ("sliding_window", "attention_chunk_size", "attention_window_size", "index_topk")
_MODEL_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)


class GenerateState:
    """The passes of one sequence: inputs, positions and cache are those of the model's own `generate`.

    prompt: the tokens before the first generated token. The model's generation config must be `plain_generation`.
    """

    def __init__(self, model: PreTrainedModel, prompt: Sequence[int]) -> None:
        self._model: Any = model
        self.prompt = prompt
        self._token_ids = torch.tensor([list(prompt)], device=model.device)
        self._arguments = self._prepared()
        self._token_ids = self._token_ids[:, :0]

    @property
    def num_tokens(self) -> int:
        """Number of tokens that have been run."""
        return self._token_ids.shape[1]

    def run(self, token_ids: Sequence[int]) -> Tensor:
        """Run the next tokens in one pass and return the logits [1, V] after the last token."""
        new = torch.tensor([list(token_ids)], device=self._token_ids.device)
        self._token_ids = torch.cat([self._token_ids, new], dim=1)
        arguments = dict(self._arguments)
        if (positions := arguments.get("position_ids")) is not None:
            arguments["position_ids"] = positions[..., : self.num_tokens]
        inputs = self._model.prepare_inputs_for_generation(
            self._token_ids,
            next_sequence_length=len(token_ids) if arguments["use_cache"] else None,
            is_first_iteration=self.num_tokens <= len(self.prompt),
            **arguments,
        )
        output = self._model(**inputs, return_dict=True)
        self._arguments = self._model._update_model_kwargs_for_generation(output, self._arguments)
        return output.logits[0, -1:]  # type: ignore[no-any-return]

    def _prepared(self) -> dict[str, Any]:
        """Return the arguments that `generate` gives to its decoding loop for this prompt."""
        prepared: dict[str, Any] = {}

        def keep(_model: Any, input_ids: Tensor, **arguments: Any) -> Tensor:
            prepared.update(arguments)
            return input_ids

        self._model.generate(
            self._token_ids, generation_config=GenerationConfig(max_new_tokens=1), custom_generate=keep
        )
        for of_the_loop in ("logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer"):
            prepared.pop(of_the_loop, None)
        return prepared


def plain_generation(model: PreTrainedModel) -> GenerationConfig:
    """Return a generation config that only says whether the model has a cache: no penalties, and no special tokens,
    from which `generate` would guess a mask."""
    known = model.generation_config
    return GenerationConfig(use_cache=known.use_cache if known is not None else None)


@torch.inference_mode()
def check_generation(model: PreTrainedModel) -> bool:
    """Require that sequences that run in turns compute what `generate` computes for each alone, on random tokens.
    Return whether prompts may be divided into chunks, too.

    Raises UnsupportedModelError for a model that computes something else, and CheckpointError for weights that compute
    NaN or infinity.
    """
    try:
        with _narrow_windows(model):
            return _check(model)
    except _MODEL_ERRORS as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        raise UnsupportedModelError(
            f"{model.config.model_type}: generate of transformers cannot continue a text with this model "
            f"({type(error).__name__}: {reason})"
        ) from error


def _check(model: PreTrainedModel) -> bool:
    tokens = torch.randint(
        model.config.get_text_config(decoder=True).vocab_size,
        [_NUM_CHECK_TOKENS],
        generator=torch.Generator().manual_seed(0),
    ).tolist()
    prompts = [tokens[:1], tokens]
    outputs = [_generated(model, prompt) for prompt in prompts]
    states = [GenerateState(model, prompt) for prompt in prompts]
    given = [[prompt, *([token] for token in output)] for prompt, (output, _) in zip(prompts, outputs, strict=True)]
    for step in range(_NUM_CHECK_STEPS + 1):
        for state, pieces, (_, logits) in zip(states, given, outputs, strict=True):
            difference = _difference(logits[step], state.run(pieces[step]))
            if not difference <= _SAME:
                raise UnsupportedModelError(
                    f"{model.config.model_type}: two sequences that decode in turns differ from generate's (by "
                    f"{difference:.1e}): the model keeps their state in its modules, or is not deterministic"
                )
    return _divides(model, tokens, *outputs[1])


def _divides(model: PreTrainedModel, prompt: Sequence[int], output: Sequence[int], logits: Sequence[Tensor]) -> bool:
    """Return whether the prompt in chunks, and a step after it, compute what the prompt in one pass computes."""
    state = GenerateState(model, prompt)
    try:
        state.run(prompt[:_CHECK_CHUNK])
        found = [state.run(prompt[_CHECK_CHUNK:]), *(state.run([token]) for token in output[:_NUM_CHECK_STEPS])]
    except _MODEL_ERRORS:
        return False
    tolerance = _ROUNDED.get(logits[0].dtype, _ROUNDED_HALF)
    return all(_difference(wanted, actual) <= tolerance for wanted, actual in zip(logits, found, strict=True))


def _generated(model: PreTrainedModel, prompt: Sequence[int]) -> tuple[list[int], list[Tensor]]:
    """Return what `generate` makes of the prompt: token ids and logits [1, V] of a few steps."""
    options = GenerationConfig(
        max_new_tokens=_NUM_CHECK_STEPS + 1, return_dict_in_generate=True, output_logits=True, do_sample=False
    )
    written: Any = model.generate(torch.tensor([prompt], device=model.device), generation_config=options)  # type: ignore[operator]
    if not all(bool(logits.isfinite().all()) for logits in written.logits):
        raise CheckpointError(
            f"the model computes NaN or infinity on plain input in {model.dtype}: "
            "its weights are damaged, or overflow; try bfloat16 or float32"
        )
    return written.sequences[0, len(prompt) :].tolist(), list(written.logits)


def _difference(expected: Tensor, actual: Tensor) -> float:
    """Return the root mean square of the difference as a share of the expected logits' own spread."""
    wanted = expected.float()
    return float((wanted - actual.float()).square().mean().sqrt() / wanted.std().clamp(min=1e-30))


@contextmanager
def _narrow_windows(model: PreTrainedModel) -> Iterator[None]:
    """Make sliding windows and attention chunks so short that the check leaves them."""
    places: list[tuple[Any, str, int]] = []
    for owner in {id(one): one for one in (model.config.get_text_config(decoder=True), *model.modules())}.values():
        for name in _WINDOW_NAMES:
            if isinstance(window := getattr(owner, name, None), int) and window > _CHECK_WINDOW:
                places.append((owner, name, window))
    try:
        for owner, name, _ in places:
            setattr(owner, name, _CHECK_WINDOW)
        yield
    finally:
        for owner, name, window in places:
            setattr(owner, name, window)
