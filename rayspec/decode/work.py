"""The records of the engine's work: what it gives to the model's processes, and what they give back.

A sequence is opened with a `SamplerSpec`. Its prompt runs in a `Prefill` of chunks; then `Round`s draft, verify and
accept tokens. A `Round` is a few `Pass`es, each one forward over packed rows. The results are `Committed` tokens. A
pipeline sends the same records; those of which a field may hold one of several are tagged Structs. Its `DecodingParams`
are the sampling parameters of the request, completed by the checkpoint's generation_config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

import msgspec
from pydantic import Field

from rayspec.choices import SKIP, Choices
from rayspec.config import SamplingParams
from rayspec.decode.drafting.lookup import LookupIndex
from rayspec.forms.grammar import Constraint
from rayspec.model.rows import RowSpan, Runs
from rayspec.types import Logprob, Plan, RayspecError

# Returns whether each sequence drafts one more token, given its confidences so far. The rule must depend on nothing
# else: if the head is in another process, a copy of the rule is sent there.
KeepDrafting = Callable[[Sequence[Sequence[float]]], Sequence[bool]]


@dataclass(frozen=True, slots=True)
class TappedToken:
    """A committed token whose hidden states the target's stages have kept."""

    sequence_id: str
    position: int


class TapsGoneError(RayspecError):
    """Later taps have replaced those of some tokens."""

    kind = "taps_gone"


TokenSequence = Annotated[tuple[int, ...], Field(min_length=1)]


