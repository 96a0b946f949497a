#!/usr/bin/env python3
"""`rayspec profile` as a Ray job: it measures forwards on the shards of a cluster, and the hops between shards.

    ray job submit --working-dir . -- python jobs/measure.py --model MODEL --cluster --stages 4

The file is not called `profile.py`, because that name would replace Python's own module in every job of this folder.
"""

from __future__ import annotations

import sys

from rayspec.cli import app

if __name__ == "__main__":
    app(["profile", *sys.argv[1:]])
