"""Strategies side by side: which, in which order, with what, and the command as a user runs it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from rayspec.bench import run as run_module
from rayspec.bench.contenders import Writing
from rayspec.bench.options import BenchOptions, bench_options
from rayspec.bench.result import Sample
from rayspec.bench.run import Say, engine_config, model_folder, strategy_names
from rayspec.bench.workloads import Workload, WorkloadOptions
from rayspec.cli import app
from rayspec.command.options import Asked
from rayspec.config import EngineConfig, Strategy
from rayspec.types import ConfigError, EngineStats

Invoke = Callable[..., Any]

SMALL = ("--model", "demo", "--dtype", "float32", "--num-threads", "1", "--context", "150", "--max-tokens", "12")
ALL = ["ar", "auto", "knapspec", "lookup", "swift", "layerskip", "clasp", "del", "asd", "lookahead"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, ["bench", *map(str, arguments)])


def options(
    *strategies: str, hf: bool = False, plans: dict[str, str] | None = None, **speculation: Any
) -> BenchOptions:
    return BenchOptions(
        engine=EngineConfig(model="demo", speculation=speculation),  # type: ignore[arg-type]
        workloads=WorkloadOptions(inputs=("demo",), contexts=(100, 300), num_prompts=1),
        strategies=strategies,
        max_tokens=20,
        batch=2,
        repeats=3,
        widen=1,
        plans=plans or {},
        hf=hf,
    )


class TestNames:
    def test_the_baseline_is_first_and_transformers_last(self) -> None:
        assert strategy_names(options("knapspec", "ar", "knapspec", hf=True)) == ["ar", "knapspec", "hf"]
        assert strategy_names(options("hf", "clasp")) == ["ar", "hf", "clasp"]

    def test_all_are_those_that_need_nothing_further(self) -> None:
        assert sorted(strategy_names(options("all"))) == sorted(ALL)

    def test_all_with_what_the_others_need(self) -> None:
        found = strategy_names(options("all", plans={"self-sd": "s.json", "knn-ssd": "k.json"}))
        assert sorted(found) == sorted([*ALL, "self-sd", "knn-ssd"])
        assert sorted(strategy_names(options("all", strategy="static", skip=(3,)))) == sorted([*ALL, "static"])
        everything = {*found, "static"}
        assert everything == set(get_args(Strategy))

    def test_a_strategy_that_needs_something(self) -> None:
        with pytest.raises(ConfigError, match="strategy 'knn-ssd' needs option 'warm_start'"):
            strategy_names(options("knn-ssd"))

    def test_plans_for_one_strategy(self) -> None:
        assert "self-sd" in strategy_names(options("all", plans={"self-sd": "s.json"}))
        assert "knn-ssd" not in strategy_names(options("all", plans={"self-sd": "s.json"}))
        with pytest.raises(ConfigError, match=r"option 'plans' has 's\.json' for 'self-sd', which does not run"):
            strategy_names(options("ar", plans={"self-sd": "s.json"}))
        with pytest.raises(ConfigError, match="does not work with strategy 'clasp'"):
            strategy_names(options("clasp", plans={"clasp": "s.json"}))

    def test_plans_that_nobody_needs(self) -> None:
        with pytest.raises(ConfigError, match=r"option 'warm_start' is 'p\.json': .* --plans self-sd=p\.json"):
            strategy_names(options("clasp", warm_start="p.json"))


def test_plans_and_sublayers_go_to_those_that_cannot_do_without() -> None:
    given = options("all", strategy="static", skip=(3,))
    assert engine_config(given, "m", "static").speculation.skip == (3,)
    assert engine_config(given, "m", "clasp").speculation.skip == ()
    given = options("all", plans={"self-sd": "s.json"})
    assert engine_config(given, "m", "self-sd").speculation.warm_start == "s.json"
    assert engine_config(given, "m", "knapspec").speculation.warm_start is None


def parsed(strategies: str = "knapspec", **changes: Any) -> Any:
    flags = {"model": "demo", "num_threads": 3, "skip": None, "static_choice": None} | changes.pop("flags", {})
    values: dict[str, Any] = {"max_tokens": 5, "batch": 1, "repeats": 1, "widen": 1} | changes
    workloads = WorkloadOptions(inputs=("demo",), contexts=(100,), num_prompts=4)
    return bench_options(Asked(flags=flags), workloads, strategies=strategies, **values)


def test_flags_of_drafts_are_those_of_the_engine() -> None:
    assert parsed(flags={"skip": [3]}).engine.speculation.skip == (3,)
    assert parsed(flags={"static_choice": "int4"}).engine.speculation.static_choice == "int4"
    assert parsed(plans=["self-sd=a=b.json", "knn-ssd=c.json"]).plans == {"self-sd": "a=b.json", "knn-ssd": "c.json"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategies": " ,"}, "option 'strategies' is ' ,': name at least one"),
        ({"plans": ["a.json"]}, "option 'plans' is 'a.json': write it as STRATEGY=FILE"),
    ],
)
def test_what_cannot_be_parsed_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parsed(**changes)


def test_what_cannot_be_widened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="option 'widen' is 0"), model_folder(EngineConfig(model="demo"), 0):
        pass


class Diary:
    """A contender that writes down what it is asked for."""

    used = EngineStats()

    def __init__(self, name: str, entries: list[str], at_once: int) -> None:
        self._name, self._entries, self._at_once = name, entries, at_once

    def forget(self) -> None:
        self._entries.append(f"{self._name} forgets")

    def warm_up(self, prompts: Any, max_tokens: int) -> None:
        self._entries.append(f"{self._name} warms up")

    def write(self, prompts: Any, max_tokens: int) -> Writing:
        for num_written in range(0, max_tokens, self._at_once):
            self._entries.append(self._name)
            yield min(max_tokens, num_written + self._at_once)
        return Sample(seconds=1.0, prefill_s=0.1, token_ids=[[1] * max_tokens for _ in prompts])


def take_turns(workload: Workload, at_once: Sequence[int] = (20, 20, 20)) -> list[str]:
    """What three contenders did, who write so many tokens at once of 20."""
    entries: list[str] = []
    say: Say = entries[:0].append
    contenders = {name: Diary(name, entries, tokens) for name, tokens in zip("abc", at_once, strict=True)}
    samples = run_module.take_turns(contenders, workload, options("ar"), say)
    assert {name: len(each) for name, each in samples.items()} == {"a": 3, "b": 3, "c": 3}
    assert samples["a"][0].num_tokens == 20
    return entries


WORKLOAD = Workload(domain="d", prompts=[[1, 2]], context=100)


def test_each_repeat_is_everyone_in_an_order_of_its_own() -> None:
    entries = take_turns(WORKLOAD)
    assert entries[:6] == ["a forgets", "a warms up", "b forgets", "b warms up", "c forgets", "c warms up"]
    orders = [tuple(entries[first : first + 3]) for first in (6, 9, 12)]
    assert {"".join(sorted(order)) for order in orders} == {"abc"}
    assert len(set(orders)) > 1


def test_one_that_is_behind_goes_on() -> None:
    at_once = {"a": 5, "b": 10, "c": 15}
    entries = take_turns(WORKLOAD, tuple(at_once.values()))
    written = dict.fromkeys("abc", 0)
    for name in entries[6:14]:
        assert written[name] == min(written.values())
        written[name] += at_once[name]
    assert min(written.values()) >= 20


def rows_of(workload: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["strategy"]: row for row in workload["results"]}


def test_strategies_on_the_same_prompts(run: Invoke, tmp_path: Path) -> None:
    result = run(
        *(*SMALL, "--num-prompts", "3", "--batch", "2", "--repeats", "2", "--strategies", "static,asd", "--skip", "5"),
        *("--no-gate", "--input", "demo", "--input", "demo:ledger", "--json", "out/b.json", "--output", "results"),
    )
    assert result.exit_code == 0, result.output
    saved = json.loads((tmp_path / "out" / "b.json").read_text(encoding="utf-8"))
    assert saved == json.loads((tmp_path / "results" / "results.json").read_text(encoding="utf-8"))
    assert [workload["name"] for workload in saved["workloads"]] == ["summary-150", "ledger-150"]
    for workload in saved["workloads"]:
        assert len(workload["prompt_tokens"]) == 3
        assert all(80 < tokens <= 150 for tokens in workload["prompt_tokens"])
        rows = rows_of(workload)
        assert list(rows) == ["ar", "static", "asd", "hf"]
        for row in rows.values():
            assert (row["identical"], row["total"]) == (6, 6)
            assert row["tokens_per_s"] > 0
        assert rows["static"]["acceptance_rate"] is not None
        plans = rows["asd"]["plans"]
        assert plans
        assert {len(plan["choices"]) for plan in plans} == {32}
        # 11 tokens of each of 3 prompts come of rounds, in 2 repeats; the first rounds are before the first plan
        assert 0 < sum(plan["num_tokens"] for plan in plans) <= 2 * 3 * 11
    assert saved["environment"]["threads"] == 1
    assert "| static | " in (tmp_path / "results" / "results.md").read_text(encoding="utf-8")
    assert "## summary-150\n\n3 prompts of" in result.stdout
    assert "demo in float32 on" in result.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--strategies", "ar,knapspac"], "did you mean 'knapspec'?"),
        (["--context", "1k"], "option 'context' is '1k'"),
        (["--stream", "0,1"], "python -m benchmarks streams"),
        (["--threads", "2"], "is now '--num-threads'"),
    ],
)
def test_what_it_cannot_do_is_said_before_anything_is_loaded(run: Invoke, flags: list[str], message: str) -> None:
    result = run("--model", "absent", *flags)
    assert result.exit_code == 2
    assert message in result.stderr
