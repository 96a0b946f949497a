"""Both rules: the coupled text is the plain text token for token; the rejection rule's edges and its packing."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from rayspec.decode.noise import Stream, gumbel
from rayspec.decode.processing import TokenSampler
from rayspec.decode.sampling import Rows, draft_tokens
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
any_params = pytest.mark.parametrize(
    "params", [SAMPLED, GREEDY, EVERYTHING, GREEDY_EVERYTHING], ids=["sampled", "greedy", "all", "greedy-all"]
)

Model = Callable[[Sequence[int]], Tensor]
Drafter = Callable[[TokenSampler, Sequence[int], random.Random], int]


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


def at_random(sampler: TokenSampler, history: Sequence[int], chance: random.Random) -> int:
    return chance.randrange(V)


def always_right(sampler: TokenSampler, history: Sequence[int], chance: random.Random) -> int:
    pending = history[sampler.position :]
    row = Rows(sampler, 0, pending)
    return int(draft_tokens(toy(history)[None], [row], "coupled").token_ids)


def always_wrong(sampler: TokenSampler, history: Sequence[int], chance: random.Random) -> int:
    return (always_right(sampler, history, chance) + chance.randrange(1, V)) % V


def mostly_right(sampler: TokenSampler, history: Sequence[int], chance: random.Random) -> int:
    return (always_wrong if chance.random() < 0.3 else always_right)(sampler, history, chance)


def toy_tree(
    history: Sequence[int], num_rows: int, drafter: Drafter, sampler: TokenSampler, chance: random.Random
) -> tuple[list[int], list[int], list[list[int]]]:
    """Tokens, the row that each follows, and the tokens on the way to each row, row 0 first."""
    pending: list[int] = []
    parents: list[int] = []
    paths: list[list[int]] = [[]]
    for row in range(num_rows):
        parents.append(row if chance.random() < 0.4 else chance.randint(0, row))
        pending.append(drafter(sampler, [*history, *paths[parents[-1]]], chance))
        paths.append([*paths[parents[-1]], pending[-1]])
    return pending, parents, paths


@any_params
@pytest.mark.parametrize("verification", ["coupled", "looked up"])
@pytest.mark.parametrize("drafter", [at_random, always_wrong, mostly_right])
def test_of_a_tree_the_longest_right_path_stands(params: DecodingParams, drafter: Drafter, verification: str) -> None:
    """Looked up, under the rejection rule, beside a sampled draft: compared in the same way."""
    chance, seeds = random.Random(6), [1, 9]
    samplers, companion = [sampler_of(params, seed) for seed in seeds], sampler_of(SAMPLED, 99)
    plain = {seed: plain_text(params, seed) for seed in seeds}
    texts: list[list[int]] = [[] for _ in seeds]
    num_branches = 0
    while any(len(text) < NUM_TOKENS for text in texts):
        rows, logits, paths = [Rows(companion, 0, [2])], [model_logits(PROMPT, [2])], []
        for sampler, text in zip(samplers, texts, strict=True):
            history = [*PROMPT, *text]
            pending, parents, lead = toy_tree(history, chance.randint(1, 9), drafter, sampler, chance)
            rows.append(Rows(sampler, rows[-1].end, pending, parents))
            logits.append(torch.stack([toy([*history, *path]) for path in lead]))
            paths.append(lead)
        everything = torch.cat(logits)
        if verification == "coupled":
            verdicts = verify_coupled(everything, rows)
        else:
            verdicts = verify_rejection(everything, rows, [toy([5])[None], None, None])
            assert verdicts[0] == verify_rejection(logits[0], rows[:1], [toy([5])[None]])[0]
        for row, text, verdict, lead in zip(rows[1:], texts, verdicts[1:], paths, strict=True):
            want = plain[row.sampler.seed][len(text) :] + [-1] * 20
            right = [path for path in lead if path == want[: len(path)]] if len(text) < NUM_TOKENS - 12 else []
            assert not right or verdict.num_accepted == max(map(len, right))
            path = verdict.path or range(1, verdict.num_accepted + 1)
            assert lead[[0, *path][-1]] == verdict.token_ids[:-1]
            num_branches += bool(verdict.path)
            row.sampler.commit(verdict.token_ids)
            text.extend(verdict.token_ids)
    for seed, text in zip(seeds, texts, strict=True):
        assert text[:NUM_TOKENS] == plain[seed]
    assert (num_branches > 0) == (drafter is not always_wrong)


def test_of_a_tree_that_was_sampled_the_spine_counts() -> None:
    chance = random.Random(2)
    for seed in range(40):
        sampler, spine = sampler_of(SAMPLED, seed), [chance.randrange(V) for _ in range(3)]
        rows = Rows(sampler, 0, [*spine, 4, 5], [0, 1, 2, 0, 4])
        logits, q = model_logits(PROMPT, spine), model_logits([7], spine[:2])
        branches = torch.stack([toy([*PROMPT, 4]), toy([*PROMPT, 4, 5])])
        want = verify_rejection(logits, [Rows(sampler, 0, spine)], [q])
        assert verify_rejection(torch.cat((logits, branches)), [rows], [q]) == want


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
