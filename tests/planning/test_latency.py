import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayspec.choices import FULL, SKIP, Choice
from rayspec.decode.profile import _grid
from rayspec.planning.latency import FORMAT, Curve, LatencyModel, Measurement, StaleProfileError, kind_of

ROWS = (1, 2, 4, 8, 16, 32, 64)
BASE = {"attention": 90e-6, "mlp": 300e-6, "head": 150e-6}
KEY = {"model": "abc", "dtype": "bfloat16", "threads": 2}


def planted_s(kind: str, rows: int, context: int, batch: int) -> float:
    base = BASE[kind] * (1 + 0.01 * rows + 0.02 * max(rows - 16, 0))
    return base + (4e-9 * batch * context + 1e-9 * rows * context if kind == "attention" else 0)


def measure(noise: float = 0.0, seed: int = 0, device: str = "", slower: float = 1.0) -> list[Measurement]:
    rng = np.random.default_rng(seed)
    found = []
    for kind, rows, context, batch in [
        (kind, rows, context, batch)
        for kind in BASE
        for rows in ROWS
        for context in (256, 4096, 16384)
        for batch in (1, 4)
        if rows >= batch
    ]:
        for _ in range(5):
            seconds = slower * planted_s(kind, rows, context, batch) * rng.lognormal(0, noise)
            found.append(
                Measurement(kind=kind, rows=rows, context=context, batch=batch, seconds=seconds, device=device)
            )
    return found


