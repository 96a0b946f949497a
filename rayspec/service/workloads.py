"""What a benchmark lets the contenders write: prompts by domain, as long as asked."""

from __future__ import annotations

import rayspec
from rayspec import demo

_TOKENS_PER_UNIT = 15
_MIN_SIZE = 2


def demo_prompts(llm: rayspec.LLM, domain: str, *, context: int, num_prompts: int, seed: int = 0) -> list[list[int]]:
    """Token ids of prompts of a demo domain, as large as fit `context` tokens whole: a ledger or a schedule may be
    smaller. Raises ConfigError naming the domains, where `domain` is none of them."""
    if domain not in demo.DOMAINS:
        raise rayspec.ConfigError(f"domain {domain!r} is none of {', '.join(demo.DOMAINS)}")
    size = max(_MIN_SIZE, context // _TOKENS_PER_UNIT)
    while True:
        tasks = demo.sample_tasks(domain, num_prompts, size=size, seed=seed)
        prompts = [list(llm.tokenizer(task.prompt).input_ids) for task in tasks]
        longest = max(map(len, prompts), default=0)
        if longest <= context or size == _MIN_SIZE:
            return prompts
        size = max(_MIN_SIZE, min(size - 1, size * context // longest))
