"""Real shards in real processes: tokens are those of generate, and what dies or freezes in mid-batch is replaced."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import pytest
import ray
import torch
from ray.util.placement_group import placement_group_table
from torch import Tensor

from rayspec import demo
from rayspec.config import KV_CACHE_SHARE, EngineConfig, SamplingParams
from rayspec.decode import loading
from rayspec.decode.engine import Engine
from rayspec.decode.rehearsal import rehearse
from rayspec.decode.runner import PackedBatch, Runner
from rayspec.decode.stages import StageLostError
from rayspec.decode.strategy import Strategy
from rayspec.local_engine import load_engine
from rayspec.model.kv_cache import CacheSize, bytes_per_slot, whole_pages
from rayspec.pipeline.loading import load_pipeline
from rayspec.pipeline.placement import ShardEndedError, kill
from rayspec.pipeline.ray_stages import RayStages
from rayspec.pipeline.replica import Replica
from rayspec.pipeline.shard import Shard
from rayspec.strategies.by_name import make_strategy
from tests import every_type
from tests.demo_model import EOS, demo_parts, demo_prompts, demo_tokenizer
from tests.engines import complete, engine_with, finish, requests_for, tokens_of
from tests.families import Cases, cases, checkpoint, greedy, parts_of, ragged_prompts, small_config
from tests.pipeline.loop import NUM_LAYERS, TravellingPlans, plant_copies
from tests.schemas import PERSON
from tests.strategy_cases import latency
from tests.waiting import freeze, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

LENGTHS = (20, 5, 60, 33, 12, 1, 25)
LONG = SamplingParams(temperature=0.0, max_tokens=80)
PATIENCE_S = 60.0
FREE_BYTES, PASS_BYTES = 8 * 2**20, 2**20
ROOT = Path(__file__).parents[2]


def known_cases() -> Cases:
    return cases(checkpoint("llama"), LENGTHS, 16)


SEARCHING = {"strategy": "knapspec", "gate": False, "optimise_share": 1.0}
_LOOKUP = {"strategy": "lookup", "gate": False}
BY_COPIES = {"strategy": "static", "static_choice": "int4+window", "skip": (3,)}


def load(
    path: str,
    *,
    speculation: Any = MappingProxyType({"strategy": "ar"}),
    verification: str = "coupled",
    shard_type: type[Shard] = Shard,
    with_tokenizer: bool = False,
    max_model_len: int = 1024,
    dtype: str = "float32",
    deterministic: bool = False,
    **parallel: Any,
) -> Engine:
    return load_pipeline(
        EngineConfig(
            model=path,
            dtype=dtype,
            device="cpu",
            num_threads=1,
            deterministic=deterministic,
            max_model_len=max_model_len,
            kv_cache_tokens=4096,
            parallel={"cpus_per_shard": 0.25, "layers": None, "start_timeout_s": PATIENCE_S, **parallel},
            speculation={**speculation, "verification": verification, "max_draft_tokens": 6},
        ),
        with_tokenizer=with_tokenizer,
        shard_type=shard_type,
    )


def stages_of(engine: Engine) -> RayStages:
    assert isinstance(engine.stages, RayStages)
    return engine.stages


@contextmanager
def plans_of(engine: Engine, strategy: Strategy) -> Iterator[None]:
    """Other plans for a while. The scheduler must know how far drafts may reach."""
    before, lookahead = engine._planner.strategy, engine._scheduler._lookahead
    engine._planner.strategy, engine._scheduler._lookahead = strategy, 6
    try:
        yield
    finally:
        engine._planner.strategy, engine._scheduler._lookahead = before, lookahead


def process_ids(engine: Engine) -> dict[str, int]:
    """Of the shards and the coordinator, by name."""
    processes = stages_of(engine).replica.processes
    return {name: process.ask("process_id").result(PATIENCE_S) for name, process in processes.items()}


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def require_gone(pids: Sequence[int]) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), PATIENCE_S)


def end(engine: Engine, pids: Sequence[int]) -> None:
    """Shut down, and require that nothing is left."""
    group = stages_of(engine).replica._bundles._group
    num_free = free_cpus(group)
    engine.shutdown()
    engine.shutdown()  # more than once is fine
    require_gone(pids)
    require_free(group, num_free)


def free_cpus(group: Any) -> float:
    """With those that the group reserves. Other engines may run beside it."""
    bundles = placement_group_table(group)["bundles"].values()
    return float(ray.available_resources().get("CPU", 0) + sum(bundle["CPU"] for bundle in bundles))


def require_free(group: Any, num_free: float) -> None:
    assert placement_group_table(group)["state"] == "REMOVED"
    wait_until(lambda: ray.available_resources().get("CPU", 0) >= num_free, PATIENCE_S)


def even(stages: int) -> tuple[int, ...]:
    return tuple(NUM_LAYERS * (at + 1) // stages - NUM_LAYERS * at // stages for at in range(stages))


def require_known_tokens(engine: Engine, known: Cases) -> None:
    with plans_of(engine, TravellingPlans(0, 2 * NUM_LAYERS)):
        assert tokens_of(complete(engine, known.prompts)) == known.expected
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens


class TightShard(Shard):
    """Of a place with little memory, of which the largest passes take some."""

    def rehearse(self) -> None:
        def peak(device: torch.device, work: Callable[[], object]) -> int:
            work()
            slots = bytes_per_slot(list(self._parts.shapes.values()), torch.float32) * (whole_pages(1024) + 1)
            return PASS_BYTES + slots  # of the small cache of these passes

        with patch.object(loading, "rehearse", partial(rehearse, peak=peak)):
            super().rehearse()

    def num_slots(self, num_sharing: int) -> int:
        with patch.object(loading, "free_bytes", lambda device: FREE_BYTES):
            return super().num_slots(num_sharing)


class SlowRunner(Runner):
    """Runs its sublayers six times; keys and values go where they went before, so the results are the same."""

    def run(self, batch: PackedBatch, hidden: Tensor, **options: Any) -> Tensor:
        for _ in range(5):
            super().run(batch, hidden, **options | {"tap": None})
        return super().run(batch, hidden, **options)


class UnevenShard(Shard):
    """The second stage is slow."""

    def prepare(self, size: CacheSize) -> None:
        super().prepare(size)
        if self.stage == 1:
            self.span.runner.__class__ = SlowRunner


@pytest.fixture
def as_they_are(ray_cluster: None) -> Iterator[None]:
    """The classes above are sent to Ray's workers as they are: workers cannot import this file."""
    module = sys.modules[__name__]
    ray.cloudpickle.register_pickle_by_value(module)
    yield
    ray.cloudpickle.unregister_pickle_by_value(module)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("as_they_are")
