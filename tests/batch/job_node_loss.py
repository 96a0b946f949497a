"""A job whose cluster loses the node of its engine in mid-run: `job_node_loss.py FOLDER`, for notes and output."""

import sys
import threading
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from tests.batch.noted_task import NotedTask, noted
from tests.batch.test_job import NUM_ROWS, Source, documents, job

# A lost node is missed soon, and one on a busy machine is not taken for lost.
QUICK_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 5,
    "health_check_timeout_ms": 5000,
}


def lose_node_of_engine(cluster: Cluster, task: NotedTask) -> None:
    """When some rows have ended."""
    while len(task.read("ended")) < NUM_ROWS // 4:
        time.sleep(0.02)
    (lost,) = task.read("nodes")
    cluster.remove_node(next(node for node in cluster.worker_nodes if node.node_id == lost), allow_graceful=False)


def main() -> None:
    folder = Path(sys.argv[1])
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": QUICK_CHECKS}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=2, include_dashboard=False)
    ray.init(address=cluster.address, log_to_driver=False)
    task = noted(folder)
    threading.Thread(target=lose_node_of_engine, args=(cluster, task), daemon=True).start()
    report = job(task, folder / "out").run(Source(rows=documents()))
    ray.shutdown()
    cluster.shutdown()
    sys.exit(report.exit_code())


if __name__ == "__main__":
    main()
