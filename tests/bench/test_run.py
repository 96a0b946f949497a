"""Strategies side by side: which, in which order, with what, and the command as a user runs it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from typer.testing import CliRunner

from rayspec import demo
from rayspec.bench import run as run_module
from rayspec.bench.contenders import Completed, Writing
from rayspec.bench.options import BenchOptions, bench_options, workload_options
from rayspec.bench.run import Say, engine_config, model_folder, strategy_names
from rayspec.bench.workloads import Workload, WorkloadOptions
from rayspec.cli import app
from rayspec.command.options import Asked
from rayspec.config import EngineConfig, Strategy
from rayspec.strategies.saved_plans import ModelIdentity, SavedPlans
from rayspec.types import ConfigError, EngineStats
from tests.strategy_cases import saved_plan

Invoke = Callable[..., Any]

SMALL = ("--model", "demo", "--dtype", "float32", "--threads", "1", "--context", "150", "--max-tokens", "12")
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
        found = strategy_names(options("all", warm_start="plans.json"))
        assert sorted(found) == sorted([*ALL, "self-sd", "knn-ssd"])
        assert sorted(strategy_names(options("all", strategy="static", skip=(3,)))) == sorted([*ALL, "static"])
        everything = {*found, "static"}
        assert everything == set(get_args(Strategy))

    def test_a_strategy_that_there_is_not(self) -> None:
        with pytest.raises(ConfigError, match="did you mean 'knapspec'"):
            strategy_names(options("all", "knapspac"))

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
        with pytest.raises(ConfigError, match=r"option 'warm_start' is 'p\.json', and none of the strategies clasp"):
            strategy_names(options("clasp", warm_start="p.json"))


def test_plans_and_sublayers_go_to_those_that_cannot_do_without() -> None:
    given = options("all", strategy="static", skip=(3,))
    assert engine_config(given, "m", "static").speculation.skip == (3,)
    assert engine_config(given, "m", "clasp").speculation.skip == ()
    given = options("all", warm_start="p.json")
    assert engine_config(given, "m", "self-sd").speculation.warm_start == "p.json"
    assert engine_config(given, "m", "knapspec").speculation.warm_start is None
    given = options("all", warm_start="p.json", plans={"self-sd": "s.json", "knapspec": "k.json"})
    found = {
        name: engine_config(given, "m", name).speculation.warm_start for name in ("self-sd", "knn-ssd", "knapspec")
    }
    assert found == {"self-sd": "s.json", "knn-ssd": "p.json", "knapspec": "k.json"}


def test_static_choices_go_to_static_drafts() -> None:
    given = options("all", strategy="static", static_choice="int4")
    assert engine_config(given, "m", "static").speculation.static_choice == "int4"
    assert engine_config(given, "m", "knapspec").speculation.static_choice == "full"
    assert sorted(strategy_names(given)) == sorted([*ALL, "static"])


def parsed(strategies: str = "knapspec", *, contexts: str = "100", stream: str | None = None, **changes: Any) -> Any:
    flags = {"model": "demo", "num_threads": 3, "skip": None, "static_choice": None} | changes.pop("flags", {})
    values: dict[str, Any] = {"max_tokens": 5, "batch": 1, "repeats": 1, "widen": 1} | changes
    workloads = workload_options(changes.pop("inputs", None), contexts, num_prompts=4, mix_ratios=stream, seed=0)
    return bench_options(Asked(flags=flags), workloads, strategies=strategies, **values)


def test_numbers_come_with_commas_each_once() -> None:
    workloads = parsed(contexts="512, 100,512", stream="0,.3,1").workloads
    assert (workloads.inputs, workloads.contexts, workloads.mix_ratios) == (("demo",), (512, 100), (0.0, 0.3, 1.0))


def test_flags_of_drafts_and_threads_are_those_of_the_engine() -> None:
    assert parsed(flags={"skip": [3]}).engine.speculation.skip == (3,)
    assert parsed(flags={"static_choice": "int4"}).engine.speculation.static_choice == "int4"
    assert (parsed().engine.num_threads, parsed(threads=1).engine.num_threads) == (3, 1)
    assert parsed(plans=["self-sd=a=b.json", "knn-ssd=c.json"]).plans == {"self-sd": "a=b.json", "knn-ssd": "c.json"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"contexts": "100,"}, "option 'context' is '100,': give numbers with commas"),
        ({"stream": "0;1"}, "option 'stream' is '0;1': give numbers with commas"),
        ({"stream": "0", "batch": 2}, "option 'batch' is 2: the prompts of a stream run one by one"),
        ({"strategies": " ,"}, "option 'strategies' is ' ,': name at least one"),
        ({"plans": ["a.json"]}, "option 'plans' is 'a.json': write it as STRATEGY=FILE"),
    ],
)
def test_what_cannot_be_parsed_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parsed(**changes)


def test_engines_have_room_for_the_longest_context() -> None:
    config = engine_config(options("ar"), "folder", "ar")
    assert (config.model, config.max_num_seqs, config.max_model_len) == ("folder", 2, 320)


def test_what_cannot_be_widened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="option 'widen' is 0"), model_folder(EngineConfig(model="demo"), 0):
        pass


class Diary:
    """A contender that writes down what it is asked for."""

    device = None
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
        return Completed(seconds=1.0, prefill_s=0.1, prefill_cpu_s=0.1, token_ids=[[1] * max_tokens for _ in prompts])


def take_turns(workload: Workload, at_once: Sequence[int] = (20, 20, 20)) -> list[str]:
    """What three contenders did, who write so many tokens at once of 20."""
    entries: list[str] = []
    say: Say = entries[:0].append
    contenders = {name: Diary(name, entries, tokens) for name, tokens in zip("abc", at_once, strict=True)}
    samples = run_module.take_turns(contenders, workload, options("ar"), say)
    assert {name: len(each) for name, each in samples.items()} == {"a": 3, "b": 3, "c": 3}
    assert samples["a"][0].num_tokens == 20
    assert samples["a"][0].decode_cpu_s is None
    return entries


WORKLOAD = Workload(name="w", domain="d", prompts=[[1, 2]], domains=["d"], context=100)


def test_each_repeat_is_everyone_in_an_order_of_its_own() -> None:
    entries = take_turns(WORKLOAD)
    assert entries[:6] == ["a forgets", "a warms up", "b forgets", "b warms up", "c forgets", "c warms up"]
    orders = [tuple(entries[first : first + 3]) for first in (6, 9, 12)]
    assert {"".join(sorted(order)) for order in orders} == {"abc"}
    assert len(set(orders)) > 1


def test_each_repeat_of_a_stream_begins_with_nothing_known() -> None:
    entries = take_turns(replace(WORKLOAD, mix_ratio=0.5))
    assert entries[6:9] == ["a forgets", "b forgets", "c forgets"]
    assert sorted(entries[9:12]) == ["a", "b", "c"]
    assert len(entries) == 6 + 2 * 9


def test_one_that_is_behind_goes_on() -> None:
    at_once = {"a": 5, "b": 10, "c": 15}
    entries = take_turns(WORKLOAD, tuple(at_once.values()))
    written = dict.fromkeys("abc", 0)
    for name in entries[6:14]:
        assert written[name] == min(written.values())
        written[name] += at_once[name]
    assert min(written.values()) >= 20


def test_nobody_always_goes_after_the_same() -> None:
    entries = take_turns(WORKLOAD, (1, 1, 1))[6:]
    assert {b for a, b in itertools.pairwise(entries) if a == "a"} == {"a", "b", "c"}


class OnOneMachine:
    """A contender whose token takes 0.1 s, or 0.4 where the machine is slow, which it is every other minute."""

    device = torch.device("cpu")
    used = EngineStats()

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock

    def forget(self) -> None: ...

    def warm_up(self, prompts: Any, max_tokens: int) -> None: ...

    def write(self, prompts: Any, max_tokens: int) -> Writing:
        seconds = 0.0
        for num_written in range(max_tokens):
            took = 0.4 if self._clock[0] % 120 > 60 else 0.1
            seconds += took
            self._clock[0] += took
            yield num_written + 1
        return Completed(seconds=seconds, prefill_s=0.0, prefill_cpu_s=0.0, token_ids=[[1] * max_tokens])


def test_a_machine_that_changes_its_pace_is_the_same_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayspec.bench.contenders.waited_seconds", lambda: None)  # it reads files, 9000 times here
    clock = [0.0]
    contenders = {name: OnOneMachine(clock) for name in "abc"}
    samples = run_module.take_turns(contenders, WORKLOAD, replace(options("ar"), max_tokens=500), print)
    for repeat in zip(*samples.values(), strict=True):
        seconds = [sample.seconds for sample in repeat]
        assert max(seconds) < 1.03 * min(seconds)
        assert all(sample.decode_cpu_s is not None and sample.decode_cpu_s > 0 for sample in repeat)


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
            assert row["cpu_speedup_vs_ar"] > 0
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


def test_a_stream_with_saved_plans(run: Invoke, tmp_path: Path) -> None:
    model = ModelIdentity.of(EngineConfig(model=demo.model_path()), 32)
    ledger = saved_plan("ledger", skip=(6, 8), num_sublayers=32, anchors=((1.0,) + (0.0,) * 127,), radius=0.5)
    SavedPlans(model=model, plans=(saved_plan(skip=(5, 7), num_sublayers=32), ledger)).save(tmp_path / "plans.json")
    result = run(
        *(*SMALL, "--num-prompts", "3", "--repeats", "1", "--strategies", "self-sd,knn-ssd", "--no-hf"),
        *("--input", "demo", "--input", "demo:ledger", "--stream", "0,1", "--warm-start", "plans.json"),
        *("--plans", "self-sd=plans.json"),
        *("--json", "b.json", "--no-gate"),
    )
    assert result.exit_code == 0, result.output
    still, mixed = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))["workloads"]
    assert (still["mix_ratio"], mixed["mix_ratio"]) == (0.0, 1.0)
    assert mixed["prompt_domains"] == ["summary", "ledger", "summary"]
    for workload in (still, mixed):
        rows = rows_of(workload)
        assert list(rows) == ["ar", "self-sd", "knn-ssd"]
        assert all(row["identical"] == row["total"] == 3 for row in rows.values())
        assert rows["self-sd"]["acceptance_rate"] is not None
        assert [at for at, choice in enumerate(rows["self-sd"]["plans"][0]["choices"]) if choice == "skip"] == [5, 7]


def test_the_widened_model_does_not_stay(run: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with model_folder(EngineConfig(model="demo"), 2):
        assert list(tmp_path.glob("rayspec-wide-*"))
    assert not list(tmp_path.glob("rayspec-wide-*"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--strategies", "ar,knapspac"], "did you mean 'knapspec'?"),
        (["--context", "1k"], "option 'context' is '1k'"),
        (["--stream", "0,2"], "option 'stream' is 2.0"),
        (["--stream", "1", "--batch", "2"], "option 'batch' is 2"),
        (["--strategies", "self-sd"], "needs option 'warm_start'"),
    ],
)
def test_what_it_cannot_do_is_said_before_anything_is_loaded(run: Invoke, flags: list[str], message: str) -> None:
    result = run("--model", "absent", *flags)
    assert result.exit_code == 2
    assert message in result.stderr
