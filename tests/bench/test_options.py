from __future__ import annotations

import json
from typing import Any

import pytest

from rayspec.bench.options import BenchOptions, bench_options, workload_options
from rayspec.bench.workloads import WorkloadOptions
from rayspec.command.options import Asked
from rayspec.types import ConfigError


def workloads(inputs: list[str] | None = None, contexts: str = "100", mix_ratios: str | None = None) -> WorkloadOptions:
    return workload_options(inputs, contexts, num_prompts=4, mix_ratios=mix_ratios, seed=0)


def bench(strategies: str = "knapspec", **changes: Any) -> BenchOptions:
    flags = {"model": "demo", "num_threads": 3, "skip": None, "static_choice": None} | changes.pop("flags", {})
    values = {"workloads": workloads(), "max_tokens": 5, "batch": 1, "repeats": 1, "widen": 1} | changes
    return bench_options(Asked(flags=flags), values.pop("workloads"), strategies=strategies, **values)


def test_numbers_come_with_commas_each_once() -> None:
    options = workloads(contexts="512, 100,512", mix_ratios="0,.3,1")
    assert (options.contexts, options.mix_ratios) == ((512, 100), (0.0, 0.3, 1.0))
    assert workloads().mix_ratios == ()


def test_without_an_input_it_is_the_demo() -> None:
    assert workloads().inputs == ("demo",)
    assert workloads(["a.txt", "demo:all"]).inputs == ("a.txt", "demo:all")


@pytest.mark.parametrize("text", ["", "100,", "many", "1.5"])
def test_a_context_that_is_no_number(text: str) -> None:
    with pytest.raises(ConfigError, match=f"option 'context' is '{text}': give numbers with commas"):
        workloads(contexts=text)


@pytest.mark.parametrize("text", ["", "half", "0;1"])
def test_a_ratio_that_is_no_number(text: str) -> None:
    with pytest.raises(ConfigError, match=f"option 'stream' is '{text}': give numbers with commas"):
        workloads(mix_ratios=text)


def test_strategies_are_names_with_commas() -> None:
    assert bench("ar, knapspec,").strategies == ("ar", "knapspec")
    with pytest.raises(ConfigError, match="option 'strategies' is ',': name at least one"):
        bench(",")


def test_what_static_drafts_are_like_makes_the_strategy_static() -> None:
    assert bench(flags={"skip": [3]}).engine.speculation.skip == (3,)
    assert bench(flags={"static_choice": "int4"}).engine.speculation.static_choice == "int4"
    assert bench().engine.speculation.strategy == "auto"


def test_threads_are_those_of_the_engine() -> None:
    assert bench(threads=1).engine.num_threads == 1
    assert bench().engine.num_threads == 3


def test_plans_are_by_strategy() -> None:
    assert bench(plans=["self-sd=a=b.json", "knn-ssd=c.json"]).plans == {"self-sd": "a=b.json", "knn-ssd": "c.json"}
    for text in ("a.json", "=a.json", "self-sd="):
        with pytest.raises(ConfigError, match=f"option 'plans' is '{text}': write it as STRATEGY=FILE"):
            bench(plans=[text])


def test_sublayers_to_skip_need_no_strategy_of_their_own() -> None:
    assert bench(flags={"skip": [3]}).engine.speculation.skip == (3,)


def test_streams_are_not_for_batches() -> None:
    assert bench(workloads=workloads(mix_ratios="0")).batch == 1
    with pytest.raises(ConfigError, match="option 'batch' is 2: the prompts of a stream run one by one"):
        bench(workloads=workloads(mix_ratios="0"), batch=2)


def test_options_stand_in_results_as_plain_values() -> None:
    plain = json.loads(json.dumps(bench(workloads=workloads(mix_ratios="0,1")).as_json()))
    assert plain["engine"]["model"] == "demo"
    assert plain["workloads"]["mix_ratios"] == [0.0, 1.0]
