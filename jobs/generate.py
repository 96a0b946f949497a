#!/usr/bin/env python3
"""`rayspec job generate` as a script: it completes prompts and answers chats. Each is a row.

    ray job submit --working-dir . -- python jobs/generate.py --model MODEL --output OUT prompts/*.jsonl

A row has a prompt or chat `messages`. The job uses the cluster of RAY_ADDRESS if that is set, and otherwise starts Ray
on this machine. After an interruption, the same command continues.
"""

from __future__ import annotations

import sys

from rayspec.cli import app

if __name__ == "__main__":
    app(["job", "generate", *sys.argv[1:]])
