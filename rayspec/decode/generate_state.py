"""One sequence of an undivided model: its passes, and two ways to take rows of a pass back.

A cache of keys and values is cut. Recurrent state cannot be cut: it is copied before a pass, and where rows are taken
back, the copy is restored. The rows that were kept then run once more, with those of the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, cache_utils
from transformers.generation.utils import ALL_CACHE_NAMES

Cuts: TypeAlias = Literal["crop", "copy"]

_BY_REFERENCE = (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)  # updates bind new tensors
# Versions of transformers differ in these layers.
_FILLED = tuple(
    getattr(cache_utils, name)
    for name in (
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "DummyLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    )
    if hasattr(cache_utils, name)
)
_MOST_PENDING = 16


class GenerateState:
    """The passes of one sequence: inputs, positions and cache are those of the model's own `generate`.

    prompt: the tokens before the first generated token. The model's generation config must only say whether it has a
    cache. cuts: how rows of passes after the prompt's are taken back; None: they never are. num_tokens: that are in the
    cache.
    """

    def __init__(self, model: PreTrainedModel, prompt: Sequence[int], *, cuts: Cuts | None = None) -> None:
        self._model: Any = model
        self._cuts = cuts
        self._tried: tuple[Tensor, Any] | None = None  # tokens of a pass whose rows are not kept yet, and its output
        self._copy: list[tuple[dict[str, Any], dict[str, Any]]] = []  # attributes of the cache's layers: now, and then
        self.prompt = prompt
        self._arguments: dict[str, Any] = {}

        def keep(_model: Any, input_ids: Tensor, **arguments: Any) -> Tensor:
            """Take what `generate` gives to its decoding loop for this prompt."""
            self._arguments = arguments
            return input_ids

        token_ids = torch.tensor([list(prompt)], device=model.device)
        options = GenerationConfig(max_new_tokens=1)  # type: ignore[no-untyped-call]
        model.generate(token_ids, generation_config=options, custom_generate=keep)  # type: ignore[operator]
        for of_the_loop in ("logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer"):
            self._arguments.pop(of_the_loop, None)
        self._token_ids = self._pending = token_ids[:, :0]  # in the cache; and kept, but not in the cache

    @property
    def num_tokens(self) -> int:
        return self._token_ids.shape[1]

    @property
    def cache(self) -> Any:
        """What the model keeps between passes, in transformers' or its own form; None if it keeps nothing."""
        return next((found for name in ALL_CACHE_NAMES if (found := self._arguments.get(name)) is not None), None)

    def run(self, token_ids: Sequence[int], *, num_logits: int = 1) -> Tensor:
        """Run the next tokens in one pass, keep them, and return the logits [num_logits, V] after the last."""
        self.keep(0)
        logits = self._pass(token_ids, num_logits)
        self.keep(len(token_ids))
        return logits

    def try_rows(self, token_ids: Sequence[int]) -> Tensor:
        """Run the next tokens in one pass and return the logits [N, V] after each. `keep` then says how many of these
        rows stay; before the next pass, none do."""
        self.keep(0)
        if self._cuts == "copy":
            self._copy = [(vars(layer), _copied(layer)) for layer in getattr(self.cache, "layers", ())]
        return self._pass(token_ids, len(token_ids))

    def keep(self, num_rows: int) -> None:
        """Keep the first `num_rows` of the rows that were tried last, and take the others back."""
        if self._tried is None:
            return
        (tried, output), self._tried = self._tried, None
        copy, self._copy = self._copy, []
        num_kept = self._pending.shape[1] + num_rows
        num_cut = tried.shape[1] - num_kept
        if self._cuts == "copy" and num_cut:
            for now, then in copy:
                now.update(then)
            self._pending = tried[:, :num_kept]
            if num_kept > _MOST_PENDING:
                self._pass([], 1)
                self.keep(0)
            return
        is_first = self.num_tokens == 0
        self._pending = tried[:, :0]
        if num_kept:
            self._token_ids = torch.cat([self._token_ids, tried[:, :num_kept]], dim=1)
            self._arguments = self._grown(1 if is_first else num_kept, output)
        cache = self.cache
        if self._cuts == "crop" and cache is not None:
            if is_first:
                # From now on the cache keeps what a pass pushes out until it is cut. The prompt pushes out too much.
                cache.activate_past_recording()
            else:
                cache.crop(-num_cut)

    def fill(self, num_tokens: int) -> None:
        """Take the tokens in the cache again and again as `num_tokens` further tokens, with the same keys and values,
        without a pass. Recurrent state stays as it is. Raises NotImplementedError for a cache of another kind."""
        cache = self.cache
        for layer in () if cache is None else getattr(cache, "self_attention_cache", cache).layers:
            if type(layer) not in _FILLED:
                raise NotImplementedError(f"a {type(layer).__name__} cannot be filled without a pass")
            if getattr(layer, "keys", None) is not None:
                at = torch.arange(num_tokens, device=layer.keys.device) % layer.keys.shape[-2]
                layer.update(layer.keys[..., at, :], layer.values[..., at, :])
        at = torch.arange(num_tokens, device=self._token_ids.device) % self.num_tokens
        self._token_ids = torch.cat([self._token_ids, self._token_ids[:, at]], dim=1)
        self._arguments = self._grown(num_tokens)
        if self._cuts == "crop" and cache is not None:
            cache.crop(0)

    def _pass(self, token_ids: Sequence[int], num_logits: int) -> Tensor:
        """Run the pending and the next tokens in one pass and return the logits [num_logits, V] after the last."""
        new = torch.tensor([list(token_ids)], dtype=torch.int64, device=self._token_ids.device)
        new = torch.cat([self._pending, new], dim=1)
        all_tokens = torch.cat([self._token_ids, new], dim=1)
        # The arguments are those of the prompt, or of one more token than are in the cache.
        arguments = self._grown(new.shape[1] - 1) if self.num_tokens else dict(self._arguments)
        if (positions := arguments.get("position_ids")) is not None:
            arguments["position_ids"] = positions[..., : all_tokens.shape[1]]
        inputs = self._model.prepare_inputs_for_generation(
            all_tokens,
            next_sequence_length=new.shape[1] if arguments["use_cache"] else None,
            is_first_iteration=all_tokens.shape[1] <= len(self.prompt),
            **arguments,
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = num_logits
        output = self._model(**inputs, return_dict=True)
        self._tried = new, output
        return output.logits[0, -num_logits:]  # type: ignore[no-any-return]

    def _grown(self, num_tokens: int, output: Any = ()) -> dict[str, Any]:
        """Return the arguments for this many tokens more. output: of the pass before."""
        arguments = dict(self._arguments)
        if num_tokens:
            arguments = self._model._update_model_kwargs_for_generation(output, arguments, num_new_tokens=num_tokens)
        return arguments


def _copied(layer: Any) -> dict[str, Any]:
    """Return the attributes of a layer of a cache, such that later passes change none of them."""

    def copied(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: copied(each) for key, each in value.items()}
        return value.clone() if isinstance(value, Tensor) else value

    return dict(vars(layer)) if type(layer) in _BY_REFERENCE else copied(vars(layer))
