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


def reference(params: DecodingParams, logits: Sequence[float], output: Sequence[int]) -> list[float]:
    x = list(logits)
    for token, bias in params.logit_bias.items():
        x[token] += bias
    if len(output) < params.min_tokens:
        for token in {*EOS, *params.stop_token_ids}:
            if token < len(x):
                x[token] = -math.inf
    for token in {*PROMPT, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in output:
        x[token] -= params.frequency_penalty
    for token in set(output):
        x[token] -= params.presence_penalty
    return x if params.greedy else reference_truncated(params, [value / params.temperature for value in x])


def reference_truncated(params: DecodingParams, x: list[float]) -> list[float]:
    def probabilities() -> list[float]:
        weights = [math.exp(value - max(x)) for value in x]
        return [weight / sum(weights) for weight in weights]

    p = probabilities()
    x = [value if p[token] >= params.min_p * max(p) else -math.inf for token, value in enumerate(x)]
    if params.top_k > 0:
        x = [value if sum(other > value for other in x) < params.top_k else -math.inf for value in x]
    p, mass = probabilities(), 0.0
    for token in sorted(range(len(x)), key=lambda token: (-x[token], token)):
        if mass >= params.top_p and params.top_p < 1:
            x[token] = -math.inf
        mass += p[token]
    return x


@any_params
@pytest.mark.parametrize("output", [[], [3], [1, 1, 2, 8, 1, 39]], ids=["none", "one", "six"])
def test_process_equals_the_reference(params: DecodingParams, output: list[int]) -> None:
    logits = random_logits(30)
    for row in logits:
        got = processed(sampler_of(params, output), row[None], [])[0]
        want = torch.tensor(reference(params, row.tolist(), output), dtype=torch.float64)
        want = want if params.greedy else want - want.max()
        assert got.dtype is torch.float32
        assert torch.equal(got.isinf(), want.isinf())
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-5)


@any_params
def test_pending_history_equals_sequential_application(params: DecodingParams) -> None:
    output, pending, logits = [8, 1], [1, 7, 1, 3], random_logits(5)
    speculative = sampler_of(params, output)
    packed = processed(speculative, logits, pending)
    sequential = sampler_of(params)
    sequential.commit(output)
    for j in range(5):
        assert sequential.position == len(PROMPT) + 2 + j
        alone = processed(sequential, logits[j : j + 1], [])
        assert torch.equal(packed[j : j + 1], alone)
        assert torch.equal(processed(speculative, logits[j : j + 1], pending, first=j), alone)
        assert torch.equal(processed(speculative, logits[j:], pending, first=j), packed[j:])
        sequential.commit(pending[j : j + 1])
    assert (speculative.num_output_tokens, speculative.position) == (2, len(PROMPT) + 2)


@any_params
def test_values_of_pending_matter_only_where_it_says_so(params: DecodingParams) -> None:
    sampler, logits = sampler_of(params), random_logits(4)
    same = torch.equal(processed(sampler, logits, [9, 9, 9]), processed(sampler, logits, [1, 2, 3]))
    assert same != sampler.reads_history


@any_params
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_process_leaves_its_argument_alone_and_computes_in_float32(params: DecodingParams, dtype: torch.dtype) -> None:
    logits = random_logits(3).to(dtype)
    before = logits.clone()
    got = processed(sampler_of(params), logits, [1, 2])
    assert torch.equal(logits, before)
    assert torch.equal(got, processed(sampler_of(params), logits.float(), [1, 2]))


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


def test_a_minus_infinity_from_the_model_stays_forbidden() -> None:
    logits = random_logits(1)
    logits[0, 3] = -math.inf
    for params in PARAMS.values():
        assert processed(sampler_of(params, [3, 3]), logits, [])[0, 3] == -math.inf


def test_is_argmax() -> None:
    plain = {name for name, params in PARAMS.items() if sampler_of(params).is_argmax}
    assert plain == {"greedy"}
    lengths = {4: True, 3: False}
    for length, is_argmax in lengths.items():
        assert sampler_of(PARAMS["greedy_min_tokens"], [1] * length).is_argmax == is_argmax
    no_stops = TokenSampler(
        PARAMS["greedy_min_tokens"].replace(stop_token_ids=()),
        seed=0,
        prompt_token_ids=(),
        eos_token_ids=(),
        vocab_size=V,
        device="cpu",
    )
    assert no_stops.is_argmax


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 12345])
def test_the_coupled_rule_is_argmax_of_logits_and_noise(seed: int) -> None:
    sampler, logits = sampler_of(PARAMS["all"], [1, 2], seed=seed), random_logits(4)
    noise = gumbel([seed] * 4, [6, 7, 8, 9], V, Stream.TARGET, "cpu")
    want = (processed(sampler, logits, [5, 6, 7]) + noise).argmax(1)
    assert torch.equal(chosen(sampler, logits, [5, 6, 7]), want)


def test_packed_rows_equal_each_sequence_alone() -> None:
    pendings = [[], [1], [2, 2, 3], [4, 5], []]
    for names in (["greedy"] * 5, ["greedy", "all", "greedy_penalties", "top_p", "plain"], ["greedy_penalties"] * 5):
        rows, start = [], 1  # row 0 belongs to nobody
        for index, (name, pending) in enumerate(zip(names, pendings, strict=True)):
            rows.append(Rows(sampler_of(PARAMS[name], [index], seed=index), start, pending))
            start = rows[-1].end
        logits = random_logits(start)
        packed = target_tokens(logits, rows[::-1])
        assert packed[0] == logits[0].argmax()
        for row in rows:
            assert torch.equal(
                packed[row.start : row.end], chosen(row.sampler, logits[row.start : row.end], row.pending)
            )


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


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(InvalidTokenError, match="logit_bias holds token 40: give tokens from 0 to 39"):
        sampler_of(DecodingParams(logit_bias={40: 1.0}))
    sampler = sampler_of(PARAMS["repetition"])
    with pytest.raises(InvalidTokenError, match="token_ids holds token -1"):
        sampler.commit([-1])
    with pytest.raises(InvalidTokenError, match="pending holds token 77"):
        processed(sampler, random_logits(2), [77])


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