class DecodingParams(SamplingParams):
    """The parameters that a sequence is decoded with: no field is unset. The defaults of SamplingParams' fields are
    vLLM's neutral values.

    The fields of its own are those of transformers' GenerationConfig that a request cannot state. They have the same
    names and meanings there. eos tokens are the engine's.
    """

    repetition_penalty: float = Field(1.0, gt=0.0)
    temperature: float = Field(1.0, ge=0.0, le=3e38)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    stop: tuple[str, ...] = ()
    max_tokens: int = Field(16, ge=1)
    min_tokens: int = Field(0, ge=0)

    no_repeat_ngram_size: int = Field(0, ge=0)
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    bad_words_ids: tuple[TokenSequence, ...] = ()
    sequence_bias: tuple[tuple[TokenSequence, float], ...] = ()
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What the checkpoint says about decoding. params: the values of unset fields, and the rules of every request.
    max_new_tokens: the output's length where nobody states one; None: the checkpoint states none. min_length: the least
    tokens of prompt and output together."""

    params: DecodingParams = field(default_factory=DecodingParams)
    max_new_tokens: int | None = None
    min_length: int = 0

    def completed(self, asked: SamplingParams, *, num_prompt_tokens: int, max_model_len: int) -> DecodingParams:
        """Return the parameters for a prompt of that many tokens. Each value that the request states wins. `max_tokens`
        of the result is a number, and no more than the context has room for; nor is `min_tokens`."""
        room = max_model_len - num_prompt_tokens
        max_tokens = room if asked.max_tokens is None else min(asked.max_tokens, room)
        min_tokens = asked.min_tokens
        if min_tokens is None:
            min_tokens = max(self.params.min_tokens, self.min_length - num_prompt_tokens)
        values = dict(self.params) | {name: value for name, value in asked if value is not None}
        values |= {"max_tokens": max_tokens, "min_tokens": min(min_tokens, max_tokens)}
        # Not validated again: both sides are valid, and a request may have thousands of biases.
        return DecodingParams.model_construct(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSpec:
    """The data of a sequence that the head needs. output_token_ids: generated before a replay. lookup: the index of its
    text; None if nothing is looked up. constraint: the state of the output's form; None without a form. The head shares
    both with the engine in one process; in another process it makes its own."""

    sequence_id: str
    params: DecodingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int] = ()
    eos_token_ids: Sequence[int] = ()
    lookup: LookupIndex | None = None
    constraint: Constraint | None = None


class Chunk(msgspec.Struct, frozen=True):
    """Committed tokens to prefill. sample: choose the token after them. replay: they were generated earlier."""

    sequence_id: str
    rows: RowSpan
    token_ids: Sequence[int]
    sample: bool
    replay: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """Copy a slot of the KV cache to another one."""

    source: int
    destination: int
    in_windowed_store: bool = False


class Draft(msgspec.Struct):
    """The draft of one entry. confidences: of the tokens that the model drafted on the main chain, which come first.
    parents: see `RoundEntry`. match_classes: of the looked-up tokens that extend them."""

    token_ids: list[int] = []
    confidences: list[float] = []
    parents: list[int] = []
    match_classes: list[int] = []

    @property
    def looked_up(self) -> bool:
        return bool(self.token_ids) and not self.confidences

    @property
    def num_drafted(self) -> int:
        return len(self.confidences)

    @property
    def length(self) -> int:
        """Number of tokens on the longest path."""
        if not self.parents:
            return len(self.token_ids)
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return max(depths)


class RoundEntry(msgspec.Struct, frozen=True):
    """One sequence's part in a round: its newest token is at position `length` - 1 and is not in the KV cache yet.

    end_tokens: a draft ends at one of these. looked_up: a draft from another source; the model then drafts nothing.
    parents: for each looked-up token, the row that it follows; row 0 is the newest token, row i + 1 is looked_up[i].
    Empty for a chain. num_probes: this many tokens at the end of `looked_up` are no draft; the verify only returns the
    target's likeliest token after each. max_tree_tokens: the most rows in addition to the newest token.
    """

    sequence_id: str
    runs: Runs
    length: int
    last_token: int
    max_draft_tokens: int
    end_tokens: Collection[int] = ()
    looked_up: Sequence[int] = ()
    parents: Sequence[int] = ()
    num_probes: int = 0
    max_tree_tokens: int = 0
    windowed: Runs = ()
    adapter: int = 0

    def rows(self, first: int, num_rows: int, parents: tuple[int, ...] = ()) -> RowSpan:
        return RowSpan(self.runs, first, num_rows, parents, self.windowed, self.adapter)

    def draft(self) -> Draft:
        """Return the initial draft: the looked-up tokens without probes."""
        num_drafted = len(self.looked_up) - self.num_probes
        return Draft(list(self.looked_up[:num_drafted]), parents=list(self.parents[:num_drafted]))


def num_rows(chunks: Sequence[Chunk]) -> int:
    return sum(chunk.rows.num_rows for chunk in chunks)


class Prefill(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Prefill chunks, and choose the token after each chunk with `sample`."""

    id: int
    chunks: Sequence[Chunk]

    @property
    def num_rows(self) -> int:
        return num_rows(self.chunks)


