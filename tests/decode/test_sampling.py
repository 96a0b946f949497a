"""Processing and sampling: all rows of all sequences at once against one row at a time by plain operations: the same
bits, whatever the batch. The noise is SplitMix64's, and has the distribution it claims."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rayspec.decode import processing, sampling
from rayspec.decode.processing import TokenSampler
from rayspec.decode.sampling import (
    DraftSteps,
    Noise,
    PlainSteps,
    Rows,
    Stream,
    logit_rows,
    row_keys,
    target_tokens,
    top_logprobs,
)
from rayspec.decode.work import DecodingParams
from rayspec.model import noise
from rayspec.model.cuda import reference
from rayspec.model.noise import splitmix, uniform
from rayspec.types import InvalidTokenError, Logprob
from tests.decode import samplers
from tests.decode.samplers import chosen, draft_tokens, gumbel_of, processed
from tests.exhaustive import few_of

V = 40
PROMPT = (3, 3, 5, 39)
EOS = (0, 7, 4000)

PARAMS = {
    "greedy": DecodingParams(temperature=0.0),
    "greedy_penalties": DecodingParams(temperature=0.0, repetition_penalty=0.5, frequency_penalty=0.3),
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


def sampler_of(params: DecodingParams, output: Sequence[int] = (), *, seed: int = 1) -> TokenSampler:
    return samplers.sampler_of(params, V, seed, prompt=PROMPT, output=output, eos=EOS)


def random_logits(rows: int, seed: int = 0, vocab_size: int = V) -> Tensor:
    return 3 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "params",
    [
        DecodingParams(min_tokens=5, stop_token_ids=tuple(range(V))),
        DecodingParams(temperature=0, min_tokens=5, stop_token_ids=tuple(range(V))),
        DecodingParams(repetition_penalty=1e300, presence_penalty=2.0),
        DecodingParams(repetition_penalty=1e-300, frequency_penalty=2.0),
        DecodingParams(temperature=3e38),
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
        noise = gumbel_of([sampler.seed], [later.position], V, Stream.DRAFT, origins=origin)[0]
        want = scores.argmax() if sampler.greedy else (scores + noise).argmax()
        assert free.token_ids[index] == want
        for drafts in (coupled, free):
            torch.testing.assert_close(drafts.confidence[index], scores.softmax(0).max())
        if free.logits is not None:
            assert torch.equal(free.logits[index], scores)


@pytest.mark.parametrize("most_ahead", [0, 1 << 18])
def test_noise_that_a_round_keeps_changes_no_token(most_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of which one ends early, and their verify, in which one sequence has a tree. Where it is kept, the noise
    of all positions is computed once."""
    calls = []
    monkeypatch.setattr(sampling, "_MOST_AHEAD", most_ahead)
    keys = sampling.row_keys
    monkeypatch.setattr(sampling, "row_keys", lambda *numbers, **o: calls.append(None) or keys(*numbers, **o))
    names = ["all", "greedy", "greedy_penalties", "all", "all"]
    own = [sampler_of(PARAMS[name], [1] * at, seed=at) for at, name in enumerate(names)]
    kept_noise = Noise(own, 4)
    steps = [[Rows(one, 0, [6] * ahead) for one in own[: 5 - ahead]] for ahead in range(3)]
    rows = [
        Rows(one, 4 * at, [6, 7, 8], (0, 0, 1) if at == 3 else ()) for at, one in enumerate(own)
    ]  # the last logits belong to no sequence
    kept = [draft_tokens(random_logits(len(step)), step, "coupled", noise=kept_noise).token_ids for step in steps]
    kept.append(target_tokens(random_logits(21), rows, kept_noise))
    assert len(calls) == (1 if most_ahead else 4)
    for step, tokens in zip(steps, kept, strict=False):
        assert torch.equal(tokens, draft_tokens(random_logits(len(step)), step, "coupled").token_ids)
    assert torch.equal(kept[-1], target_tokens(random_logits(21), rows))


