import random
from typing import Any

import pytest
import torch
from torch import Tensor

from rayspec.model import attention
from rayspec.model.attention import Division, PackedRows, pack, pack_branches
from rayspec.model.kv_cache import KVCache, LayerShape
from rayspec.model.rows import Path, RowSpan, Run, Runs, one_run, slots_between
from tests.model.by_definition import CPU, LAYER, again, attend, attention_of, random_cache

HEADS, DIM, VALUE_DIM = 4, 8, 6
OPTIONS = [
    pytest.param({"sliding_window": window, "softcap": softcap, "scaling": scaling}, id=f"{window}-{softcap}")
    for window in (None, 1, 5, 40)
    for softcap, scaling in ((None, None), (2.0, 0.7))
]


def _seen(places: list[int], options: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """The places within the window, in order of position, and the other options."""
    rest = dict(options)
    window = rest.pop("sliding_window")
    return places[-window:] if window else places, rest


def _require_attention(rows: PackedRows, num_padding: int = 0, **options: Any) -> None:
    """Random rows write their keys where they should, change nothing else, and see what they should."""
    cache = rows.cache
    keys, values = cache.keys[LAYER], cache.values[LAYER]
    before = keys.clone()
    query, key, _, output = attend(rows, **options)
    at, written = 0, set()
    for span, tree in zip(rows.spans, rows.paths, strict=True):
        slots = slots_between(span.runs, 0, span.end)
        for row in range(span.num_rows):
            all_places = [*range(tree[row].shared), *tree[row].own] if tree else [*range(span.context + row + 1)]
            places, rest = _seen(all_places, options)
            seen, own = [slots[place] for place in places], slots[span.context + row]
            assert torch.equal(keys[:, own], key[:, at])
            assert rows.positions[at] == len(all_places) - 1
            expected = attention_of(query[:, at], keys[:, seen], values[:, seen], **rest)
            torch.testing.assert_close(output[at], expected, atol=2e-5, rtol=2e-5)
            written.add(own)
            at += 1
    untouched = [slot for slot in range(cache.num_slots) if slot not in written]
    assert torch.equal(keys[:, untouched], before[:, untouched])
    assert len(output) == at + num_padding
    assert not output[at:].any(), "padding rows attend to nothing"


def _random_paths(rng: random.Random, first: int, num_rows: int) -> list[Path]:
    """Of a tree behind `first` filled slots; some rows hang on one of the last of these."""
    parents = [rng.randrange(-4, row) if rng.random() < 0.5 else row - 1 for row in range(num_rows)]
    return RowSpan((), first, num_rows, tuple(parents)).paths()


def _scattered(rng: random.Random, shared: Runs, first: int, num_slots: int) -> list[Runs]:
    """Sequences that begin with `shared` and go on in runs of random lengths, in random order, from slot `first` on."""
    runs, at = [], first
    while at < num_slots:
        runs.append(Run(at, min(rng.choice([2, 5, 17, 40]), num_slots - at)))
        at = runs[-1].end
    rng.shuffle(runs)
    return [(*shared, *runs[index::4]) for index in range(4)]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("options", OPTIONS)
def test_branches_see_the_context_and_themselves(kv_heads: int, options: dict[str, Any]) -> None:
    cache, num_branches = random_cache(LayerShape(kv_heads, DIM, VALUE_DIM), 96), 5
    tokens = [RowSpan(one_run(start, 1000), context, 1) for start, context in ((0, 7), (40, 21), (0, 12), (70, 0))]
    positions = torch.tensor([token.context for token in tokens]).repeat_interleave(num_branches)
    before = (cache.keys[LAYER].clone(), cache.values[LAYER].clone())
    query, key, value, output = attend(pack_branches(cache, tokens, num_branches, positions), **options)
    assert torch.equal(cache.keys[LAYER], before[0])
    assert torch.equal(cache.values[LAYER], before[1])
    for at, row in enumerate(output):
        runs, context = tokens[at // num_branches].runs, tokens[at // num_branches].context
        slots, rest = _seen(slots_between(runs, 0, context + 1), options)
        own = zip(before, (key, value), strict=True)
        seen = [torch.cat([cached[:, slots[:-1]], each[:, at : at + 1]], 1) for cached, each in own]
        torch.testing.assert_close(row, attention_of(query[:, at], *seen, **rest), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("division", "value_dim"), [("runs", DIM), ("runs", VALUE_DIM), ("places", DIM)])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("options", OPTIONS)
def test_rows_see_their_own_keys_wherever_they_lie(
    kv_heads: int, options: dict[str, Any], division: Division, value_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single rows, a few rows, a chunk, trees and a row of a tree, of sequences that share their first keys or lie in
    one run. Results for values of another size cannot be merged."""
    monkeypatch.setattr(attention, "_LONG_RUN_BYTES", 16 * kv_heads * DIM * 4)
    cache, rng = random_cache(LayerShape(kv_heads, DIM, value_dim), 720, num_spare=4), random.Random(kv_heads)
    places = _scattered(rng, (Run(96, 24), Run(40, 3), Run(0, 20)), 120, 600)
    spans = [
        RowSpan(places[0], 48, 1),
        RowSpan(places[1], 60, 5),
        RowSpan(places[2], 70, 40),
        RowSpan(places[3], 55, 6, (-1, 0, 0, 1, 2, 2)),
        RowSpan(places[0], 60, 1, (-1,)),
        RowSpan(one_run(600, 60), 0, 1),
    ]
    trees = [*(span.paths() for span in spans), _random_paths(rng, 11, 40)]
    rows = pack(
        cache, [*spans, RowSpan(one_run(660, 60), 11, 40)], device=CPU, paths=trees, division=division, pad_to=96
    )
    _require_attention(rows, num_padding=2, **options)
    (calls,) = rows.calls.values()
    if options["sliding_window"] in (None, 40) and not options["softcap"] and value_dim == DIM:
        shares_keys = any(isinstance(call.rows, Tensor) for call in calls.pieces)
        reads_in_place = any(isinstance(call.slots, slice) for call in calls.pieces)
        assert (reads_in_place if options["sliding_window"] else shares_keys) == (division == "runs")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_by_places_a_row_has_the_same_bits_wherever_its_keys_lie(dtype: torch.dtype) -> None:
    layouts = (
        one_run(100, 560),
        (Run(700, 300), Run(0, 16), Run(320, 244)),
        tuple(Run(2 * at, 1) for at in range(560)),
    )
    keys, values = torch.randn(2, 2, 560, 64).to(dtype)
    query, key, value = (torch.randn(heads, 60, 64).to(dtype) for heads in (HEADS, 2, 2))
    results = []
    for runs in layouts:
        cache = random_cache(LayerShape(2, 64, 64), 1200, dtype=dtype)
        cache.write(LAYER, torch.tensor(slots_between(runs, 0, 560)), keys, values)
        parts = []
        for context, count in ((500, 60), (559, 1), (530, 8)):
            rows = pack(cache, [RowSpan(runs, context, count)], device=CPU, division="places")
            parts.append(again(rows, *(one[:, :count] for one in (query, key, value))))
        results.append(torch.cat(parts))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("options", OPTIONS)
def test_in_blocks_every_row_sees_its_own_keys(kv_heads: int, options: dict[str, Any]) -> None:
    """Chains, single rows and rows of a tree, of sequences in one run and in several, one at the cache's end."""
    cache, rng = random_cache(LayerShape(kv_heads, DIM, DIM), 300), random.Random(kv_heads)
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
    _require_attention(pack(cache, spans, device=CPU, paths=paths, division="blocks"), **options)


def test_in_blocks_what_is_not_finite_stays_with_its_sequence() -> None:
    """A block may reach into the slots of another sequence and of rejected drafts."""
    cache = KVCache({LAYER: LayerShape(2, DIM, DIM)}, 96, dtype=torch.float32, device=CPU, keeps_finite=True)
    bad = torch.full((HEADS, 30, DIM), float("nan"))
    bad[:, ::2] = float("inf")
    for span in (RowSpan(one_run(40, 30), 0, 30), RowSpan(one_run(0, 40), 0, 30)):
        again(pack(cache, [span], device=CPU), bad, bad[:2], bad[:2])
    rows = pack(cache, [RowSpan(one_run(0, 40), 0, 5)], device=CPU, division="blocks")
    assert attend(rows)[-1].isfinite().all()