def test_a_slow_stage_gets_fewer_layers() -> None:
    num_layers, prompts = 16, demo_prompts(2, 6)
    engine = load(demo.model_path(), shard_type=UnevenShard, stages=2, cohorts=1)
    try:
        (first, middle), (_, last) = stages_of(engine).replica.spans
        assert (first, last) == (0, 2 * num_layers)
        assert num_layers - middle // 2 <= num_layers // 4, "a seventh would make the stages equally fast"
        assert tokens_of(complete(engine, prompts, LONG)) == greedy(
            demo.model_path(), prompts, LONG.max_tokens, eos=(EOS,)
        )
    finally:
        engine.shutdown()


@pytest.mark.exhaustive
def test_a_shard_that_ends_before_it_is_connected_may_be_started_again() -> None:
    """A pool starts an engine again after this error, and ends the job after others."""
    own = Replica.start

    def start(replica: Replica) -> None:
        own(replica)
        lost = replica.shards["stage-0"]
        kill([lost])
        wait_until(lambda: lost.end() is not None)  # on a busy machine it answers for a while

    with patch.object(Replica, "start", start), pytest.raises(ShardEndedError, match="stage-0 has ended"):
        load(demo.model_path(), stages=2)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("as_they_are")
def test_shards_of_a_place_share_its_memory() -> None:
    parallel = {"stages": 2, "layers": even(2), "cpus_per_shard": 0.25}
    room = {"num_threads": 1, "max_model_len": 1024, "kv_cache_tokens": None}
    config = small_config(checkpoint("llama"), parallel=parallel, speculation={"strategy": "ar"}, **room)
    engine = load_pipeline(config, with_tokenizer=False, shard_type=TightShard)
    try:
        parts = parts_of(checkpoint("llama"))
        num_bytes = bytes_per_slot(list(parts.shapes.values()), torch.float32) * engine.load.kv_total_tokens
        share = KV_CACHE_SHARE["cpu"] * (FREE_BYTES - 2 * PASS_BYTES)
        assert 0.9 * share < num_bytes <= share
    finally:
        engine.shutdown()


@pytest.mark.exhaustive
def test_ranks_of_a_stage_die_together(expected: Any) -> None:
    """Two stages of two ranks: the other stage's ranks stay, in step, whatever they were about to do."""
    prompts, tokens = expected
    slowly = {"start_timeout_s": 300.0, "heartbeat_timeout_s": 60.0}  # four processes load DeepSpeed at the same time
    engine = load(checkpoint("llama"), stages=2, tensor=2, layers=even(2), verification="rejection", **slowly)
    assert set(stages_of(engine).measure().stages) == {0, 1}, "the ranks of a stage measure together"
    require_known_tokens(engine, known_cases())
    usage = stages_of(engine).usage()
    assert [use.num_passes > 0 and 0 < use.busy_s <= use.elapsed_s for use in usage] == [True] * 2
    assert len(process_ids(engine)) == 2 * 2 + 1
    with plans_of(engine, TravellingPlans(3, 2 * NUM_LAYERS)):
        outputs, before = start_batch(engine, prompts), process_ids(engine)
        os.kill(before["stage-0.1"], signal.SIGKILL)
        assert finish_batch(engine, outputs, len(prompts)) == tokens
    after = process_ids(engine)
    assert engine.stats.num_replays == 1
    assert {name for name in after if after[name] != before[name]} == {"stage-0", "stage-0.1"}
    require_gone([before["stage-0"]])
    end(engine, list(after.values()))


