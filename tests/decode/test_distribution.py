"""Both rules give the target's distribution, and the checks that say so would notice if they did not.

Every draw is a seed, so a test gives the same statistic every time. The bound is vLLM's, df + 10 sqrt(2 df): a correct
implementation exceeds it by chance with odds of 5e-9 at df = 15, below 1e-11 from df = 30 on. The checks run on the
implementation and on copies of it with a planted bias, which must exceed the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from rayspec.decode import rounds
from rayspec.decode.rounds import decide, verify_rejection
from rayspec.decode.sampling import Rows, Stream, row_keys, target_tokens
from rayspec.decode.work import DecodingParams
from tests.decode.samplers import draft_tokens, gumbel_of, processed, sampler_of
from tests.exhaustive import few_of

EVERYTHING = DecodingParams(
    temperature=0.9,
    top_p=0.95,
    top_k=5,
    min_p=0.01,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
    logit_bias={1: 0.7},
    min_tokens=2,
)


def random_logits(vocab_size: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed))


def excess(counts: Tensor, probabilities: Tensor) -> float:
    """The chi-squared statistic over its bound: a correct sampler stays below 1. Cells expected less than five times
    are one cell; something that cannot happen but did is infinite."""
    counts, expected = counts.flatten().double(), probabilities.flatten().double() * counts.sum()
    if (counts[expected == 0] > 0).any():
        return math.inf
    rare = expected < 5
    pooled = [(counts[~rare], expected[~rare])]
    if expected[rare].sum() > 5:
        pooled.append((counts[rare].sum()[None], expected[rare].sum()[None]))
    observed, wanted = (torch.cat(parts) for parts in zip(*pooled, strict=True))
    df = len(wanted) - 1
    return ((observed - wanted) ** 2 / wanted).sum().item() / (df + 10 * math.sqrt(2 * df))


def plant_recovered_from_target(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rounds, "_residual", lambda target, draft: target)


def plant_shared_noise(patch: pytest.MonkeyPatch) -> None:
    """The recovered token is drawn with the noise that the draft was drawn with."""

    def shared(seeds: Tensor, positions: Tensor, stream: int | Tensor, device: torch.device) -> Tensor:
        recovers = torch.as_tensor(stream) == int(Stream.RECOVER)
        stream = torch.where(recovers, int(Stream.DRAFT), stream)
        return row_keys(seeds, positions, stream, device, origins=torch.where(recovers, positions, 0))

    patch.setattr(rounds, "row_keys", shared)


def plant_lenient(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rounds, "_accepts", lambda p, q, noise: noise * q <= 1.2 * p)


VOCAB, NUM_TOKENS, LONGEST = 6, 3, 2


@dataclass(frozen=True)
class Toy:
    """A target and a draft over VOCAB tokens, as tables over every history of up to NUM_TOKENS + LONGEST tokens:
    raw logits of a second-order Markov chain, and what a sampler's parameters make of them."""

    params: DecodingParams
    raw_target: Tensor
    raw_draft: Tensor
    target: Tensor
    draft: Tensor

    @classmethod
    def make(cls, params: DecodingParams) -> Toy:
        sampler = sampler_of(params, VOCAB, eos=(0,))
        raw: list[tuple[Tensor, Tensor]] = []
        both: list[list[Tensor]] = []
        for length in range(NUM_TOKENS + LONGEST):
            for history in product(range(VOCAB), repeat=length):
                state = index_of(list(history[-2:]))
                target = random_logits(VOCAB, state)
                raw.append((target, random_logits(VOCAB, 1000 + state) - 0.3 * target))
                both.append([processed(sampler, row[None], history, first=length)[0] for row in raw[-1]])
        raw_target, raw_draft = (torch.stack(rows) for rows in zip(*raw, strict=True))
        target, draft = (torch.stack(rows) for rows in zip(*both, strict=True))
        return cls(params, raw_target, raw_draft, target, draft)

    def joint(self) -> Tensor:
        """Exact probabilities of the first NUM_TOKENS tokens, [VOCAB] * NUM_TOKENS."""
        joint = torch.ones(1, dtype=torch.float64)
        for length in range(NUM_TOKENS):
            begin = index_of([0] * length)
            table = self.target[begin : begin + VOCAB**length].double()
            joint = (joint.unsqueeze(1) * table.softmax(1)).flatten()
        return joint


def history_index(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Rows of Toy's tables for the first `lengths` tokens of each row of [S, at least max(lengths)]."""
    index = torch.zeros_like(lengths)
    for at in range(tokens.shape[1]):
        index = torch.where(at < lengths, index * VOCAB + tokens[:, at], index)
    return index + (VOCAB**lengths - 1) // (VOCAB - 1)


Lengths = Callable[[Tensor, Tensor, Tensor], Tensor]


def varied_lengths(seeds: Tensor, committed: Tensor, stale: Tensor) -> Tensor:
    return (seeds + committed) % (LONGEST + 1)


def steered_lengths(seeds: Tensor, committed: Tensor, stale: Tensor) -> Tensor:
    """Looks at what an earlier round drafted here, behind a rejection: drafts only if that was an even token."""
    return torch.where(stale < 0, 2, (stale % 2 == 0).long())


def generate(
    toy: Toy, num_draws: int, lengths_of: Lengths, *, fresh: bool = True, rule: Callable[..., tuple[Tensor, Tensor]]
) -> Tensor:
    """Rounds until each of `num_draws` seeds has NUM_TOKENS tokens: int64 [num_draws, NUM_TOKENS]."""
    seeds = torch.arange(num_draws)
    tokens = torch.zeros(num_draws, NUM_TOKENS + LONGEST + 1, dtype=torch.int64)
    committed, stale = torch.zeros_like(seeds), torch.full_like(seeds, -1)
    while (live := (committed < NUM_TOKENS).nonzero().flatten()).numel():
        begin, text, own = committed[live], tokens[live], seeds[live]
        lengths = lengths_of(own, begin, stale[live])
        draft_scores = torch.zeros(len(live), LONGEST, VOCAB)
        for ahead in range(LONGEST):
            at = begin + ahead
            scores = toy.draft[history_index(text, at)]
            origins = begin if fresh else torch.zeros_like(begin)
            noise = gumbel_of(own, at, VOCAB, Stream.DRAFT, origins)
            text.scatter_(1, at.unsqueeze(1), (scores + noise).argmax(1, keepdim=True))
            draft_scores[:, ahead] = scores
        accepted, last = rule(toy, text, begin, lengths, draft_scores, own)
        rejected = begin + accepted + 1
        drafted = text.gather(1, rejected.clamp_max(tokens.shape[1] - 1).unsqueeze(1)).squeeze(1)
        stale[live] = torch.where(accepted + 1 < lengths, drafted, -1)
        text.scatter_(1, (begin + accepted).unsqueeze(1), last.unsqueeze(1))
        tokens[live], committed[live] = text, begin + accepted + 1
    return tokens[:, :NUM_TOKENS]


def reject(
    toy: Toy,
    text: Tensor,
    begin: Tensor,
    lengths: Tensor,
    draft_scores: Tensor,
    seeds: Tensor,
    num_sampled: int = LONGEST,
) -> tuple[Tensor, Tensor]:
    """The rejection rule; tokens from `num_sampled` on count as looked up."""
    ahead = torch.arange(LONGEST + 1)
    owned = ahead <= lengths.unsqueeze(1)  # ragged: sequence s has lengths[s] + 1 rows
    histories = torch.stack([history_index(text, begin + offset) for offset in range(LONGEST + 1)], 1)
    drafts = text.gather(1, (begin.unsqueeze(1) + ahead).clamp_max(text.shape[1] - 1))
    draft_rows = torch.arange(len(seeds)).unsqueeze(1) * LONGEST + ahead
    return decide(
        scores=toy.target[histories[owned]],
        drafts=drafts[owned],
        draft_scores=draft_scores.flatten(0, 1),
        draft_rows=torch.where(ahead < lengths.unsqueeze(1).clamp_max(num_sampled), draft_rows, -1)[owned],
        seeds=seeds,
        positions=begin,
        first_rows=(lengths + 1).cumsum(0) - lengths - 1,
        lengths=lengths,
        longest=LONGEST,
    )


def reject_looked_up(*arguments: Tensor) -> tuple[Tensor, Tensor]:
    return reject(*arguments, num_sampled=0)  # type: ignore[arg-type]


def reject_both(*arguments: Tensor) -> tuple[Tensor, Tensor]:
    """A draft that was sampled, and looked up from its second token on."""
    return reject(*arguments, num_sampled=1)  # type: ignore[arg-type]


def joint_excess(toy: Toy, tokens: Tensor) -> float:
    cells = (tokens * VOCAB ** torch.arange(NUM_TOKENS - 1, -1, -1)).sum(1)
    return excess(cells.bincount(minlength=VOCAB**NUM_TOKENS), toy.joint())


@pytest.fixture(scope="module", params=["plain", "everything"])
def toy(request: pytest.FixtureRequest) -> Toy:
    return Toy.make(EVERYTHING if request.param == "everything" else DecodingParams())


@pytest.mark.parametrize(
    ("rule", "lengths_of"),
    few_of(
        list(product([reject, reject_looked_up, reject_both], [varied_lengths, steered_lengths])),
        [(reject, steered_lengths), (reject_looked_up, varied_lengths), (reject_both, steered_lengths)],
    ),
)
def test_joint_of_several_rounds(toy: Toy, rule: Callable[..., tuple[Tensor, Tensor]], lengths_of: Lengths) -> None:
    assert joint_excess(toy, generate(toy, 100_000, lengths_of, rule=rule)) < 1


@pytest.mark.parametrize("plant", [plant_recovered_from_target, plant_lenient, plant_shared_noise])
@pytest.mark.parametrize("toy", ["everything"], indirect=True)
def test_joint_flags_planted_biases(monkeypatch: pytest.MonkeyPatch, toy: Toy, plant: Callable[..., None]) -> None:
    plant(monkeypatch)
    assert joint_excess(toy, generate(toy, 100_000, varied_lengths, rule=reject)) > 1


def test_joint_flags_draft_noise_that_a_stale_draft_has_shown(toy: Toy) -> None:
    """Why DRAFT noise depends on the round: `steered_lengths` above passes with it and fails without."""
    assert joint_excess(toy, generate(toy, 100_000, steered_lengths, rule=reject, fresh=False)) > 1


def test_coupled_target_tokens() -> None:
    """Many positions of one sequence; neighbours must be independent too."""
    params = DecodingParams(temperature=0.8, top_p=0.97, min_p=0.002, logit_bias={3: 1.0})
    logits = random_logits(16, 8)
    samplers = [sampler_of(params, 16, -5, prompt=range(begin)) for begin in range(0, 16_000, 4_000)]
    expanded = logits.expand(4_000, -1)
    tokens = torch.cat([target_tokens(expanded, [Rows(one, 0, range(3_999))]) for one in samplers])
    p = processed(sampler_of(params, 16, -5), logits[None], [])[0].double().softmax(0)
    assert excess(tokens.bincount(minlength=16), p) < 1
    pairs = tokens[:-1:2] * 16 + tokens[1::2]
    assert excess(pairs.bincount(minlength=256), p.outer(p)) < 1


def test_engine_path_draws_what_the_vectorised_one_draws(toy: Toy) -> None:
    """TokenSampler, Rows, DraftSteps and verify_rejection, per sequence, against `generate` with the same seeds."""
    num = 150
    want = generate(toy, num, varied_lengths, rule=reject).tolist()
    samplers = [sampler_of(toy.params, VOCAB, seed, eos=(0,)) for seed in range(num)]
    texts: list[list[int]] = [[] for _ in samplers]
    while live := [index for index, text in enumerate(texts) if len(text) < NUM_TOKENS]:
        lengths = [(index + len(texts[index])) % (LONGEST + 1) for index in live]
        pendings: list[list[int]] = [[] for _ in live]
        draft_logits: list[list[Tensor]] = [[] for _ in live]
        for ahead in range(LONGEST):
            going = [at for at, length in enumerate(lengths) if ahead < length]
            rows = [Rows(samplers[live[at]], 0, tuple(pendings[at])) for at in going]
            logits = toy.raw_draft[[index_of(texts[live[at]] + pendings[at]) for at in going]]
            drafts = draft_tokens(logits, rows, "rejection")
            for place, (at, token) in enumerate(zip(going, drafts.token_ids.tolist(), strict=True)):
                pendings[at].append(token)
                if drafts.logits is not None:
                    draft_logits[at].append(drafts.logits[place])
        rows = []
        histories: list[int] = []
        for index, pending in zip(live, pendings, strict=True):
            rows.append(Rows(samplers[index], len(histories), pending))
            histories += [index_of(texts[index] + pending[:j]) for j in range(len(pending) + 1)]
        logits = toy.raw_target[histories]
        given = [torch.stack(each) if each else None for each in draft_logits]
        verdicts = verify_rejection(logits, rows, given)
        for index, verdict in zip(live, verdicts, strict=True):
            samplers[index].commit(verdict.token_ids)
            texts[index].extend(verdict.token_ids)
    assert [text[:NUM_TOKENS] for text in texts] == want


def index_of(history: list[int]) -> int:
    return int(history_index(torch.tensor([history], dtype=torch.int64), torch.tensor([len(history)])))
