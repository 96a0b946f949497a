"""Sequences and samplers for tests, and what a sampler makes of raw logits, one sequence alone."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rayspec.config import Verification
from rayspec.decode.processing import LogitRows, TokenSampler, process
from rayspec.decode.requests import SequenceState
from rayspec.decode.sampling import Drafts, DraftSteps, Integers, Noise, Rows, row_keys, target_tokens
from rayspec.decode.work import DecodingParams, SamplerSpec
from rayspec.model.noise import gumbel


def gumbel_of(
    seeds: Integers, positions: Integers, vocab_size: int, stream: int | Tensor, origins: Integers | None = None
) -> Tensor:
    return gumbel(row_keys(seeds, positions, stream, "cpu", origins=origins), vocab_size)


def sequence_of(prompt: Sequence[int], max_tokens: int = 100, **options: Any) -> SequenceState:
    values = {
        "sequence_id": "a", "index": 0, "params": DecodingParams(max_tokens=max_tokens), "seed": 0,
        "token_ids": list(prompt), "num_prompt_tokens": len(prompt), "max_total_tokens": len(prompt) + max_tokens,
        "eos_token_ids": (), "detokenizer": None,
    }  # fmt: skip
    return SequenceState(**(values | options))


def sampler_of(
    params: DecodingParams,
    vocab_size: int,
    seed: int = 0,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    eos: Sequence[int] = (),
) -> TokenSampler:
    spec = SamplerSpec(
        sequence_id="s", params=params, seed=seed, prompt_token_ids=prompt, output_token_ids=output, eos_token_ids=eos
    )
    return TokenSampler(spec, vocab_size=vocab_size, device="cpu")


def processed(sampler: TokenSampler, logits: Tensor, pending: Sequence[int], *, first: int = 0) -> Tensor:
    """The logits that the sequence samples from, [m, V]. Row j follows the committed tokens and pending[:first + j]."""
    befores = [pending[: first + at] for at in range(len(logits))]
    rows = LogitRows(list(range(len(logits))), [sampler] * len(logits), list(map(len, befores)), befores)
    return process(logits, rows)


def draft_tokens(
    logits: Tensor, rows: Sequence[Rows], verification: Verification, noise: Noise | None = None
) -> Drafts:
    """The draft's next token of each sequence: row i of raw draft logits [S, V] follows the pending of rows[i]."""
    steps = DraftSteps([row.sampler for row in rows], verification, noise or Noise())
    return steps.draw(logits, [row.pending for row in rows])


def chosen(sampler: TokenSampler, logits: Tensor, pending: Sequence[int] = ()) -> Tensor:
    """The token after committed + pending[:j] for each row j of [m, V] by the coupled rule: int64 [m]."""
    return target_tokens(logits, [Rows(sampler, 0, pending[: logits.shape[0] - 1])])
