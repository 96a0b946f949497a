"""`rayspec tune` as a user runs it, on the bundled model and on tiny ones."""

import json
from pathlib import Path
from typing import Any

import pytest

import rayspec
from rayspec import demo
from rayspec.bench import tune
from rayspec.bench.options import TuneOptions
from rayspec.bench.tune import calibration_prompts, run_tune
from rayspec.choices import SKIP
from rayspec.config import EngineConfig
from rayspec.strategies.saved_plans import ModelIdentity, SavedPlan, SavedPlans
from rayspec.strategies.tuning import tune_plan
from rayspec.types import ConfigError
from tests.demo_model import demo_tokenizer
from tests.families import build

MODEL = ("--model", "demo", "--dtype", "float32", "--num-threads", "1")
FAST = ("--context", "150", "--num-prompts", "2", "--max-tokens", "4", "--num-tries", "2")

STRATEGY = "speculation.strategy=lookup"

COMMAND = ("tune",)


@pytest.fixture(scope="module")
def llm() -> rayspec.LLM:
    return rayspec.LLM("demo", dtype="float32", num_threads=1, max_model_len=512, speculation={"strategy": "ar"})


def load(path: Path) -> SavedPlans:
    config = EngineConfig(model=demo.model_path(), dtype="float32")
    return SavedPlans.load(path, ModelIdentity.of(config, 32))


def options(*inputs: str, **changes: Any) -> TuneOptions:
    values = {"engine": EngineConfig(model="demo"), "output": Path("plans.json"), "context": 150, "num_prompts": 3}
    return TuneOptions(input=inputs, **(values | changes))


def write_documents(path: Path, count: int) -> Path:
    rows = [{"text": document.text} for document in demo.sample_documents(count, num_sentences=8, seed=4)]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.mark.exhaustive
def test_one_plan_a_domain_with_anchors(run: Any, tmp_path: Path) -> None:
    write_documents(tmp_path / "audits.jsonl", 2)
    result = run(*MODEL, *FAST, "--input", "audits.jsonl", "--input", "plan=demo:schedule", "-o", "new/plans.json")
    assert result.exit_code == 0, result.output
    saved = load(tmp_path / "new" / "plans.json")
    assert saved.model.name == "demo"
    assert [(plan.domain, len(plan.anchors)) for plan in saved.plans] == [("audits", 2), ("plan", 2)]
    for plan in saved.plans:
        assert plan.radius > 0
        assert plan.provenance["calibration"] == "2 prompts, 4 tokens generated from each"
        (line,) = [line for line in result.stdout.splitlines() if line.startswith(f"│ {plan.domain} ")]
        cells = [cell.strip() for cell in line.split("│")][1:-1]
        num_attention, num_mlp = (plan.choices[kind::2].count(SKIP) for kind in (0, 1))
        assert cells[1:4] == [f"{num_attention} of 16", f"{num_mlp} of 16", "16"]
        assert cells[4] == f"{100 * plan.acceptance:.0f} %"
        assert cells[5:7] == [f"{plan.tokens_per_s:.1f}", f"{plan.plain_tokens_per_s:.1f}"]
        assert cells[8] == f"{plan.radius:.3f}"
    assert "audits: 2 prompts of up to" in result.stderr
    assert "plan: plan 1 of 2 makes" in result.stderr
    assert "saved in new/plans.json" in result.stderr


def test_one_input_without_a_domain_gives_a_plan_for_any_text(run: Any, tmp_path: Path) -> None:
    result = run(*MODEL, *FAST, "--input", "demo:summary", "-o", "plans.json", "--num-tries", "1", "--set", STRATEGY)
    assert result.exit_code == 0, result.output
    plan = load(tmp_path / "plans.json").only()
    assert (plan.domain, plan.anchors) == ("", ())
    assert "any text" in result.stdout
    assert "plans are tuned without lookup" in result.stderr
    before = (tmp_path / "plans.json").read_bytes()
    again = run(*MODEL, *FAST, "--input", "demo:summary", "-o", "plans.json")
    assert again.exit_code == 2
    assert "which exists" in again.stderr
    assert (tmp_path / "plans.json").read_bytes() == before


def test_what_another_run_saves_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, said = tmp_path / "plans.json", list[str]()

    def tuned(*given: Any, **named: Any) -> SavedPlan:
        place.write_text("of another run")
        return tune_plan(*given, **named)

    monkeypatch.setattr(tune, "tune_plan", tuned)
    few = {"num_prompts": 1, "num_tries": 1, "max_tokens": 4}
    engine = EngineConfig(model="demo", dtype="float32", num_threads=1)
    run_tune(options("demo:summary", engine=engine, output=place, **few), said.append)
    [mine] = set(tmp_path.iterdir()) - {place}
    assert (place.read_text(), said[-1]) == ("of another run", f"saved in {mine}")
    assert load(mine).only().domain == ""


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["demo:novels"], "'novels' is none of summary"),
        (["=demo:summary"], "write it as FILE or DOMAIN=FILE"),
        (["law="], "write it as FILE or DOMAIN=FILE"),
        (["demo:summary", "demo:all"], "names two of domain 'summary'"),
    ],
)
def test_inputs_that_are_none(llm: rayspec.LLM, inputs: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        calibration_prompts(llm, options(*inputs))


def test_several_replicas_are_refused_before_they_are_loaded(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("rayspec.bench.tune.load_llm")
    result = run(*MODEL, *FAST, "--input", "demo:summary", "--replicas", "2", "-o", "plans.json")
    assert result.exit_code == 2
    assert "option 'replicas' is 2: one replica is measured, leave it out" in result.output


def test_domains_are_named_by_their_inputs(llm: rayspec.LLM, tmp_path: Path) -> None:
    file = str(write_documents(tmp_path / "law=new.jsonl", 5))
    assert {domain: len(prompts) for domain, prompts in calibration_prompts(llm, options(file)).items()} == {"": 3}
    found = calibration_prompts(llm, options("demo:all", f"audits={file}", "audits=demo:summary", context=200))
    sizes = {domain: len(prompts) for domain, prompts in found.items()}
    assert sizes == {**dict.fromkeys(demo.DOMAINS, 3), "audits": 6}
    assert list(calibration_prompts(llm, options("audits=demo:summary"))) == ["audits"]


def test_a_model_that_does_not_split_has_no_plans(run: Any, tmp_path: Path) -> None:
    build("gpt2").save_pretrained(tmp_path / "model")
    demo_tokenizer().save_pretrained(tmp_path / "model")
    result = run("--model", "model", *FAST, "--input", "demo:summary", "-o", "plans.json")
    assert result.exit_code == 2, result.output
    assert "model 'model' does not split into sublayers" in result.stderr
    assert not (tmp_path / "plans.json").exists()
