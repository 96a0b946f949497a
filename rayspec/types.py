"""The types that all packages share: plans, requests, outputs. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal, TypedDict

from rayspec.choices import FULL, SKIP, Choices, num_leading_full
from rayspec.errors import *  # noqa: F403 - programs import the errors from here, too
from rayspec.errors import RayspecError

if TYPE_CHECKING:
    from rayspec.config import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
Role = Literal["system", "developer", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the target drafts for itself.

    choices: how the draft runs each sublayer, in order (attention and MLP of layer 0, of layer 1, ...).
    num_draft_tokens: the most tokens that the model drafts before a verify; 0: it drafts none.
    num_lookup_tokens: the most tokens copied from the sequence's own text, from after an earlier occurrence of its
    newest tokens. The model then drafts only for the other sequences. 0: no lookup. Both 0: plain decoding.
    lookup_lengths: num_lookup_tokens of each sequence of the round, if they differ; else empty.
    source: the author of the plan and the reason, for reports.
    tree_widths: number of alternatives of a drafted token, itself included, for four levels of falling confidence
    (`decode.rounds.SURENESS`); empty: no trees. lookahead: drafts are n-grams of the sequence's Jacobi window.
    """

    choices: Choices
    num_draft_tokens: int
    source: str
    num_lookup_tokens: int = 0
    lookup_lengths: tuple[int, ...] = ()
    tree_widths: tuple[int, ...] = ()
    lookahead: bool = False

    def __post_init__(self) -> None:
        for name in ("num_draft_tokens", "num_lookup_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 (none) or more")
        if self.lookup_lengths and (min(self.lookup_lengths) < 0 or max(self.lookup_lengths) != self.num_lookup_tokens):
            raise ValueError(f"lookup_lengths is {self.lookup_lengths}; the most must be {self.num_lookup_tokens}")
        if len(self.tree_widths) not in (0, 4) or any(width < 1 for width in self.tree_widths):
            raise ValueError(f"tree_widths is {self.tree_widths}; it must be empty or four numbers from 1 on")

    @property
    def drafts(self) -> bool:
        return self.num_draft_tokens > 0 or self.num_lookup_tokens > 0 or self.lookahead

    @property
    def prefix(self) -> int:
        """Number of leading sublayers that the draft and the target compute alike."""
        return num_leading_full(self.choices)

    @property
    def uses_page_scores(self) -> bool:
        """Whether an attention sublayer of the draft reads the pages with the most attention in the last verify."""
        return any(choice.endswith("pages") for choice in self.choices)

    @property
    def keep(self) -> tuple[bool, ...]:
        """A flag per sublayer: whether the draft runs it at all."""
        return tuple(choice != SKIP for choice in self.choices)


def no_draft(num_sublayers: int, source: str) -> Plan:
    return Plan(choices=(FULL,) * num_sublayers, num_draft_tokens=0, source=source)


_ROUNDS_TO_COMPARE = 32


@dataclass(slots=True, kw_only=True)
class PlanRecord:
    """A decision of the plan search, its reason, and its results in use. Rates are tokens per second of one sequence.

    `optimise_s` is 0 when a known candidate was taken without a new search. `num_tokens` and `sequence_s` (seconds
    times sequences) grow while the plan is in use.
    """

    elapsed_s: float = 0.0
    context: int = 0
    batch: int = 0
    plan: Plan
    reason: str
    estimated_acceptance: float = 0.0
    predicted_tpt: float = 0.0
    plain_tpt: float = 0.0
    optimise_s: float = 0.0
    num_tokens: int = 0
    sequence_s: float = 0.0
    num_accepted_tokens: int = 0
    num_tested_tokens: int = 0

    def add_round(self, *, num_tokens: int, sequence_s: float, num_accepted: int, num_tested: int) -> None:
        self.num_tokens += num_tokens
        self.sequence_s += sequence_s
        self.num_accepted_tokens += num_accepted
        self.num_tested_tokens += num_tested

    @property
    def measured_tpt(self) -> float | None:
        return self.num_tokens / self.sequence_s if self.sequence_s else None

    @property
    def observed_acceptance(self) -> float | None:
        """Accepted share of the tested draft tokens, which are those up to and including the first rejected token."""
        return self.num_accepted_tokens / self.num_tested_tokens if self.num_tested_tokens else None


@dataclass(slots=True, kw_only=True)
class DraftCounts:
    """Counts of an engine or a request. A *round* is one verify; rounds without a draft count too, and are called
    *plain*. num_replays: how often lost stages were replaced. num_cached_tokens: tokens of prompts that were found in
    the KV cache; of a request with several sequences, for the sequence that computed the prompt.

    accepted_by_source: accepted draft tokens that the model drafted ("model"), or that were copied from the sequence
    ("own text") or from finished outputs ("corpus"), or that the target found likely before ("recycled"), or that the
    form of the output forced ("form").
    """

    num_rounds: int = 0
    num_plain_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_preemptions: int = 0
    num_replays: int = 0
    num_cached_tokens: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)

    @property
    def acceptance_rate(self) -> float | None:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None


