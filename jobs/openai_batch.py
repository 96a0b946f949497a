#!/usr/bin/env python3
"""`rayspec job openai-batch` as a script: it answers an OpenAI batch file, whose lines are for /v1/chat/completions,
/v1/completions or /v1/responses.

    ray job submit --working-dir . -- python jobs/openai_batch.py --model MODEL --output OUT batch.jsonl

It writes output.jsonl and errors.jsonl, in OpenAI's format. After an interruption, the same command continues.
"""

from __future__ import annotations

import sys

from rayspec.cli import app

if __name__ == "__main__":
    app(["job", "openai-batch", *sys.argv[1:]])
