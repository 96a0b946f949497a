#!/usr/bin/env python3
"""`rayspec profile` as a Ray job: what a forward costs on the shards of a cluster, and what hops between them do.

    ray job submit --working-dir . -- python jobs/measure.py --model MODEL --cluster --stages 4

Not named after the command: a `profile.py` here would stand in for Python's own module in every job of this folder.
"""

from __future__ import annotations

import sys

from rayspec.cli import app

if __name__ == "__main__":
    app(["profile", *sys.argv[1:]])
