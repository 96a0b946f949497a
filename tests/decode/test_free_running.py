"""Whole continuations that the engine draws, free-running, against their exact probabilities, which are enumerated.

What `test_distribution.py` shows of single rules is shown here of all that runs: drafts and trees of a real model,
lookup in the sequence's own text, Jacobi windows, keys and values of accepted branches. Draws are seeded, so a test
gives the same statistic every time; its bound is the one of `test_distribution.py`.
"""

from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rayspec.choices import choices_of
from rayspec.config import SamplingParams
from rayspec.decode import requests, round_planner, rounds
from rayspec.decode.drafting.lookahead import Lookahead
from rayspec.strategies.fixed import lookahead_plan, lookup_plan
from rayspec.types import EngineStats, Plan
from tests.decode.test_distribution import excess
from tests.engines import complete, engine_with, tokens_of
from tests.exhaustive import few_of
from tests.families import build, parts_of, reference

VOCAB, NUM_SUBLAYERS, BATCH = 4, 8, 100
NUM_TOKENS, NUM_DRAWS = 4, 1500
TEMPERATURE = 2.0
PROMPT = (0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3, 0)  # every token after every token
PLANS = {
    "tree": Plan(
        choices=choices_of([index not in (3, 4) for index in range(NUM_SUBLAYERS)]),
        num_draft_tokens=3,
        source="swift",
        tree_widths=(2, 2, 2, 2),
    ),
    "lookup": lookup_plan(NUM_SUBLAYERS, 3),
    "recycling": lookup_plan(NUM_SUBLAYERS, 4, "recycling"),
    "lookahead": lookahead_plan(NUM_SUBLAYERS),
}


class FromPrompt(Lookahead):
    """A small window, and a pool that has the n-grams of the prompt: texts of a few tokens make none."""

    num_levels, num_columns, max_guesses = 3, 2, 4

    def __init__(self, token_ids: Sequence[int]) -> None:
        super().__init__(token_ids)
        for first in range(len(token_ids) - 2):
            self.keep(token_ids[first : first + 3])


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """And copies of texts in which a single token matches."""
    monkeypatch.setattr(requests, "Lookahead", FromPrompt)
    monkeypatch.setattr(round_planner, "_NGRAM", 1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of four tokens, none of which is ever out of the question."""
    folder: Path = tmp_path_factory.mktemp("four-tokens")
    model = build("llama", vocab_size=VOCAB, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    model.save_pretrained(folder)
    return str(folder)


@cache
@torch.no_grad()
def exact(path: str) -> Tensor:
    """Probabilities of all continuations of NUM_TOKENS tokens, by transformers: float64 [VOCAB ** NUM_TOKENS]."""
    texts = torch.tensor([[*PROMPT, *tokens] for tokens in product(range(VOCAB), repeat=NUM_TOKENS)])
    logits = reference(path)(texts, use_cache=False).logits[:, len(PROMPT) - 1 : -1]
    log_p = (logits.double() / TEMPERATURE).log_softmax(-1)
    return log_p.gather(2, texts[:, len(PROMPT) :, None]).sum((1, 2)).exp()


def drawn(path: str, plan: Plan, verification: str) -> tuple[float, EngineStats]:
    """By how much the counts of continuations, one a seed, exceed what chance allows; and what the engine did."""
    engine = engine_with(
        parts_of(path),
        plan,
        verification=verification,
        speculation={"strategy": "recycling" if plan.source == "recycling" else "lookup"},
        max_draft_tokens=4,
        num_beside=16,
        max_num_seqs=BATCH,
        kv_cache_tokens=BATCH * 56,
    )
    params = [SamplingParams(temperature=TEMPERATURE, seed=seed, max_tokens=NUM_TOKENS) for seed in range(NUM_DRAWS)]
    tokens = torch.tensor(tokens_of(complete(engine, [PROMPT] * NUM_DRAWS, params)))
    cells = (tokens * VOCAB ** torch.arange(NUM_TOKENS - 1, -1, -1)).sum(1)
    return excess(cells.bincount(minlength=VOCAB**NUM_TOKENS), exact(path)), engine.stats


@pytest.mark.parametrize(
    ("name", "verification"),
    few_of(list(product(PLANS, ["coupled", "rejection"])), [("recycling", "rejection")]),
)
def test_continuations_come_as_often_as_they_should(path: str, name: str, verification: str) -> None:
    value, stats = drawn(path, PLANS[name], verification)
    assert value < 1
    assert stats.num_accepted_tokens > NUM_DRAWS / 5


@pytest.mark.exhaustive
def test_a_planted_bias_is_seen(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that was refused may come back."""
    monkeypatch.setattr(rounds, "_residual", lambda target, draft: target)
    value, _ = drawn(path, PLANS["lookup"], "rejection")
    assert value > 1
