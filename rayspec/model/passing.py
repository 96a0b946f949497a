"""A stage of a model that does not split: the model's own forward, in which layers of other stages only pass states on.

The forward makes masks and positions from the lengths of the cache, so the passing layers keep these: their keys are
one number wide. At the stage's first layer the states that came from the stage before replace those of the passing
layers. At the layer after its last, the states are taken for the next stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from rayspec.model.layer_bytes import decoder_layers, layer_flow
from rayspec.model.weights import Absent


class Border:
    """What a pass of this thread takes from the stage before, [1, N, S], and sends to the next. S: numbers of a row."""

    def __init__(self, received: Tensor | None) -> None:
        self._received = received
        self.received_shape = (0, 0, 0)
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
            if self._index < len(cache.layers):  # else it reads the keys of an earlier layer
                _lengthen(cache.layers[self._index], hidden)
        if (border := _border.get()) is not None:
            *others, num_rows, size = hidden.shape  # [1, N, hidden_size], or several such states
            if self._takes:
                border.received_shape = (1, num_rows, hidden.numel() // num_rows)
                if (received := border.take(num_rows)) is not None:
                    hidden = received.view(num_rows, *others, size).movedim(0, -2)
            if self._sends:
                border.sent.append(hidden.movedim(-2, 0).reshape(1, num_rows, -1))
        return hidden if self._num_nones is None else (hidden, *[None] * self._num_nones)


def _lengthen(layer: Any, hidden: Tensor) -> None:
    """Let this layer of the cache know of as many further tokens."""
    if isinstance(layer, CacheLayerMixin):
        keys = hidden.new_zeros(1, 1, hidden.shape[-2], 1)  # keys of no width would count as no tokens
        layer.update(keys, keys)
    if hasattr(layer, "has_previous_state"):
        known = layer.has_previous_state
        layer.has_previous_state = dict.fromkeys(known, True) if isinstance(known, dict) else True


class StandIn(Absent):
    """In place of an embedding that another stage has: numbers that follow from the token, so that a stage is a model
    that the checks at load can run. No result of a pipeline depends on them."""

    def __init__(self, embedding: Any, model: PreTrainedModel) -> None:
        super().__init__(embedding)
        self._size, self._dtype, self.shift = embedding.weight.shape[1], model.dtype, 0
        self.weight = torch.empty(0, dtype=model.dtype, device=model.device)  # some models read the device

    def forward(self, token_ids: Tensor) -> Tensor:
        odd = torch.arange(1, 2 * self._size, 2, device=token_ids.device)
        return (((token_ids + 1 + self.shift).unsqueeze(-1) * odd % 1009) / 291 - 1.73).to(self._dtype)


def as_stage(model: PreTrainedModel, layers: range) -> None:
    """Make a model of which only these layers are loaded a stage. Raises UnsupportedModelError as `layer_flow` does."""
    with torch.device("meta"):
        whole: Any = type(model).__bases__[0](model.config)
    num_nones = layer_flow(whole).num_nones
    own = decoder_layers(model, model.config)
    for index in set(range(len(own))).difference(layers):
        takes, sends = index == 0, index == layers.stop
        elsewhere: Any = vars(own[index])["module"]
        own[index] = _Passing(elsewhere, index, takes=takes, sends=sends, num_nones=num_nones)
    embedding = model.get_input_embeddings()
    if isinstance(embedding, Absent):
        model.set_input_embeddings(StandIn(vars(embedding)["module"], model))
