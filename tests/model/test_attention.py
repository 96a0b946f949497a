from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rayspec.model import attention
from rayspec.model.attention import Division, PackedRows, pack, pack_branches, packed_attention
from rayspec.model.kv_cache import KVCache, LayerShape
from rayspec.model.rows import Path, RowSpan, Run, Runs, one_run, slots_between

CPU = torch.device("cpu")
HEADS, DIM, VALUE_DIM, SLOTS = 4, 8, 6, 96
MODULE: Any = SimpleNamespace(layer_idx=3)
# The context, the number of rows and the parents of two trees.
TREES = ((55, 6, (-1, 0, 0, 1, 2, 2)), (60, 1, (-1,)))
OPTIONS = [
    pytest.param({"sliding_window": window, "softcap": softcap, "scaling": scaling}, id=f"{window}-{softcap}-{scaling}")
    for window in (None, 1, 5, 40)
    for softcap in (None, 2.0)
    for scaling in (None, 0.7)
]


def _expected(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    position: int,
    *,
    sliding_window: int | None,
    softcap: float | None,
    scaling: float | None,
) -> Tensor:
    """One row by the book. query: [H, D]; keys: [H_kv, n, D], of positions 0 .. n - 1; returns [H, D_v]."""
    first = max(0, position + 1 - sliding_window) if sliding_window else 0
    rows = []
    for head, one in enumerate(query.double()):
        shared = head // (len(query) // len(keys))
        scores = keys[shared, first : position + 1].double() @ one * (scaling or query.shape[-1] ** -0.5)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        rows.append(scores.softmax(-1) @ values[shared, first : position + 1].double())
    return torch.stack(rows).float()


def _cache(kv_heads: int, num_spare: int = 0, num_slots: int = SLOTS, value_dim: int = VALUE_DIM) -> KVCache:
    shapes = {3: LayerShape(kv_heads, DIM, value_dim)}
    cache = KVCache(shapes, num_slots, dtype=torch.float32, device=CPU, num_spare=num_spare)
    torch.manual_seed(0)
    for tensor in (cache.keys[3], cache.values[3]):
        tensor.copy_(torch.randn_like(tensor) * 2)
    return cache


def _random_paths(rng: random.Random, first: int, num_rows: int) -> list[Path]:
    """Of a tree behind `first` filled slots; some rows hang on one of the last of these."""
    paths: list[Path] = []
    for row in range(num_rows):
        parent = rng.randrange(-4, row) if rng.random() < 0.5 else row - 1
        before = paths[parent] if parent >= 0 else Path(first + 1 + parent, ())
        paths.append(Path(before.shared, (*before.own, first + row)))
    return paths


