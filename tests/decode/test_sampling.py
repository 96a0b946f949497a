"""Parameters against a slow reference in plain Python; history under speculation; the packed entries."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rayspec.config import Verification
from rayspec.decode.noise import Stream, gumbel
from rayspec.decode.processing import TokenSampler
from rayspec.decode.sampling import Rows, draft_tokens, finite_rows, target_tokens, top_logprobs
from rayspec.generation import DecodingParams
from rayspec.types import InvalidTokenError, Logprob
from tests.decode.samplers import chosen, processed

V = 40
PROMPT = (3, 3, 5, 39)
EOS = (0, 7, 4000)

PARAMS = {
    "plain": DecodingParams(),
    "greedy": DecodingParams(temperature=0.0),
    "temperature": DecodingParams(temperature=0.4),
    "bias": DecodingParams(logit_bias={2: 5.0, 9: -100.0}),
    "min_tokens": DecodingParams(min_tokens=4, stop_token_ids=(11, 999)),
    "greedy_min_tokens": DecodingParams(temperature=0.0, min_tokens=4, stop_token_ids=(11,)),
    "presence": DecodingParams(presence_penalty=1.5),
    "frequency": DecodingParams(frequency_penalty=-0.7),
    "repetition": DecodingParams(repetition_penalty=1.7),
    "greedy_penalties": DecodingParams(temperature=0.0, repetition_penalty=0.5, frequency_penalty=0.3),
    "top_k": DecodingParams(top_k=5),
    "top_k_off": DecodingParams(top_k=-1),
    "top_k_all": DecodingParams(top_k=1000),
    "top_p": DecodingParams(top_p=0.6),
    "min_p": DecodingParams(min_p=0.2),
    "all": DecodingParams(
        temperature=0.8,
        top_p=0.8,
        top_k=12,
        min_p=0.02,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        repetition_penalty=1.3,
        min_tokens=3,
        stop_token_ids=(12,),
        logit_bias={1: 3.0, 30: -2.0},
    ),
}
any_params = pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())


def sampler_of(
    params: DecodingParams, output: Sequence[int] = (), *, seed: int = 1, vocab_size: int = V
) -> TokenSampler:
    return TokenSampler(
        params,
        seed=seed,
        prompt_token_ids=PROMPT,
        eos_token_ids=EOS,
        output_token_ids=output,
        vocab_size=vocab_size,
        device="cpu",
    )


def random_logits(rows: int, seed: int = 0, vocab_size: int = V) -> Tensor:
    return 3 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


@any_params
def test_values_of_pending_matter_only_where_it_says_so(params: DecodingParams) -> None:
    sampler, logits = sampler_of(params), random_logits(4)
    same = torch.equal(processed(sampler, logits, [9, 9, 9]), processed(sampler, logits, [1, 2, 3]))
    assert same != sampler.reads_history


@pytest.mark.parametrize(
    "params",
    [
        DecodingParams(min_tokens=5, stop_token_ids=tuple(range(V))),
        DecodingParams(temperature=0, min_tokens=5, stop_token_ids=tuple(range(V))),
        DecodingParams(repetition_penalty=1e300, presence_penalty=2.0),
        DecodingParams(repetition_penalty=1e-300, frequency_penalty=2.0),
        DecodingParams(temperature=1e-5, logit_bias=dict.fromkeys(range(V), -100.0)),
        DecodingParams(top_p=1e-12, top_k=1, min_p=1.0),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 0.0, 1e38])
def test_something_is_always_left(params: DecodingParams, scale: float) -> None:
    logits = (random_logits(4) / 12 * scale).clamp(-3e38, 3e38)
    logits[1, 1:] = -math.inf
    got = processed(sampler_of(params, [0, 1, 2]), logits, list(range(4)))
    assert got.amax(1).isfinite().all()
    assert not got.isnan().any()


def test_ties() -> None:
    logits = torch.zeros(1, V)
    assert processed(sampler_of(DecodingParams(top_k=3)), logits, []).isfinite().sum() == V
    kept = processed(sampler_of(DecodingParams(top_p=0.19)), logits, [])[0].isfinite().nonzero().flatten()
    assert kept.tolist() == list(range(8))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@any_params
def test_broken_rows_are_detected_and_do_not_crash_or_touch_others(params: DecodingParams, value: float) -> None:
    logits = random_logits(3)
    broken = logits.clone()
    broken[1, 4:] = value
    if value == -math.inf:
        broken[1] = value
    assert finite_rows(broken).tolist() == [True, False, True]
    assert finite_rows(broken.bfloat16()).tolist() == [True, False, True]
    rows = [Rows(sampler_of(params), 0, [1, 2])]
    tokens = target_tokens(broken, rows)
    assert torch.equal(tokens[::2], target_tokens(logits, rows)[::2])
    assert 0 <= tokens[1] < V
    singles = [Rows(sampler_of(params), index, ()) for index in range(3)]
    verifications: tuple[Verification, ...] = ("coupled", "rejection")
    for verification in verifications:
        drafts = draft_tokens(broken, singles, verification)
        assert ((drafts.token_ids >= 0) & (drafts.token_ids < V)).all()
        assert drafts.confidence.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("names", [["greedy", "greedy", "greedy"], ["greedy", "all", "greedy_penalties"], ["all"] * 3])
def test_draft_tokens(names: list[str]) -> None:
    logits, pending = random_logits(3), [6, 6]
    samplers = [sampler_of(PARAMS[name], [1], seed=9 + index) for index, name in enumerate(names)]
    rows = [Rows(sampler, 0, pending) for sampler in samplers]
    coupled, free = draft_tokens(logits, rows, "coupled"), draft_tokens(logits, rows, "rejection")
    assert coupled.logits is None
    assert (free.logits is None) == (names == ["greedy"] * 3)
    for index, sampler in enumerate(samplers):
        alone = logits[index : index + 1]
        scores = processed(sampler, alone, pending, first=2)[0]
        later = sampler_of(sampler.params, [1, 6, 6], seed=sampler.seed)
        assert coupled.token_ids[index] == chosen(later, alone)[0]  # a perfect draft always agrees
        origin = [sampler.position]
        noise = gumbel([sampler.seed], [later.position], V, Stream.DRAFT, "cpu", origins=origin)[0]
        want = scores.argmax() if sampler.greedy else (scores + noise).argmax()
        assert free.token_ids[index] == want
        for drafts in (coupled, free):
            torch.testing.assert_close(drafts.confidence[index], scores.softmax(0).max())
        if free.logits is not None:
            assert torch.equal(free.logits[index], scores)


def test_draft_noise_is_new_in_every_round() -> None:
    logits = torch.zeros(64, V)
    early = [Rows(sampler_of(PARAMS["plain"], [1], seed=seed), 0, [2]) for seed in range(64)]
    later = [Rows(sampler_of(PARAMS["plain"], [1, 2], seed=seed), 0, []) for seed in range(64)]
    first, second = (draft_tokens(logits, rows, "rejection").token_ids for rows in (early, later))
    assert (first == second).sum() < 16
    first, second = (draft_tokens(logits, rows, "coupled").token_ids for rows in (early, later))
    assert torch.equal(first, second)


def test_top_logprobs() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, -math.inf]] * 2)
    values = logits[0].log_softmax(0).tolist()
    first, second = top_logprobs(logits.double(), [2, 4], 2)
    assert first == {
        1: Logprob(logprob=values[1], rank=1),
        3: Logprob(logprob=values[1], rank=1),
        2: Logprob(logprob=values[2], rank=3),
    }
    assert second[4] == Logprob(logprob=-math.inf, rank=5)
    assert top_logprobs(logits, [1, 0], 0)[1] == {0: Logprob(logprob=values[0], rank=4)}
    assert len(top_logprobs(logits, [1, 0], 20)[0]) == 5
    with pytest.raises(InvalidTokenError, match="token_ids holds token 5"):
        top_logprobs(logits, [1, 5], 1)


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_ranked_are_the_tokens_nearest_to_being_drawn(verification: Verification) -> None:
    """Under the coupled rule without those before it the next one would be drawn; nothing is ranked unless asked."""
    torch.manual_seed(3)
    logits = torch.randn(20, V)
    params = [DecodingParams(temperature=index % 2) for index in range(20)]
    rows = [Rows(sampler_of(one, seed=index), index, ()) for index, one in enumerate(params)]
    assert draft_tokens(logits, rows, verification).ranked is None
    ranked = draft_tokens(logits, rows, verification, num_ranked=3).ranked
    assert ranked is not None
    left = logits.clone()
    for place in range(3):
        assert draft_tokens(left, rows, verification).token_ids.tolist() == ranked[:, place].tolist()
        left.scatter_(1, ranked[:, place : place + 1], -torch.inf)