@pytest.mark.exhaustive
def test_knapspec_drafts_with_plans_of_the_coordinator_and_a_lost_stage_is_an_error() -> None:
    prompts, params = demo_prompts(4, 8), SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    engine = load(demo.model_path(), speculation=SEARCHING, stages=2, layers=(8, 8), max_restarts=0)
    try:
        expected = greedy(demo.model_path(), prompts, 120)
        assert tokens_of(complete(engine, prompts, params)) == expected
        # What a busy machine measures may leave no gain to any plan.
        num_sublayers = stages_of(engine).num_sublayers
        with plans_of(engine, make_strategy(engine.config, num_sublayers, latency(num_sublayers))):
            deadline = time.monotonic() + PATIENCE_S
            while not any(
                plan.optimise_s > 0 for plan in engine.stats.plans
            ):  # a search runs in the gaps between passes, and may take longer than a text
                assert tokens_of(complete(engine, prompts, params)) == expected
                assert time.monotonic() < deadline
        assert engine.latency is not None
        assert engine.latency.hop_s > 0
        assert set(engine.latency.stages) == {0, 1}
        require_lost(engine, prompts, params)
    finally:
        engine.shutdown()


def require_lost(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
    """With no restarts allowed, a killed shard ends all requests, now and later."""
    pids, group = process_ids(engine), stages_of(engine).replica._bundles._group
    num_free = free_cpus(group)
    for request in requests_for(prompts, params):
        engine.add(request)
    engine.step()
    os.kill(pids["stage-1"], signal.SIGKILL)
    started = time.monotonic()
    outputs = finish(engine)
    assert len(outputs) == len(prompts)
    assert {type(output.error) for output in outputs.values()} == {StageLostError}
    assert time.monotonic() - started < PATIENCE_S
    with pytest.raises(StageLostError, match="stage-1"):
        engine.add(requests_for(prompts, params)[0])
    require_gone(list(pids.values()))
    require_free(group, num_free)
    engine.shutdown()


@pytest.fixture(scope="module")
def engine(ray_cluster: None) -> Iterator[Engine]:
    """Two stages that may die any number of times, and are found frozen soon."""
    engine = load(
        checkpoint("llama"),
        speculation=BY_COPIES,
        stages=2,
        layers=(1, 3),
        max_restarts=100,
        heartbeat_timeout_s=5.0,
    )
    require_known_tokens(engine, known_cases())
    yield engine
    end(engine, list(process_ids(engine).values()))


@pytest.fixture(scope="module")
def expected() -> tuple[list[list[int]], list[tuple[int, ...]]]:
    long = cases(checkpoint("llama"), LENGTHS, LONG.max_tokens)
    return long.prompts, long.expected


def start_batch(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams = LONG) -> dict[str, Any]:
    """Adds the prompts and goes on until some tokens of each are there. Returns what has finished already."""
    for request in requests_for(prompts, params):
        engine.add(request)
    wanted = engine.stats.num_generated_tokens + 10 * len(prompts)
    outputs: dict[str, Any] = {}
    while engine.stats.num_generated_tokens < wanted:
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def finish_batch(engine: Engine, outputs: dict[str, Any], num_prompts: int) -> list[tuple[int, ...]]:
    outputs |= finish(engine)
    return tokens_of(outputs[str(index)] for index in range(num_prompts))


@pytest.mark.exhaustive
def test_outputs_keep_their_form_when_a_shard_is_replaced() -> None:
    prompts = demo_prompts(4, 2)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=120, structured_outputs={"json": PERSON})  # type: ignore[arg-type]
    alone = engine_with(demo_parts(), eos=(EOS,), tokenizer=demo_tokenizer())
    expected = tokens_of(complete(alone, prompts, params))
    engine = load(
        demo.model_path(),
        stages=2,
        layers=(8, 8),
        speculation={"strategy": "static", "skip": (13, 14, 18)},
        with_tokenizer=True,
    )
    assert tokens_of(complete(engine, prompts, params)) == expected
    assert engine.stats.accepted_by_source["form"] > 20
    outputs, before = start_batch(engine, prompts, params), process_ids(engine)
    os.kill(before["stage-1"], signal.SIGKILL)
    assert finish_batch(engine, outputs, len(prompts)) == expected
    assert engine.stats.num_replays == 1
    end(engine, list(process_ids(engine).values()))


