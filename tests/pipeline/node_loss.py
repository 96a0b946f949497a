"""A driver whose cluster loses a node in mid-batch, and which ends without cleaning up: `node_loss.py REPORT`."""

import json
import sys
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from tests.families import cases, checkpoint
from tests.pipeline.test_ray_stages import (
    LENGTHS,
    LONG,
    finish_batch,
    load,
    process_ids,
    require_gone,
    stages_of,
    start_batch,
)

FAST_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 2,
    "health_check_timeout_ms": 500,
}


def node_ids(engine: Any) -> dict[str, str]:
    """Where the placement group's bundles are."""
    return dict(placement_group_table(stages_of(engine).replica._bundles._group)["bundles_to_node_id"])


def main() -> None:
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": FAST_CHECKS}
    )
    workers = [cluster.add_node(num_cpus=1, include_dashboard=False) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False)
    known = cases(checkpoint("llama"), LENGTHS, LONG.max_tokens)
    engine = load(
        checkpoint("llama"), stages=2, layers=(2, 2), cpus_per_shard=1.0, placement="SPREAD", heartbeat_timeout_s=3.0
    )
    before, pids = node_ids(engine), process_ids(engine)
    outputs = start_batch(engine, known.prompts)
    lost = next(worker for worker in workers if worker.node_id == before[1])
    cluster.add_node(num_cpus=1, include_dashboard=False)
    cluster.remove_node(lost, allow_graceful=False)
    require_gone([pids["stage-1"]])  # it notices a moment after its node, and a batch takes little longer than that
    equal = finish_batch(engine, outputs, len(known.prompts)) == known.expected
    report = {
        "equal": equal,
        "nodes_before": list(before.values()),
        "nodes_after": list(node_ids(engine).values()),
        "num_replays": engine.stats.num_replays,
        "recovery_s": stages_of(engine).recovery_s,
        "pids": list(process_ids(engine).values()),
    }
    Path(sys.argv[1]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
