"""What the doctor says of a cluster of three nodes on this machine: `three_nodes.py REPORT`."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from ray.cluster_utils import Cluster

from rayspec.ops.doctor.cluster import cluster_findings


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=1, include_dashboard=False)
    findings = cluster_findings(cluster.address, "demo")
    Path(sys.argv[1]).write_text(json.dumps([asdict(finding) for finding in findings]))
    cluster.shutdown()


if __name__ == "__main__":
    main()