def test_a_killed_shard_is_replaced(engine: Engine, expected: Any) -> None:
    prompts, tokens = expected
    with plans_of(engine, TravellingPlans(7, 2 * NUM_LAYERS)):
        outputs, before = start_batch(engine, prompts), process_ids(engine)
        num_replays = engine.stats.num_replays
        os.kill(before["stage-1"], signal.SIGKILL)
        assert finish_batch(engine, outputs, len(prompts)) == tokens
    after = process_ids(engine)
    recovery_s = stages_of(engine).recovery_s[-1]
    assert engine.stats.num_replays == num_replays + 1
    assert {name for name in after if after[name] != before[name]} == {"stage-1"}
    assert recovery_s < PATIENCE_S, f"it took {recovery_s:.1f} s"


def test_shards_draft_by_copies_that_each_makes_for_itself(engine: Engine) -> None:
    """Those that were replaced, too."""
    attention, mlp = {"full", "int4", "window", "int4+window", "skip"}, {"full", "int4", "skip"}
    assert [set(ways) for ways in stages_of(engine).ways] == [attention, mlp] * NUM_LAYERS
    choices = engine._planner.strategy.choose(None).plan.choices  # type: ignore[arg-type]
    assert choices == ("int4+window", "int4", "int4+window", "skip", *("int4+window", "int4") * 2)
    num_drafted = engine.stats.num_draft_tokens
    known = known_cases()
    assert tokens_of(complete(engine, known.prompts)) == known.expected
    assert engine.stats.num_draft_tokens > num_drafted


@pytest.mark.exhaustive
@pytest.mark.parametrize("when", ["under way", "idle"])
def test_a_frozen_shard_is_replaced(engine: Engine, expected: Any, when: str) -> None:
    """An idle engine finds it by a ping."""
    prompts, tokens = expected
    outputs = start_batch(engine, prompts) if when == "under way" else {}
    before = process_ids(engine)
    freeze(before["stage-1"])
    if when == "idle":
        engine.ping()
        outputs = start_batch(engine, prompts)
    assert finish_batch(engine, outputs, len(prompts)) == tokens
    assert process_ids(engine)["stage-1"] != before["stage-1"]
    require_gone([before["stage-1"]])


@pytest.mark.exhaustive
def test_a_node_is_lost_and_the_driver_just_ends(ray_environment: None, tmp_path: Path) -> None:
    """In a Ray of its own: the shard of a removed node comes back on another one, and nothing outlives the driver."""
    path = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.pipeline.node_loss", str(path)]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert report["equal"]
    assert report["num_replays"] >= 1
    assert len(set(report["nodes_before"]) & set(report["nodes_after"])) == 1
    assert max(report["recovery_s"]) < PATIENCE_S, report["recovery_s"]
    require_gone(report["pids"])


@pytest.mark.exhaustive
def test_deterministic_stages_write_what_one_process_does() -> None:
    """In bfloat16, by drafts that do not branch."""
    model, prompts = checkpoint("llama"), [prompt * 4 for prompt in ragged_prompts((7, 5, 11, 20))]
    config = EngineConfig(
        model=model, dtype="bfloat16", device="cpu", num_threads=1, deterministic=True, max_model_len=400,
        kv_cache_tokens=4096, speculation={"strategy": "ar"},
    )  # fmt: skip
    alone = load_engine(config, with_tokenizer=False)
    expected = tokens_of(complete(alone, prompts, LONG))
    alone.shutdown()
    engine = load(model, dtype="bfloat16", deterministic=True, speculation=_LOOKUP, stages=2, layers=even(2))
    pids = process_ids(engine)
    assert not stages_of(engine).takes_trees
    assert tokens_of(complete(engine, prompts, LONG)) == expected
    assert engine.stats.num_draft_tokens > 0
    end(engine, list(pids.values()))


# The second looks as if it splits, until its loaded layers are checked. Layers of the third read its embeddings.
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen3_next", "phimoe", "gemma4"])
def test_a_model_that_does_not_split_copies_in_stages(family: str, tmp_path: Path) -> None:
    """`test_whole_stages.py` has stages of such models that die."""
    every_type.build(family).save_pretrained(tmp_path)
    prompts = [prompt * 4 for prompt in ragged_prompts((7, 5, 11), vocab_size=200)]
    params, expected = SamplingParams(temperature=0.0, max_tokens=60), greedy(str(tmp_path), prompts, 60)
    engine = load(str(tmp_path), max_model_len=400, speculation=_LOOKUP, stages=2, layers=even(2))
    pids = process_ids(engine)
    plant_copies(engine, expected, 1)
    assert tokens_of(complete(engine, prompts, params)) == expected
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens
    end(engine, list(pids.values()))
