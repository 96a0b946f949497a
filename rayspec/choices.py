"""How a draft may run a sublayer: in full, not at all, or by one of the cheaper ways of the hardware. Standard library
only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, TypeAlias

__all__ = [
    "FULL",
    "QUANTISED_WEIGHTS",
    "SKIP",
    "Choice",
    "Choices",
    "Keys",
    "Weights",
    "choices_of",
    "combinations",
    "combined",
    "described",
    "keys_of",
    "nearest",
    "num_leading_full",
    "weights_of",
]

# What the matrices of a sublayer are multiplied by: the target's own weights, or a copy with 8 or 4 bits a weight.
Weights: TypeAlias = Literal["full", "int8", "int4"]
# The keys that attention reads: all; the first and the newest pages; or these and the pages that the last verify looked
# at most.
Keys: TypeAlias = Literal["all", "window", "pages"]
Choice: TypeAlias = Literal[
    "full",
    "skip",
    "int8",
    "int4",
    "window",
    "pages",
    "int8+window",
    "int8+pages",
    "int4+window",
    "int4+pages",
]

# One for each sublayer of a model, in order.
Choices: TypeAlias = tuple[Choice, ...]

FULL: Choice = "full"
SKIP: Choice = "skip"
# The smallest first.
QUANTISED_WEIGHTS: tuple[Weights, ...] = ("int4", "int8")

_PARTS: Mapping[Choice, tuple[Weights, Keys]] = {
    "full": ("full", "all"),
    "skip": ("full", "all"),  # of what is not run; it reads neither
    "int8": ("int8", "all"),
    "int4": ("int4", "all"),
    "window": ("full", "window"),
    "pages": ("full", "pages"),
    "int8+window": ("int8", "window"),
    "int8+pages": ("int8", "pages"),
    "int4+window": ("int4", "window"),
    "int4+pages": ("int4", "pages"),
}


def weights_of(choice: Choice) -> Weights:
    """The weights of a choice that runs the sublayer."""
    return _PARTS[choice][0]


def keys_of(choice: Choice) -> Keys:
    """The keys of a choice that runs the sublayer."""
    return _PARTS[choice][1]


def combined(weights: Weights, keys: Keys) -> Choice:
    """The choice that runs a sublayer so."""
    return next(choice for choice, parts in _PARTS.items() if parts == (weights, keys) and choice != SKIP)


def combinations(allowed: Collection[str]) -> tuple[Choice, ...]:
    """`full`, and all choices that consist of allowed ones: of "int4" and "pages" also "int4+pages"."""
    weights: list[Weights] = ["full", *(one for one in ("int8", "int4") if one in allowed)]
    keys: list[Keys] = ["all", *(one for one in ("window", "pages") if one in allowed)]
    found = tuple(combined(weight, key) for key in keys for weight in weights)
    return (*found, SKIP) if SKIP in allowed else found


def nearest(choice: Choice, possible: Collection[Choice]) -> Choice:
    """The choice itself where it is possible, or else with all keys, or else with the full weights, or else in full."""
    candidates = (choice, combined(weights_of(choice), "all"), combined("full", keys_of(choice)))
    return next((one for one in candidates if one in possible), FULL)


def choices_of(keep: Sequence[bool]) -> Choices:
    """Full where the flag is set, else skipped."""
    return tuple(FULL if kept else SKIP for kept in keep)


def described(choices: Sequence[Choice]) -> str:
    """How many there are of each, in words: "14 full, 2 skip"."""
    return ", ".join(f"{count} {choice}" for choice, count in Counter(choices).most_common())


def num_leading_full(choices: Sequence[Choice]) -> int:
    """Sublayers before the first one that a draft does not run in full."""
    return next((index for index, choice in enumerate(choices) if choice != FULL), len(choices))
