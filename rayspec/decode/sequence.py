"""The state of one sequence. Only its committed tokens are essential: the KV cache can be computed from them again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from rayspec.decode.drafting.lookahead import Guess, Lookahead
from rayspec.decode.drafting.lookup import NOTHING, LookupIndex, Proposal
from rayspec.decode.output import Detokenizer
from rayspec.decode.pages import PageHash, PageTable
from rayspec.generation import DecodingParams
from rayspec.model.rows import RowSpan
from rayspec.types import CompletionOutput, FinishReason, Logprob, RayspecError, RequestMetrics


@dataclass(slots=True, kw_only=True, eq=False)
class SequenceState:
    """A sequence of a request (a request with n > 1 has several) and its progress. num_computed: leading tokens whose
    keys and values are in the KV cache. windowed_table: pages in the windowed store, if the cache has one."""

    sequence_id: str
    index: int
    params: DecodingParams
    seed: int
    token_ids: list[int]
    num_prompt_tokens: int
    max_total_tokens: int
    eos_token_ids: Collection[int]
    detokenizer: Detokenizer | None
    streams: bool = False
    background: bool = False
    num_computed: int = 0
    cohort: int = 0
    table: PageTable = field(default_factory=PageTable)
    windowed_table: PageTable = field(default_factory=PageTable)
    page_hashes: list[PageHash] = field(default_factory=list)  # of its first pages, as many as were needed
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: RayspecError | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    num_taken: int = 0  # output tokens that `take_new_output` has returned
    taken_end: bool = False
    lookup: LookupIndex | None = None  # None if nothing is looked up
    lookahead: Lookahead | None = None  # created at the first guess
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def prefilled(self) -> bool:
        """Whether the sequence can take part in a round: all its tokens except the newest are in the KV cache."""
        return self.num_computed == self.num_tokens - 1 and self.num_tokens > self.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        return self.max_total_tokens - self.num_tokens

    def rows(self, first: int, num_rows: int) -> RowSpan:
        """Return rows of this sequence, a chain from position `first` on."""
        return RowSpan(self.table.runs, first, num_rows, windowed=self.windowed_table.runs)

    def commit(self, token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]] = ()) -> int:
        """Append tokens up to the first that ends the sequence. Return how many were appended."""
        for position, token_id in enumerate(token_ids):
            self.token_ids.append(token_id)
            if logprobs:
                self.logprobs.append(logprobs[position])
            self._check_end(token_id)
            if self.finished:
                return position + 1
        return len(token_ids)

    def _check_end(self, token_id: int) -> None:
        enough = self.num_tokens - self.num_prompt_tokens >= self.params.min_tokens
        is_eos = enough and not self.params.ignore_eos and token_id in self.eos_token_ids
        is_stop = enough and token_id in self.params.stop_token_ids
        is_end, stop_string = is_eos or is_stop, None
        if self.params.stop and self.detokenizer and (self.params.include_stop_str_in_output or not is_end):
            stop_string = self.detokenizer.push(token_id, may_stop=enough and not is_end)
        if is_eos:
            self.finish_reason = "stop"
        elif is_stop:
            self.finish_reason, self.stop_reason = "stop", token_id
        elif stop_string is not None:
            self.finish_reason, self.stop_reason = "stop", stop_string
        elif self.num_remaining <= 0:
            self.finish_reason = "length"

    def note_computed(self, num_tokens: int) -> None:
        """Note that keys and values of this many leading tokens are in the KV cache, and index them for lookups."""
        self.num_computed = num_tokens
        if self.lookup is not None:
            self.lookup.extend_to(self.token_ids, self.num_computed)

    def proposal(self, num_tokens: int) -> Proposal:
        """Return tokens that may come next, looked up in the sequence's own text; at most one fewer than the sequence
        may still have. Nothing without an index."""
        if self.lookup is None:
            return NOTHING
        self.lookup.extend_to(self.token_ids)
        return self.lookup.propose(min(num_tokens, self.num_remaining - 1))

    def guess(self, max_tokens: int) -> Guess:
        """Return a tree of tokens that may come next, from the sequence's Jacobi window, and that window. The tree's
        depth is less than the number of tokens that the sequence may still have."""
        if self.lookahead is None:
            self.lookahead = Lookahead(self.token_ids)
        return self.lookahead.guess(self.token_ids[-1], max_tokens=max_tokens, max_depth=self.num_remaining - 1)

    def fail(self, error: RayspecError) -> None:
        self.finish_reason, self.error = "error", error

    @property
    def has_new_output(self) -> bool:
        """Whether `take_new_output` would return anything."""
        return not self.taken_end and (self.finished or self.num_taken < self.num_tokens - self.num_prompt_tokens)

    def take_new_output(self) -> CompletionOutput | None:
        """Return the output since the last call, or None if there is none. `text` is empty, unless the sequence has
        stop strings and the engine a tokenizer."""
        if not self.has_new_output:
            return None
        first, self.num_taken, self.taken_end = self.num_taken, self.num_tokens - self.num_prompt_tokens, self.finished
        chosen = [row[token_id].logprob for row, token_id in zip(self.logprobs, self.output_token_ids, strict=False)]
        return CompletionOutput(
            index=self.index,
            text=self.detokenizer.take(finished=self.finished) if self.params.stop and self.detokenizer else "",
            token_ids=tuple(self.token_ids[self.num_prompt_tokens + first :]),
            cumulative_logprob=sum(chosen) if self.logprobs else None,
            logprobs=self.logprobs[first:] or None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
