#!/usr/bin/env python3
"""`rayspec bench` as a Ray job: it compares strategies, with shards if options ask for them.

ray job submit --working-dir . -- python jobs/bench.py --model MODEL --context 4096
"""

from __future__ import annotations

import sys

from rayspec.cli import app

if __name__ == "__main__":
    app(["bench", *sys.argv[1:]])
