"""LoRA adapters in PEFT's folders: products of low rank that are added to the matrices of some rows of a pass."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import regex
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from rayspec.model.fused import FusedLayer, LowRank, names_of
from rayspec.model.sources import adapter_config
from rayspec.model.sublayers import Decomposition, Sublayer
from rayspec.model.weights import num_layers
from rayspec.types import CheckpointError

_WEIGHTS = "adapter_model.safetensors"
_KEY = re.compile(r"(?P<path>.*\blayers\.(?P<layer>\d+)\..*?(?P<module>\w+))\.lora_[AB]\.weight")
_PREFIX = "base_model.model."  # of peft, before the name that a module has in the base model
_MOST_KEY = 256  # characters; the search in a key takes the cube of its length
_MOST_PATTERN = 256  # characters; without "{", which may take any memory, a pattern has as many states
_PATTERNS_S = 5.0  # to search all keys by the patterns, which may be anybody's
_MERGE = "merge it into the model with merge_and_unload() of peft, and load the result"
# What an adapter may hold or change in addition to its products, and the values with which it does not.
_MORE: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # others change the model's own weights
    **dict.fromkeys(("use_dora", "lora_bias", "fan_in_fan_out", "use_qalora"), (False,)),
    **dict.fromkeys(("modules_to_save", "layer_replication", "target_parameters", "trainable_token_indices"), ([], {})),
    **dict.fromkeys(("alora_invocation_tokens", "use_bdlora", "velora_config", "monteclora_config"), ()),
}


@torch.inference_mode()
def install_adapters(parts: Decomposition, folders: Mapping[str, str], *, first: int = 1) -> None:
    """Read the adapters in `folders`, by name, and give them to the fused sublayers of a model or span. They have the
    numbers `first`, ... in `RowSpan`. Passes without them may run meanwhile. Raises CheckpointError for an adapter that
    cannot be read, does not fit, or changes something else than the matrices of attention and MLP."""
    for number, (name, folder) in enumerate(folders.items(), first):
        products = _products_of(folder)
        try:
            if (most := max((layer for layer, _ in products), default=0)) >= num_layers(parts.config):
                raise ValueError(f"it has layer {most}, and the model only {num_layers(parts.config)}")  # noqa: TRY301
            made = [(sublayer.body, _taken(sublayer, products, parts)) for sublayer in parts.sublayers]
            if left := [one for one in products if parts.sublayers[0].layer <= one[0] <= parts.sublayers[-1].layer]:
                layer, module = min(left)
                raise ValueError(f"{module} of layer {layer} is no matrix of attention or MLP: {_MERGE}")  # noqa: TRY301
        except ValueError as error:
            raise CheckpointError(f"adapter {name!r} ({folder}) does not fit the model: {error}") from error
        for body, own in made:  # now, so that one that does not fit leaves nothing behind for the next of its number
            if isinstance(body, FusedLayer) and own != (None, None):
                body.adapters[number] = own


def matrices_of_adapters(parts: Decomposition) -> list[Tensor]:
    """Return the matrices of all adapters of a model or span."""
    bodies = [sublayer.body for sublayer in parts.sublayers if isinstance(sublayer.body, FusedLayer)]
    both = [product for body in bodies for pair in body.adapters.values() for product in pair]
    return [matrix for product in both if product is not None for matrix in product]


def _taken(
    sublayer: Sublayer, products: dict[tuple[int, str], tuple[Tensor, Tensor]], parts: Decomposition
) -> tuple[LowRank | None, LowRank | None]:
    """Take the products of the sublayer's two matrices out of `products`. Raises ValueError for a misfit."""
    block, body = sublayer.block, sublayer.body
    if not isinstance(body, FusedLayer):
        if any((sublayer.layer, name) in products for name, _ in block.named_children()):
            raise ValueError(
                f"sublayer {sublayer.index} is run by transformers' modules, not by two matrices: {_MERGE}"
            )
        return None, None
    first, last = names_of(block, sublayer.kind)
    both: list[LowRank | None] = []
    for names in (first, [last]):
        own = [products.pop((sublayer.layer, name), None) for name in names]
        linears: list[Any] = [getattr(block, name) for name in names]
        for name, linear, product in zip(names, linears, own, strict=True):
            if product is not None:
                given, wanted = (product[1].shape[0], product[0].shape[1]), (linear.out_features, linear.in_features)
                if given != wanted:
                    raise ValueError(f"{name} of layer {sublayer.layer} is for {given}, and the model has {wanted}")
        both.append(_side_by_side(linears, own, parts))
    return both[0], both[1]


