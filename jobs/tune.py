#!/usr/bin/env python3
"""`rayspec tune` as a Ray job: it tunes plans on the GPUs, or with --stages on the shards, that will use them.

ray job submit --working-dir . -- python jobs/tune.py --model MODEL --input law=law.jsonl -o /shared/plans.json
"""

from __future__ import annotations

import sys

from rayspec.cli import app

if __name__ == "__main__":
    app(["tune", *sys.argv[1:]])
