"""Usage of a request: token counts, and statistics of drafting."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from typing_extensions import Self

from rayspec.types import RequestMetrics, RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokensDetails:
    """cached_tokens: prompt tokens that were found in the KV cache and not computed."""

    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a request. A prompt with several completions counts once.

    There are no `accepted_prediction_tokens`. In OpenAI's API they count tokens of a prediction that the *client* sent,
    and `completion_tokens` includes the rejected tokens. Tokens that the model drafts for itself are neither.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput]) -> Self:
        return cls.with_outputs(outputs, sum(_num_output_tokens(output) for output in outputs))

    @classmethod
    def with_outputs(cls, latest: Collection[RequestOutput], num_output_tokens: int) -> Self:
        """Count prompts. latest: for each prompt, its output or its latest streamed output."""
        num_prompt_tokens = sum(len(output.prompt_token_ids) for output in latest)
        num_cached_tokens = sum(output.metrics.num_cached_tokens for output in latest)
        return cls.counted(num_prompt_tokens, num_output_tokens, num_cached_tokens)

    @classmethod
    def counted(cls, num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int = 0) -> Self:
        return cls(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_output_tokens,
            total_tokens=num_prompt_tokens + num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached_tokens),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecDecodeMetrics:
    """Statistics of drafting, with the names and meanings of vLLM's `--per-request-spec-decode-metrics summary`.

    num_spec_steps: rounds with a draft. mean_acceptance_length: tokens that such a round commits, 1 + accepted /
    rounds. mean_acceptance_length and draft_acceptance_rate are None if nothing was drafted.
    """

    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_spec_steps: int

    @classmethod
    def of(cls, metrics: Iterable[RequestMetrics]) -> Self:
        """Add up the metrics of several prompts."""
        num_steps = num_drafted = num_accepted = 0
        for one in metrics:
            num_steps += one.num_rounds - one.num_plain_rounds
            num_drafted += one.num_draft_tokens
            num_accepted += one.num_accepted_tokens
        return cls(
            mean_acceptance_length=1 + num_accepted / num_steps if num_steps else None,
            draft_acceptance_rate=num_accepted / num_drafted if num_drafted else None,
            num_draft_tokens=num_drafted,
            num_accepted_draft_tokens=num_accepted,
            num_spec_steps=num_steps,
        )


class UsageTally:
    """Counts the usage of a request whose output is streamed."""

    def __init__(self) -> None:
        self._latest: dict[int, RequestOutput] = {}
        self._num_output_tokens = 0

    def add(self, prompt_index: int, piece: RequestOutput) -> None:
        self._latest[prompt_index] = piece
        self._num_output_tokens += _num_output_tokens(piece)

    @property
    def usage(self) -> Usage:
        return Usage.with_outputs(self._latest.values(), self._num_output_tokens)

    @property
    def metrics(self) -> SpecDecodeMetrics:
        return SpecDecodeMetrics.of(piece.metrics for piece in self._latest.values())


def _num_output_tokens(output: RequestOutput) -> int:
    return sum(len(one.token_ids) for one in output.outputs)
