"""The decoder layers of each pipeline stage: a partition that minimises the slowest stage's time, within memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rayspec.types import ConfigError

Floats = NDArray[np.float64]

_GIB = 2**30
_ROUNDING = 1e-9  # relative error of a span's seconds, which are differences of running sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device of one stage. bytes_free: for weights, keys and values together. cache_share: part of what the weights
    leave that keys and values may take."""

    name: str
    bytes_free: int
    cache_share: float = 1.0

    def bytes_for(self, part: LayerCost | StageCost) -> int:
        """Return the free bytes that a part needs there."""
        return part.weight_bytes + math.ceil(part.kv_bytes / self.cache_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Memory and time of a decoder layer, or of an end of the model. seconds: of a step, on each stage's device."""

    weight_bytes: int
    kv_bytes: int = 0
    seconds: tuple[float, ...]

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """The parts of the model in order. The first stage also holds the embedding, the last stage the final norm and the
    LM head. starts: layers that can begin a stage; None: all. embedding_everywhere: whether every stage holds it."""

    embedding: LayerCost
    layers: tuple[LayerCost, ...]
    head: LayerCost
    starts: tuple[int, ...] | None = None
    embedding_everywhere: bool = False

    @property
    def total_bytes(self) -> int:
        return sum(part.total_bytes for part in (self.embedding, *self.layers, self.head))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Layers, memory and seconds of one stage, including an end of the model that the stage holds."""

    device: Device
    layers: range
    weight_bytes: int
    kv_bytes: int
    seconds: float

    @property
    def bytes_left(self) -> int:
        """Free bytes that remain; below 0, the number of missing bytes."""
        return self.device.bytes_free - self.device.bytes_for(self)


def partition(costs: ModelCosts, devices: Sequence[Device], pinned: Sequence[int] | None = None) -> tuple[range, ...]:
    """Return consecutive layers for each stage, at least one each; stage i runs on devices[i].

    Of all partitions that fit, take the one whose slowest stage takes least time, because that stage sets the
    throughput of a full pipeline. Of equal ones, take the least sum of squared times. pinned: number of layers of each
    stage; it overrides even the memory limit, because bytes are estimates. Raises ConfigError if there are more stages
    than layers, if `pinned` does not add up, or if nothing fits.
    """
    _check(costs, devices)
    if pinned is not None:
        shown, num_layers = ",".join(map(str, pinned)), len(costs.layers)
        if len(pinned) != len(devices):
            raise ConfigError(
                f"option 'layers' is {shown}: it has {len(pinned)} numbers for {len(devices)} stages; give each one"
            )
        if min(pinned) < 1 or sum(pinned) != num_layers:
            raise ConfigError(
                f"option 'layers' is {shown}, {sum(pinned)} layers in all: the model has {num_layers}, and each stage "
                "at least 1"
            )
        ends = np.cumsum(pinned).tolist()
        spans = tuple(range(end - count, end) for end, count in zip(ends, pinned, strict=True))
        for span in spans:
            if costs.starts is not None and span.start not in costs.starts:
                raise ConfigError(
                    f"option 'layers' is {shown}: layer {span.start} cannot begin a stage, because layers from there "
                    f"on read keys of earlier ones; only {_in_words(costs.starts)} can"
                )
        return spans
    missing = bytes_missing(costs, devices)
    if missing:
        free = sum(device.bytes_free for device in devices)
        raise ConfigError(
            f"option 'stages' is {len(devices)}: the model needs {costs.total_bytes / _GIB:.1f} GiB, the devices hold "
            f"{free / _GIB:.1f}, and at least {missing / _GIB:.1f} GiB are missing whichever way its layers are cut: "
            "use more stages or tensor-parallel ranks, quantization, offload, or plan for fewer or shorter sequences"
        )
    by_layer = np.asarray([layer.seconds for layer in costs.layers]).T
    seconds = _span_sums(costs, by_layer, costs.embedding.seconds[0], costs.head.seconds[-1])
    if costs.embedding_everywhere:
        seconds[1:] += np.asarray(costs.embedding.seconds[1:])[:, None, None]
    seconds[_bytes_over(costs, devices) > 0] = np.inf
    slowest_s, _ = _best_cut(seconds, np.maximum)
    even = np.where(seconds <= slowest_s * (1 + _ROUNDING), seconds**2, np.inf)
    return _best_cut(even, np.add)[1]


def bytes_missing(costs: ModelCosts, devices: Sequence[Device]) -> int:
    """Return the bytes that the best partition lacks, summed over stages. Raises ConfigError for too many stages."""
    _check(costs, devices)
    return int(_best_cut(np.maximum(_bytes_over(costs, devices), 0), np.add)[0])


def stage_costs(costs: ModelCosts, devices: Sequence[Device], spans: Sequence[range]) -> tuple[StageCost, ...]:
    """Return the cost of each stage of a partition. Raises ValueError if there is not one span for each device."""
    stages = []
    for stage, (device, span) in enumerate(zip(devices, spans, strict=True)):
        parts = [costs.layers[layer] for layer in span]
        parts += [costs.embedding] if stage == 0 or costs.embedding_everywhere else []
        parts += [costs.head] if stage == len(devices) - 1 else []
        stages.append(
            StageCost(
                device=device,
                layers=span,
                weight_bytes=sum(part.weight_bytes for part in parts),
                kv_bytes=sum(part.kv_bytes for part in parts),
                seconds=sum(part.seconds[stage] for part in parts),
            )
        )
    return tuple(stages)


def _check(costs: ModelCosts, devices: Sequence[Device]) -> None:
    if not 1 <= len(devices) <= len(costs.layers):
        raise ConfigError(
            f"option 'stages' is {len(devices)}: a model of {len(costs.layers)} layers has 1 to {len(costs.layers)}"
        )
    if costs.starts is not None and len(costs.starts) < len(devices):
        raise ConfigError(
            f"option 'stages' is {len(devices)}, but only {_in_words(costs.starts)} can begin a stage, because later "
            f"layers read keys of earlier ones: set it to at most {len(costs.starts)}"
        )


def _in_words(starts: Sequence[int]) -> str:
    return f"layers {', '.join(map(str, starts))}" if len(starts) > 1 else f"layer {starts[0]}"


def _bytes_over(costs: ModelCosts, devices: Sequence[Device]) -> Floats:
    """Return [stage, start, end]: bytes of layers start .. end - 1 beyond those that the stage's device has free."""
    layers = np.asarray([[device.bytes_for(layer) for layer in costs.layers] for device in devices])
    free = np.asarray([device.bytes_free for device in devices], np.float64)[:, None, None]
    sums = _span_sums(costs, layers, costs.embedding.total_bytes, costs.head.total_bytes)
    if costs.embedding_everywhere:
        sums[1:] += costs.embedding.total_bytes
    return sums - free


def _span_sums(costs: ModelCosts, layers: NDArray[np.generic], first: float, last: float) -> Floats:
    """Return [stage, start, end]: the sum over layers start .. end - 1 on a stage, infinite for an empty span and for
    one that cannot begin there. layers: [stage, layer]. first, last: added for the first and the last stage."""
    running = np.pad(np.cumsum(layers, axis=1, dtype=np.float64), ((0, 0), (1, 0)))
    sums = running[:, None, :] - running[:, :, None]
    sums[0] += first
    sums[-1] += last
    if costs.starts is not None:
        sums[:, np.setdiff1d(np.arange(sums.shape[1]), costs.starts)] = np.inf
    return np.where(np.triu(np.ones(sums.shape[1:], bool), k=1), sums, np.inf)


def _best_cut(costs: Floats, combine: np.ufunc) -> tuple[float, tuple[range, ...]]:
    """Return the least combined cost over the stages, and its spans: a dynamic program over (stage, end). costs:
    [stage, start, end]. combine: non-decreasing in both arguments."""
    best = costs[0, 0]
    choices = []
    for stage in costs[1:]:
        totals = combine(best[:, None], stage)  # [start, end]
        choices.append(totals.argmin(axis=0))
        best = totals.min(axis=0)
    cuts = [len(best) - 1]
    for starts in reversed(choices):
        cuts.append(int(starts[cuts[-1]]))
    cuts.append(0)
    cuts.reverse()
    return float(best[-1]), tuple(range(start, end) for start, end in itertools.pairwise(cuts))
