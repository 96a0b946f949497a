"""Both rules: the coupled text is the plain text token for token; the rejection rule's edges and its packing."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from rayspec.config import Verification
from rayspec.decode import verify
from rayspec.decode.noise import Stream, gumbel, uniform
from rayspec.decode.processing import TokenSampler
from rayspec.decode.sampling import Rows, draft_tokens
from rayspec.decode.verify import Verdict, verify_coupled, verify_rejection
from rayspec.generation import DecodingParams
from rayspec.types import InvalidTokenError
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
    return TokenSampler(params, seed=seed, prompt_token_ids=PROMPT, eos_token_ids=(1,), vocab_size=V, device="cpu")


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


@any_params
@pytest.mark.parametrize("drafter", [at_random, always_right, always_wrong, mostly_right])
def test_coupled_text_is_the_plain_text_whatever_is_drafted(params: DecodingParams, drafter: Drafter) -> None:
    chance, seeds = random.Random(5), [1, -7, 2**63 - 1]
    samplers = [sampler_of(params, seed) for seed in seeds]
    texts: list[list[int]] = [[] for _ in seeds]
    num_drafted = num_accepted = 0
    while any(len(text) < NUM_TOKENS for text in texts):
        rows: list[Rows] = []
        logits: list[Tensor] = []
        for sampler, text in zip(samplers, texts, strict=True):
            pending: list[int] = []
            for _ in range(chance.randrange(6)):
                pending.append(drafter(sampler, [*PROMPT, *text, *pending], chance))
            rows.append(Rows(sampler, sum(len(each) for each in logits), pending))
            logits.append(model_logits([*PROMPT, *text], pending))
        for row, text, verdict in zip(rows, texts, verify_coupled(torch.cat(logits), rows), strict=True):
            assert verdict.token_ids[:-1] == row.pending[: verdict.num_accepted]
            num_drafted, num_accepted = num_drafted + len(row.pending), num_accepted + verdict.num_accepted
            row.sampler.commit(verdict.token_ids)
            text.extend(verdict.token_ids)
    for seed, text in zip(seeds, texts, strict=True):
        assert text[:NUM_TOKENS] == plain_text(params, seed)
    assert num_drafted > 20
    assert (num_accepted == num_drafted) == (drafter is always_right)
    assert (num_accepted == 0) == (drafter is always_wrong)


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


@any_params
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_an_empty_draft_is_plain_decoding(params: DecodingParams, verification: Verification) -> None:
    samplers = [sampler_of(params, seed) for seed in range(5)]
    companion = sampler_of(SAMPLED, 99)  # with a draft, so that the batch takes the general path
    texts: list[list[int]] = [[] for _ in samplers]
    for _ in range(NUM_TOKENS):
        rows = [Rows(sampler, index, []) for index, sampler in enumerate(samplers)] + [Rows(companion, 5, [2])]
        logits = torch.cat((torch.stack([toy([*PROMPT, *text]) for text in texts]), model_logits(PROMPT, [2])))
        if verification == "coupled":
            verdicts = verify_coupled(logits, rows)
        else:
            verdicts = verify_rejection(logits, rows, [None] * 6)
        for sampler, text, verdict in zip(samplers, texts, verdicts[:5], strict=True):
            assert verdict.num_accepted == 0
            sampler.commit(verdict.token_ids)
            text.extend(verdict.token_ids)
    assert texts == [plain_text(params, seed) for seed in range(5)]


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


def one_round(p: Tensor, q: Tensor | None, drafts: Sequence[int]) -> list[Verdict]:
    """For seeds 0, 1, ...: a verdict on a draft of one token, with target logits p, and p again for the bonus token."""
    rows = [Rows(sampler_of(SAMPLED, seed), 2 * seed, [draft]) for seed, draft in enumerate(drafts)]
    return verify_rejection(p.repeat(2 * len(rows), 1), rows, [None if q is None else q[None]] * len(rows))


def test_acceptance_is_the_ratio_against_the_position_noise() -> None:
    p, q = toy([1]), toy([2])
    seeds = torch.arange(300)
    drafts = seeds % V
    u = uniform(seeds, torch.full_like(seeds, len(PROMPT)), Stream.ACCEPT)
    for given, q_drafts in ((q, q.softmax(0)[drafts]), (None, torch.ones(300))):
        want = u * q_drafts.double() <= p.softmax(0)[drafts].double()
        assert [verdict.num_accepted for verdict in one_round(p, given, drafts.tolist())] == want.long().tolist()
        assert 0 < want.sum() < 300


def test_what_the_target_forbids_never_comes_out() -> None:
    p = toy([1])
    p[[2, 5]] = -torch.inf
    for given in (torch.zeros(V), None):
        verdicts = one_round(p, given, [2] * 300)
        assert all(verdict.num_accepted == 0 and verdict.token_ids[0] not in (2, 5) for verdict in verdicts)


def test_a_token_that_the_draft_could_not_have_drawn_is_refused() -> None:
    q = toy([2])
    q[4] = -torch.inf
    assert all(verdict.num_accepted == 0 for verdict in one_round(toy([1]), q, [4] * 50))


def test_equal_distributions_accept_everything() -> None:
    p = toy([1])
    assert all(verdict.num_accepted == 1 for verdict in one_round(p, p, [seed % V for seed in range(300)]))


def test_a_rejected_certain_draft_is_never_recovered() -> None:
    verdicts = one_round(torch.zeros(V), None, [4] * 300)
    assert {verdict.token_ids[0] for verdict in verdicts if not verdict.num_accepted} == set(range(V)) - {4}


def test_an_empty_residual_falls_back_to_the_target() -> None:
    p = torch.tensor([[0.0, 0.3, 0.7], [0.2, 0.2, 0.6]])
    residual = verify._residual(p, torch.stack((p[0], torch.tensor([0.6, 0.2, 0.2]))))
    torch.testing.assert_close(residual, torch.tensor([[0.0, 0.3, 0.7], [0.0, 0.0, 0.4]]))


def test_nothing_after_a_rejection_stands() -> None:
    p = torch.full((V,), -torch.inf)
    p[3] = 0.0
    rows = [Rows(sampler_of(SAMPLED), 0, [3, 5, 3, 3])]
    assert verify_rejection(p.repeat(5, 1), rows, [None]) == [Verdict([3, 3], 1)]
    assert verify_coupled(p.repeat(5, 1), rows) == [Verdict([3, 3], 1)]


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


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_broken_logits_do_not_crash_and_do_not_touch_others(value: float) -> None:
    rows = [Rows(sampler_of(params, index), 3 * index, [1, 2]) for index, params in enumerate([EVERYTHING] * 3)]
    logits = torch.cat([model_logits(PROMPT, [1, 2])] * 3)
    q = model_logits(PROMPT, [2])
    broken = logits.clone()
    broken[3:6] = value
    for got, want in (
        (verify_coupled(broken, rows), verify_coupled(logits, rows)),
        (verify_rejection(broken, rows, [q, q, None]), verify_rejection(logits, rows, [q, q, None])),
    ):
        assert (got[0], got[2]) == (want[0], want[2])
        assert all(0 <= token < V for token in got[1].token_ids)


def test_errors_name_what_is_wrong() -> None:
    rows, logits = [Rows(sampler_of(SAMPLED), 0, [1])], torch.zeros(2, V)
    with pytest.raises(ValueError, match="2 rows for a draft of 1"):
        verify_rejection(logits, rows, [logits])
    with pytest.raises(ValueError, match="0 draft_logits for 1 sequences"):
        verify_rejection(logits, rows, [])
    with pytest.raises(InvalidTokenError, match="pending holds token -1"):
        verify_rejection(logits, [Rows(sampler_of(SAMPLED), 0, [-1])], [None])


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