@dataclass(slots=True, kw_only=True)
class EngineStats(DraftCounts):
    """Counts and times of an engine since it was made. num_lost_replicas: replicas that are lost for good.
    num_prefilled_tokens: tokens computed as parts of prompts, or again after a preemption or a replay.

    Times are wall time in seconds. In one process `prefill_s`, `draft_s`, `verify_s` and `optimise_s` count no second
    twice. In a pipeline `prefill_s` is the share of the prompts: work items at the same time share the time evenly.
    There `draft_s` and `verify_s` are times at the stage with the head, summed over rounds that may overlap.

    compared_s: of the rounds for which the speed of plain decoding is known. plain_s: what their tokens would have
    taken without drafts, by the latency profile and the rounds without drafts, which num_compared_rounds counts for
    each sequence; those of requests that want no drafts are not among them. died_at_s: when engines died, by
    the `time.monotonic` of the process that replaces them. weights: what became of a quantised checkpoint's weights.
    """

    num_prompt_tokens: int = 0
    num_prefilled_tokens: int = 0
    num_generated_tokens: int = 0
    num_lost_replicas: int = 0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    optimise_s: float = 0.0
    total_s: float = 0.0
    compared_s: float = 0.0
    plain_s: float = 0.0
    num_compared_rounds: int = 0
    accepted_lengths: dict[int, int] = field(default_factory=dict)
    gate_reason: str = ""
    weights: str = ""
    plans: list[PlanRecord] = field(default_factory=list)
    died_at_s: list[float] = field(default_factory=list)

    @property
    def speed_up(self) -> float | None:
        """Estimated speed of decoding over plain decoding; None with too few rounds of plain decoding to compare."""
        is_known = self.compared_s > 0 and self.num_compared_rounds >= _ROUNDS_TO_COMPARE
        return self.plain_s / self.compared_s if is_known else None

    @property
    def cache_hit_rate(self) -> float | None:
        """Share of the tokens to be prefilled that were found in the KV cache."""
        num_tokens = self.num_prefilled_tokens + self.num_cached_tokens
        return self.num_cached_tokens / num_tokens if num_tokens else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens committed by a round with a draft: 1 + accepted / rounds, as vLLM counts them."""
        rounds = self.num_rounds - self.num_plain_rounds
        return 1 + self.num_accepted_tokens / rounds if rounds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The present load of an engine. num_running, num_waiting: sequences, of which a request with n > 1 has several.
    Tokens are slots of the KV cache."""

    num_running: int
    num_waiting: int
    kv_used_tokens: int
    kv_total_tokens: int

    def __add__(self, other: EngineLoad) -> EngineLoad:
        return EngineLoad(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """Log-probability of one token under the model's raw distribution, and its rank (1 = most likely).

    decoded_token: text of the token (`decode.output.TokenTexts`); set in outputs of an engine with a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


class TextPrompt(TypedDict):
    """A prompt of `LLM.generate`, with the name of vLLM's class."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt of `LLM.generate` as token ids, with the name of vLLM's class."""

    prompt_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to complete: text, or token ids, which take precedence. stream: the output comes as it is generated,
    see RequestOutput. background: other requests go first, see `Scheduler`. owner: only requests of the same owner copy
    from this one's output. client: who shares the engine with the clients of other requests, see `Scheduler`. adapter:
    name of the LoRA adapter to use, of those in option `lora_modules`."""

    request_id: str
    params: SamplingParams
    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    stream: bool = False
    background: bool = False
    owner: str = ""
    client: str = ""
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """vLLM's name of an adapter: one of option `lora_modules`, or the folder of another. lora_int_id has no effect."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


@dataclass(slots=True, kw_only=True)
class RequestMetrics(DraftCounts):
    arrival_s: float = 0.0
    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One generated text, with the names of vLLM's class. `cumulative_logprob` is of the whole text, even if this
    output has only a part of the text."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """The output of a request, with the names of vLLM's class. `error` is set if the request failed; `outputs` then
    has the tokens generated before. prompt_logprobs: an item for each token of the prompt, if they are wanted; the
    first is None.

    A streaming request has several outputs, of which the last is `finished`. Each holds only the completions with new
    tokens, and only their new text, token ids and logprobs; one of them has the prompt_logprobs. Joined, they equal the
    output of the request not streamed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    error: RayspecError | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def num_cached_tokens(self) -> int:
        return self.metrics.num_cached_tokens

    @classmethod
    def refused(cls, request: Request, error: RayspecError) -> RequestOutput:
        """Make the output of a request that never ran."""
        token_ids = request.prompt_token_ids
        return cls(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=tuple(token_ids) if isinstance(token_ids, list | tuple) else (),
            outputs=[],
            finished=True,
            error=error,
        )
