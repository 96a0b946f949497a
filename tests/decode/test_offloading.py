"""Weights on disk under a whole engine: no token changes, and plans skip what is slow to fetch."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rayspec import demo
from rayspec.choices import SKIP
from rayspec.config import EngineConfig, SamplingParams, SpeculationOptions
from rayspec.decode.engine import Engine
from rayspec.decode.loading import least_needed, load_weights, prepare_span
from rayspec.local_engine import load_engine
from rayspec.model.architecture import decompose
from rayspec.strategies.knapspec import Auto
from rayspec.types import ConfigError
from tests.demo_model import EOS, demo_parts, demo_prompts
from tests.engines import complete, engine_with, tokens_of
from tests.exhaustive import few_of
from tests.families import checkpoint, modules_of

OFFLOADED = (5, 13, 15, 17, 18, 25)
KNAPSPEC = {"strategy": "knapspec", "gate": False, "optimise_share": 1.0, "num_search_tokens": 4}
PARAMS = SamplingParams(temperature=0, max_tokens=60)
Tokens = list[tuple[int, ...]]


def config(model: str, folder: Path, *, offload: Any = None, **options: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "max_model_len": 512, "kv_cache_tokens": 1024, "num_threads": 1,
        "profile_cache": str(folder), "speculation": {"strategy": "ar"},
    }  # fmt: skip
    where = None if offload is None else {"to": "disk", "folder": str(folder), **offload}
    return EngineConfig(model=model, offload=where, **(values | options))


def load(model: str, folder: Path, **options: Any) -> Engine:
    return load_engine(config(model, folder, **options), with_tokenizer=False)


@cache
def prompts() -> list[list[int]]:
    return demo_prompts(2, 6)


@cache
def resident() -> Tokens:
    """Of the demo model with all its weights in memory, decoding plainly."""
    engine = engine_with(demo_parts(), eos=(EOS,), max_num_batched_tokens=1024)
    return tokens_of(complete(engine, prompts(), PARAMS))


@pytest.mark.parametrize("speculation", few_of([{"strategy": "ar"}, KNAPSPEC], [KNAPSPEC]), ids=["ar", "knapspec"])
def test_tokens_are_those_of_the_model_in_memory(speculation: dict[str, Any], tmp_path: Path) -> None:
    engine = load(demo.model_path(), tmp_path, offload={"sublayers": OFFLOADED}, speculation=speculation)
    assert tokens_of(complete(engine, prompts(), PARAMS)) == resident()
    assert (engine.stats.num_draft_tokens > 0) == (speculation is KNAPSPEC)


def test_a_share_is_taken_from_the_mlps_in_the_middle() -> None:
    parts = modules_of(checkpoint("llama"))  # attention has 2/5 of the weights, MLPs 3/5, in 4 layers
    assert least_needed(parts, 0.01) == [3]
    assert least_needed(parts, 0.3) == [3, 5]
    assert least_needed(parts, 0.59) == [1, 3, 5, 7]
    assert least_needed(parts, 0.65) == [1, 3, 4, 5, 7]
    assert least_needed(parts, 0.99) == list(range(8))
    span = replace(parts, embedding=None, sublayers=parts.sublayers[4:])
    assert least_needed(span, 0.2) == [5]
    demo_share = least_needed(modules_of(demo.model_path()), 0.2)
    assert all(index % 2 for index in demo_share)
    assert demo_share == list(range(demo_share[0], demo_share[-1] + 1, 2))
    assert demo_share[0] + demo_share[-1] in (30, 32, 34)


def test_a_profile_of_other_weights_on_disk_is_not_used(tmp_path: Path) -> None:
    path = checkpoint("llama")
    for sublayers in (None, (1,), (3, 5)):
        offload = None if sublayers is None else {"sublayers": sublayers}
        latency = load(path, tmp_path, offload=offload, speculation=KNAPSPEC).latency
        assert latency is not None
        assert tuple(index for index, seconds in enumerate(latency.transfer_s) if seconds > 0) == (sublayers or ())


def test_drafts_do_without_all_that_is_slow_to_fetch(tmp_path: Path) -> None:
    """Fetching made as slow as it is for weights of gigabytes: all of it together takes 100 forwards."""
    measured = load(demo.model_path(), tmp_path, offload={"sublayers": OFFLOADED}, speculation=KNAPSPEC).latency
    assert measured is not None
    forward_s = measured.decode_step_s(context=200, batch=1) - sum(measured.transfer_s)
    each_s = 100 * forward_s / len(OFFLOADED)
    slow = replace(measured, transfer_s=tuple(each_s if seconds else 0.0 for seconds in measured.transfer_s))
    options = SpeculationOptions(**KNAPSPEC, choices=("skip",))  # whose knapsack is between skipping and fetching
    engine = engine_with(
        demo_parts(), Auto(options, slow, looks_up=False), max_draft_tokens=16, eos=(EOS,), speculation=KNAPSPEC
    )
    assert tokens_of(complete(engine, prompts(), PARAMS)) == resident()
    drafts = [record.plan.choices for record in engine.stats.plans if record.plan.drafts]
    assert drafts
    skipped = {tuple(index for index, choice in enumerate(choices) if choice == SKIP) for choices in drafts}
    assert skipped == {OFFLOADED}, "nothing else is worth skipping"


@pytest.mark.parametrize(
    ("offload", "message"),
    [
        ({"sublayers": (1, 8)}, r"'sublayers' names sublayer 8; the model has 0 to 7"),
        ({"sublayers": (-1,)}, r"'sublayers' names sublayer -1"),
        ({"to": "cpu"}, r"'to' is 'cpu'.*disk"),
        ({"folder": "/no/such/folder"}, r"'folder' is '/no/such/folder'"),
        ({"to": "tape"}, r"'tape'"),
        ({"share": 1.0}, r"share"),
    ],
)
def test_options_that_cannot_work_are_refused(offload: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(checkpoint("llama"), tmp_path, offload=offload)


@pytest.mark.parametrize("layers", [range(2), range(2, 4)])
def test_a_span_offloads_its_own_of_the_model_s_sublayers(layers: range, tmp_path: Path) -> None:
    asked = config(checkpoint("llama"), tmp_path, offload={"sublayers": (1, 2, 5, 7)})
    model = load_weights(asked, layers=layers)
    parts, offloaded, _ = prepare_span(asked, model, decompose(model, layers=layers))
    assert offloaded is not None
    here = [index for index in (1, 2, 5, 7) if index // 2 in layers]
    assert list(offloaded.sublayers) == here
    seconds = zip(parts.sublayers, offloaded.transfer_seconds(), strict=True)
    assert [sublayer.index for sublayer, each_s in seconds if each_s > 0] == here