def _require_attention(cache: KVCache, rows: PackedRows, num_padding: int = 0, **options: Any) -> None:
    """Random rows write their keys where they should, change nothing else, and see what they should."""
    num_rows = sum(span.num_rows for span in rows.spans) + num_padding
    kv_heads, value_dim = len(cache.keys[3]), cache.values[3].shape[-1]
    query, key = torch.randn(1, HEADS, num_rows, DIM), torch.randn(1, kv_heads, num_rows, DIM)
    value, before = torch.randn(1, kv_heads, num_rows, value_dim), cache.keys[3].clone()
    output, _ = packed_attention(MODULE, query, key, value, None, packed=rows, **options)
    at, written = 0, set()
    for span, tree in zip(rows.spans, rows.paths, strict=True):
        slots = slots_between(span.runs, 0, span.end)
        for row in range(span.num_rows):
            places = [*range(tree[row].shared), *tree[row].own] if tree else range(span.context + row + 1)
            seen, own = [slots[place] for place in places], slots[span.context + row]
            assert torch.equal(cache.keys[3][:, own], key[0, :, at])
            assert rows.positions[at] == len(seen) - 1
            keys, values = cache.keys[3][:, seen], cache.values[3][:, seen]
            expected = _expected(query[0, :, at], keys, values, len(seen) - 1, **options)
            torch.testing.assert_close(output[0, at], expected, atol=2e-5, rtol=2e-5)
            written.add(own)
            at += 1
    untouched = [slot for slot in range(cache.num_slots) if slot not in written]
    assert torch.equal(cache.keys[3][:, untouched], before[:, untouched])
    assert not output[0, at:].any(), "padding rows attend to nothing"


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("options", OPTIONS)
def test_branches_see_the_context_and_themselves(kv_heads: int, options: dict[str, Any]) -> None:
    cache = _cache(kv_heads)
    tokens, num_branches = (
        [RowSpan(one_run(0, 1000), 7, 1), RowSpan(one_run(40, 1000), 21, 1), RowSpan(one_run(70, 1000), 0, 1)],
        5,
    )
    num_rows = len(tokens) * num_branches
    positions = torch.tensor([token.context for token in tokens]).repeat_interleave(num_branches)
    rows = pack_branches(cache, tokens, num_branches, positions)
    query = torch.randn(1, HEADS, num_rows, DIM)
    key, value = torch.randn(1, kv_heads, num_rows, DIM), torch.randn(1, kv_heads, num_rows, VALUE_DIM)
    keys_before, values_before = cache.keys[3].clone(), cache.values[3].clone()
    output, _ = packed_attention(MODULE, query, key, value, None, packed=rows, **options)
    assert torch.equal(cache.keys[3], keys_before)
    assert torch.equal(cache.values[3], values_before)
    for at in range(num_rows):
        token = tokens[at // num_branches]
        start, position = token.runs[0].start, token.context
        keys = torch.cat([keys_before[:, start : start + position], key[0, :, at : at + 1]], 1)
        values = torch.cat([values_before[:, start : start + position], value[0, :, at : at + 1]], 1)
        expected = _expected(query[0, :, at], keys, values, position, **options)
        torch.testing.assert_close(output[0, at], expected, atol=2e-5, rtol=2e-5)


def _scattered(rng: random.Random, shared: Runs, first: int, num_slots: int) -> list[Runs]:
    """Sequences that begin with `shared` and go on in runs of random lengths, in random order, from slot `first` on."""
    runs, at = [], first
    while at < num_slots:
        runs.append(Run(at, min(rng.choice([2, 5, 17, 40]), num_slots - at)))
        at = runs[-1].end
    rng.shuffle(runs)
    return [(*shared, *runs[index::4]) for index in range(4)]


@pytest.mark.parametrize(("division", "value_dim"), [("runs", DIM), ("runs", VALUE_DIM), ("places", DIM)])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("options", OPTIONS)
def test_rows_see_their_own_keys_wherever_they_lie(
    kv_heads: int, options: dict[str, Any], division: Division, value_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single rows, a few rows, a chunk, trees and a row of a tree, of sequences that share their first keys or lie in
    one run. Results for values of another size cannot be merged."""
    monkeypatch.setattr(attention, "_LONG_RUN_BYTES", 16 * kv_heads * DIM * 4)
    cache, rng = _cache(kv_heads, num_spare=4, num_slots=720, value_dim=value_dim), random.Random(kv_heads)
    shared = (Run(96, 24), Run(40, 3), Run(0, 20))
    places = _scattered(rng, shared, 120, 600)
    spans = [
        RowSpan(places[0], 48, 1),
        RowSpan(places[1], 60, 5),
        RowSpan(places[2], 70, 40),
        RowSpan(places[3], 55, 6),
        RowSpan(places[0], 60, 1),
        RowSpan(one_run(600, 60), 0, 1),
        RowSpan(one_run(660, 60), 11, 40),
    ]
    trees: list[list[Path]] = [[], [], [], *(RowSpan((), *tree).paths() for tree in TREES), []]
    trees.append(_random_paths(rng, 11, 40))
    rows = pack(cache, spans, device=CPU, paths=trees, division=division, pad_to=96)
    _require_attention(cache, rows, num_padding=2, **options)
    (calls,) = rows.calls.values()
    if options["sliding_window"] is None and not options["softcap"] and value_dim == DIM:
        assert any(isinstance(call.rows, Tensor) for call in calls.pieces) == (division == "runs"), "a shared run"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_by_places_a_row_has_the_same_bits_wherever_its_keys_lie(dtype: torch.dtype) -> None:
    num_slots, results = 1200, []
    every_other = tuple(Run(2 * at, 1) for at in range(560))
    layouts = (one_run(100, 560), (Run(700, 300), Run(0, 16), Run(320, 244)), every_other)
    keys, values = torch.randn(2, 2, 560, 64, dtype=torch.float32).to(dtype)
    query, key, value = (torch.randn(1, heads, 60, 64).to(dtype) for heads in (HEADS, 2, 2))
    for runs in layouts:
        cache = KVCache({3: LayerShape(2, 64, 64)}, num_slots, dtype=dtype, device=CPU)
        cache.write(3, torch.tensor(slots_between(runs, 0, 560)), keys, values)
        parts = []
        for context, count in ((500, 60), (559, 1), (530, 8)):
            rows = pack(cache, [RowSpan(runs, context, count)], device=CPU, division="places")
            own = (one[:, :, :count] for one in (query, key, value))
            parts.append(packed_attention(MODULE, *own, None, packed=rows)[0])
        results.append(torch.cat(parts, 1))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("options", OPTIONS)
def test_in_blocks_every_row_sees_its_own_keys(kv_heads: int, options: dict[str, Any]) -> None:
    """Chains, single rows and rows of a tree, of sequences in one run and in several, one at the cache's end."""
    num_slots = 300
    cache, rng = _cache(kv_heads, num_slots=num_slots, value_dim=DIM), random.Random(kv_heads)
    scattered = _scattered(rng, one_run(0, 20), 115, 280)
    tree = RowSpan((), 40, 6, (-1, 0, 0, 1, 2, 2)).paths()
    pieces: list[tuple[RowSpan, list[Path]]] = [
        (RowSpan(one_run(20, 82), 50, 32), []),
        (RowSpan(one_run(280, 20), 3, 17), []),
        (RowSpan(scattered[0], 25, 4), []),
        (RowSpan(one_run(103, 10), 0, 1), []),
        *((RowSpan(scattered[1], 40 + row, 1), [] if path.is_straight else [path]) for row, path in enumerate(tree)),
    ]
    spans, paths = [span for span, _ in pieces], [path for _, path in pieces]
    _require_attention(cache, pack(cache, spans, device=CPU, paths=paths, division="blocks"), **options)


def test_in_blocks_what_is_not_finite_stays_with_its_sequence() -> None:
    """A block may reach into the slots of another sequence and of rejected drafts."""
    shapes = {3: LayerShape(2, DIM, DIM)}
    cache = KVCache(shapes, SLOTS, dtype=torch.float32, device=CPU, keeps_finite=True)
    bad = torch.full((1, HEADS, 30, DIM), float("nan"))
    bad[:, :, ::2] = float("inf")
    for spans in ([RowSpan(one_run(40, 30), 0, 30)], [RowSpan(one_run(0, 40), 0, 30)]):
        packed_attention(MODULE, bad, bad[:, :2], bad[:, :2], None, packed=pack(cache, spans, device=CPU))
    rows = pack(cache, [RowSpan(one_run(0, 40), 0, 5)], device=CPU, division="blocks")
    output, _ = packed_attention(MODULE, *(torch.randn(1, heads, 5, DIM) for heads in (HEADS, 2, 2)), None, packed=rows)
    assert output.isfinite().all()