class Round(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Draft, verify and accept for several sequences at once. chunks: prompt chunks to prefill in the verify pass.
    num_taps: how many entries, from the first, have their newest token tapped: its hidden states at all sublayer
    boundaries are kept. num_likeliest: how many of the target's likeliest tokens after each row are wanted. num_steps:
    the most tokens of each entry that a round without drafts decodes, one after another. fixes_drafts: whether draft
    steps have the fixed shape of the deterministic mode; those whose states the verify uses have it in any case."""

    id: int
    entries: Sequence[RoundEntry]
    plan: Plan
    fixes_drafts: bool = False
    keep_drafting: KeepDrafting | None = None
    num_taps: int = 0
    chunks: Sequence[Chunk] = ()
    num_likeliest: int = 0
    num_steps: int = 1

    @property
    def save_at(self) -> int:
        """Sublayer before which the draft's states are saved for the verify; 0 saves none. Taps need these states."""
        return 0 if self.num_taps else self.plan.prefix

    @property
    def num_rows(self) -> int:
        """Most rows that the passes of the round compute in all."""
        own = sum(self.num_steps + len(entry.looked_up) + 2 * entry.max_draft_tokens for entry in self.entries)
        return own + num_rows(self.chunks)

    @property
    def taps(self) -> list[TappedToken]:
        return [TappedToken(entry.sequence_id, entry.length - 1) for entry in self.entries[: self.num_taps]]


class Committed(msgspec.Struct, frozen=True):
    """Tokens that the target chose for one sequence; void unless `finite`, as its logits were, and void with a
    `problem`: why the form of the output cannot be kept."""

    token_ids: Sequence[int]
    logprobs: Sequence[dict[int, Logprob]]
    finite: bool
    problem: str = ""


class PrefillResult(msgspec.Struct, frozen=True, tag=True):
    """committed: for each chunk, the token after it, or None if the chunk does not sample. prompt_logprobs: for each
    chunk, of the prompt's tokens up to the one after its last row; empty if they are not wanted."""

    committed: Sequence[Committed | None]
    prompt_logprobs: Sequence[Sequence[dict[int, Logprob]]] = ()


class RoundResult(msgspec.Struct, frozen=True, tag=True):
    """Lists have an item per entry unless noted. draft_s, verify_s: seconds on the device. is_unready: some of its
    passes took longer than they will later, because they were captured or will be: its seconds say little.

    paths: rows of the accepted tokens, where row 0 is the newest token's; empty unless a branch was accepted, whose
    keys and values then lie in other places than their positions. probed: the target's likeliest token after each
    probe. queued_s: seconds for which the device was still busy with earlier work when the host began the round.
    owed_s: seconds of a round without drafts that rows rejected before it took; negative where a verify is charged with
    them.
    prefilled, prompt_logprobs: an item per chunk, as in PrefillResult. prefill_s: the chunks' share of the verify pass,
    by rows.
    likeliest: for each row of the entry's newest token and draft, the target's likeliest next tokens and their
    probabilities; empty if they are not wanted. num_steps: one after another, of a round without drafts.
    """

    committed: Sequence[Committed]
    drafts: Sequence[Draft]
    num_accepted: Sequence[int]
    num_draft_steps: int
    draft_s: float
    verify_s: float
    paths: Sequence[Sequence[int]] = ()
    probed: Sequence[Sequence[int]] = ()
    queued_s: float = 0.0
    owed_s: float = 0.0
    prefilled: Sequence[Committed | None] = ()
    prefill_s: float = 0.0
    likeliest: Sequence[Sequence[tuple[Sequence[int], Sequence[float]]]] = ()
    prompt_logprobs: Sequence[Sequence[dict[int, Logprob]]] = ()
    num_steps: int = 1
    is_unready: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """Before sublayer `at`, join the round's saved rows and those of this pass, sorted by `order`, as `rows`."""

    at: int
    order: Sequence[int]
    rows: Sequence[RowSpan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward over packed rows: `token_ids` enter at the embedding as `rows`. It carries the positions of its rows,
    so a stage needs no data about its sequences. Empty `token_ids`: the tokens were drawn in this process and are on
    the device.

    round_id: whose saved rows it uses. choices: one for each sublayer of the whole model; None runs all in full.
    save_at: sublayer before which the states are saved for a later pass of the round; 0 saves nothing. taps: pairs of a
    row and its token, whose states every stage keeps. fixed_shape, scores_pages: see `Runner.batch`. sequence_ids,
    is_prefill: for a model that does not split, the sequences of these rows, and whether the rows are chunks.
    """

    round_id: int
    token_ids: Sequence[int]
    rows: Sequence[RowSpan]
    choices: Choices | None = None
    save_at: int = 0
    merge: Merge | None = None
    taps: Sequence[tuple[int, TappedToken]] = ()
    scores_pages: bool = False
    fixed_shape: bool = True
    sequence_ids: Sequence[str] = ()
    is_prefill: bool = False

    def needs(self, first: int, last: int) -> bool:
        """Return whether the pass runs any of the sublayers `first` .. `last` (exclusive)."""
        return self.choices is None or any(choice != SKIP for choice in self.choices[first:last])


Work: TypeAlias = Prefill | Round
Result: TypeAlias = PrefillResult | RoundResult
