"""The numbers of rows per pass and per attention call for which the bits of a row do not depend on the number (batch
invariance). Kernels choose their order of summation by the number of rows, and processors differ, so the deterministic
mode tests the loaded model. It pads passes to one fixed number of rows only if the test finds no range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor, nn

from rayspec.model.attention import LONGEST_CHAIN, AttentionKind, PackedRows, pack
from rayspec.model.kv_cache import PAGE_SIZE, KVCache, whole_pages
from rayspec.model.rows import RowSpan, one_run
from rayspec.model.sublayers import Decomposition, Sublayer

# A kernel serves all counts up to a power of two. Two kernels differ in few results, in about one of 20,000, so the
# largest count that seems to agree with the smaller ones may belong to another kernel.
_MOST_ROWS = (64, 32, 16, 8)
_LEAST_ROWS = (1, 2, 4, 8)
# Random inputs for each test: so many that passes of 64 rows give `_NUM_TESTED` results, but at most `_MAX_TRIALS`.
_NUM_TESTED = 2**18
_MAX_TRIALS = 4
# The test of chains: the places before them. The kernel reads 512 keys at a time.
_CHAIN_CONTEXTS = (0, 37, 63, 500, 777, 1500)


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Limits of the number of rows in a pass. Padding fills up to `least` rows; rows above `most` need another pass.
    longest_chain: rows of a chain that may share an attention call; 1 if every row attends separately."""

    least: int
    most: int
    longest_chain: int = 1


# The rows of an expert depend on the routing: in a mixture of experts, only passes of a single row have a fixed shape.
SINGLE_ROWS = RowCounts(1, 1)
FIXED = RowCounts(8, 8)
# On a GPU where products are torch's: reading the weights takes the time, so 64 rows take a few per cent more than one.
FIXED_IN_BUFFERS = RowCounts(64, 64)


def has_experts(parts: Decomposition) -> bool:
    return any(sublayer.has_experts for sublayer in parts.sublayers)


@torch.inference_mode()
def independent_row_counts(parts: Decomposition) -> RowCounts:
    """Find the widest range of row counts up to 64 in which the bits of a row are the same for every count.

    The result holds for this device and this number of threads. The test runs random rows, in every count, through
    each kind of sublayer, and through the head if this process has it.
    """
    kinds = _one_of_each_kind(parts)
    agreements = [_agreement_of_kind(parts, sublayer) for sublayer in kinds]
    if parts.lm_head is not None:
        agreements.append(_agreement(lambda some, trial: parts.head(_rows(parts, some, trial))))
    for most in _MOST_ROWS:
        least = max((agreement[most] for agreement in agreements), default=1)
        allowed = [count for count in _LEAST_ROWS if least <= count <= most]
        if allowed:
            can_share = parts.device.type == "cpu" and parts.dtype == torch.bfloat16 and most >= LONGEST_CHAIN
            shares = can_share and all(
                _chain_is_exact(parts, sublayer, context, allowed[0], trial)
                for sublayer in kinds
                if sublayer.kind == "attention"
                for context in _CHAIN_CONTEXTS
                for trial in range(_MAX_TRIALS)
            )
            return RowCounts(allowed[0], most, LONGEST_CHAIN if shares else 1)
    return FIXED


def _one_of_each_kind(parts: Decomposition) -> list[Sublayer]:
    """Return one sublayer of each curve name, with or without a body, and sizes of matrices."""
    found: dict[object, Sublayer] = {}
    for name, sublayer in zip(parts.curve_names, parts.sublayers, strict=True):
        linears = [module for module in sublayer.block.modules() if isinstance(module, nn.Linear)]
        sizes = tuple((linear.in_features, linear.out_features) for linear in linears)
        found[name, sublayer.body is None, sizes] = sublayer
    return list(found.values())


def _agreement_of_kind(parts: Decomposition, sublayer: Sublayer) -> dict[int, int]:
    """Return the `_agreement` of a sublayer. Every row is a sequence of one token."""
    cache = _cache(parts, sublayer, _MOST_ROWS[0] * PAGE_SIZE)

    def result(some: range, trial: int) -> Tensor:
        spans = [RowSpan(one_run(row * PAGE_SIZE, PAGE_SIZE), 0, 1) for row in some]
        rows = pack(cache, spans, device=parts.device, division="places")
        return _run(parts, sublayer, rows, _rows(parts, some, trial))

    return _agreement(result)


