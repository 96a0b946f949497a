"""Unfinished requests: their prompts as tokens, their sequences, and their outputs.

Of a sequence, only the committed tokens are essential: the KV cache can be computed from them again.
"""

from __future__ import annotations

import itertools
import operator
import reprlib
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from rayspec.decode.drafting.lookahead import Guess, Lookahead
from rayspec.decode.drafting.lookup import LookupIndex
from rayspec.decode.output import Detokenizer, NewOutput, TokenTexts
from rayspec.decode.processing import check_tokens
from rayspec.decode.work import DecodingParams, GenerationDefaults
from rayspec.forms.grammar import Constraint, Grammars
from rayspec.model.kv_cache import PageHash, PageTable
from rayspec.model.rows import RowSpan
from rayspec.prompts import bad_word_tokens, text_tokens, truncated
from rayspec.types import (
    CompletionOutput,
    EmptyPromptError,
    FinishReason,
    InvalidTokenError,
    Logprob,
    OutOfMemoryError,
    PromptTooLongError,
    RayspecError,
    Request,
    RequestError,
    RequestMetrics,
    RequestOutput,
)

_SEED_STRIDE = 0x9E3779B97F4A7C15
Account = tuple[bool, str]  # whether sequences are of the background, and their client


@dataclass(slots=True, kw_only=True, eq=False)
class SequenceState:
    """A sequence of a request and its progress. num_computed: leading tokens whose keys and values are in the KV cache.
    windowed_table: pages in the windowed store, if the cache has one. adapter: see `RowSpan`."""

    sequence_id: str
    index: int
    params: DecodingParams
    seed: int
    token_ids: list[int]
    num_prompt_tokens: int
    max_total_tokens: int
    eos_token_ids: Collection[int]
    detokenizer: Detokenizer | None
    owner: str = ""
    client: str = ""
    streams: bool = False
    background: bool = False
    adapter: int = 0
    num_computed: int = 0
    cohort: int = 0
    table: PageTable = field(default_factory=PageTable)
    windowed_table: PageTable = field(default_factory=PageTable)
    page_hashes: list[PageHash] = field(default_factory=list)  # of its first pages, as many as were needed
    prompt_hashes: list[PageHash] = field(default_factory=list)  # of its prompt's, shared by the request's sequences
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: RayspecError | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # of the second token of the prompt, ...
    num_taken: int = 0  # output tokens that `take_new_output` has returned
    sum_logprob: float = 0.0  # of these
    taken_end: bool = False
    lookup: LookupIndex | None = None  # None if nothing is looked up
    first: SequenceState | None = None  # of the request; None in the first
    constraint: Constraint | None = None  # None without a form of the output
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
        return len(self.token_ids) - 1 == self.num_computed >= self.num_prompt_tokens

    @property
    def account(self) -> Account:
        return self.background, self.client

    @property
    def may_sample(self) -> bool:
        """Whether the mask of its next token is there, if the output has a form."""
        return self.constraint is None or self.constraint.is_ready

    @property
    def num_remaining(self) -> int:
        return self.max_total_tokens - len(self.token_ids)

    def rows(self, first: int, num_rows: int) -> RowSpan:
        return RowSpan(self.table.runs, first, num_rows, (), self.windowed_table.runs, self.adapter)

    def commit(self, token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]] = ()) -> int:
        """Append tokens up to the first that ends the sequence. Return how many were appended."""
        params = self.params
        for num_before, token_id in enumerate(token_ids):
            if self.finished:
                return num_before
            self.token_ids.append(token_id)
            self.logprobs.extend(logprobs[num_before : num_before + 1])
            enough = self.num_tokens - self.num_prompt_tokens >= params.min_tokens
            may_end = self.constraint is not None or (enough and not params.ignore_eos)  # nothing follows a whole form
            is_eos = may_end and token_id in self.eos_token_ids
            is_stop = enough and token_id in params.stop_token_ids
            is_end, stop_string = is_eos or is_stop, None
            if params.stop and self.detokenizer and (params.include_stop_str_in_output or not is_end):
                stop_string = self.detokenizer.push(token_id, may_stop=enough and not is_end)
            if is_eos:
                self.finish_reason = "stop"
            elif is_stop:
                self.finish_reason, self.stop_reason = "stop", token_id
            elif stop_string is not None:
                self.finish_reason, self.stop_reason = "stop", stop_string
            elif self.num_remaining <= 0:
                self.finish_reason = "length"
        return len(token_ids)

    def note_computed(self, num_tokens: int) -> None:
        """Note that keys and values of this many leading tokens are there, and index them for lookups."""
        self.num_computed = num_tokens
        if self.lookup is not None:
            self.lookup.extend_to(self.token_ids, self.num_computed)

    def begin_lookup(self) -> None:
        """Index the prompt as far as the request's first sequence has, which costs little."""
        if self.lookup is not None and self.first is not None and self.first.lookup is not None:
            self.lookup.begin_as(self.first.lookup, self.num_prompt_tokens)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether all tokens of the prompt must be computed, for their log-probabilities."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def note_prompt_logprobs(self, rows: Sequence[dict[int, Logprob]], end: int) -> None:
        """Keep what a chunk that ends before position `end` has given, again after a preemption."""
        first = min(end, self.num_prompt_tokens - 1) - len(rows)
        self.prompt_logprobs[first : first + len(rows)] = rows

    def guess(self, max_tokens: int) -> Guess:
        """Return a tree of tokens that may come next, from the sequence's Jacobi window, and that window."""
        if self.lookahead is None:
            self.lookahead = Lookahead(self.token_ids)
        return self.lookahead.guess(self.token_ids[-1], max_tokens=max_tokens, max_depth=self.num_remaining - 1)

    @property
    def has_new_output(self) -> bool:
        return not self.taken_end and (self.finished or self.num_taken < self.num_tokens - self.num_prompt_tokens)

    def take_new_output(self) -> CompletionOutput | None:
        """Return the output since the last call, or None. `text` is empty, unless the sequence has stop strings and the
        engine a tokenizer."""
        if not self.has_new_output:
            return None
        first, self.num_taken, self.taken_end = self.num_taken, self.num_tokens - self.num_prompt_tokens, self.finished
        token_ids, logprobs = tuple(self.token_ids[self.num_prompt_tokens + first :]), self.logprobs[first:]
        chosen = (row[token_id].logprob for row, token_id in zip(logprobs, token_ids, strict=False))
        self.sum_logprob = sum(chosen, self.sum_logprob)
        has_text = self.params.stop and self.params.detokenize
        return CompletionOutput(
            index=self.index,
            text=self.detokenizer.take(finished=self.finished) if has_text and self.detokenizer else "",
            token_ids=token_ids,
            cumulative_logprob=self.sum_logprob if self.logprobs else None,
            logprobs=logprobs or None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the engine knows of the model. max_model_len: the most prompt and output tokens of a request together.
    defaults: the checkpoint's, of sampling parameters. adapters: names of the loaded adapters, to which others may be
    added. adapter: the one of requests that name none. given_texts: tokens of texts that drafts are copied from.
    scores_prompts: whether the model can give log-probabilities of a prompt. weights: see `EngineStats`."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    tokenizer: PreTrainedTokenizerBase | None = None
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    adapters: list[str] = field(default_factory=list)
    adapter: str | None = None
    given_texts: Sequence[int] = ()
    scores_prompts: bool = True
    weights: str = ""
    grammars: Grammars = field(init=False)

    def __post_init__(self) -> None:
        grammars = Grammars(lambda: self.tokenizer, vocab_size=self.vocab_size, eos_token_ids=self.eos_token_ids)
        object.__setattr__(self, "grammars", grammars)


def admitted_tokens(request: Request, model: ModelInfo) -> list[int]:
    """Return the prompt's tokens, cut by `truncate_prompt_tokens`. Raises RequestError if the prompt is invalid, empty
    or too long, if it or the parameters have foreign tokens, or if the model cannot give the log-probabilities of the
    prompt. Checked here, because a stage in another process cannot refuse."""
    check_tokens("logit_bias", request.params.logit_bias, model.vocab_size)
    check_tokens("allowed_token_ids", request.params.allowed_token_ids or (), model.vocab_size)
    if request.params.prompt_logprobs is not None and not model.scores_prompts:
        raise RequestError(
            "prompt_logprobs: one pass of this model does not give the log-probabilities of a prompt's tokens: leave "
            "it out"
        )
    if request.adapter is not None and request.adapter not in model.adapters:
        known = ", ".join(map(repr, model.adapters)) or "none"
        raise RequestError(f"adapter {request.adapter!r} is not loaded: name it in option 'lora_modules' ({known} now)")
    prompt: Any = request.prompt
    if request.prompt_token_ids is None:
        if isinstance(prompt, str) and model.tokenizer is None:
            raise RequestError("the prompt is a text and the engine has no tokenizer: give `prompt_token_ids`")
        token_ids = text_tokens(prompt, model.tokenizer)
    else:
        try:
            tokens = list(request.prompt_token_ids)
        except Exception as error:  # what a caller's object raises ends its request only
            given = reprlib.repr(request.prompt_token_ids)
            raise RequestError(f"prompt_token_ids is {given}: give a list of token ids") from error
        token_ids = [_integer(token) for token in tokens]
    if not token_ids:
        raise EmptyPromptError("the prompt has zero tokens: give it some text")
    params = request.params
    token_ids = truncated(token_ids, params.truncate_prompt_tokens, model.max_model_len, params.max_tokens)
    if len(token_ids) >= model.max_model_len:
        raise PromptTooLongError(
            f"the prompt has {len(token_ids)} tokens, max_model_len is {model.max_model_len} with the output: "
            "shorten or split it, or raise max_model_len if it is below the model's own limit"
        )
    foreign = [token for token in token_ids if not 0 <= token < model.vocab_size]
    if foreign:
        raise InvalidTokenError(
            f"prompt token {foreign[0]} is outside the vocabulary of {model.vocab_size}: use the model's own tokenizer"
        )
    return token_ids


def _integer(token: Any) -> int:
    """Return an int for an integer of Python, NumPy or torch. Raises InvalidTokenError for other values."""
    try:
        number = None if isinstance(token, bool) else operator.index(token)
    except Exception:  # noqa: BLE001 - torch raises its own for some tensors
        number = None
    if number is None:
        raise InvalidTokenError(f"prompt token {reprlib.repr(token)} is not an integer: give token ids")
    return number


@dataclass(slots=True)
class LiveRequest:
    """An unfinished request and its `params.n` sequences."""

    request: Request
    prompt_token_ids: tuple[int, ...]
    sequences: list[SequenceState]
    has_given_prompt: bool = False  # the log-probabilities of its prompt, to the caller

    def take_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Return the log-probabilities of the prompt, once: its first sequence computes them."""
        first = self.sequences[0]
        if first.params.prompt_logprobs is None or first.wants_prompt_logprobs or self.has_given_prompt:
            return None
        self.has_given_prompt = True
        return [None, *first.prompt_logprobs]

    @property
    def finished(self) -> bool:
        return all(sequence.finished for sequence in self.sequences)


class Requests(dict[str, LiveRequest]):
    """Requests by id, from admission to their last output. num_slots: tokens that the KV cache can hold."""

    def __init__(self, *, model: ModelInfo, num_slots: int, clock: Callable[[], float]) -> None:
        super().__init__()
        self._model = model
        self._num_slots = num_slots
        self._clock = clock
        self._texts = TokenTexts(model.tokenizer) if model.tokenizer is not None else None
        self._sequence_ids = itertools.count(1)

    def admit(self, request: Request) -> LiveRequest:
        """Return the request with its sequences, for the caller to add. Waits for the form of the output. Raises
        RequestError if the id is in use, if the KV cache is too small, for the form, and as `admitted_tokens` does."""
        if request.request_id in self:
            raise RequestError(f"request id {request.request_id!r} is in use: give each request its own")
        token_ids = admitted_tokens(request, self._model)
        max_model_len = self._model.max_model_len
        if request.params.max_tokens is None:  # as many as there is room for
            max_model_len = min(max_model_len, max(self._num_slots, len(token_ids) + 1))
        params = self._model.defaults.completed(
            request.params, num_prompt_tokens=len(token_ids), max_model_len=max_model_len
        )
        if params.bad_words:
            if self._model.tokenizer is None:
                raise RequestError("bad_words are texts and the engine has no tokenizer: leave them out")
            words = bad_word_tokens(params.bad_words, self._model.tokenizer)
            params = params.model_copy(update={"bad_words_ids": (*params.bad_words_ids, *words)})
        if params.structured_outputs is not None:
            failed = self._model.grammars.compiled(params.structured_outputs).exception()
            if failed is not None:  # for all requests with the form: each would leave its frames, and so its prompt
                raise failed.with_traceback(None)
        sequences = [self._new_sequence(request, index, token_ids, params) for index in range(params.n)]
        for sequence in sequences[1:]:
            sequence.first, sequence.prompt_hashes = sequences[0], sequences[0].prompt_hashes
        if sequences[0].max_total_tokens > self._num_slots:
            raise OutOfMemoryError(
                f"the request may need {sequences[0].max_total_tokens} tokens of KV cache, more than there are: "
                "raise kv_cache_tokens or lower max_tokens"
            )
        return LiveRequest(request, tuple(token_ids), sequences)

    def outputs(self) -> list[NewOutput]:
        """Return and forget the finished requests, and return the new output of streaming requests."""
        return [
            self.new_output(live)
            for live in list(self.values())
            if live.finished or (live.request.stream and any(one.has_new_output for one in live.sequences))
        ]

    def new_output(self, live: LiveRequest) -> NewOutput:
        """Return what is new of a request, which is forgotten if it is finished."""
        if live.finished:
            del self[live.request.request_id]
        new = [(one, sequence) for sequence in live.sequences if (one := sequence.take_new_output()) is not None]
        output = RequestOutput(
            request_id=live.request.request_id,
            prompt=live.request.prompt,
            prompt_token_ids=live.prompt_token_ids,
            outputs=[one for one, _ in new],
            finished=live.finished,
            prompt_logprobs=live.take_prompt_logprobs(),
            metrics=_summed([sequence.metrics for sequence in live.sequences]),
            error=next((sequence.error for sequence in live.sequences if sequence.error), None),
        )
        detokenizers = [None if sequence.params.stop else sequence.detokenizer for _, sequence in new]
        return NewOutput(output, detokenizers, self._texts if live.request.params.detokenize else None)

    def _new_sequence(
        self, request: Request, index: int, token_ids: Sequence[int], params: DecodingParams
    ) -> SequenceState:
        seed = secrets.randbits(63) if params.seed is None else params.seed
        if index > 0 and params.prompt_logprobs is not None:  # the first sequence computes them
            params = params.model_copy(update={"prompt_logprobs": None})
        form = params.structured_outputs
        constraint = None if form is None else self._model.grammars.constraint(form, len(token_ids))
        adapter = self._model.adapter if request.adapter is None else request.adapter
        return SequenceState(
            sequence_id=f"{next(self._sequence_ids)}/{request.request_id}/{index}",
            index=index,
            params=params,
            seed=(seed + index * _SEED_STRIDE + 2**63) % 2**64 - 2**63,  # as a signed 64-bit integer
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            max_total_tokens=len(token_ids) + params.max_tokens,
            eos_token_ids=self._model.eos_token_ids if constraint is None else constraint.end_tokens,
            detokenizer=(
                Detokenizer(self._model.tokenizer, params)
                if self._model.tokenizer and (params.detokenize or params.stop)
                else None
            ),
            owner=request.owner,
            client=request.client,
            streams=request.stream,
            background=request.background,
            adapter=0 if adapter is None else 1 + self._model.adapters.index(adapter),
            constraint=constraint,
            metrics=RequestMetrics(arrival_s=self._clock()),
        )


def _summed(metrics: Sequence[RequestMetrics]) -> RequestMetrics:
    counts = ("rounds", "plain_rounds", "draft_tokens", "accepted_tokens", "preemptions", "replays")
    by_source = Counter[str]()
    for one in metrics:
        by_source.update(one.accepted_by_source)
    return RequestMetrics(
        **{f"num_{name}": sum(getattr(one, f"num_{name}") for one in metrics) for name in counts},
        accepted_by_source=dict(by_source),
        num_cached_tokens=min(one.num_cached_tokens for one in metrics),
        arrival_s=min(one.arrival_s for one in metrics),
        first_token_s=min((one.first_token_s for one in metrics if one.first_token_s is not None), default=None),
        finished_s=max((one.finished_s or 0.0 for one in metrics), default=None),
    )