def _side_by_side(
    linears: Sequence[nn.Linear], products: Sequence[tuple[Tensor, Tensor] | None], parts: Decomposition
) -> LowRank | None:
    """Return the products of linear layers whose outputs stand side by side as one; None if there are none."""
    if all(product is None for product in products):
        return None
    down = [product[0] for product in products if product is not None]
    up = [
        torch.zeros(linear.out_features, 0) if product is None else product[1]
        for linear, product in zip(linears, products, strict=True)
    ]
    both = torch.cat(down), torch.block_diag(*up)  # type: ignore[no-untyped-call]
    return LowRank(*(each.to(parts.device, parts.dtype) for each in both))


def _products_of(folder: str) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
    """Return the products of an adapter, by number of the layer and name of the module: float32 [rank, inputs] and
    [outputs, rank], scaled. Raises CheckpointError."""
    config = adapter_config(folder)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"the adapter {folder!r} has peft_type {config.get('peft_type')!r}, not LORA: {_MERGE}")
    for name, neutral in _MORE.items():
        if (value := config.get(name)) is not None and value not in neutral:
            raise CheckpointError(f"the adapter {folder!r} has {name} {value!r}, which is not supported: {_MERGE}")
    try:
        tensors = load_file(Path(folder) / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the adapter {folder!r} has no readable {_WEIGHTS} ({error}): save it with save_pretrained() of peft"
        ) from error
    found, deadline = {}, time.monotonic() + _PATTERNS_S
    for key in tensors:
        match = _KEY.fullmatch(key) if len(key) <= _MOST_KEY else None
        down, up = (tensors.get(re.sub(r"\.lora_[AB]\.", f".lora_{one}.", key)) for one in "AB")
        if match is None or down is None or up is None or down.dim() != 2 or up.dim() != 2 or len(down) != up.shape[1]:
            problem = f"has {key[:_MOST_KEY]}, which is not supported, or without its other half: {_MERGE}"
            raise CheckpointError(f"the adapter {folder!r} {problem}")
        if ".lora_A." not in key:
            continue
        try:
            scale = _scale(config, match["path"].removeprefix(_PREFIX), len(down), deadline)
        except (regex.error, TimeoutError, TypeError, ValueError, RecursionError) as error:
            problem = f"has an alpha or a pattern of alphas that cannot be used ({error}): {_MERGE}"
            raise CheckpointError(f"the adapter {folder!r} {problem}") from error
        place = int(match["layer"]), match["module"]
        if place in found:  # of an encoder of images, for example
            problem = f"has two products for {place[1]} of layer {place[0]}, one of them {key}: {_MERGE}"
            raise CheckpointError(f"the adapter {folder!r} {problem}")
        found[place] = (down.float(), up.float() * scale)
    return found


def _scale(config: Mapping[str, Any], path: str, rank: int, deadline: float) -> float:
    """Return the factor of the product of a module, as in `peft.tuners.lora.LoraModel`. Raises ValueError and
    TimeoutError."""
    patterns = config.get("alpha_pattern") or {}
    if any(len(pattern) > _MOST_PATTERN or "{" in pattern for pattern in patterns):
        raise ValueError(f"a pattern may have {_MOST_PATTERN} characters, and no '{{'")
    fits = partial(regex.match, string=path, timeout=max(1e-3, deadline - time.monotonic()))
    own = next((pattern for pattern in patterns if fits(rf"(.*\.)?({pattern})$")), None)
    alpha = float(config.get("lora_alpha", 8) if own is None else patterns[own])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
