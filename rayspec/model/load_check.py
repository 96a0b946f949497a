"""Random rows that show at load whether two computations of a layer are the same.

They come in passes, a prompt in two chunks and a decode step, so rows read keys that earlier passes have written. Some
sequences begin late: around every length that the config names, and at the end of the context.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig

from rayspec.model.attention import AttentionKind, PackedRows, Rows, pack
from rayspec.model.kv_cache import PAGE_SIZE, KVCache, LayerShape
from rayspec.model.rows import RowSpan, runs_of_pages
from rayspec.model.sublayers import Decomposition
from rayspec.types import CheckpointError, RayspecError

# Rows of a sequence, and of the sequence with long chunks. Attention reads chunks of more than 32 rows by other calls.
_NUM_ROWS = 8
_NUM_ROWS_IN_CHUNKS = 69
# Rows before the boundary in a sequence that crosses it. The row at the boundary is in the second chunk.
_NUM_BEFORE = 5
# The residual is small, so that it hides no error. A block's output stays large: its input is normalised.
_SCALE = 1e-2
# The end of a context of unknown length.
_UNKNOWN_END = 4096
# Masks of longer contexts take too much memory to compare.
LONGEST_MASK = 2**18
# Names of the config's numbers that may be lengths in tokens.
_LENGTH = re.compile(r"position|window|length|chunk|context|seq|floor_scale")
# Attributes that number a module. They differ between layers that compute the same.
_NUMBER = re.compile(r"(^|_)(idx|index|layer_id|layer_number)$")


@dataclass(frozen=True, slots=True)
class CheckSequence:
    """One sequence of a check. first: the position of its first row. counts: its rows in each pass."""

    first: int
    counts: tuple[int, ...]

    @classmethod
    def of(cls, first: int, num_rows: int) -> CheckSequence:
        return cls(first, (num_rows // 2, num_rows - 1 - num_rows // 2, 1))

    @property
    def num_rows(self) -> int:
        return sum(self.counts)


def boundaries(config: PretrainedConfig, end: int | None) -> list[int]:
    """Return the lengths that the config names, in ascending order. From such a position on, a layer may compute
    something else: a sliding window begins to hide keys, a rotary embedding or a query is scaled. The last is the end
    of the context, the model's `end`."""
    end = max(end or _UNKNOWN_END, _NUM_ROWS)
    found = {end}
    left: list[tuple[str, Any]] = [("", config.to_dict())]
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left.extend((str(key), each) for key, each in value.items())
        elif isinstance(value, list | tuple):
            left.extend((name, each) for each in value)
        elif type(value) in (int, float) and _LENGTH.search(name) and 1 < value < end and value == int(value):
            found.add(int(value))
    return sorted(found)


def sequences(lengths: Sequence[int], *, with_chunks: bool) -> list[CheckSequence]:
    """Return the sequences of a check. lengths: from `boundaries`. with_chunks: one sequence has long chunks."""
    end = lengths[-1]
    firsts = sorted({min(max(0, length - _NUM_BEFORE), end - _NUM_ROWS) for length in lengths})
    num_rows = min(_NUM_ROWS_IN_CHUNKS, end) if with_chunks else _NUM_ROWS
    return [CheckSequence.of(0, num_rows), *(CheckSequence.of(first, _NUM_ROWS) for first in (0, *firsts))]


class CheckRows:
    """The rows of a check, packed as decoding packs them. All sequences have the same number of passes. states: by
    sequence, random hidden states [n, hidden_size], the same in every process. hidden: by pass, the states of all
    sequences [1, N, hidden_size]. passes: by pass, the rows. dtype: of the rows, by default that of the parts."""

    def __init__(
        self, parts: Decomposition, sequences: Sequence[CheckSequence], *, dtype: torch.dtype | None = None
    ) -> None:
        self.sequences = sequences
        device, dtype = parts.device, dtype or parts.dtype
        generator, size = torch.Generator().manual_seed(0), parts.config.hidden_size
        self.states = [
            (torch.randn(one.num_rows, size, generator=generator) * _SCALE).to(device, dtype) for one in sequences
        ]
        self.hidden = self.in_passes(self.states)
        # The sequences take turns, so pages of a sequence are not adjacent in the cache.
        counter = itertools.count()
        pages: list[list[int]] = [[] for _ in sequences]
        for first in range(0, max(one.num_rows for one in sequences), PAGE_SIZE):
            for one, own in zip(sequences, pages, strict=True):
                if first < one.num_rows:
                    own.append(next(counter))
        self._cache = KVCache(parts.shapes, sum(map(len, pages)) * PAGE_SIZE, dtype=dtype, device=device)
        self.passes: list[PackedRows] = []
        for number, hidden in enumerate(self.hidden):
            spans = [
                RowSpan(runs_of_pages(own, PAGE_SIZE), sum(one.counts[:number]), one.counts[number])
                for one, own in zip(sequences, pages, strict=True)
            ]
            rows = pack(self._cache, spans, device=device)
            firsts = [one.first for one in sequences for _ in range(one.counts[number])]
            self.passes.append(replace(rows, positions=rows.positions + torch.tensor(firsts, device=device)))
            parts.rotate(hidden, self.passes[-1])

    def in_passes(self, by_sequence: Sequence[Tensor]) -> list[Tensor]:
        """Return rows in the order of the passes: [n, ...] of each sequence -> [1, N, ...] of each pass."""
        parts = [torch.split(rows, list(one.counts)) for one, rows in zip(self.sequences, by_sequence, strict=True)]
        return [torch.cat(rows)[None] for rows in zip(*parts, strict=True)]

    def outputs(
        self,
        layer: int,
        body: Callable[[Tensor, Any], Tensor],
        *,
        hidden: Sequence[Tensor] | None = None,
        passes: Sequence[Rows] | None = None,
    ) -> Tensor:
        """Return the output of a body of this layer in all passes, [1, rows, hidden_size]. The cache is empty before.
        hidden, passes: in place of those of the same names."""
        self._cache.keys[layer].zero_()
        self._cache.values[layer].zero_()
        return torch.cat(
            [body(h, rows) for h, rows in zip(hidden or self.hidden, passes or self.passes, strict=True)], 1
        )

    def branch(self, outputs: Tensor) -> Tensor:
        """Return what a body that reads `hidden` has added to it: float32 [1, rows, hidden_size]."""
        return outputs.float() - torch.cat(self.hidden, 1).float()


