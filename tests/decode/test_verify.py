"""Both rules: the coupled text is the plain text token for token; the rejection rule's edges and its packing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from rayspec.decode.noise import Stream, gumbel
from rayspec.decode.processing import TokenSampler
from rayspec.decode.sampling import Rows
from rayspec.decode.verify import Verdict, verify_coupled, verify_rejection
from rayspec.generation import DecodingParams
from tests.decode import samplers
from tests.decode.samplers import chosen

V = 12
NUM_TOKENS = 24
PROMPT = (4, 0, 4)

SAMPLED = DecodingParams()
GREEDY = DecodingParams(temperature=0.0)
EVERYTHING = DecodingParams(
    temperature=0.9,
    top_p=0.9,
    top_k=8,
    min_p=0.01,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    repetition_penalty=1.2,
    min_tokens=10,
    max_tokens=64,
    stop_token_ids=(2, 3),
    logit_bias={5: 1.5, 6: -1.0},
)
GREEDY_EVERYTHING = EVERYTHING.replace(temperature=0.0)


@cache
def toy_table(recent: tuple[int, ...]) -> Tensor:
    return 1.5 * gumbel([hash(recent)], [0], V, Stream.TARGET, "cpu")[0]


def toy(history: Sequence[int]) -> Tensor:
    """Raw logits [V] after a history: a random table, indexed by its last three tokens."""
    return toy_table(tuple(history[-3:])).clone()


def model_logits(history: Sequence[int], pending: Sequence[int]) -> Tensor:
    return torch.stack([toy([*history, *pending[:j]]) for j in range(len(pending) + 1)])


def sampler_of(params: DecodingParams, seed: int = 1) -> TokenSampler:
    return samplers.sampler_of(params, V, seed, prompt=PROMPT, eos=(1,))


def plain_text(params: DecodingParams, seed: int) -> list[int]:
    sampler, history = sampler_of(params, seed), list(PROMPT)
    while sampler.num_output_tokens < NUM_TOKENS:
        history.append(int(chosen(sampler, toy(history)[None])))
        sampler.commit(history[-1:])
    return history[len(PROMPT) :]


def test_greedy_sequences_compare_exactly_under_the_rejection_rule() -> None:
    """Alone, and beside a sampled sequence; draft logits, which disagree with the draft, are ignored."""
    text = plain_text(GREEDY_EVERYTHING, 1)
    wrong = [*text[:3], (text[3] + 1) % V, text[4]]
    logits = torch.cat((model_logits(PROMPT, text[:4]), model_logits(PROMPT, wrong), model_logits(PROMPT, [3])))
    nonsense = torch.zeros(5, V)
    rows = [
        Rows(sampler_of(GREEDY_EVERYTHING), 0, text[:4]),
        Rows(sampler_of(GREEDY_EVERYTHING), 5, wrong),
        Rows(sampler_of(SAMPLED), 11, [3]),
    ]
    want = [Verdict(text[:5], 4), Verdict(text[:4], 3)]
    assert verify_rejection(logits[:11], rows[:2], [None, nonsense]) == want
    assert verify_rejection(logits, rows, [nonsense[:4], None, None])[:2] == want
    assert verify_coupled(logits, rows)[:2] == want


@pytest.mark.parametrize("sources", ["sampled", "certain", "mixed"])
def test_packing_does_not_change_a_verdict(sources: str) -> None:
    chance = random.Random(1)
    rows, logits, draft_logits, start = [], [], [], 0
    for index in range(40):
        params = chance.choice([SAMPLED, EVERYTHING, GREEDY, GREEDY_EVERYTHING])
        pending = [chance.randrange(V) for _ in range(chance.randrange(6))]
        rows.append(Rows(sampler_of(params, index), start, pending))
        logits.append(model_logits([index, *PROMPT], pending))
        dense = sources == "sampled" or (sources == "mixed" and chance.random() < 0.5)
        draft_logits.append(toy([index])[None].repeat(len(pending), 1) if dense else None)
        start = rows[-1].end
    together = verify_rejection(torch.cat(logits), rows, draft_logits)
    for row, alone, given, verdict in zip(rows, logits, draft_logits, together, strict=True):
        assert verify_rejection(alone, [Rows(row.sampler, 0, row.pending)], [given]) == [verdict]
    assert any(0 < verdict.num_accepted < len(row.pending) for row, verdict in zip(rows, together, strict=True))


def test_tokens_beyond_the_sampled_ones_are_certain() -> None:
    """A draft that was sampled as far as its logits go, and looked up from there on: as if q were one there."""
    chance = random.Random(3)
    for seed in range(60):
        sampler, pending = sampler_of(SAMPLED, seed), [chance.randrange(V) for _ in range(4)]
        rows, logits = [Rows(sampler, 0, pending)], model_logits(PROMPT, pending)
        sampled = model_logits(PROMPT, pending[:1]) / 2
        certain = torch.full((2, V), -torch.inf)
        certain[[0, 1], pending[2:]] = 0.0
        assert verify_rejection(logits, rows, [sampled]) == verify_rejection(
            logits, rows, [torch.cat((sampled, certain))]
        )
