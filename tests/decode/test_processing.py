"""All rows of all sequences at once against one row at a time: the same bits, whatever the batch."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rayspec.config import Verification
from rayspec.decode import processing
from rayspec.decode.noise import Stream, gumbel
from rayspec.decode.processing import TokenSampler
from rayspec.decode.sampling import Rows, draft_tokens, processed_logits, target_tokens
from rayspec.generation import DecodingParams
from tests.decode.samplers import processed

EOS = (0, 7, 10**6)


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


def any_params(chance: random.Random, vocab_size: int) -> DecodingParams:
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
        sampler = TokenSampler(
            any_params(chance, vocab_size),
            seed=chance.getrandbits(64),
            prompt_token_ids=(3, index),
            eos_token_ids=EOS,
            vocab_size=vocab_size,
            device="cpu",
        )
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
    return [[*committed, *(row.pending[at - 1] for at in row.path(place))] for place in range(len(row.pending) + 1)]


@pytest.mark.parametrize("vocab_size", [12, 130, 3001])
def test_a_batch_has_the_bits_of_its_rows(vocab_size: int) -> None:
    chance = random.Random(vocab_size)
    for _ in range(60):
        logits, rows, outputs = any_batch(chance, vocab_size)
        want, tokens = logits.to(torch.float32, copy=True), logits.argmax(-1)
        for row, committed in zip(rows, outputs, strict=True):
            for at, output in enumerate(histories(row, committed), row.start):
                params, prompt = row.sampler.params, row.sampler.token_ids[:2]
                want[at] = processed_alone(params, logits[at], prompt, output)
                noise = gumbel([row.sampler.seed], [2 + len(output)], vocab_size, Stream.TARGET, "cpu")[0]
                tokens[at] = (want[at] if params.greedy else want[at] + noise).argmax()
        before = logits.clone()
        chance.shuffle(rows)
        assert torch.equal(processed_logits(logits, rows), want)
        assert torch.equal(target_tokens(logits, rows), tokens)
        assert torch.equal(logits, before)


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize("num_ranked", [0, 4])
def test_drafts_of_a_batch_are_those_of_its_sequences(verification: Verification, num_ranked: int) -> None:
    chance, vocab_size = random.Random(5), 3001
    for _ in range(40):
        _, rows, _ = any_batch(chance, vocab_size)
        logits = torch.randn(len(rows), vocab_size) * chance.choice([1, 5])
        together = draft_tokens(logits, rows, verification, num_ranked=num_ranked)
        for at, row in enumerate(rows):
            alone = draft_tokens(logits[at : at + 1], [row], verification, num_ranked=num_ranked)
            assert alone.token_ids[0] == together.token_ids[at]
            assert alone.confidence[0] == together.confidence[at]
            if alone.ranked is not None and together.ranked is not None:
                assert torch.equal(alone.ranked[0], together.ranked[at])
            if alone.logits is not None and together.logits is not None:
                assert torch.equal(alone.logits[0], together.logits[at])


def test_top_p_with_ties_at_the_end_of_the_shortlist() -> None:
    size = processing._SHORTLISTS[0]
    for num_best, num_equal, top_p in [(size - 1, 5, 0.5), (size - 3, 9, 0.999), (0, 3 * size, 0.4), (1, size, 0.97)]:
        logits = torch.full((1, 6 * size), -9.0)
        logits[0, torch.randperm(6 * size)[:num_equal]] = 1.0
        logits[0, torch.randperm(6 * size)[:num_best]] = 4.0
        params = DecodingParams(top_p=top_p)
        sampler = TokenSampler(params, seed=1, prompt_token_ids=(), eos_token_ids=(), vocab_size=6 * size, device="cpu")
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
        samplers = [
            TokenSampler(params, seed=at, prompt_token_ids=(3,), eos_token_ids=EOS, vocab_size=500, device="cpu")
            for at in range(num_sequences)
        ]
        rows = [Rows(sampler, 3 * at, (8, 9)) for at, sampler in enumerate(samplers)]
        with _CountsCalls() as calls:
            target_tokens(logits, rows)
            for sampler in samplers:
                sampler.commit((8, 9, 10))
        counts.append(calls.num_calls)
    assert counts[0] == counts[1]
