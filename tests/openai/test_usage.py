"""What a request used, counted at once and piece by piece."""

from __future__ import annotations

from rayspec.openai.usage import SpecDecodeMetrics, Usage, UsageTally
from rayspec.types import CompletionOutput, RequestMetrics, RequestOutput


def _output(*lengths: int, num_prompt: int = 3, num_rounds: int = 0) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=(0,) * num_prompt,
        outputs=[
            CompletionOutput(index=index, text="", token_ids=(0,) * length) for index, length in enumerate(lengths)
        ],
        finished=True,
        metrics=RequestMetrics(
            num_rounds=num_rounds, num_plain_rounds=1, num_draft_tokens=2 * num_rounds, num_accepted_tokens=num_rounds
        ),
    )


def test_a_prompt_counts_once_and_every_completion_counts() -> None:
    usage = Usage.of([_output(2, 4), _output(1, num_prompt=5)])
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (8, 7, 15)


def test_pieces_count_as_the_whole_does() -> None:
    tally = UsageTally()
    for prompt_index, piece in (
        (0, _output(1, num_rounds=2)),
        (1, _output(1, num_prompt=5, num_rounds=3)),
        (0, _output(1, 4, num_rounds=5)),
    ):
        tally.add(prompt_index, piece)
    assert tally.usage == Usage.of([_output(2, 4), _output(1, num_prompt=5)])
    assert tally.metrics == SpecDecodeMetrics.of([_output(num_rounds=5).metrics, _output(num_rounds=3).metrics])
    assert (tally.metrics.num_spec_steps, tally.metrics.num_draft_tokens) == (6, 16)


def test_means_of_nothing_are_none() -> None:
    metrics = SpecDecodeMetrics.of([RequestMetrics(num_rounds=4, num_plain_rounds=4)])
    assert (metrics.mean_acceptance_length, metrics.draft_acceptance_rate, metrics.num_spec_steps) == (None, None, 0)
