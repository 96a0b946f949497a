"""A private Ray with a dashboard, told of on standard output, that ends with its standard input.

Its token is in the environment. By cluster_utils, because `ray.init` gives the agent of the Jobs API a fixed port,
which another Ray here may have.
"""

import json
import os
import sys

from ray.cluster_utils import Cluster

if __name__ == "__main__":
    options = {"num_cpus": 4, "include_dashboard": True, "dashboard_port": 0, "dashboard_agent_listen_port": 0}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    print(json.dumps({"url": cluster.webui_url, "token": os.environ["RAY_AUTH_TOKEN"]}), flush=True)
    sys.stdin.read()
    cluster.shutdown()