@dataclass(slots=True)
class RecordingRows(Rows):
    """`Rows` that record the attention calls of a block: the shape of keys and values, and the parameters. rows: what
    computes their attention; None gives zeros."""

    positions: Tensor
    rope: dict[str, Any] = field(default_factory=dict)
    rows: Rows | None = None
    calls: list[tuple[LayerShape, AttentionKind]] = field(default_factory=list)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind, *, first_head: int = 0
    ) -> Tensor:
        self.calls.append((LayerShape(len(key), key.shape[-1], value.shape[-1]), kind))
        if self.rows is None:
            return query.new_zeros(query.shape[1], len(query), value.shape[-1])
        return self.rows.attend(layer, query, key, value, kind, first_head=first_head)


def likeness(module: nn.Module) -> tuple[Any, ...]:
    """Return what modules have in common that differ in their weights only: classes, shapes, flags and counts."""
    return tuple(
        (
            type(each).__name__,
            tuple(weight.shape for weight in each.parameters(recurse=False)),
            tuple(
                (name, value)
                for name, value in vars(each).items()
                if not name.startswith("_") and not _NUMBER.search(name) and isinstance(value, bool | int | str | None)
            ),
        )
        for each in module.modules()
    )


class TransformersLayers:
    """Decoder layers as transformers runs them: by the model's own forward, with its cache, masks and rotary embedding.
    The other layers only lengthen the cache."""

    def __init__(self, trunk: Any, numbers: Sequence[int]) -> None:
        self._trunk = trunk
        self._numbers = numbers

    def states(
        self, rows: CheckRows, after_attention: Mapping[int, nn.Module]
    ) -> tuple[list[Tensor], dict[int, list[Tensor]], dict[int, list[tuple[Tensor, Tensor]]]]:
        """Return the hidden states that enter the layers, [n, hidden_size] by sequence; by layer, those after attention
        in the same form; by layer, in each call, those after attention and those that leave it, [B, n, hidden_size].

        A sequence has two passes: its prompt, and a decode step. after_attention: by layer, the module whose input is
        the residual after attention. Raises ValueError if a layer does not call it once, or if the model changes the
        states between layers.
        """
        entering: list[Tensor] = [torch.empty(0)] * len(rows.sequences)
        after: dict[int, list[Tensor]] = {number: list(entering) for number in self._numbers}
        all_calls: dict[int, list[tuple[Tensor, Tensor]]] = {number: [] for number in self._numbers}
        for num_rows in dict.fromkeys(one.num_rows for one in rows.sequences):
            group = [place for place, one in enumerate(rows.sequences) if one.num_rows == num_rows]
            states = torch.stack([rows.states[place] for place in group])
            firsts = torch.tensor([rows.sequences[place].first for place in group], device=states.device)
            positions = firsts[:, None] + torch.arange(num_rows, device=states.device)
            inputs, calls = self._run_group(states, positions, after_attention)
            for number, own in calls.items():
                all_calls[number].extend(own)
                middle = torch.cat([before for before, _ in own], 1)
                for place, each in zip(group, middle, strict=True):
                    after[number][place] = each
            for place, each in zip(group, inputs, strict=True):
                entering[place] = each
        return entering, after, all_calls

    def mask(self, context: int, states: Tensor) -> dict[int, Tensor | None]:
        """Return the mask of each layer for rows `states`, [1, n, hidden_size], after `context` tokens in the cache:
        bool [n, keys], where a row sees a key. The last key is that of the last row; a cache of few keys leaves out
        the first."""
        found: dict[int, Tensor | None] = {}
        cache = DynamicCache(config=self._trunk.config)
        for number in range(len(self._trunk.layers)):
            _lengthen(cache, number, states.new_zeros(1, context))

        def note(number: int, *args: Any, **options: Any) -> Tensor:
            hidden = _hidden_of(args, options)
            mask = options.get("attention_mask")
            found[number] = None if mask is None else mask[0, 0] == 0
            _lengthen(cache, number, hidden)
            return hidden

        positions = torch.arange(context, context + states.shape[1], device=states.device)
        with _forwards(self._trunk, dict.fromkeys(range(len(self._trunk.layers)), note)):
            self._run(states, positions[None], cache)
        return {number: found[number] for number in self._numbers}

    def _run_group(
        self, states: Tensor, positions: Tensor, after_attention: Mapping[int, nn.Module]
    ) -> tuple[Tensor, dict[int, list[tuple[Tensor, Tensor]]]]:
        cache = DynamicCache(config=self._trunk.config)
        entering: list[Tensor] = []
        calls: dict[int, list[tuple[Tensor, Tensor]]] = {number: [] for number in self._numbers}
        forwards = {number: self._trunk.layers[number].forward for number in self._numbers}

        def run(number: int, *args: Any, **options: Any) -> Tensor:
            hidden = _hidden_of(args, options)
            if number == self._numbers[0]:
                entering.append(hidden)
            if number not in forwards:
                _lengthen(cache, number, hidden)
                return hidden
            middle: list[Tensor] = []
            with after_attention[number].register_forward_pre_hook(
                lambda _, args, options: middle.append(args[0] if args else next(iter(options.values()))),
                with_kwargs=True,
            ):
                leaving = forwards[number](*args, **options)
            if len(middle) != 1:
                raise ValueError(
                    f"layer {number} calls its {type(after_attention[number]).__name__} {len(middle)} times"
                )
            calls[number].append((middle[0], leaving))
            return hidden

        with _forwards(self._trunk, dict.fromkeys(range(len(self._trunk.layers)), run)):
            for part in (slice(0, -1), slice(-1, None)):
                after = self._run(states[:, part], positions[:, part], cache)
                if not torch.equal(after, entering[-1]):
                    raise ValueError("the model changes the hidden states between its layers")
        return torch.cat(entering, 1), calls

    def _run(self, states: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        known = inspect.signature(self._trunk.forward).parameters
        name = "cache" if "cache" in known else "past_key_values"  # the second before transformers 5.24
        output = self._trunk(inputs_embeds=states, position_ids=positions, use_cache=True, **{name: cache})
        hidden: Tensor = output.last_hidden_state
        return hidden


def lack_of_memory(error: BaseException) -> str | None:
    """Return the first line of an error that torch raises if memory is short, on a device or of this machine; None for
    other errors, and for our own, which may quote such an error."""
    is_foreign = not isinstance(error, RayspecError)
    is_short = isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)
    return (str(error).splitlines() or ["out of memory"])[0] if is_foreign and is_short else None


