"""The state of one sequence. Only its committed tokens are essential: the KV cache can be computed from them again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from transformers import PreTrainedTokenizerBase

from rayspec.config import LookaheadOptions
from rayspec.decode.drafting.lookahead import Guess, Lookahead
from rayspec.decode.drafting.lookup import NOTHING, LookupIndex, Proposal
from rayspec.decode.pages import PageHash, PageTable
from rayspec.decode.token_texts import byte_of
from rayspec.decode.unread import UnreadCompletion
from rayspec.generation import DecodingParams
from rayspec.model.rows import RowSpan
from rayspec.types import CompletionOutput, FinishReason, Logprob, RayspecError, RequestMetrics


class _Beginning:
    """How much of the beginning of a stop string ends a growing text (Knuth, Morris, Pratt): each character costs the
    same, however long text and string are."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = [0]  # of the string's first 1, 2, ... characters: their longest beginning that also ends them
        self.length = 0

    def push(self, text: str) -> None:
        for character in text:
            self.length = self._next(self.length, character)
            if self.length == len(self._stop):  # no end of the text that is the whole string is a beginning of it
                self.length = self._borders[self.length - 1]

    def _next(self, length: int, character: str) -> int:
        while length and self._stop[length] != character:
            length = self._borders[length - 1]
        length += self._stop[length] == character
        while len(self._borders) < length:
            border = self._next(self._borders[-1], self._stop[len(self._borders)])
            self._borders.append(border)
        return length


