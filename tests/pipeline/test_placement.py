"""Placement groups, on a real Ray."""

import os

import pytest
import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from rayspec.config import ParallelOptions
from rayspec.pipeline.placement import (
    Bundles,
    PlacementError,
    ShardEndedError,
    remove_orphaned_groups,
    start_process,
    wait_for,
)
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@ray.remote(num_cpus=0, max_restarts=0)
class Owner:
    """Has shards' places reserved."""

    def reserve(self) -> str:
        self._bundles = Bundles(ParallelOptions(cpus_per_shard=0.01), num_gpus=0.0, timeout_s=60.0)
        return self._bundles._group.id.hex()


def states(*groups: str) -> list[str]:
    table = placement_group_table()
    return [table[group]["state"] for group in groups]


def test_the_group_of_a_named_actor_that_was_killed_is_removed_and_no_other() -> None:
    here = Bundles(ParallelOptions(cpus_per_shard=0.01), num_gpus=0.0, timeout_s=60.0)
    owners = [Owner.options(name=name).remote() for name in ("SERVE::a:b#1", "second", None)]  # type: ignore[attr-defined]
    groups = ray.get([owner.reserve.remote() for owner in owners])
    ray.kill(owners[0])
    ray.kill(owners[2])

    def removed() -> bool:
        remove_orphaned_groups()
        return states(groups[0]) == ["REMOVED"]

    wait_until(removed)
    assert states(*groups[1:], here._group.id.hex()) == ["CREATED"] * 3
    ray.kill(owners[1])
    wait_until(lambda: Bundles(ParallelOptions(cpus_per_shard=0.01), num_gpus=0.0, timeout_s=60.0).close() is None)
    wait_until(lambda: states(groups[1]) == ["REMOVED"])
    here.close()
    remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(groups[2]))))  # nobody else does


class Stand:
    """Stands for a shard."""

    def __init__(self, spec: object) -> None:
        self._spec = spec

    def spec(self) -> object:
        return self._spec

    def end(self) -> None:
        os._exit(1)


def test_a_shard_that_ends_while_it_is_started_has_an_error_of_its_own() -> None:
    process = start_process(Stand, None, name="stand", num_cpus=0)
    with pytest.raises(ShardEndedError, match="a shard ended while it was started"):
        wait_for([process.ask("end")], 60.0)


def test_the_ranks_of_a_stage_share_a_bundle_which_is_on_one_node() -> None:
    options = ParallelOptions(stages=2, tensor=3, cpus_per_shard=0.02)
    bundles = Bundles(options, num_gpus=0.0, timeout_s=60.0)
    try:
        found = placement_group_table()[bundles._group.id.hex()]["bundles"]
        assert found == {0: {"CPU": 0.06}, 1: {"CPU": 0.06}}
        shards = [bundles.start(Stand, (stage, rank), name="", stage=stage) for stage in range(2) for rank in range(3)]
        specs = [shard.ask("spec").result(60) for shard in shards]
        assert specs == [(stage, rank) for stage in range(2) for rank in range(3)]
    finally:
        bundles.close()


def test_a_stage_that_fits_no_node_is_an_error_that_says_so() -> None:
    with pytest.raises(PlacementError, match=r"2 stages of \{'CPU': 3000.0\}, each on one node, placed PACK"):
        Bundles(ParallelOptions(stages=2, tensor=3, cpus_per_shard=1000.0), num_gpus=0.0, timeout_s=0.2)


@pytest.mark.parametrize("where", ["labels", "topology"])
def test_shards_are_where_labels_and_topology_say(where: str) -> None:
    here = ray.get_runtime_context().get_node_id()
    named = {"labels": {"ray.io/node-id": here}, "topology": {"ray.io/node-id": "STRICT_PACK"}}[where]
    bundles = Bundles(
        ParallelOptions(stages=2, cpus_per_shard=0.01, **{where: named}),  # type: ignore[arg-type]
        num_gpus=0.0,
        timeout_s=60.0,
    )
    assert set(placement_group_table(bundles._group)["bundles_to_node_id"].values()) == {here}
    bundles.close()