@contextmanager
def enough_memory(remedy: str = "use a quantised checkpoint, or set option 'offload' or 'parallel'") -> Iterator[None]:
    """Raise CheckpointError, with the remedy, in place of an error that torch raises if memory is short."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if (lack := lack_of_memory(error)) is None:
            raise
        raise CheckpointError(f"the memory is too small for this model ({lack}): {remedy}") from error


def require_finite(expected: Tensor) -> None:
    """Raise CheckpointError for NaN or infinity in what the model computes on plain input."""
    if not bool(expected.isfinite().all()):
        raise CheckpointError(
            f"the model computes NaN or infinity on plain input in {expected.dtype}: "
            "its weights are damaged, or overflow; try bfloat16 or float32"
        )


def _hidden_of(args: Sequence[Any], options: Mapping[str, Any]) -> Tensor:
    hidden: Tensor = args[0] if args else options["hidden_states"]
    return hidden


def _lengthen(cache: DynamicCache, layer: int, rows: Tensor) -> None:
    """Append keys of a layer to the cache that nothing reads, as many as there are rows [B, n, ...]."""
    unread = torch.zeros(rows.shape[0], 1, rows.shape[1], 1, dtype=torch.bool, device=rows.device)
    cache.update(unread, unread, layer)


@contextmanager
def _forwards(trunk: Any, forwards: Mapping[int, Callable[..., Tensor]]) -> Iterator[None]:
    """Give the decoder layers other forwards, which get the layer's number first. The trunk has no final norm then."""
    layers = [trunk.layers[number] for number in forwards]
    before = [vars(layer).get("forward") for layer in layers]
    norm, trunk.norm = trunk.norm, nn.Identity()
    try:
        for number, layer in zip(forwards, layers, strict=True):
            layer.forward = partial(forwards[number], number)
        yield
    finally:
        trunk.norm = norm
        for layer, forward in zip(layers, before, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward
