"""From logits to tokens: what one request's parameters make of them, and the coupled rule for a packed batch.

Parameters apply in vLLM's order, in float32: logit_bias, min_tokens; repetition, frequency and presence penalties;
(greedy stops here); temperature; min_p; top-k; top-p. A forbidden token is -inf; something is always left.

The coupled rule: the token at a position is argmax(processed logits + Gumbel(seed, position)), which is a sample of
softmax(processed logits), and a pure function of the committed tokens and the seed (Gumbel-max trick).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayspec.config import SamplingParams, Verification
from rayspec.decode.noise import Stream, gumbel, integers
from rayspec.types import InvalidTokenError, Logprob

_LARGEST = torch.finfo(torch.float32).max


class TokenSampler:
    """How one sequence chooses its tokens, and the history its parameters look at. Lives where the LM head lives.

    seed: 64-bit. output_token_ids: tokens generated before (a replay). Raises InvalidTokenError when `logit_bias` or,
    where a penalty has to count it, a token of the history lies outside the vocabulary. Stop and EOS ids outside it
    are ignored: they can never be generated.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        prompt_token_ids: Sequence[int],
        eos_token_ids: Collection[int],
        output_token_ids: Sequence[int] = (),
        vocab_size: int,
        device: torch.device | str,
    ) -> None:
        self.params = params
        self.seed = seed
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_output_tokens = 0
        self.token_ids = list(prompt_token_ids)  # and the output
        check_tokens("logit_bias", params.logit_bias, vocab_size)
        self._bias_ids = integers(list(params.logit_bias), device)
        self._biases = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32).to(device)
        stops = {*params.stop_token_ids, *eos_token_ids} if params.min_tokens else set()
        self._held_back = integers(sorted(token for token in stops if 0 <= token < vocab_size), device)
        if params.has_penalties:
            check_tokens("prompt_token_ids", prompt_token_ids, vocab_size)
            self._prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._prompt[integers(prompt_token_ids, device)] = True
            self._counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self.commit(output_token_ids)

    @property
    def position(self) -> int:
        """Number of committed tokens, prompt and output: the position of the next token."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def greedy(self) -> bool:
        return self.params.greedy

    @property
    def is_argmax(self) -> bool:
        """The next token is the argmax of the raw logits: nobody needs `process` (now; `min_tokens` runs out)."""
        return self.greedy and not (self.params.has_penalties or self.params.logit_bias or self._holds_back(0))

    @property
    def reads_history(self) -> bool:
        """`process` looks at the values of `pending`. Where False, placeholders of the right number do as well, so
        draft tokens may stay on the device."""
        return self.params.has_penalties

    @property
    def ignores_history(self) -> bool:
        """`process` makes the same of a row whatever comes before it (now; `min_tokens` runs out)."""
        return not (self.params.has_penalties or self._holds_back(0))

    def commit(self, token_ids: Sequence[int]) -> None:
        """Appends tokens to the output. Raises InvalidTokenError as the constructor does."""
        self.num_output_tokens += len(token_ids)
        self.token_ids.extend(token_ids)
        if self.params.has_penalties and len(token_ids):
            check_tokens("token_ids", token_ids, self.vocab_size)
            tokens = integers(token_ids, self.device)
            self._counts.index_add_(0, tokens, torch.ones_like(tokens, dtype=torch.float32))

    def process(self, logits: Tensor, pending: Sequence[int], *, first: int = 0) -> Tensor:
        """The logits this sequence samples from, float32 [m, V], shifted so that the largest is 0 when sampling.

        logits: raw, [m, V]. Row j follows the committed tokens and pending[:first + j], so pending holds at least
        first + m - 1 tokens (their number matters even where `reads_history` is False). Leaves `logits` alone. Rows
        that were finite somewhere stay finite somewhere; a row that holds NaN or +inf comes back as something, without
        an error: see `finite_rows`.
        """
        self._check_rows(logits, pending, first)
        scores = logits.to(torch.float32, copy=True)
        if self.params.logit_bias:
            scores.index_add_(1, self._bias_ids, self._biases.expand(scores.shape[0], -1))
        if self._holds_back(first):
            self._hold_back_stops(scores, first)
        if self.params.has_penalties:
            scores = self._penalised(scores, self._counts_at(pending, first, scores.shape[0]))
        return scores if self.greedy else _truncated(_scaled(scores, self.params.temperature), self.params)

    def choose(self, logits: Tensor, pending: Sequence[int] = ()) -> Tensor:
        """The token after committed + pending[:j] for each row j of [m, V] by the coupled rule: int64 [m]."""
        return target_tokens(logits, [Rows(self, 0, pending[: logits.shape[0] - 1])])

    def _holds_back(self, first: int) -> bool:
        return self.num_output_tokens + first < self.params.min_tokens and self._held_back.numel() > 0

    def _hold_back_stops(self, scores: Tensor, first: int) -> None:
        """Forbids EOS and stop tokens, in place, in the rows where the output is shorter than `min_tokens`; except
        where nothing else is left."""
        early = scores[: self.params.min_tokens - self.num_output_tokens - first]
        masked = early.index_fill(1, self._held_back, -math.inf)
        nothing_left = masked.amax(1, keepdim=True) == -math.inf
        early.copy_(torch.where(nothing_left, early, masked))

    def _counts_at(self, pending: Sequence[int], first: int, num_rows: int) -> Tensor:
        """How often each token is in the output before each row: float32 [num_rows, V]."""
        counts = self._counts.repeat(num_rows, 1)
        seen = pending[: first + num_rows - 1]
        if len(seen):
            check_tokens("pending", seen, self.vocab_size)
            rows, columns = torch.tril_indices(num_rows, len(seen), offset=first - 1)
            tokens = torch.tensor(list(seen), dtype=torch.int64)[columns]
            where = (integers(rows, self.device), integers(tokens, self.device))
            counts.index_put_(where, torch.ones((), device=self.device), accumulate=True)
        return counts

    def _penalised(self, scores: Tensor, counts: Tensor) -> Tensor:
        """Repetition as in CTRL (Keskar et al., 2019), over prompt and output; presence and frequency as OpenAI's, over
        the output. Finite scores stay finite."""
        repetition = min(max(self.params.repetition_penalty, 1e-30), 1e30)
        if repetition != 1:
            scaled = torch.where(scores > 0, scores / repetition, scores * repetition).clamp_(-_LARGEST, _LARGEST)
            scores = torch.where(((counts > 0) | self._prompt) & scores.isfinite(), scaled, scores)
        scores = scores - self.params.frequency_penalty * counts
        return scores.sub_(self.params.presence_penalty * (counts > 0))

    def _check_rows(self, logits: Tensor, pending: Sequence[int], first: int) -> None:
        if logits.shape[-1] != self.vocab_size:
            raise ValueError(f"logits have {logits.shape[-1]} columns; the sampler was made for {self.vocab_size}")
        if len(pending) < first + logits.shape[0] - 1:
            raise ValueError(f"{logits.shape[0]} rows from {first} need more than {len(pending)} pending tokens")


def check_tokens(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raises InvalidTokenError, naming the argument, if a token is not in 0 .. vocab_size - 1."""
    bad = [token for token in token_ids if not 0 <= token < vocab_size]
    if bad:
        raise InvalidTokenError(f"{name} holds token {bad[0]}: give tokens from 0 to {vocab_size - 1}")


def _scaled(scores: Tensor, temperature: float) -> Tensor:
    """Shifted to a maximum of 0 before the division, so that no temperature overflows."""
    return scores.sub_(scores.amax(1, keepdim=True)).div_(temperature)


def _truncated(scores: Tensor, params: SamplingParams) -> Tensor:
    """min_p, top-k, top-p on scores [m, V] whose row maxima are 0. Ties at the k-th place all stay, as in vLLM and
    transformers; of ties at top-p's edge the lowest ids stay, so that the cut is the same on every device."""
    if params.min_p > 0:
        scores.masked_fill_(scores < math.log(params.min_p), -math.inf)
    if 0 < params.top_k < scores.shape[1]:
        weakest = scores.topk(params.top_k, dim=1).values[:, -1:]
        scores.masked_fill_(scores < weakest, -math.inf)
    if params.top_p < 1:
        ranked, order = scores.sort(dim=1, descending=True, stable=True)
        mass = ranked.to(torch.float64).softmax(1)
        beyond = mass.cumsum(1).sub_(mass) >= params.top_p
        beyond[:, 0] = False
        scores.masked_fill_(torch.zeros_like(beyond).scatter_(1, order, beyond), -math.inf)
    return scores


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows start .. start + len(pending) of a packed logits tensor, of one sequence: row 0 predicts the token after
    its committed ones, row j + 1 the one after pending[j].

    parents: of each pending token the row that it follows, an earlier one than its own; empty where they follow one
    another. The leading tokens that do are the *spine*.
    """

    sampler: TokenSampler
    start: int
    pending: Sequence[int]
    parents: Sequence[int] = ()

    @property
    def end(self) -> int:
        return self.start + len(self.pending) + 1

    @property
    def spine(self) -> Rows:
        """Without the branches."""
        branches = (at for at, parent in enumerate(self.parents) if parent != at)
        return Rows(self.sampler, self.start, self.pending[: next(branches, len(self.pending))])

    def depths(self) -> Sequence[int]:
        """How many pending tokens come before each row's token."""
        if not self.parents:
            return range(len(self.pending) + 1)
        return depths_of(self.parents)

    def path(self, row: int) -> list[int]:
        """The rows on the way to `row`, from row 1 on."""
        if not self.parents:
            return list(range(1, row + 1))
        path = []
        while row > 0:
            path.append(row)
            row = self.parents[row - 1]
        return path[::-1]

    def process(self, logits: Tensor) -> Tensor:
        """`TokenSampler.process` of the rows, each after what lies on its path. logits: [len(pending) + 1, V]."""
        if not self.parents or self.sampler.ignores_history:
            return self.sampler.process(logits, self.pending)
        cuts = [0, *(row for row, parent in enumerate(self.parents, 1) if parent != row - 1), len(logits)]
        parts = []
        for first, end in itertools.pairwise(cuts):  # rows that follow one another
            before = [self.pending[row - 1] for row in self.path(first)]
            pending = [*before, *self.pending[first : end - 1]]
            parts.append(self.sampler.process(logits[first:end], pending, first=len(before)))
        return torch.cat(parts)


def depths_of(parents: Sequence[int]) -> list[int]:
    """How far each row of a tree is from row 0; parents: of rows 1, 2, ..."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths


@dataclass(frozen=True, slots=True)
class Drafts:
    """One draft token a sequence. token_ids: int64 [S]. confidence: float32 [S]. logits: float32 [S, V], processed, for
    `verify_rejection`; None under the coupled rule and where every sequence takes the argmax. ranked: int64 [S, k], the
    k tokens that were nearest to being drawn, best first; None where k is 0."""

    token_ids: Tensor
    confidence: Tensor
    logits: Tensor | None
    ranked: Tensor | None = None


def target_tokens(logits: Tensor, rows: Sequence[Rows]) -> Tensor:
    """The token plain decoding takes at every row of raw logits [N, V], by the coupled rule: int64 [N], on the device,
    without host synchronisation. Greedy rows, and rows of no sequence, take the argmax."""
    if all(row.sampler.is_argmax for row in rows):
        return logits.argmax(-1)
    scores = processed_logits(logits, rows)
    sampled = [(row, at, depth) for row in rows if not row.sampler.greedy for at, depth in enumerate(row.depths())]
    where = [row.start + at for row, at, _ in sampled]
    positions = [row.sampler.position + depth for row, _, depth in sampled]
    seeds = [row.sampler.seed for row, _, _ in sampled]
    return _add_noise(scores, where, seeds, positions, Stream.TARGET, None).argmax(-1)


def draft_tokens(logits: Tensor, rows: Sequence[Rows], verification: Verification, *, num_ranked: int = 0) -> Drafts:
    """The draft's next token for each sequence, from raw draft logits [S, V]: row i belongs to rows[i] and follows its
    committed tokens and *all* of its pending ones (the draft so far). `start` is ignored. No host synchronisation.

    "coupled": argmax with the target's own noise at that position. "rejection": a sample of the processed draft logits
    with noise of its own, which is also new in every round. Greedy sequences take the argmax. Ranked are the scores
    that the argmax is of, so under the coupled rule noise and all.

    Confidence is the largest probability of the processed distribution (of the raw one where `is_argmax`). It does not
    depend on which token was drawn, and must not: see `verify` on when a draft may stop. Not finite logits make it NaN.
    """
    coupled = verification == "coupled"
    samplers = [row.sampler for row in rows]
    if all(sampler.is_argmax for sampler in samplers):
        scores = logits.to(torch.float32)
        top, tokens = scores.max(-1)
        return Drafts(tokens, (top - scores.logsumexp(-1)).exp(), None, _ranked(scores, num_ranked))
    scores = logits.to(torch.float32, copy=True)
    for at, row in enumerate(rows):
        if not row.sampler.is_argmax:
            scores[at : at + 1] = row.sampler.process(logits[at : at + 1], row.pending, first=len(row.pending))
    confidence = (scores.amax(-1) - scores.logsumexp(-1)).exp()
    where = [at for at, sampler in enumerate(samplers) if not sampler.greedy]
    seeds = [samplers[at].seed for at in where]
    positions = [samplers[at].position + len(rows[at].pending) for at in where]
    if coupled:
        noisy = _add_noise(scores, where, seeds, positions, Stream.TARGET, None)
        return Drafts(noisy.argmax(-1), confidence, None, _ranked(noisy, num_ranked))
    origins = [samplers[at].position for at in where]
    noisy = _add_noise(scores.clone(), where, seeds, positions, Stream.DRAFT, origins)
    return Drafts(noisy.argmax(-1), confidence, scores, _ranked(noisy, num_ranked))


def _ranked(scores: Tensor, num_ranked: int) -> Tensor | None:
    return scores.topk(min(num_ranked, scores.shape[1]), dim=-1).indices if num_ranked else None


def processed_logits(logits: Tensor, rows: Sequence[Rows]) -> Tensor:
    """`TokenSampler.process` of every sequence's rows of raw logits [N, V], other rows as they are: new, float32."""
    scores = logits.to(torch.float32, copy=True)
    for row in rows:
        if not row.sampler.is_argmax:
            scores[row.start : row.end] = row.process(logits[row.start : row.end])
    return scores


def finite_rows(logits: Tensor) -> Tensor:
    """Which rows of raw logits [N, V] can be sampled from: bool [N], on the device. False where a row holds NaN or
    +inf, or nothing but -inf."""
    return logits.amax(-1).isfinite()


def top_logprobs(logits: Tensor, token_ids: Sequence[int], k: int) -> list[dict[int, Logprob]]:
    """For each row of raw logits [m, V], its chosen token and the k most likely ones, most likely first, the chosen
    token last if it is not among them. Natural logarithms; rank 1 is the most likely and tied tokens share a rank.

    One host synchronisation. Raises InvalidTokenError for a chosen token outside the vocabulary.
    """
    vocab_size = logits.shape[-1]
    check_tokens("token_ids", token_ids, vocab_size)
    logprobs = logits.to(torch.float32).log_softmax(-1)
    chosen = integers(token_ids, logits.device).unsqueeze(1)
    top = logprobs.topk(min(k, vocab_size), dim=-1)
    tokens = torch.cat((top.indices, chosen), 1)
    values = logprobs.gather(1, tokens)
    ranks = torch.stack([(logprobs > value.unsqueeze(1)).sum(1) for value in values.unbind(1)], 1) + 1
    table = torch.stack((tokens.double(), values.double(), ranks.double()), 2).tolist()
    return [{int(token): Logprob(logprob=value, rank=int(rank)) for token, value, rank in row} for row in table]


def _add_noise(
    scores: Tensor,
    where: Sequence[int],
    seeds: Sequence[int],
    positions: Sequence[int],
    stream: Stream,
    origins: Sequence[int] | None,
) -> Tensor:
    """Adds Gumbel noise to the rows `where` of [N, V], in place, with one copy from the host."""
    if not where:
        return scores
    columns = integers([*where, *seeds, *positions, *(origins or positions)], scores.device).view(4, -1)
    origin = None if origins is None else columns[3]
    noise = gumbel(columns[1], columns[2], scores.shape[1], stream, scores.device, origins=origin)
    return scores.index_add_(0, columns[0], noise)
