import json
from pathlib import Path
from typing import Any

import pytest

from rayspec.choices import FULL, SKIP
from rayspec.config import SamplingParams, SpeculationOptions
from rayspec.local_engine import load_engine
from rayspec.strategies.knapspec import KnapSpec
from rayspec.strategies.saved_plans import ModelIdentity, SavedPlan, SavedPlans, known_candidates
from rayspec.types import ConfigError
from tests.engines import complete, tokens_of
from tests.families import cases, checkpoint, small_config
from tests.strategy_cases import latency_model, result, saved_plan, state

MODEL = ModelIdentity(name="llama-a", weights="00ff", family="llama", num_sublayers=8)


def _plans(*plans: SavedPlan) -> SavedPlans:
    return SavedPlans(model=MODEL, plans=plans or (saved_plan(),))


def _damaged(path: Path, **changes: Any) -> None:
    """Another value at a place such as "plans.0.choices"."""
    content = json.loads(path.read_text())
    for place, value in changes.items():
        *way, last = [int(part) if part.isdigit() else part for part in place.split("__")]
        inner = content
        for part in way:
            inner = inner[part]
        inner[last] = value
    path.write_text(json.dumps(content))


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    plans = _plans(saved_plan("law", anchors=((0.6, 0.8), (1.0, 0.0)), radius=0.25), saved_plan(threshold=None))
    path = tmp_path / "new" / "plans.json"
    plans.save(path)
    assert SavedPlans.load(path, MODEL) == plans
    _plans(saved_plan("law", [1]), *plans.plans[1:]).save(path)
    again = SavedPlans.load(path, MODEL)
    assert again.of_domain("law") == saved_plan("law", [1])
    assert again.of_domain("") == plans.of_domain("")
    assert again.of_domain("code") is None
    assert [file.name for file in path.parent.iterdir()] == ["plans.json"]


BAD = [
    ({"plans__0__choices": ["full"] * 6}, "of 6 sublayers, not of 8"),
    ({"plans__0__choices": ["full"] * 7 + ["int3"]}, r"'int3' - at `\$\.plans\[0\]\.choices\[7\]`"),
    ({"plans__0__num_draft_tokens": 0}, "num_draft_tokens"),
    ({"plans__0__acceptance": 1.5}, "acceptance"),
    ({"plans__0__anchors": [[0.5, 0.5]]}, "unit vectors"),
    ({"plans__0__anchors": [[1.0], [0.6, 0.8]]}, "one length"),
    ({"plans__0__speed": 3}, "unknown field `speed`"),
    ({"model__weights": "00fe"}, r"are of 'llama-a' .*, not of 'llama-a' .*: tune this model"),
    ({"model": {}}, "missing required field"),
    ({"format": "rayspec-plans-1"}, "its format is 'rayspec-plans-1', not 'rayspec-plans-2'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[next(iter(changes)) for changes, _ in BAD])
def test_a_damaged_file_is_refused_with_the_place(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "plans.json"
    _plans().save(path)
    _damaged(path, **changes)
    with pytest.raises(ConfigError, match=message) as raised:
        SavedPlans.load(path, MODEL)
    assert str(path) in str(raised.value)
    assert "warm_start" in str(raised.value)


def test_half_a_file_other_bytes_and_no_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    with pytest.raises(ConfigError, match="No such file"):
        SavedPlans.load(path, MODEL)
    _plans().save(path)
    for content in (path.read_bytes()[:200], b"\xff\xfe\x00", b'{"format": "\xff"}'):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="not a file of saved plans"):
            SavedPlans.load(path, MODEL)


def test_a_plan_for_any_text_is_the_unnamed_or_the_only_one() -> None:
    assert _plans(saved_plan("law"), saved_plan()).only().domain == ""
    assert _plans(saved_plan("law")).only().domain == "law"
    with pytest.raises(ConfigError, match="'law', 'code'"):
        _plans(saved_plan("law"), saved_plan("code")).only()


def test_knapspec_drafts_by_a_saved_plan_after_the_first_round_and_learns_from_there() -> None:
    known = known_candidates(_plans(saved_plan("slow", [0], acceptance=0.1), saved_plan("fast", [2, 3, 4, 5, 6])))
    assert [candidate.used.weight for candidate in known] == [60.0, 60.0]
    options = SpeculationOptions(optimise_share=0.0, gate=False)
    knapspec, here = KnapSpec(options, latency_model(4, sublayer_s=1e-3, row_s=1e-4), known=known), state()
    assert not knapspec.plan.drafts
    knapspec.observe(here, knapspec.plan, result([0], [0]), 1, 0.01)
    record = knapspec.search(here, lambda question: None)
    assert record is not None
    assert record.plan.choices == (FULL, FULL, SKIP, SKIP, SKIP, SKIP, SKIP, FULL)
    assert 0.6 < record.estimated_acceptance < 0.8
    assert knapspec.plan is record.plan
    for _ in range(48):
        knapspec.observe(here, record.plan, result([4], [0]), 1, 0.01)
        knapspec.search(here, lambda question: None)
    assert not knapspec.plan.drafts, "use has shown otherwise"


@pytest.mark.parametrize("strategy", ["knapspec", "auto", "self-sd"])
def test_an_engine_loads_with_plans_of_its_model_and_with_no_others(strategy: str, tmp_path: Path) -> None:
    path, plans = checkpoint("llama"), tmp_path / "plans.json"
    speculation = {"strategy": strategy, "warm_start": str(plans), "gate": False}
    config = small_config(path, profile_cache=str(tmp_path), speculation=speculation)
    saved = SavedPlans(model=ModelIdentity.of(config, 8), plans=(saved_plan(),))
    saved.save(plans)
    known = cases(path, (37, 12), 16)
    engine = load_engine(config, with_tokenizer=False)
    outputs = complete(engine, known.prompts, SamplingParams(temperature=0, max_tokens=16))
    assert tokens_of(outputs) == known.expected
    _damaged(plans, model__weights="0" * 16)
    with pytest.raises(ConfigError, match="not of"):
        load_engine(config, with_tokenizer=False)
