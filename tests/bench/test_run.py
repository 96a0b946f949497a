"""Strategies side by side: which, in which order, with what, and the command as a user runs it."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from rayspec.bench import run as run_module
from rayspec.bench.contenders import Writing
from rayspec.bench.options import BenchOptions, bench_options
from rayspec.bench.result import Sample
from rayspec.bench.run import Say, engine_config, strategy_names
from rayspec.bench.workloads import Workload
from rayspec.command.options import Asked
from rayspec.config import EngineConfig, Strategy
from rayspec.types import ConfigError, EngineStats

COMMAND = ("bench",)


SMALL = ("--model", "demo", "--dtype", "float32", "--num-threads", "1", "--context", "150", "--max-tokens", "12")
ALL = ["ar", "auto", "knapspec", "lookup", "recycling", "swift", "layerskip", "clasp", "del", "asd", "lookahead"]


def options(
    *strategies: str, plans: dict[str, str] | None = None, hf: bool = False, **speculation: Any
) -> BenchOptions:
    engine = EngineConfig(model="demo", speculation=speculation)  # type: ignore[arg-type]
    more: dict[str, Any] = {"max_tokens": 20, "batch": 2, "plans": plans or {}, "hf": hf, "context": (100, 300)}
    return BenchOptions(engine=engine, strategies=strategies, **more)


SAVED = {"self-sd": "s.json", "knn-ssd": "k.json"}


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (options("knapspec", "ar", "knapspec", hf=True), {"ar", "knapspec", "hf"}),
        (options("hf", "clasp"), {"ar", "hf", "clasp"}),
        (options("all"), set(ALL)),
        (options("all", plans=SAVED), {*ALL, *SAVED}),
        (options("all", strategy="static", skip=(3,)), {*ALL, "static"}),
    ],
)
def test_the_baseline_is_first_and_all_are_those_that_lack_nothing(given: BenchOptions, names: set[str]) -> None:
    found = strategy_names(given)
    assert found[0] == "ar"
    assert len(found) == len(names)
    assert set(found) == names
    assert {*ALL, *SAVED, "static"} == set(get_args(Strategy))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (options("knn-ssd"), "strategy 'knn-ssd' needs option 'warm_start'"),
        (options("ar", plans=SAVED), "option 'plans' has 's.json' for 'self-sd', which does not run"),
        (options("clasp", plans={"clasp": "s.json"}), "does not work with strategy 'clasp'"),
        (options("clasp", warm_start="p.json", strategy="auto"), "name the strategy that the saved plans are for"),
        (options("ar").replace(engine=EngineConfig(model="m", parallel={"replicas": 2})), "option 'replicas' is 2"),
    ],
)
def test_options_that_cannot_be_measured_are_named(given: BenchOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        strategy_names(given)


def test_plans_and_sublayers_go_to_those_that_cannot_do_without() -> None:
    given = options("all", strategy="static", skip=(3,))
    assert engine_config(given, "m", "static").speculation.skip == (3,)
    assert engine_config(given, "m", "clasp").speculation.skip == ()
    given = options("all", plans=SAVED)
    assert engine_config(given, "m", "self-sd").speculation.warm_start == "s.json"
    assert engine_config(given, "m", "knapspec").speculation.warm_start is None


def test_flags_of_drafts_are_those_of_the_engine() -> None:
    def parsed(**flags: Any) -> BenchOptions:
        flags = {"model": "demo", "skip": None, "static_choice": None} | flags
        return bench_options(Asked(flags=flags), plans=["self-sd=a=b.json", "knn-ssd=c.json"])

    assert parsed(skip=["3"]).engine.speculation.skip == (3,)
    assert parsed(static_choice="int4").engine.speculation.static_choice == "int4"
    assert parsed().plans == {"self-sd": "a=b.json", "knn-ssd": "c.json"}


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


def test_each_repeat_is_everyone_in_an_order_of_its_own_and_who_is_behind_goes_on() -> None:
    entries = take_turns(WORKLOAD)
    assert entries[:6] == ["a forgets", "a warms up", "b forgets", "b warms up", "c forgets", "c warms up"]
    orders = [tuple(entries[first : first + 3]) for first in (6, 9, 12)]
    assert {"".join(sorted(order)) for order in orders} == {"abc"}
    assert len(set(orders)) > 1
    at_once = {"a": 5, "b": 10, "c": 15}
    written = dict.fromkeys("abc", 0)
    for name in take_turns(WORKLOAD, tuple(at_once.values()))[6:14]:
        assert written[name] == min(written.values())
        written[name] += at_once[name]
    assert min(written.values()) >= 20


def rows_of(workload: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["strategy"]: row for row in workload["results"]}


def test_strategies_on_the_same_prompts(run: Any, tmp_path: Path) -> None:
    result = run(
        *(*SMALL, "--num-prompts", "2", "--batch", "2", "--repeats", "1", "--strategies", "static,asd", "--skip", "5"),
        *("--no-gate", "--input", "demo", "--input", "demo:ledger", "--json", "out/b.json", "--output", "results"),
    )
    assert result.exit_code == 0, result.output
    saved = json.loads((tmp_path / "out" / "b.json").read_text(encoding="utf-8"))
    assert saved == json.loads((tmp_path / "results" / "results.json").read_text(encoding="utf-8"))
    assert [workload["name"] for workload in saved["workloads"]] == ["summary-150", "ledger-150"]
    for workload in saved["workloads"]:
        assert len(workload["prompt_tokens"]) == 2
        assert all(80 < tokens <= 150 for tokens in workload["prompt_tokens"])
        rows = rows_of(workload)
        assert list(rows) == ["ar", "static", "asd", "hf"]
        for row in rows.values():
            assert (row["identical"], row["total"]) == (2, 2)
            assert row["tokens_per_s"] > 0
        assert rows["static"]["acceptance_rate"] is not None
        plans = rows["asd"]["plans"]
        assert plans
        assert {len(plan["choices"]) for plan in plans} == {32}
        # 11 tokens of each of 2 prompts come of rounds; the first rounds are before the first plan
        assert 0 < sum(plan["num_tokens"] for plan in plans) <= 2 * 11
    assert saved["environment"]["threads"] == 1
    assert "| static | " in (tmp_path / "results" / "results.md").read_text(encoding="utf-8")
    assert "## summary-150\n\n2 prompts of" in result.stdout
    assert "demo in float32 on" in result.stdout