def _agreement(result: Callable[[range, int], Tensor]) -> dict[int, int]:
    """Return, for each of `_MOST_ROWS`, the smallest count from which on all results up to that count agree. result:
    gives the results of these rows of a trial by one pass, [rows, ...]."""
    least = dict.fromkeys(_MOST_ROWS, 1)
    num_tested, num_in_row = 0, result(range(1), 0).numel()
    num_rows = min(_MOST_ROWS[0], -(-_NUM_TESTED // num_in_row))
    for trial in range(_MAX_TRIALS):
        results = {}
        for count in range(1, _MOST_ROWS[0] + 1):
            firsts = range(0, max(num_rows - count, 0) + 1, count)
            results[count] = torch.cat([result(range(first, first + count), trial) for first in firsts])
        for most in _MOST_ROWS:
            differing = [count for count in range(1, most) if _differ(results[count], results[most])]
            least[most] = max(least[most], 1 + max(differing, default=0))
        num_tested += _MOST_ROWS[0] * num_in_row
        if num_tested >= _NUM_TESTED:
            break
    return least


def _differ(one: Tensor, other: Tensor) -> bool:
    """Return whether rows that are in both are unequal."""
    num_rows = min(len(one), len(other))
    return not torch.equal(one[:num_rows], other[:num_rows])


@dataclass(slots=True)
class _WithoutWindow(PackedRows):
    """Rows that see all keys. mixed: what attention has given."""

    mixed: list[Tensor] = field(default_factory=list)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind, *, first_head: int = 0
    ) -> Tensor:
        kind = kind._replace(sliding_window=None)
        self.mixed.append(PackedRows.attend(self, layer, query, key, value, kind, first_head=first_head))
        return self.mixed[-1]


def _chain_is_exact(parts: Decomposition, sublayer: Sublayer, context: int, least: int, trial: int) -> bool:
    """Return whether the rows of a chain have the same bits in shared attention calls as alone. Each trial has other
    numbers of rows. What attention gives is compared by itself, because few differences survive the rest of the
    sublayer. Sliding windows are left out: where the kernel reads few keys, it differs most rarely."""
    num_slots = whole_pages(context + LONGEST_CHAIN)
    cache = _cache(parts, sublayer, num_slots, num_spare=least)
    generator = torch.Generator().manual_seed(_MAX_TRIALS * context + trial)
    for cached in (cache.keys[sublayer.layer], cache.values[sublayer.layer]):
        cached.copy_(torch.randn(cached.shape, generator=generator))

    def result(spans: Sequence[RowSpan]) -> list[Tensor]:
        packed = pack(cache, spans, device=parts.device, pad_to=least, division="blocks")
        rows = _WithoutWindow(**{each.name: getattr(packed, each.name) for each in fields(packed)})
        return [_run(parts, sublayer, rows, _rows(parts, range(len(rows.positions)), trial)), *rows.mixed]

    runs = one_run(0, num_slots)
    alone = result([RowSpan(runs, context + row, 1) for row in range(LONGEST_CHAIN)])
    return not any(
        _differ(one[:count], other[:count])
        for count in range(2 + trial, LONGEST_CHAIN + 1, _MAX_TRIALS)
        for one, other in zip(result([RowSpan(runs, context, count)]), alone, strict=True)
    )


def _cache(parts: Decomposition, sublayer: Sublayer, num_slots: int, num_spare: int = 0) -> KVCache:
    shapes = {sublayer.layer: parts.shapes[sublayer.layer]}
    return KVCache(shapes, num_slots, dtype=parts.dtype, device=parts.device, num_spare=num_spare)


def _run(parts: Decomposition, sublayer: Sublayer, rows: PackedRows, hidden: Tensor) -> Tensor:
    """Return the results of a sublayer over states [1, N, hidden_size]: [N, hidden_size]."""
    parts.rotate(hidden, rows)
    return sublayer(hidden, rows)[0]


def _rows(parts: Decomposition, some: range, trial: int) -> Tensor:
    """Return these rows of the trial's random tensor: [1, rows, hidden_size]. The values are small, because large ones
    would hide differences in what a sublayer adds to them."""
    generator = torch.Generator().manual_seed(trial)
    size = parts.config.get_text_config().hidden_size
    rows = torch.randn(1, _MOST_ROWS[0], size, generator=generator)[:, some.start : some.stop] / 32
    return rows.to(parts.device, parts.dtype)
