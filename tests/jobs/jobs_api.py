"""A private Ray with a dashboard, told of on standard output, that ends with its standard input."""

from __future__ import annotations

import json
import os
import secrets
import sys

import ray

if __name__ == "__main__":
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(16)
    context = ray.init(address="local", num_cpus=4, include_dashboard=True, dashboard_port=0)
    print(json.dumps({"url": context.dashboard_url, "token": os.environ["RAY_AUTH_TOKEN"]}), flush=True)
    sys.stdin.read()
    ray.shutdown()
