#!/usr/bin/env python3
"""`rayspec job summarize` as a script: Ray Data reads documents, engines summarize them; it writes rows and a report.

    python jobs/summarize.py --model demo --output out
    ray job submit --working-dir . -- python jobs/summarize.py --model MODEL --output OUT documents/*.parquet

Without inputs it takes twelve bundled documents. The job uses the cluster of RAY_ADDRESS if that is set, and otherwise
starts Ray on this machine. After an interruption, the same command continues.
"""

from __future__ import annotations

import sys

from rayspec.cli import app

if __name__ == "__main__":
    app(["job", "summarize", *sys.argv[1:]])