@pytest.mark.parametrize("most_ahead", [0, 1 << 18])
@pytest.mark.parametrize("names", [["plain"], ["plain", "cut"], ["plain", "greedy", "begin"]])
def test_steps_choose_what_a_verify_chooses(names: list[str], most_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_MOST_AHEAD", most_ahead)
    params = {
        "plain": DecodingParams(temperature=0.7),
        "cut": DecodingParams(temperature=0.9, top_k=5, top_p=0.9),
        "greedy": DecodingParams(temperature=0.0),
        "begin": DecodingParams(min_tokens=3, stop_token_ids=tuple(range(2, 39))),
    }
    own = [sampler_of(params[name], [1], seed=at) for at, name in enumerate(names)]
    steps, logits = PlainSteps(own, 4), random_logits(4 * len(own)).view(4, len(own), V)
    drafts = DraftSteps(own, "coupled", Noise(own, 4))
    for ahead in range(4):
        rows = [Rows(one, (ahead + 1) * at, [0] * ahead) for at, one in enumerate(own)]
        spread = logits[ahead].repeat_interleave(ahead + 1, 0)
        want = target_tokens(spread, rows).view(len(own), ahead + 1)[:, -1]
        assert torch.equal(steps.tokens(logits[ahead], ahead), want)
        assert torch.equal(drafts.draw(logits[ahead], [()] * len(own), ahead).token_ids, want)


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


def processed_alone(params: DecodingParams, logits: Tensor, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """One row, [V], by plain operations: full sorts, counts from nothing."""
    scores = logits.to(torch.float32, copy=True)
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    if len(output) < params.min_tokens:
        masked = scores.clone()
        masked[[token for token in {*EOS, *params.stop_token_ids} if token < len(scores)]] = -math.inf
        scores = scores if masked.max() == -math.inf else masked
    if params.has_penalties:
        scores = penalised_alone(params, scores, prompt, output)
    if params.greedy:
        return scores
    if params.temperature != 1 or params.min_p > 0 or params.top_p < 1:
        scores = (scores - scores.max()) / params.temperature
    if params.min_p > 0:
        scores[scores < math.log(params.min_p)] = -math.inf
    if 0 < params.top_k < len(scores):
        scores[scores < scores.topk(params.top_k).values[-1]] = -math.inf
    if params.top_p < 1:
        ranked, order = scores.sort(descending=True, stable=True)
        mass = ranked.double().softmax(0)
        beyond = mass.cumsum(0) - mass >= params.top_p
        beyond[0] = False
        scores[order[beyond]] = -math.inf
    return scores


def penalised_alone(params: DecodingParams, scores: Tensor, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    counts = torch.tensor(list(output), dtype=torch.int64).bincount(minlength=len(scores)).float()
    repeated = counts > 0
    repeated[list(prompt)] = True
    repetition = min(max(params.repetition_penalty, 1e-30), 1e30)
    largest = torch.finfo(torch.float32).max
    scaled = torch.where(scores > 0, scores / repetition, scores * repetition).clamp(-largest, largest)
    scores = torch.where(repeated & scores.isfinite(), scaled, scores)
    return scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def random_params(chance: random.Random, vocab_size: int) -> DecodingParams:
    def sometimes(value: float, otherwise: float) -> float:
        return value if chance.random() < 0.5 else otherwise

    return DecodingParams(
        temperature=sometimes(chance.uniform(0.1, 2), chance.choice([0.0, 1.0])),
        top_p=sometimes(chance.choice([chance.random() + 1e-9, 0.95, 1e-9]), 1.0),
        top_k=int(sometimes(chance.choice([1, 5, vocab_size, 2 * vocab_size]), 0)),
        min_p=sometimes(chance.choice([0.001, 0.3, 1.0]), 0.0),
        presence_penalty=sometimes(0.4, 0.0),
        frequency_penalty=sometimes(-0.3, 0.0),
        repetition_penalty=sometimes(chance.choice([1.3, 0.6, 1e300]), 1.0),
        min_tokens=int(sometimes(4, 0)),
        stop_token_ids=(1, 2),
        logit_bias={token: chance.uniform(-2, 9) for token in range(3, 6)} if chance.random() < 0.3 else {},
    )


def any_batch(chance: random.Random, vocab_size: int) -> tuple[Tensor, list[Rows], list[list[int]]]:
    """Raw logits, the rows of some sequences in any order, and what was put out before each row."""
    rows, outputs, start = [], [], 0
    for index in range(chance.randint(1, 5)):
        start += chance.randrange(2)  # a row of no sequence
        committed = chance.choices(range(vocab_size), k=chance.choice([0, 2, 30]))
        pending = chance.choices(range(vocab_size), k=chance.randrange(5))
        is_tree = chance.random() < 0.5
        parents = [chance.randint(0, at) for at in range(len(pending))] if is_tree else []
        params, seed = random_params(chance, vocab_size), chance.getrandbits(64)
        sampler = samplers.sampler_of(params, vocab_size, seed, prompt=(3, index), eos=EOS)
        for token in committed:
            sampler.commit([token])
        rows.append(Rows(sampler, start, pending, parents))
        outputs.append(committed)
        start = rows[-1].end
    scale = chance.choice([0.1, 1.0, 5.0, 20.0])
    logits = scale * torch.randn(start, vocab_size, generator=torch.Generator().manual_seed(chance.getrandbits(32)))
    if chance.random() < 0.5:
        logits = logits.to(torch.bfloat16)  # ties
    return logits, rows, outputs


def histories(row: Rows, committed: list[int]) -> list[list[int]]:
    before = [committed]
    for token, parent in zip(row.pending, row.parents or range(len(row.pending)), strict=True):
        before.append([*before[parent], token])
    return before


@pytest.mark.parametrize("vocab_size", few_of([12, 130, 3001], [130]))
def test_a_batch_has_the_bits_of_its_rows(vocab_size: int) -> None:
    chance = random.Random(vocab_size)
    for _ in range(60):
        logits, rows, outputs = any_batch(chance, vocab_size)
        want, tokens = logits.to(torch.float32, copy=True), logits.argmax(-1)
        for row, committed in zip(rows, outputs, strict=True):
            for at, output in enumerate(histories(row, committed), row.start):
                params, prompt = row.sampler.params, row.sampler.token_ids[:2]
                want[at] = processed_alone(params, logits[at], prompt, output)
                noise = gumbel_of([row.sampler.seed], [2 + len(output)], vocab_size, Stream.TARGET)[0]
                tokens[at] = (want[at] if params.greedy else want[at] + noise).argmax()
        before = logits.clone()
        chance.shuffle(rows)
        assert torch.equal(processing.process(logits, logit_rows(rows)), want)
        assert torch.equal(target_tokens(logits, rows), tokens)
        assert torch.equal(logits, before)


def test_top_p_with_ties_at_the_end_of_the_shortlist() -> None:
    size = reference._SHORTLISTS[0]
    for num_best, num_equal, top_p in [(size - 1, 5, 0.5), (size - 3, 9, 0.999), (0, 3 * size, 0.4), (1, size, 0.97)]:
        logits = torch.full((1, 6 * size), -9.0)
        logits[0, torch.randperm(6 * size)[:num_equal]] = 1.0
        logits[0, torch.randperm(6 * size)[:num_best]] = 4.0
        params = DecodingParams(top_p=top_p)
        sampler = samplers.sampler_of(params, 6 * size)
        assert torch.equal(processed(sampler, logits, [])[0], processed_alone(params, logits[0], (), ()))


class _CountsCalls(TorchDispatchMode):
    """Of torch operations while it is active."""

    num_calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


def test_the_number_of_torch_calls_does_not_grow_with_the_number_of_sequences() -> None:
    params = DecodingParams(
        temperature=0.8, top_p=0.95, top_k=40, min_p=0.01, presence_penalty=0.3, min_tokens=9, logit_bias={4: 1.0}
    )
    counts = []
    for num_sequences in (2, 40):
        logits = 5 * torch.randn(3 * num_sequences, 500, generator=torch.Generator().manual_seed(1))
        each = [samplers.sampler_of(params, 500, at, prompt=(3,), eos=EOS) for at in range(num_sequences)]
        rows = [Rows(sampler, 3 * at, (8, 9)) for at, sampler in enumerate(each)]
        target_tokens(logits, rows)  # makes what each sampler counts in
        with _CountsCalls() as calls:
            target_tokens(logits, rows)
            for sampler in each:
                sampler.commit((8, 9, 10))
        counts.append(calls.num_calls)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("params", [{"repetition_penalty": 1.2}, {"allowed_token_ids": [1, 2]}])
def test_a_sequence_that_waits_has_no_tensor_of_the_vocabulary(params: dict[str, Any]) -> None:
    """`n` sequences of a request begin to wait together."""
    samplers.sampler_of(DecodingParams(**params), 2**50, prompt=(3,), eos=EOS)


EXTREME_SEEDS = [0, 1, -1, 2**31, 2**32, -(2**32), 2**63 - 1, -(2**63), 0x123456789ABCDEF]

# The first outputs of Vigna's splitmix64.c with the state 1234567, as Rosetta Code lists them.
KNOWN_ANSWERS = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_splitmix_gives_the_known_answers(kind: Callable[[list[int]], Any]) -> None:
    assert [word % 2**64 for word in splitmix(kind([1234567]), kind(list(range(5)))).tolist()] == KNOWN_ANSWERS


def test_seed_position_origin_and_stream_are_where_the_documentation_says() -> None:
    at = 7 << 33 | 5 << 2 | Stream.RECOVER
    words = splitmix(splitmix(torch.tensor([0x100000009]), torch.tensor([at])), torch.arange(2)).tolist()
    halves = [half for word in words for half in (word & 0x7FFFFFFF, word >> 32 & 0x7FFFFFFF)]
    expected = [-math.log(-math.log1p(-(half + 0.5) / 2**31)) for half in halves]
    found = gumbel_of([0x100000009], [7], 4, Stream.RECOVER, origins=[5])[0]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=1e-6)
    keys = row_keys([0x100000009], [7], Stream.RECOVER, "cpu", origins=[5])
    assert uniform(keys).item() == ((words[0] % 2**64 >> 12) + 0.5) / 2**52


def test_the_ends_of_the_noise() -> None:
    """NumPy on a CPU and torch elsewhere agree, and the noise is finite for every number."""
    halves = torch.tensor([0, 1, 2**31 - 1, -1, -(2**31), *range(2**30, 2**30 + 60)], dtype=torch.int32)
    found = noise._gumbel_of(halves, torch)
    assert found.isfinite().all()
    assert found.min() > -2.9
    assert found.max() < 22.2
    torch.testing.assert_close(torch.from_numpy(noise._gumbel_of(halves.numpy(), np)), found, rtol=0, atol=2e-6)


def test_a_row_does_not_depend_on_its_batch_or_its_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    positions = list(range(len(EXTREME_SEEDS)))
    whole = gumbel_of(EXTREME_SEEDS, positions, 103, Stream.TARGET)
    for row, (seed, position) in enumerate(zip(EXTREME_SEEDS, positions, strict=True)):
        assert torch.equal(gumbel_of([seed], [position], 50, Stream.TARGET)[0], whole[row, :50])
    monkeypatch.setattr(noise, "_CHUNK_WORDS", 110)  # two rows at a time
    assert torch.equal(gumbel_of(EXTREME_SEEDS, positions, 103, Stream.TARGET), whole)
    streams = torch.tensor([position % 4 for position in positions])
    mixed = gumbel_of(torch.tensor(EXTREME_SEEDS), torch.tensor(positions), 103, streams)
    assert torch.equal(mixed[::4], whole[::4])
    assert torch.equal(mixed[1::4], gumbel_of(EXTREME_SEEDS[1::4], positions[1::4], 103, Stream.DRAFT))


@pytest.mark.parametrize("vary", ["seed", "position", "origin"])
def test_distribution(vary: str) -> None:
    """Kolmogorov-Smirnov at odds of 1e-6, and correlation of neighbours within 5 standard deviations (6e-7)."""
    count = 100_000
    index, zero = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    seeds, positions, origins = (index if vary == name else zero for name in ("seed", "position", "origin"))
    u = uniform(row_keys(seeds, positions, Stream.ACCEPT, "cpu", origins=origins))
    g = gumbel_of(seeds, positions, 6, Stream.TARGET, origins=origins).double()
    assert u.dtype is torch.float64
    assert scipy.stats.kstest(u.numpy(), "uniform", method="asymp").pvalue > 1e-6
    for column in g.unbind(1):
        assert scipy.stats.kstest(column.numpy(), "gumbel_r", method="asymp").pvalue > 1e-6
    series = [u, *g.unbind(1)]
    pairs = [(a, b) for a, b in itertools.combinations(series, 2)] + [(a[1:], a[:-1]) for a in series]
    for a, b in pairs:
        assert abs(torch.corrcoef(torch.stack((a, b)))[0, 1].item()) < 5 / math.sqrt(count)
