"""How a draft may run a sublayer: in full, not at all, or with quantised weights or fewer keys. No dependencies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, TypeAlias, get_args

# The weights that a sublayer uses: the target's own weights, or a copy with 8 or 4 bits for each weight.
Weights: TypeAlias = Literal["full", "int8", "int4"]
# The keys that attention reads: all; the first and the newest pages; or these and the pages with the most
# attention in the last verify.
Keys: TypeAlias = Literal["all", "window", "pages"]
Choice: TypeAlias = Literal[
    "full", "skip", "int8", "int4", "window", "pages", "int8+window", "int8+pages", "int4+window", "int4+pages"
]

# A choice for each sublayer of a model, in order.
Choices: TypeAlias = tuple[Choice, ...]

FULL: Choice = "full"
SKIP: Choice = "skip"
# The smallest first.
QUANTISED_WEIGHTS: tuple[Weights, ...] = ("int4", "int8")

# A skipped sublayer uses neither.
_PARTS: Mapping[Choice, tuple[Weights, Keys]] = {
    choice: (
        next((weights for weights in get_args(Weights) if weights in choice.split("+")), "full"),
        next((keys for keys in get_args(Keys) if keys in choice.split("+")), "all"),
    )
    for choice in get_args(Choice)
}


def weights_of(choice: Choice) -> Weights:
    """Return the weights of a choice that runs the sublayer."""
    return _PARTS[choice][0]


def keys_of(choice: Choice) -> Keys:
    """Return the keys of a choice that runs the sublayer."""
    return _PARTS[choice][1]


def combined(weights: Weights, keys: Keys) -> Choice:
    """Return the choice that runs a sublayer with these weights and keys."""
    return next(choice for choice, parts in _PARTS.items() if parts == (weights, keys) and choice != SKIP)


def combinations(allowed: Collection[str]) -> tuple[Choice, ...]:
    """Return `full`, and all choices that combine allowed choices: "int4" and "pages" also give "int4+pages"."""
    weights: list[Weights] = ["full", *(one for one in ("int8", "int4") if one in allowed)]
    keys: list[Keys] = ["all", *(one for one in ("window", "pages") if one in allowed)]
    found = tuple(combined(weight, key) for key in keys for weight in weights)
    return (*found, SKIP) if SKIP in allowed else found


def nearest(choice: Choice, possible: Collection[Choice]) -> Choice:
    """Return the first possible of: the choice, the choice with all keys, the choice with full weights, `full`."""
    candidates = (choice, combined(weights_of(choice), "all"), combined("full", keys_of(choice)))
    return next((one for one in candidates if one in possible), FULL)


def choices_of(keep: Sequence[bool]) -> Choices:
    """Return `full` where the flag is set, else `skip`."""
    return tuple(FULL if kept else SKIP for kept in keep)


def described(choices: Sequence[Choice]) -> str:
    """Return how often each choice occurs, in words: "14 full, 2 skip"."""
    return ", ".join(f"{count} {choice}" for choice, count in Counter(choices).most_common())


def num_leading_full(choices: Sequence[Choice]) -> int:
    """Return the number of sublayers before the first sublayer that a draft does not run in full."""
    return next((index for index, choice in enumerate(choices) if choice != FULL), len(choices))


def drafts_by_copies(copies: Sequence[Weights], ways: Sequence[Collection[Choice]]) -> dict[Weights, Choices]:
    """Return, for each kind of copies, the draft that runs all sublayers by it, or in full where there is none. Leave
    out a kind that no sublayer has. ways: the choices of each sublayer."""
    found = {weights: tuple(weights if weights in each else FULL for each in ways) for weights in copies}
    return {weights: choices for weights, choices in found.items() if weights in choices}