def model(noise: float = 0.0, **options: object) -> LatencyModel:
    extra = [
        Measurement(kind="overhead", rows=1, context=0, batch=1, seconds=20e-6),
        Measurement(kind="round", rows=1, context=0, batch=1, seconds=50e-6),
    ]
    return LatencyModel.fit(measure(noise) + extra, ["attention", "mlp"] * 4, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_recovers_what_was_planted(noise: float) -> None:
    fitted = model(noise)
    for rows, context, batch in [(1, 1000, 1), (4, 9000, 4), (12, 12000, 2), (48, 3000, 1)]:
        for sublayer, kind in enumerate(("attention", "mlp")):
            seconds = fitted.sublayer_s(sublayer, rows=rows, context=context, batch=batch)
            assert seconds == pytest.approx(planted_s(kind, rows, context, batch), rel=0.06 if noise else 0.01)
        assert fitted.head_s(rows) == pytest.approx(planted_s("head", rows, 0, 1), rel=0.06 if noise else 0.01)
    attention = fitted.curves["attention"]
    assert attention.kv_s == pytest.approx(4e-9, rel=0.15 if noise else 0.01)
    assert attention.score_s == pytest.approx(1e-9, rel=0.15 if noise else 0.01)
    assert (fitted.overhead_s, fitted.round_s) == (20e-6, 50e-6)


def test_an_outlier_hardly_counts() -> None:
    spoiled = [*measure(), Measurement(kind="mlp", rows=3, context=0, batch=1, seconds=1.0)]
    spoiled += [Measurement(kind="mlp", rows=rows, context=7, batch=1, seconds=0.02) for rows in (1, 8)]
    fitted = LatencyModel.fit(spoiled, ["attention", "mlp"])
    assert fitted.sublayer_s(1, rows=8, context=0, batch=1) == pytest.approx(planted_s("mlp", 8, 0, 1), rel=0.05)


def called_s(rows: int, context: int, batch: int) -> float:
    """Attention that is called once a sequence, with a mask for a sequence with several rows."""
    num_masked = max(0, min(rows - batch, batch))
    return planted_s("attention", rows, context, batch) + 20e-6 * (batch - 1) + 15e-6 * num_masked * (batch - 1) / batch


def called(cells: Sequence[tuple[int, int, int]]) -> list[Measurement]:
    return [
        Measurement(kind="attention", rows=rows, context=context, batch=batch, seconds=called_s(rows, context, batch))
        for rows, context, batch in cells
    ]


def test_each_sequence_has_its_price_and_more_with_several_rows() -> None:
    alone = [(rows, context, 1) for rows in ROWS for context in (32, 1024, 4096)]
    together = [(8 * each, context, 8) for each in (1, 4) for context in (32, 1024)]
    curve = Curve.fit(called(alone + together))
    assert curve.sequence_s == pytest.approx(20e-6, rel=0.02)
    assert curve.masked_s == pytest.approx(15e-6, rel=0.02)
    for rows, context, batch in ((4, 500, 4), (20, 500, 4), (6, 900, 4), (40, 2000, 8), (8, 2000, 8), (5, 700, 1)):
        seconds = curve.seconds(rows=rows, context=context, batch=batch)
        assert seconds == pytest.approx(called_s(rows, context, batch), rel=0.02)
    assert curve.seconds(rows=0.5, context=9, batch=0.5) >= curve.seconds(rows=0.5, context=0, batch=0.5) > 0


@given(st.integers(0, 10**6), st.sampled_from([1, 40, 90, 300, 1200, 9000]), st.sampled_from([0.05, 0.5, 2.0]))
def test_whatever_an_arena_lets_measure_gives_a_curve(seed: int, num_slots: int, noise: float) -> None:
    rng = np.random.default_rng(seed)
    curve = Curve.fit([replace(one, seconds=one.seconds * rng.lognormal(0, noise)) for one in called(_grid(num_slots))])
    assert min(curve.base_s[0], curve.sequence_s, curve.masked_s, curve.kv_s, curve.score_s) >= 0
    for rows, context, batch in itertools.product((1, 3, 8, 100, 1000), (0, 10, 5000, 100_000), (1, 8)):
        seconds = curve.seconds(rows=rows, context=context, batch=batch)
        assert np.isfinite(seconds)
        assert seconds <= curve.seconds(rows=2 * rows, context=context, batch=batch)
        assert seconds <= curve.seconds(rows=rows, context=context + 1000, batch=batch)


def test_extrapolation() -> None:
    curve = Curve(rows=(1, 32, 64), base_s=(1.0, 1.0, 2.0))
    assert curve.seconds(rows=128) == pytest.approx(4.0)
    assert Curve(rows=(4,), base_s=(1.0,)).seconds(rows=8) == pytest.approx(2.0)
    assert Curve(rows=(4,), base_s=(1.0,)).seconds(rows=1) == pytest.approx(1.0)
    two_close = Curve(rows=(1, 31, 32), base_s=(1.0, 2.0, 3.0))
    assert two_close.seconds(rows=64) == pytest.approx(3 + 32 * 2 / 31)


CHEAPER: dict[Choice, float] = {"int8": 0.6, "int4": 0.4, "window": 0.7, "int4+window": 0.3}


def model_of_choices(device: str = "", **options: object) -> LatencyModel:
    """Attention by each choice of `CHEAPER`, an MLP also by int4; by which each is faster by that factor."""
    full = measure(device=device)
    cheaper = [
        replace(one, kind=kind_of(one.kind, choice), seconds=one.seconds * factor)
        for one in full
        for choice, factor in CHEAPER.items()
        if one.kind == "attention" or (one.kind == "mlp" and choice == "int4")
    ]
    return LatencyModel.fit(full + cheaper, ["attention", "mlp"] * 2, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["", "cuda:0"])
def test_each_choice_has_its_curve(device: str) -> None:
    fitted = model_of_choices(device)
    cell: dict[str, Any] = {"rows": 2, "context": 5000, "batch": 1}
    attention_s, mlp_s = fitted.sublayers_s(**cell)[:2]
    for choice, factor in CHEAPER.items():
        assert fitted.sublayer_s(2, **cell, choice=choice) == pytest.approx(factor * attention_s, rel=1e-3)
    by_choice = fitted.sublayers_s(**cell, choices=("int4+window", "int4", "skip", "full"))
    assert by_choice == pytest.approx([0.3 * attention_s, 0.4 * mlp_s, 0, mlp_s], rel=1e-3)
    assert fitted.sublayer_s(0, **cell, choice="skip") == 0
    assert not fitted.sublayers_s(rows=0, context=0, batch=1, choices=("int4",) * 4).any()
    draft_s = fitted.draft_step_s(("int4+window", "int4", "skip", "full"), context=5000, batch=1)
    one_row_s = fitted.sublayers_s(rows=1, context=5000, batch=1)
    assert draft_s == pytest.approx(one_row_s @ (0.3, 0.4, 0, 1) + fitted.head_s(1), rel=1e-3)
    draft_head = Measurement(kind="draft head", rows=1, context=0, batch=1, seconds=1e-6, device=device)
    with_copy = LatencyModel.fit([*measure(device=device), draft_head], ["attention", "mlp"] * 2)
    in_full = ("full",) * 4
    assert with_copy.draft_step_s(in_full, context=0, batch=1) == pytest.approx(
        with_copy.decode_step_s(context=0, batch=1) - with_copy.round_s - with_copy.head_s(1) + 1e-6
    )
    with pytest.raises(ValueError, match="choice 'pages' was not measured"):
        fitted.sublayer_s(0, **cell, choice="pages")


def test_hops_bypass_stages_with_nothing_to_run() -> None:
    fitted = replace(model(stages=[0, 0, 1, 1, 2, 2, 3, 3]), hop_s=1.0)
    assert fitted.hops_s((FULL,) * 8) == 4
    assert fitted.hops_s((FULL, FULL, SKIP, SKIP, FULL, FULL, FULL, FULL)) == 3
    assert fitted.hops_s((FULL, FULL, SKIP, "int4", FULL, FULL, FULL, FULL)) == 4, "a cheaper way is a visit too"
    assert fitted.hops_s((SKIP,) * 8) == 2  # embedding to head, and the token back
    assert replace(model(), hop_s=1.0).hops_s((FULL,) * 8) == 0
    waking = replace(fitted, wake_s=0.5)
    assert waking.hops_s((FULL,) * 8) == 6
    assert waking.hops_s((FULL, FULL, SKIP, SKIP, FULL, FULL, FULL, FULL)) == 4.5


def test_a_hop_takes_the_time_of_its_own_link() -> None:
    """Two nodes of two stages each: the links between nodes are slow."""
    fitted = model(stages=[0, 0, 1, 1, 2, 2, 3, 3], link_s=[1.0, 10.0, 2.0, 20.0])
    assert fitted.hop_s == 8.25
    assert fitted.hops_s((FULL,) * 8) == 33
    assert fitted.hops_s((FULL, FULL, SKIP, SKIP, FULL, FULL, FULL, FULL)) == 10 + 2 + 20, "one hop in place of two"
    assert fitted.hops_s((SKIP,) * 8) == 10 + 20
    assert replace(fitted, wake_s=0.5).hops_s((SKIP,) * 8) == 31


def test_only_the_full_weights_are_transferred() -> None:
    """A copy with fewer bits is on the device already."""
    fitted = model_of_choices(transfer_s=[1.0] * 4)
    cell: dict[str, Any] = {"rows": 1, "context": 100, "batch": 1}
    is_paid = {choice: fitted.sublayer_s(0, **cell, choice=choice) > 1 for choice in fitted.choices_of(0)}
    assert is_paid == {"full": True, "int8": False, "int4": False, "window": True, "int4+window": False, "skip": False}
    seconds = fitted.sublayers_s(**cell, choices=("window", "full", "int4", "skip"))
    assert (seconds > 1).tolist() == [True, True, False, False]
    assert seconds[3] == 0


def test_devices_have_their_own_curves() -> None:
    measured = measure(device="fast") + measure(device="slow", slower=3.0)
    fitted = LatencyModel.fit(measured, ["attention", "mlp"] * 2, devices=["fast", "fast", "slow", "slow"])
    seconds = fitted.sublayers_s(rows=2, context=5000, batch=1)
    assert seconds[2:] == pytest.approx(3 * seconds[:2], rel=1e-3)
    assert fitted.head == "head@slow"
    with pytest.raises(ValueError, match="expert"):
        LatencyModel.fit(measure(), ["attention", "expert"])


def test_a_pass_takes_what_it_takes_whichever_was_asked_for_before() -> None:
    asked, fresh = model(), model()
    asked.verify_s(rows=16, context=1000, batch=2)
    many_s, one_s = (fresh.verify_s(rows=rows, context=1000, batch=16) for rows in (128, 16))
    assert asked.verify_s(rows=16, context=1000, batch=16) == one_s
    assert asked.row_s(context=1000, batch=16) * 16 * 7 == pytest.approx(many_s - one_s)


def test_save_and_load(tmp_path: Path) -> None:
    fitted = model_of_choices(stages=[0, 0, 1, 1], link_s=[1e-3, 2e-3])
    assert fitted.covers([(64, 16384, 4), (1, 0, 1)])
    assert not fitted.covers([(1, 16385, 1)])
    assert not fitted.covers([(16, 32, 5)])
    path = tmp_path / "profiles" / "p.json"
    fitted.save(path, KEY)
    assert LatencyModel.load(path, KEY) == fitted
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(StaleProfileError, match="threads is 2, not 4"):
        LatencyModel.load(path, {**KEY, "threads": 4})
    older = path.read_text().replace(FORMAT, "rayspec-latency-2")
    path.write_text(older)
    with pytest.raises(StaleProfileError, match=f"'rayspec-latency-2', not '{FORMAT}': profile again"):
        LatencyModel.load(path, KEY)
    for content in ("{", "[]", json.dumps({"format": "other"}), path.read_text().replace('"head"', '"had"')):
        path.write_text(content)
        with pytest.raises(StaleProfileError):
            LatencyModel.load(path, KEY)
    with pytest.raises(FileNotFoundError):
        LatencyModel.load(tmp_path / "none.json", KEY)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rows", []), ("rows", [1, 2]), ("rows", [0, 2, 64]), ("rows", [1, 64, 2]), ("base_s", [1.0]),
        ("base_s", [-1.0, 1.0, 1.0]), ("base_s", [1.0, 0.0, 1.0]), ("kv_s", 1e300), ("masked_s", -1e-9),
    ],
)  # fmt: skip
def test_a_saved_profile_with_numbers_that_no_measurement_gives_is_stale(name: str, value: Any, tmp_path: Path) -> None:
    curve = {"rows": [1, 2, 64], "base_s": [1.0, 1.0, 2.0]}
    model = {
        "sublayers": ["mlp"],
        "curves": {"mlp": curve, "head": curve},
        "head": "head",
        "stages": [0],
        "transfer_s": [0.0],
    }
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"format": FORMAT, "key": KEY, "model": model}))
    LatencyModel.load(path, KEY)
    instant = curve | {"base_s": [0.0] * 3}
    for curves in ({"mlp": curve | {name: value}}, {"mlp int4+pages": curve}, {"mlp": instant}, {"head": instant}):
        model["curves"] = {"head": curve, "mlp": curve} | curves
        path.write_text(json.dumps({"format": FORMAT, "key": KEY, "model": model}))
        with pytest.raises(StaleProfileError, match="profile again"):
            LatencyModel.load(path, KEY)
