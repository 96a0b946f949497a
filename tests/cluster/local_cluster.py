"""A Ray cluster as a manifest describes it, on this machine: `local_cluster.py < commands`.

The first line of standard input is the spec of a RayCluster. Its head and workers get the CPUs of their pods, or what
their `rayStartParams` say; memory, ports and images are left to this machine. Prints what `State` holds after each
command: `add` (another worker), `drain NODE_ID`, `remove NODE_ID`. It ends with standard
input. Its token is in the environment.
"""

import json
import subprocess
import sys
from typing import Any

from ray.cluster_utils import Cluster


def num_cpus(group: dict[str, Any]) -> int:
    """Of a pod of the group, for Ray."""
    [container] = group["template"]["spec"]["containers"]
    return int(group["rayStartParams"].get("num-cpus", container["resources"]["limits"]["cpu"]))


class LocalCluster:
    """The head and the workers of one group."""

    def __init__(self, spec: dict[str, Any]) -> None:
        [self._group] = spec["workerGroupSpecs"]
        head = {"include_dashboard": True, "dashboard_port": 0, "dashboard_agent_listen_port": 0}
        self._cluster: Any = Cluster(
            initialize_head=True, head_node_args={"num_cpus": num_cpus(spec["headGroupSpec"]), **head}
        )
        self._workers: dict[str, Any] = {}
        for _ in range(self._group["replicas"]):
            self.add()

    def add(self) -> None:
        node = self._cluster.add_node(num_cpus=num_cpus(self._group), dashboard_agent_listen_port=0)
        self._workers[node.node_id] = node

    def drain(self, node_id: str) -> None:
        """From now on nothing begins on it, and what can go elsewhere does."""
        why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test"]
        where = ["--address", self._cluster.address, "--node-id", node_id]
        subprocess.run(["ray", "drain-node", *where, *why, "--deadline-remaining-seconds", "300"], check=True)

    def remove(self, node_id: str) -> None:
        self._cluster.remove_node(self._workers.pop(node_id), allow_graceful=True)

    @property
    def state(self) -> dict[str, Any]:
        return {"url": f"http://{self._cluster.webui_url}", "workers": sorted(self._workers)}

    def shutdown(self) -> None:
        self._cluster.shutdown()


def main() -> None:
    cluster = LocalCluster(json.loads(sys.stdin.readline()))
    try:
        print(json.dumps(cluster.state), flush=True)
        for line in sys.stdin:
            command, *node_ids = line.split()
            commands: dict[str, Any] = {"add": cluster.add, "drain": cluster.drain, "remove": cluster.remove}
            commands[command](*node_ids)
            print(json.dumps(cluster.state), flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
