"""A stage of a model that does not split: the model's own forward, in which layers of other stages only pass states on.

The forward makes masks and positions from the lengths of the cache, so the passing layers keep these: their keys are
one number wide. At the stage's first layer the states that came from the stage before replace those of the passing
layers. At the layer after its last, the states are taken for the next stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from rayspec.model.layer_bytes import META_ERRORS, decoder_layers, meta_pass
from rayspec.model.weights import Absent
from rayspec.types import UnsupportedModelError


class Border:
    """What a pass of this thread takes from the stage before, [1, N, hidden_size], and sends to the next."""

    def __init__(self, received: Tensor | None) -> None:
        self._received = received
        self.sent: list[Tensor] = []

    def take(self, num_rows: int) -> Tensor | None:
        """Return the next rows; None on the first stage."""
        if self._received is None:
            return None
        taken, self._received = self._received[:, :num_rows], self._received[:, num_rows:]
        return taken


_border: ContextVar[Border | None] = ContextVar("rayspec_border", default=None)


@contextmanager
def at_border(received: Tensor | None) -> Iterator[Border]:
    """Let the passes of this thread take these states, row by row. Without a border, as in the checks at load, a stage
    begins with the states of its own embedding or of what stands in for it."""
    border = Border(received)
    before = _border.set(border)
    try:
        yield border
    finally:
        _border.reset(before)


class _Passing(Absent):
    """In place of layer `index` of another stage."""

    def __init__(self, layer: nn.Module, index: int, *, takes: bool, sends: bool, num_nones: int | None) -> None:
        super().__init__(layer)
        self._index, self._takes, self._sends, self._num_nones = index, takes, sends, num_nones

    def forward(self, *given: Any, **named: Any) -> Any:
        hidden: Tensor = given[0] if given else named["hidden_states"]
        for cache in (each for each in (*given, *named.values()) if isinstance(each, Cache)):
            _lengthen(cache.layers[self._index], hidden)
        if (border := _border.get()) is not None:
            if self._takes and (received := border.take(hidden.shape[1])) is not None:
                hidden = received
            if self._sends:
                border.sent.append(hidden)
        return hidden if self._num_nones is None else (hidden, *[None] * self._num_nones)


def _lengthen(layer: Any, hidden: Tensor) -> None:
    """Let this layer of the cache know of as many further tokens."""
    if isinstance(layer, CacheLayerMixin):
        keys = hidden.new_zeros(hidden.shape[0], 1, hidden.shape[1], 1)  # keys of no width would count as no tokens
        layer.update(keys, keys)
    if hasattr(layer, "has_previous_state"):
        known = layer.has_previous_state
        layer.has_previous_state = dict.fromkeys(known, True) if isinstance(known, dict) else True


class _Embedding(Absent):
    """In place of an embedding that another stage has: numbers that follow from the token, so that a stage is a model
    that the checks at load can run. No result of a pipeline depends on them."""

    def __init__(self, embedding: Any, dtype: torch.dtype) -> None:
        super().__init__(embedding)
        self._size, self._dtype = embedding.weight.shape[1], dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        odd = torch.arange(1, 2 * self._size, 2, device=token_ids.device)
        return (((token_ids + 1).unsqueeze(-1) * odd % 1009) / 291 - 1.73).to(self._dtype)


def as_stage(model: PreTrainedModel, layers: range) -> None:
    """Make a model of which only these layers are loaded a stage. Raises UnsupportedModelError if its layers do not
    simply follow one another."""
    with torch.device("meta"):
        whole: Any = type(model).__bases__[0](model.config)
    absent = {name for name, module in model.named_modules() if isinstance(module, Absent)}
    ends = [whole.get_submodule(name) for name in absent]
    num_nones = _num_nones(whole, [each for each in ends if each is not whole.get_input_embeddings()])
    own = decoder_layers(model, model.config)
    for index in set(range(len(own))).difference(layers):
        takes, sends = index == 0, index == layers.stop
        elsewhere: Any = vars(own[index])["module"]
        own[index] = _Passing(elsewhere, index, takes=takes, sends=sends, num_nones=num_nones)
    embedding = model.get_input_embeddings()
    if isinstance(embedding, Absent):
        model.set_input_embeddings(_Embedding(vars(embedding)["module"], model.dtype))


def _num_nones(whole: Any, absent: Sequence[nn.Module]) -> int | None:
    """Return how many values, all None, layers of this model on the meta device return after the states; None if they
    return no tuple. Require that each layer runs once, on the states that the layer before returned, and before the
    absent modules at the end."""
    layers = list(decoder_layers(whole, whole.config))
    seen: list[tuple[nn.Module, Any, Any]] = []

    def note(module: nn.Module, given: Sequence[Any], named: dict[str, Any], output: Any) -> None:
        seen.append((module, given[0] if given else named["hidden_states"], output))

    handles = [each.register_forward_hook(note, with_kwargs=True) for each in {*layers, *absent}]
    try:
        meta_pass(whole, 2)
    except META_ERRORS as error:
        raise UnsupportedModelError(f"{whole.config.model_type}: it does not run without weights: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    of_layers = seen[: len(layers)]
    outputs = [output if isinstance(output, tuple) else (output,) for _, _, output in of_layers]
    is_chain = (
        [module for module, _, _ in of_layers] == layers
        and not any(module in layers for module, _, _ in seen[len(layers) :])
        and all(hidden is before[0] for (_, hidden, _), before in zip(of_layers[1:], outputs, strict=False))
        and all(other is None for output in outputs for other in output[1:])
    )
    if not is_chain:
        raise UnsupportedModelError(f"{whole.config.model_type}: its layers do not simply follow one another")
    return len(outputs[0]) - 1 if isinstance(seen[0][2], tuple) else None