class Detokenizer:
    """Decodes a growing list of tokens, and detects stop strings. What `take` has returned is the beginning of the text
    wherever the output ends. So it never splits a character, nor a run of byte tokens, as sentencepiece has them: if
    one of their bytes fits no character, the whole run becomes replacement characters.

    Only the engine's thread calls `push`, `text` and `take`. The functions that `text` and `take` return may be called
    on another thread; those of `take` must be called in order.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, params: DecodingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._token_ids: list[int] = []
        self._text = ""  # does not change any more
        self._tail = ""  # text of whole characters after it, if no later token changes it
        self._bytes = bytearray()  # after the tail: byte tokens that are no whole character yet
        self._num_grown = 0  # tokens that `_grow` has processed
        self._num_shown = 0  # tokens whose text is in _text
        self._window = 0  # first token that is decoded again, because spaces depend on the tokens before
        self._num_taken = 0  # characters that `take` has returned
        self._beginnings = [_Beginning(stop) for stop in params.stop]

    def push(self, token_id: int, *, may_stop: bool) -> str | None:
        """Add a token and return the stop string that it completed, if any. Decodes only if there are stop strings."""
        self._token_ids.append(token_id)
        if not self._params.stop:
            return None
        settled = len(self._text)
        length = settled + len(self._tail)
        self._grow()
        for beginning in self._beginnings:
            beginning.push(self._text[settled:])
        text = self._text + self._tail
        starts = [(text.find(stop, max(0, length - len(stop) + 1)), stop) for stop in self._params.stop]
        found = [(position, stop) for position, stop in starts if position >= 0]
        if not found or not may_stop or len(text) == length:
            return None
        position, stop = min(found)
        self._text = text[: position + (len(stop) if self._params.include_stop_str_in_output else 0)]
        return stop

    def text(self, *, stopped: bool, finished: bool) -> Callable[[], str]:
        """Return a function that decodes the text so far, without an incomplete last character. If `stopped`, the text
        ends at the stop string."""
        if stopped:
            return partial(str, self._text)
        return partial(self._whole, len(self._token_ids), finished=finished)

    def take(self, *, stopped: bool, finished: bool) -> Callable[[], str]:
        """Return a function that decodes the new text since the last call, without an end that later tokens may change
        and without one that may be the beginning of a stop string."""
        if finished:
            return partial(self._take, self.text(stopped=stopped, finished=True))
        if self._params.stop:
            return partial(self._take, partial(str, self._text[: len(self._text) - self._num_pending()]))
        return partial(self._take, partial(self._grown_to, len(self._token_ids)))

    def _whole(self, num_tokens: int, *, finished: bool) -> str:
        text = self._decode(self._token_ids[:num_tokens])
        return text if finished else text.rstrip("\N{REPLACEMENT CHARACTER}")

    def _take(self, text: Callable[[], str]) -> str:
        now = text()
        taken, self._num_taken = self._num_taken, max(self._num_taken, len(now))
        return now[taken:]

    def _grown_to(self, num_tokens: int) -> str:
        while self._num_grown < num_tokens:
            self._grow()
        return self._text

    def _grow(self) -> None:
        """Decode one more token into the text, or into its tail if a later token may still change what it says."""
        piece = self._tokenizer.convert_ids_to_tokens(self._token_ids[self._num_grown])
        byte = byte_of(piece) if isinstance(piece, str) else None
        self._num_grown += 1
        if byte is not None:
            self._bytes.append(byte)
            with suppress(UnicodeDecodeError):
                self._tail += self._bytes.decode()
                self._bytes.clear()
            return
        shown = self._decode(self._token_ids[self._window : self._num_shown])
        grown = self._decode(self._token_ids[self._window : self._num_grown])
        is_skipped = bool(self._tail or self._bytes) and grown == self._decode(
            self._token_ids[self._window : self._num_grown - 1]
        )  # such a token does not end a run of byte tokens
        if len(grown) > len(shown) and not is_skipped and not grown.endswith("\N{REPLACEMENT CHARACTER}"):
            self._text, self._tail = self._text + grown[len(shown) :], ""
            self._bytes.clear()
            self._window, self._num_shown = self._num_shown, self._num_grown

    def _num_pending(self) -> int:
        """Return how many characters at the end of the text may be the beginning of a stop string."""
        return max((beginning.length for beginning in self._beginnings), default=0)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._params.skip_special_tokens)  # type: ignore[return-value]


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
    num_computed: int = 0
    cohort: int = 0
    table: PageTable = field(default_factory=PageTable)
    windowed_table: PageTable = field(default_factory=PageTable)
    page_hashes: list[PageHash] = field(default_factory=list)  # of its first pages, as many as were needed
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: RayspecError | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    num_taken: int = 0  # output tokens of a streaming request that `take_new_output` has returned
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
        stop_string = None
        if self.detokenizer and (self.params.include_stop_str_in_output or not (is_eos or is_stop)):
            stop_string = self.detokenizer.push(token_id, may_stop=enough)
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

    def guess(self, options: LookaheadOptions, max_tokens: int) -> Guess:
        """Return a tree of tokens that may come next, from the sequence's Jacobi window, and that window. The tree's
        depth is less than the number of tokens that the sequence may still have."""
        if self.lookahead is None:
            self.lookahead = Lookahead(options, self.token_ids)
        return self.lookahead.guess(self.token_ids[-1], max_tokens=max_tokens, max_depth=self.num_remaining - 1)

    def fail(self, error: RayspecError) -> None:
        self.finish_reason, self.error = "error", error

    def output(self) -> UnreadCompletion:
        """Return the output so far. `text` is empty if the engine has no tokenizer."""
        stopped = isinstance(self.stop_reason, str)
        text = self.detokenizer.text(stopped=stopped, finished=self.finished) if self.detokenizer else str
        return UnreadCompletion(self._output_from(0), text)

    def take_new_output(self) -> UnreadCompletion | None:
        """Return the output since the last call, or None if there is none."""
        if self.taken_end or (not self.finished and self.num_taken == self.num_tokens - self.num_prompt_tokens):
            return None
        stopped = isinstance(self.stop_reason, str)
        text = self.detokenizer.take(stopped=stopped, finished=self.finished) if self.detokenizer else str
        new = self._output_from(self.num_taken)
        self.num_taken, self.taken_end = self.num_taken + len(new.token_ids), self.finished
        return UnreadCompletion(new, text)

    def _output_from(self, first: int) -> CompletionOutput:
        """Return the output tokens from index `first` on, without text."""
        chosen = [row[token_id].logprob for row, token_id in zip(self.logprobs, self.output_token_ids, strict=False)]
        return CompletionOutput(
            index=self.index,
            text="",
            token_ids=tuple(self.token_ids[self.num_prompt_tokens + first :]),
            cumulative_logprob=sum(chosen) if self.logprobs else None,
            logprobs=self.logprobs[first:] or None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
