"""Whole continuations that the engine draws, free-running, against their exact probabilities, which transformers enumerates.

What `test_distribution.py` shows of single rules is shown here of all that runs: drafts and trees of a real model,
lookup in the sequence's own text, Jacobi windows, keys and values of accepted branches. Draws are seeded, so a test gives
the same statistic every time; its bound is the one of `test_distribution.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rayspec.config import SamplingParams
from rayspec.decode import verify
from rayspec.decode.sampling import Rows
from rayspec.decode.selection.base import lookup_plan
from rayspec.decode.selection.lookahead import lookahead_plan
from rayspec.decode.verify import Verdict
from rayspec.types import EngineStats, Plan
from tests.decode.test_distribution import excess
from tests.engines import complete, engine_with
from tests.families import build, parts_of, reference

VOCAB, NUM_TOKENS, NUM_DRAWS, BATCH = 4, 5, 3000, 100
NUM_SUBLAYERS = 8
TEMPERATURE = 2.0
PROMPT = (1, 3, 0, 2, 1, 3, 2, 0, 1, 3)

CHAIN = Plan(keep=tuple(index not in (3, 4) for index in range(NUM_SUBLAYERS)), num_draft_tokens=3, source="chain")
PLANS = {
    "chain": CHAIN,
    "tree": replace(CHAIN, source="swift", tree_widths=(3, 3, 3, 3)),
    "lookup": lookup_plan(NUM_SUBLAYERS, 4),
    "lookahead": lookahead_plan(NUM_SUBLAYERS),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of four tokens, none of which is ever out of the question."""
    folder: Path = tmp_path_factory.mktemp("four-tokens")
    build("llama", vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2).save_pretrained(folder)
    return str(folder)


@cache
@torch.no_grad()
def exact(path: str) -> Tensor:
    """Probabilities of all continuations of NUM_TOKENS tokens: float64 [VOCAB ** NUM_TOKENS], in the order of `cell`."""
    texts = torch.tensor([[*PROMPT, *tokens] for tokens in product(range(VOCAB), repeat=NUM_TOKENS)])
    logits = reference(path)(texts, use_cache=False).logits[:, len(PROMPT) - 1 : -1]
    log_p = (logits.double() / TEMPERATURE).log_softmax(-1)
    return log_p.gather(2, texts[:, len(PROMPT) :, None]).sum((1, 2)).exp()


def cell(tokens: tuple[int, ...]) -> int:
    index = 0
    for token in tokens:
        index = index * VOCAB + token
    return index


def drawn(path: str, plan: Plan, verification: str) -> tuple[Tensor, EngineStats]:
    """How often each continuation came, and what the engine did."""
    engine = engine_with(
        parts_of(path),
        plan,
        verification=verification,
        max_draft_tokens=4,
        num_beside=64,
        max_num_seqs=BATCH,
        kv_cache_tokens=BATCH * 96,
    )
    params = [SamplingParams(temperature=TEMPERATURE, seed=seed, max_tokens=NUM_TOKENS) for seed in range(NUM_DRAWS)]
    outputs = complete(engine, [PROMPT] * NUM_DRAWS, params)
    cells = [cell(tuple(output.outputs[0].token_ids)) for output in outputs]
    return torch.tensor(cells).bincount(minlength=VOCAB**NUM_TOKENS), engine.stats


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize("name", PLANS)
def test_continuations_come_as_often_as_they_should(path: str, name: str, verification: str) -> None:
    counts, stats = drawn(path, PLANS[name], verification)
    print(name, verification, excess(counts, exact(path)), stats.num_rounds, stats.num_draft_tokens, stats.num_accepted_tokens)
    assert excess(counts, exact(path)) < 1
    assert stats.num_accepted_tokens > NUM_DRAWS / 10
